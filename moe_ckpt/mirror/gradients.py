"""Merges final sums from the captures at several ranks into the gradients of an iteration. Pure.

Owns: the set of captured bytes. Must not: accept a byte on which two captures differ. FlowCheck, sections 6.1 and 6.2.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from moe_ckpt.mirror.frames import TcpSegment
from moe_ckpt.mirror.framing import Framing
from moe_ckpt.mirror.ring import RingTracker
from moe_ckpt.mirror.tcp import Chunk, Reassembly


class Spans:
    """A set of numbers from 0 on, as spans that do not touch."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def add(self, start: int, end: int) -> None:
        """Add the numbers from `start` to before `end`."""
        first = bisect_left(self._spans, (start, -1))
        if first and self._spans[first - 1][1] >= start:
            first -= 1
        last = first
        while last < len(self._spans) and self._spans[last][0] <= end:
            start, end = min(start, self._spans[last][0]), max(end, self._spans[last][1])
            last += 1
        self._spans[first:last] = [(start, end)]

    def within(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the spans of the set between two numbers."""
        cut = [(max(start, first), min(end, last)) for first, last in self._spans]
        return [(first, last) for first, last in cut if first < last]

    def covers(self, num: int) -> bool:
        """Return whether all numbers below `num` are in the set."""
        return not num or self._spans[:1] == [(0, num)]


class Gradient:
    """The captured part of one all-reduce's result. `differs`: captures have different bytes of it."""

    def __init__(self, num_bytes: int) -> None:
        self._bytes = bytearray(num_bytes)
        self._there = Spans()
        self.differs = False

    def put(self, start: int, data: bytes) -> None:
        """Add the bytes of one capture; bytes that another capture delivered before must be equal."""
        end = start + len(data)
        assert 0 <= start <= end <= len(self._bytes), (start, end, len(self._bytes))
        for first, last in self._there.within(start, end):
            self.differs |= self._bytes[first:last] != data[first - start : last - start]
        self._bytes[start:end] = data
        if data:
            self._there.add(start, end)

    @property
    def is_complete(self) -> bool:
        return not self.differs and self._there.covers(len(self._bytes))

    def to_bytes(self) -> bytes:
        """Return the complete result."""
        assert self.is_complete
        return bytes(self._bytes)


class Collected:
    """The all-reduces of a run, counted from the first, with their captured parts."""

    def __init__(self, buckets: Sequence[int]) -> None:
        self._buckets = tuple(buckets)
        self._gradients: dict[int, Gradient] = {}

    def gradient(self, operation: int) -> Gradient:
        """Return the result of one all-reduce."""
        if operation not in self._gradients:
            self._gradients[operation] = Gradient(self._buckets[operation % len(self._buckets)])
        return self._gradients[operation]

    def is_complete(self, iteration: int) -> bool:
        """Return whether all gradients of an iteration, counted from 0, are complete."""
        return all(self.gradient(operation).is_complete for operation in self._operations(iteration))

    def take(self, iteration: int) -> list[bytes]:
        """Return the complete gradients of an iteration, and drop them and all earlier ones."""
        whole = [self.gradient(operation).to_bytes() for operation in self._operations(iteration)]
        self.drop(iteration)
        return whole

    def drop(self, iteration: int) -> None:
        """Drop an iteration and all earlier ones."""
        last = self._operations(iteration)[-1]
        self._gradients = {operation: each for operation, each in self._gradients.items() if operation > last}

    def _operations(self, iteration: int) -> range:
        return range(iteration * len(self._buckets), (iteration + 1) * len(self._buckets))


class Capture:
    """The stream from one rank to the one before it in its group, from segments to gradients."""

    def __init__(self, collected: Collected, tracker: RingTracker, *, patience_bytes: int) -> None:
        self._collected = collected
        self._tracker = tracker
        self._reassembly = Reassembly(patience_bytes)
        self._framing = Framing()

    def feed(self, segment: TcpSegment) -> None:
        """Add one segment of the stream; segments may come in any order."""
        for chunk in self._reassembly.feed(segment):
            self._put_all(chunk)

    def flush(self) -> None:
        """Count missing bytes as lost: their frames will not come in time."""
        for chunk in self._reassembly.flush():
            self._put_all(chunk)

    def resume(self, iteration: int) -> None:
        """The stream is between iterations: the next operation is the first of `iteration`, despite losses."""
        self._tracker.resume(iteration)

    def _put_all(self, chunk: Chunk) -> None:
        for message in self._framing.feed(chunk):
            place = self._tracker.place(message.slot, message.length, message.skipped_bytes)
            if place is not None and place.sent.is_final:
                gradient = self._collected.gradient(place.operation)
                for start, piece in message.pieces:
                    gradient.put(place.sent.start + start, piece)
