"""gloo's ring all-reduce: the messages that carry bytes of the result, and those that carry partial sums. Pure.

The bytes are cut into segments, at least two for each of N ranks and of at most 1 MiB; a rank sends to the one before
it. First come (N - 1) / N of the segments with partial sums (reduce-scatter), then as many with final ones
(all-gather), in the order that its rank in the group gives. So a capture at one rank has (N - 1) / N of the result: two
are needed. FlowCheck, sections 2.1 and 6.1. Algorithm 1 as printed counts packets from the start of the iteration and
finds the steps of a layer by the whole count, which is right for the first layer only; here each all-reduce counts from
its own start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from moe_ckpt.mirror.framing import PREAMBLE_BYTES

_LARGEST_SEGMENT_BYTES = 1 << 20
_MOST_UNDER_WAY = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RingSend:
    """One message: `num_bytes` of the buffer from `start` on; final sums, or partial ones."""

    start: int
    num_bytes: int
    is_final: bool


@dataclass(frozen=True, kw_only=True)
class Ring:
    """An all-reduce of `num_bytes` over `size` ranks, whose elements have `element_bytes`."""

    num_bytes: int
    size: int
    element_bytes: int = 4

    @cached_property
    def segments_per_rank(self) -> int:
        largest = self.element_bytes * max(1, _LARGEST_SEGMENT_BYTES // self.element_bytes)
        wanted = max(-(-self.num_bytes // largest), 2 * self.size)
        return -(-wanted // self.size)

    @cached_property
    def segment_bytes(self) -> int:
        num_bytes = -(-self.num_bytes // (self.segments_per_rank * self.size))
        return -(-num_bytes // self.element_bytes) * self.element_bytes

    def sends(self, rank: int) -> list[RingSend]:
        """Return the messages that a rank of the group sends, in order; empty segments are not sent."""
        num_segments = self.segments_per_rank * self.size
        sent: list[RingSend] = []
        for first, is_final in (((rank + 1) * self.segments_per_rank, False), (rank * self.segments_per_rank, True)):
            for step in range(num_segments - self.segments_per_rank):
                start = (first + step) % num_segments * self.segment_bytes
                num_bytes = min(self.segment_bytes, self.num_bytes - start)
                if num_bytes > 0:
                    sent.append(RingSend(start=start, num_bytes=num_bytes, is_final=is_final))
        return sent


@dataclass(frozen=True, kw_only=True, slots=True)
class RingPlace:
    """The place of a message: the number of its all-reduce among the expected ones, and its bytes of the buffer."""

    operation: int
    sent: RingSend


@dataclass(slots=True)
class _Run:
    """An operation in progress: an expected one, or None for another; with the number of its messages so far."""

    operation: int | None
    messages: Sequence[RingSend]
    count: int = 0

    @property
    def is_over(self) -> bool:
        return self.count >= len(self.messages)

    def give_up(self) -> None:
        """The position in it is lost."""
        self.count = len(self.messages)


class RingTracker:
    """Follows the stream from one rank to the one before it: the expected all-reduces of each iteration, and others.

    gloo numbers the operations of a group: all messages of one have the same slot, and several may be in progress. An
    operation whose first message has another length than the expected one's is another operation, and is skipped.
    """

    def __init__(self, buckets: Sequence[int], *, size: int, rank: int) -> None:
        """`buckets`: the bytes of the all-reduces of an iteration, in order."""
        self._expected = [Ring(num_bytes=num_bytes, size=size).sends(rank) for num_bytes in buckets]
        self._next = 0  # the operation that is expected next, counted from the first
        self._runs: dict[int, _Run] = {}  # by slot
        self._is_lost = False

    def resume(self, iteration: int) -> None:
        """The next operation is the first of this iteration, or another one."""
        self._next, self._is_lost = iteration * len(self._expected), False
        self._runs.clear()

    def place(self, slot: int, length: int, skipped_bytes: int | None = None) -> RingPlace | None:
        """Return the place of a message; None if it belongs to another operation, or its place cannot be determined.

        `skipped_bytes` of the stream before it are lost: the number of lost messages follows from their lengths.
        """
        if skipped_bytes is not None:
            self._pass_over(slot, length, skipped_bytes)
        if slot not in self._runs:
            self._runs[slot] = self._begin(length)
            for old in list(self._runs)[:-_MOST_UNDER_WAY]:
                del self._runs[old]
        return self._take(self._runs[slot], length)

    def _begin(self, length: int) -> _Run:
        """Return the operation of a new slot, by the length of its first message."""
        left = len(self._expected) - self._next % len(self._expected)
        for operation in () if self._is_lost else range(self._next, self._next + left):
            messages = self._expected[operation % len(self._expected)]
            if messages and messages[0].num_bytes == length:
                self._next = operation + 1
                return _Run(operation=operation, messages=messages)
        return _Run(operation=None, messages=())

    def _pass_over(self, slot: int, length: int, skipped_bytes: int) -> None:
        """Find the position again in the only operation in progress, or give up all until `resume`."""
        open_slots = [each for each, run in self._runs.items() if not run.is_over]
        number = _number_after(self._runs[slot], length, skipped_bytes) if open_slots == [slot] else None
        if number is not None:
            self._runs[slot].count = number
            return
        for run in self._runs.values():
            run.give_up()
        self._is_lost = True

    def _take(self, run: _Run, length: int) -> RingPlace | None:
        if run.is_over or run.operation is None or run.messages[run.count].num_bytes != length:
            run.give_up()
            return None
        run.count += 1
        return RingPlace(operation=run.operation, sent=run.messages[run.count - 1])


def _number_after(run: _Run, length: int, skipped_bytes: int) -> int | None:
    """Return the number of the message of this length after this many lost bytes; None if that is not certain.

    The lost bytes are messages of the operation and announcements of 48 bytes each.
    """
    fitting, left = [], skipped_bytes
    for number in range(run.count, len(run.messages)):
        if left >= 0 and left % PREAMBLE_BYTES == 0 and run.messages[number].num_bytes == length:
            fitting.append(number)
        left -= PREAMBLE_BYTES + run.messages[number].num_bytes
    return fitting[0] if len(fitting) == 1 else None
