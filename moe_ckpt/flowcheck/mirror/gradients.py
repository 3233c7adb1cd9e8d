"""Merges final sums from the captures at several ranks into one result. Pure.

Owns: the set of captured bytes. Must not: accept a byte on which two captures differ.
FlowCheck, sections 6.1 and 6.2.
"""

from __future__ import annotations

from bisect import bisect_left


class Spans:
    """A set of integers from 0 on, stored as spans that do not touch."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def add(self, start: int, end: int) -> None:
        """Add the numbers from `start` to before `end`."""
        first = bisect_left(self._spans, (start, -1))
        if first and self._spans[first - 1][1] >= start:
            first -= 1
        last = first
        while last < len(self._spans) and self._spans[last][0] <= end:
            start, end = (
                min(start, self._spans[last][0]),
                max(end, self._spans[last][1]),
            )
            last += 1
        self._spans[first:last] = [(start, end)]

    def within(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the spans of the set from `start` to before `end`."""
        cut = [(max(start, first), min(end, last)) for first, last in self._spans]
        return [(first, last) for first, last in cut if first < last]

    def covers(self, num: int) -> bool:
        """Return whether all numbers below `num` are in the set."""
        return self.within(0, num) == ([(0, num)] if num else [])


class Gradient:
    """Captured part of one all-reduce's result.

    Attributes:
        differs: Whether two captures have different bytes of the result.
    """

    def __init__(self, num_bytes: int) -> None:
        self._bytes = bytearray(num_bytes)
        self._there = Spans()
        self.differs = False

    def put(self, start: int, data: bytes) -> None:
        """Add the bytes of one capture.

        Bytes that another capture has delivered before must be equal; otherwise
        `differs` becomes True.

        Args:
            start: Position of the bytes in the result.
            data: The bytes.
        """
        end = start + len(data)
        assert 0 <= start <= end <= len(self._bytes), (start, end, len(self._bytes))
        for first, last in self._there.within(start, end):
            self.differs |= (
                self._bytes[first:last] != data[first - start : last - start]
            )
        self._bytes[start:end] = data
        if data:
            self._there.add(start, end)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole result."""
        return len(self._bytes)

    @property
    def is_complete(self) -> bool:
        """Whether all bytes were captured, and all captures agree."""
        return not self.differs and self._there.covers(len(self._bytes))

    def take(self) -> bytearray:
        """Return the complete result, which must not change afterwards."""
        assert self.is_complete
        return self._bytes
