"""The seconds of single iterations beside the mean. Pure.

Where a router sends most tokens to a few experts, an iteration takes longer. While it learns, iterations may take from
half to twice the mean, the same ones in every run of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


class Pace:
    """The length of each iteration, in mean iterations: `lengths` of the first ones, and 1 for all later ones."""

    def __init__(self, lengths: Sequence[float] = ()) -> None:
        self._lengths = tuple(lengths)
        self._sums = [0, *accumulate(lengths)]

    def between(self, done: int, reached: int) -> float:
        """Return the length of the iterations `done` + 1 to `reached`: exactly their number at an even pace."""
        return self._up_to(reached) - self._up_to(done)

    def length(self, number: int) -> float:
        """Return the length of the iteration `number`, from 1."""
        return self._lengths[number - 1] if number <= len(self._lengths) else 1.0

    def after(self, done: int) -> tuple[float, ...]:
        """Return the lengths of the iterations from `done` + 1 on as far as they are known; all later ones are 1."""
        return self._lengths[done:]

    def again(self, reached: int, share: float) -> Pace:
        """Return the pace of processes that have run iterations up to `reached`: these take a share of their time."""
        return self if reached == 0 or share == 1.0 else _PaceAgain(self, reached, share)

    def _up_to(self, iteration: int) -> float:
        num_known = len(self._lengths)
        return self._sums[min(iteration, num_known)] + max(0, iteration - num_known)


class _PaceAgain(Pace):
    def __init__(self, first: Pace, reached: int, share: float) -> None:
        super().__init__()
        self._first, self._reached, self._share = first, reached, share

    def between(self, done: int, reached: int) -> float:
        again = self._first.between(done, max(done, min(reached, self._reached)))
        return self._first.between(done, reached) - (1 - self._share) * again

    def length(self, number: int) -> float:
        return self._first.length(number) * (self._share if number <= self._reached else 1.0)

    def after(self, done: int) -> tuple[float, ...]:
        again = tuple(map(self.length, range(done + 1, self._reached + 1)))
        return (*again, *self._first.after(done)[len(again) :])


EVEN = Pace()
