"""Assembles the sums of marked groups from the frames of a mirror port. Pure.

Owns: the streams of watched ranks, by five-tuple, and the captured messages until a
server has asked for them. Must not: read a port, or wait. FlowCheck, sections 6.1 and
6.2.

    frame -> segment -> stream of a watched rank -> messages by operation
          -> sums(iteration) from all watched ranks

`merge` concatenates while frames come, by the buckets of the iteration before.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from moe_ckpt.flowcheck.mirror.frames import Stream, TcpSegment, segment_of
from moe_ckpt.flowcheck.mirror.framing import Framing
from moe_ckpt.flowcheck.mirror.gradients import Gradient
from moe_ckpt.flowcheck.mirror.marks import StreamMark, find_mark
from moe_ckpt.flowcheck.mirror.operations import (
    LocatedMessages,
    StreamRecord,
    locate_all,
)
from moe_ckpt.flowcheck.mirror.plan import MirroredSums
from moe_ckpt.flowcheck.mirror.ring import Ring, RingSend
from moe_ckpt.flowcheck.mirror.tcp import Reassembly

_PATIENCE_BYTES = 1 << 20
_MOST_GROUPS = 1024
_MOST_BYTES = 1 << 30
_MOST_OPERATIONS = 1 << 32


class _WatchedStream:
    """Stream from one watched rank of a group to the rank before it."""

    def __init__(self, start: int) -> None:
        self._reassembly = Reassembly(_PATIENCE_BYTES, start)
        self._framing = Framing()
        self.record = StreamRecord()
        self.left: dict[int, tuple[RingSend, ...] | None] = {}
        """Messages that were still to come, by operation that was located."""

    def feed(self, segment: TcpSegment) -> None:
        for chunk in self._reassembly.feed(segment):
            for message in self._framing.feed(chunk):
                self.record.add(message)

    def flush(self) -> None:
        for chunk in self._reassembly.flush():
            for message in self._framing.feed(chunk):
                self.record.add(message)

    def drop_up_to(self, operation: int) -> None:
        self.record.drop_up_to(operation)
        self.left = {
            each: left for each, left in self.left.items() if each >= operation
        }


class _Merge:
    """Sums of one bucket, put together message by message while no message is lost."""

    def __init__(
        self, number: int, num_bytes: int, sends: Sequence[Sequence[RingSend]]
    ) -> None:
        self.number = number
        self.gradient = Gradient(num_bytes)
        self.fits = True
        self._sends = sends
        self._done: dict[int, int] = {}  # messages, by the sender's rank

    @property
    def is_complete(self) -> bool:
        has_all = all(
            done == len(self._sends[rank]) for rank, done in self._done.items()
        )
        return self.fits and has_all and self.gradient.is_complete

    def follow(self, operation: int, streams: Mapping[int, _WatchedStream]) -> None:
        """Add the messages that have come since the last call."""
        for rank, stream in streams.items():
            messages, done = stream.record.of(operation), self._done.get(rank, 0)
            self.fits &= len(messages) <= len(self._sends[rank])
            for sent, message in zip(
                self._sends[rank][done:], messages[done:], strict=False
            ):
                self.fits &= (
                    sent.num_bytes == message.length and message.skipped_bytes is None
                )
                if not self.fits:
                    return
                for start, piece in message.pieces if sent.is_final else ():
                    self.gradient.put(sent.start + start, piece)
            self._done[rank] = len(messages)
            if len(messages) == len(self._sends[rank]):
                stream.left[operation] = ()


@dataclass(slots=True)
class _Group:
    """Watched streams of one group."""

    streams: dict[int, _WatchedStream] = field(default_factory=dict)
    """Streams by the sender's rank in the group."""

    before: MirroredSums | None = None
    """The iteration that was asked for last. The next iteration has the same buckets.
    """

    merges: dict[int, _Merge] = field(default_factory=dict)
    """Merges of the iteration that arrives, by operation."""

    @property
    def size_bytes(self) -> int:
        return sum(stream.record.size_bytes for stream in self.streams.values())

    def merge(self) -> None:
        """Put together all final sums that have arrived, bucket after bucket.

        After a loss, `Watcher.results` finds the positions.
        """
        if self.before is None:
            return
        sends = _sends(self.before.buckets, self.before.size, self.before.element_bytes)
        for operation in self.operations(range(self.before.end, _MOST_OPERATIONS)):
            if operation not in self.merges:
                number = sum(merge.is_complete for merge in self.merges.values())
                if number == len(sends):
                    return
                self.merges[operation] = _Merge(
                    number, self.before.buckets[number], sends[number]
                )
            merge = self.merges[operation]
            merge.follow(operation, self.streams)
            if merge.fits and not merge.is_complete:
                return

    def operations(self, wanted: range) -> list[int]:
        found = {
            each
            for stream in self.streams.values()
            for each in stream.record.operations()
        }
        return sorted(each for each in found if each in wanted)


