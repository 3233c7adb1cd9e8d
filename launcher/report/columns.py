"""Events of one kind as a table of numbers: a run has millions of them, and a Python
object each would be too many.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Microseconds = NDArray[np.int64]
KEYS = ("t_s", "iteration")  # without them a row says nothing
_US_PER_S = 1e6


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Columns:
    """`rows` has a row for each event in the order of the file, a column for each name;
    NaN where one lacks.
    """

    names: tuple[str, ...]
    rows: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        return self.rows[:, self.names.index(name)]

    def us(self, name: str) -> Microseconds:
        """Return a column of seconds in whole microseconds; 0 where it is lacking."""
        seconds = np.nan_to_num(self[name], nan=0.0, posinf=0.0, neginf=0.0)
        return np.rint(seconds * _US_PER_S).astype(np.int64)

    @property
    def at_us(self) -> Microseconds:
        """When each event was written: never before the one above it, whatever the
        machine's clock did.
        """
        # searches and differences below rely on ascending times, which a wall clock
        # that is set back does not give
        return (
            np.maximum.accumulate(self.us("t_s"))
            if len(self)
            else np.empty(0, np.int64)
        )

    @property
    def iteration(self) -> NDArray[np.int64]:
        return self["iteration"].astype(np.int64)


def join(names: tuple[str, ...], parts: Iterable[NDArray[np.float64]]) -> Columns:
    """Return the parts one below the other; none lacks any of `KEYS`."""
    return Columns(
        names=names, rows=np.concatenate([np.empty((0, len(names))), *parts])
    )
