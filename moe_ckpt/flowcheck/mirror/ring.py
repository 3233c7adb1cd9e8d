"""gloo's ring all-reduce: messages that carry final sums or partial sums. Pure.

The bytes are cut into segments of at most 1 MiB, at least two for each of N ranks. A
rank sends to the rank before it. First come (N - 1) / N of the segments with partial
sums (reduce-scatter), then as many with final sums (all-gather), in the order that the
sender's rank in the group gives. A capture at one rank thus has (N - 1) / N of the
result, and two captures are needed. FlowCheck, sections 2.1 and 6.1.

Algorithm 1 as printed counts packets from the start of the iteration, and finds the
steps of a layer by the whole count. Such a count is right for the first layer only, so
here each all-reduce counts from its own start.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

_LARGEST_SEGMENT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RingSend:
    """One message of a ring."""

    start: int
    """Position of the message's bytes in the buffer."""

    num_bytes: int
    """Bytes of the message."""

    is_final: bool
    """Whether the message carries final sums, not partial sums."""


@dataclass(frozen=True, kw_only=True)
class Ring:
    """An all-reduce over the ranks of a group."""

    num_bytes: int
    """Bytes of the buffer."""

    size: int
    """Number of ranks in the group."""

    element_bytes: int = 4
    """Bytes of an element."""

    @cached_property
    def segments_per_rank(self) -> int:
        """Segments of the buffer for each rank."""
        largest = self.element_bytes * max(
            1, _LARGEST_SEGMENT_BYTES // self.element_bytes
        )
        wanted = max(-(-self.num_bytes // largest), 2 * self.size)
        return -(-wanted // self.size)

    @cached_property
    def segment_bytes(self) -> int:
        """Bytes of a segment, a multiple of `element_bytes`."""
        num_bytes = -(-self.num_bytes // (self.segments_per_rank * self.size))
        return -(-num_bytes // self.element_bytes) * self.element_bytes

    def sends(self, rank: int) -> list[RingSend]:
        """Return the messages that a rank of the group sends, in order.

        Empty segments are not sent.
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