class Watcher:
    """Watches the first ranks of each marked group.

    Attributes:
        num_frames: Segments of any stream so far.
        num_watched: Segments with data of watched streams so far.
        num_dropped: Watched segments that were dropped to simulate loss.
    """

    def __init__(
        self,
        captures: int,
        *,
        loss: float = 0.0,
        seed: int = 0,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        """Begin without groups.

        Args:
            captures: Number of ranks that are watched in each group.
            loss: Share of the frames that each capture loses, to simulate loss.
            seed: Seed of the simulated loss.
            most_bytes: Captured bytes above which `limit` forgets groups.
        """
        self._captures = captures
        self._loss = loss
        self._random = random.Random(seed)
        self._most_bytes = most_bytes
        self._groups: dict[str, _Group] = {}  # in the order of their marks
        # None: the stream of a rank that is not watched
        self._streams: dict[Stream, tuple[str, _WatchedStream | None]] = {}
        self.num_frames = 0
        self.num_watched = self.num_dropped = 0

    def see(self, frame: bytes) -> None:
        """Add a frame of the port. Frames may come in any order."""
        segment = segment_of(frame)
        if segment is not None:
            self.see_segment(segment)

    def see_segment(self, segment: TcpSegment) -> None:
        """Add a segment of any stream."""
        self.num_frames += 1
        group, stream = self._streams.get(segment.stream, (None, None))
        if stream is not None and segment.payload:
            self.num_watched += 1
            if self._loss and self._random.random() < self._loss:
                self.num_dropped += 1
                return
        mark = find_mark(segment.payload) if segment.payload else None
        if mark and mark.group.hex() != group:
            stream = self._watch(segment, mark)
        # ports are used again: a later connection of the same five-tuple is followed
        # from its own mark
        if segment.begins or segment.ends:
            self._streams.pop(segment.stream, None)
        if stream is not None and not segment.begins:
            stream.feed(segment)

    def merge(self) -> None:
        """Put together the final sums that have arrived.

        Little is then left to do once a server asks for an iteration.
        """
        for group in self._groups.values():
            group.merge()

    def flush(self) -> None:
        """Count missing bytes as lost: their frames will not come in time."""
        for group in self._groups.values():
            for stream in group.streams.values():
                stream.flush()

    @property
    def size_bytes(self) -> int:
        """Captured bytes that no server has asked for yet."""
        return sum(group.size_bytes for group in self._groups.values())

    @property
    def merged_bytes(self) -> int:
        """Bytes of sums that are put together before a server asks for the sums."""
        merges = [
            merge for group in self._groups.values() for merge in group.merges.values()
        ]
        return sum(merge.gradient.num_bytes for merge in merges if merge.is_complete)

    def knows(self, group: str) -> bool:
        """Return whether the mark of a group was captured."""
        return group in self._groups

    def sums(self, wanted: MirroredSums) -> list[bytearray] | None:
        """Return the results of an iteration's all-reduces.

        Returns:
            Bytes of each bucket; None unless all bytes were captured. The results also
            count as incomplete if two captures differ, or if more operations fit than
            are wanted.
        """
        results = self.results(wanted)
        complete = len(results) == len(wanted.buckets) and all(
            result.is_complete for result in results
        )
        return [result.take() for result in results] if complete else None

    def results(self, wanted: MirroredSums) -> list[Gradient]:
        """Return the captured parts of the results of an iteration's all-reduces.

        Returns:
            Results that were found, in the order of the buckets; none if more
            operations fit than are wanted.
        """
        group = self._groups.get(wanted.group)
        if group is None:
            return []
        group.merge()
        sends = _sends(wanted.buckets, wanted.size, wanted.element_bytes)
        is_same = (
            group.before is not None
            and replace(group.before, first=wanted.first, end=wanted.end) == wanted
        )
        # merges follow the buckets of the iteration before: with other buckets the sums
        # are wrong
        merges = group.merges if is_same else {}
        results: list[Gradient] = []
        for operation in group.operations(range(wanted.first, wanted.end)):
            number = len(results)
            if number == len(sends):
                if any(
                    _locate(group, operation, of_bucket, remember=False)
                    for of_bucket in sends
                ):
                    return []
                continue
            merge = merges.get(operation)
            if merge and merge.is_complete and merge.number == number:
                results.append(merge.gradient)
                continue
            located = _locate(group, operation, sends[number], remember=True)
            if located:
                results.append(Gradient(wanted.buckets[number]))
                for each in located:
                    for start, piece in each.final_sums():
                        results[-1].put(start, piece)
        return results

    def drop(self, wanted: MirroredSums) -> None:
        """Drop the operations of an iteration, and all earlier ones of its group."""
        group = self._groups.get(wanted.group)
        if group is None:
            return
        for stream in group.streams.values():
            stream.drop_up_to(wanted.end - 1)
        group.before = wanted
        group.merges = {
            each: merge for each, merge in group.merges.items() if each >= wanted.end
        }

    def limit(self) -> None:
        """Forget groups, the largest first, until captured bytes fit into the limit.

        No server asks for the sums of such a group.
        """
        while self.size_bytes > self._most_bytes:
            self._drop(
                max(self._groups, key=lambda name: self._groups[name].size_bytes)
            )

    def _watch(self, segment: TcpSegment, mark: StreamMark) -> _WatchedStream | None:
        """Follow a stream from its mark on.

        Returns:
            The stream; None if the rank is not watched.
        """
        name = mark.group.hex()
        stream = None
        if mark.rank < self._captures:
            stream = _WatchedStream((segment.sequence + mark.start) % (1 << 32))
            self._groups.setdefault(name, _Group()).streams[mark.rank] = stream
        self._streams[segment.stream] = name, stream
        if len(self._groups) > _MOST_GROUPS:
            self._drop(next(iter(self._groups)))
        return stream

    def _drop(self, name: str) -> None:
        del self._groups[name]
        self._streams = {
            each: known for each, known in self._streams.items() if known[0] != name
        }


# cached: every iteration has the same buckets
@lru_cache(maxsize=64)
def _sends(
    buckets: tuple[int, ...], size: int, element_bytes: int
) -> list[list[list[RingSend]]]:
    """Return the messages of each bucket's all-reduce, by the sender's rank."""
    rings = [
        Ring(num_bytes=num_bytes, size=size, element_bytes=element_bytes)
        for num_bytes in buckets
    ]
    return [[ring.sends(rank) for rank in range(size)] for ring in rings]


def _locate(
    group: _Group,
    operation: int,
    sends: Sequence[Sequence[RingSend]],
    *,
    remember: bool,
) -> list[LocatedMessages] | None:
    """Return the positions of an operation's messages in the ring, by stream.

    Args:
        group: Group of the operation.
        operation: Number of the operation.
        sends: Messages of the all-reduce, by the sender's rank.
        remember: Whether to keep the messages that are still to come, for the next
            operation.

    Returns:
        The positions; None if the operation is not the all-reduce of `sends`.
    """
    found: dict[int, LocatedMessages] = {}
    for rank, stream in group.streams.items():
        messages = stream.record.of(operation)
        if messages:
            located = locate_all(messages, sends[rank], stream.left.get(operation - 1))
            if located is None:
                return None
            found[rank] = located
    if not any(located.messages for located in found.values()):
        return None
    for rank, located in found.items() if remember else ():
        group.streams[rank].left[operation] = located.left
    return list(found.values())
