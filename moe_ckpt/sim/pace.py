"""The lengths of single iterations relative to the mean. Pure.

Where a router sends most tokens to a few experts, an iteration takes longer. While the
router learns, iterations may take from half to twice the mean, the same iterations in
every run of the job.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate


class Pace:
    """The length of each iteration, in mean iterations.

    Args:
        lengths: The lengths of the first iterations; all later lengths are 1.
    """

    def __init__(self, lengths: Sequence[float] = ()) -> None:
        self._lengths = tuple(lengths)
        self._sums = [0, *accumulate(lengths)]
        self._rerun_until, self._rerun_ratio = 0, 1.0

    def rerun(self, until: int, ratio: float) -> Pace:
        """Return the pace of processes that have run the iterations up to `until`.

        Args:
            until: The last iteration that has been run.
            ratio: The length of an iteration that is run again, relative to its first
                run.
        """
        pace = copy.copy(self)
        pace._rerun_until, pace._rerun_ratio = (
            (until, ratio) if ratio != 1.0 else (0, 1.0)
        )
        return pace

    def between(self, done: int, reached: int) -> float:
        """Return the length of the iterations `done` + 1 to `reached`.

        At an even pace the length is exactly the number of iterations.
        """
        first = self._up_to(reached) - self._up_to(done)
        if done >= self._rerun_until:
            return first
        again = self._up_to(min(reached, self._rerun_until)) - self._up_to(done)
        return first - (1 - self._rerun_ratio) * again

    def length(self, number: int) -> float:
        """Return the length of the iteration `number`, from 1."""
        first = self._lengths[number - 1] if number <= len(self._lengths) else 1.0
        return first * self._rerun_ratio if number <= self._rerun_until else first

    def after(self, done: int) -> tuple[float, ...]:
        """Return the known lengths of the iterations from `done` + 1 on.

        All later lengths are 1.
        """
        rerun = tuple(map(self.length, range(done + 1, self._rerun_until + 1)))
        return (*rerun, *self._lengths[done + len(rerun) :])

    def _up_to(self, iteration: int) -> float:
        num_known = len(self._lengths)
        return self._sums[min(iteration, num_known)] + max(0, iteration - num_known)


EVEN = Pace()
