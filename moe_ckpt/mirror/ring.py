"""gloo's ring all-reduce: the messages that carry bytes of the result, and those that
carry partial sums. Pure.

The bytes are cut into segments, at least two for each of N ranks and of at most 1 MiB;
a rank sends to the one before it. First come (N - 1) / N of the segments with partial
sums (reduce-scatter), then as many with final ones (all-gather), in the order that its
rank in the group gives. So a capture at one rank has (N - 1) / N of the result: two are
needed. FlowCheck, sections 2.1 and 6.1. Algorithm 1 as printed counts packets from the
start of the iteration and finds the steps of a layer by the whole count, which is right
for the first layer only; here each all-reduce counts from its own start.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

_LARGEST_SEGMENT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RingSend:
    """One message: `num_bytes` of the buffer from `start` on; final sums, or partial
    ones.
    """

    start: int
    num_bytes: int
    is_final: bool


@dataclass(frozen=True, kw_only=True)
class Ring:
    """An all-reduce of `num_bytes` over `size` ranks, whose elements have
    `element_bytes`.
    """

    num_bytes: int
    size: int
    element_bytes: int = 4

    @cached_property
    def segments_per_rank(self) -> int:
        largest = self.element_bytes * max(
            1, _LARGEST_SEGMENT_BYTES // self.element_bytes
        )
        wanted = max(-(-self.num_bytes // largest), 2 * self.size)
        return -(-wanted // self.size)

    @cached_property
    def segment_bytes(self) -> int:
        num_bytes = -(-self.num_bytes // (self.segments_per_rank * self.size))
        return -(-num_bytes // self.element_bytes) * self.element_bytes

    def sends(self, rank: int) -> list[RingSend]:
        """Return the messages that a rank of the group sends, in order; empty segments
        are not sent.
        """
        num_segments = self.segments_per_rank * self.size
        sent: list[RingSend] = []
        for first, is_final in (
            ((rank + 1) * self.segments_per_rank, False),
            (rank * self.segments_per_rank, True),
        ):
            for step in range(num_segments - self.segments_per_rank):
                start = (first + step) % num_segments * self.segment_bytes
                num_bytes = min(self.segment_bytes, self.num_bytes - start)
                if num_bytes > 0:
                    sent.append(
                        RingSend(start=start, num_bytes=num_bytes, is_final=is_final)
                    )
        return sent
