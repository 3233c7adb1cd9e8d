"""Events of one kind as a table of numbers.

A run has millions of such events. One Python object for each event would be too many.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Microseconds = NDArray[np.int64]
KEYS = ("t_s", "iteration")
"""Columns without which a row is useless."""

_US_PER_S = 1e6


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Columns:
    """The events of one kind, as a table."""

    names: tuple[str, ...]
    """Names of the columns, in order."""

    rows: NDArray[np.float64]
    """A row for each event in the order of the file, a column for each name; NaN where
    an event lacks the number.
    """

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        return self.rows[:, self.names.index(name)]

    def us(self, name: str) -> Microseconds:
        """Return a column of seconds in whole microseconds; 0 for NaN and infinity."""
        seconds = np.nan_to_num(self[name], nan=0.0, posinf=0.0, neginf=0.0)
        return np.rint(seconds * _US_PER_S).astype(np.int64)

    @property
    def at_us(self) -> Microseconds:
        """The time of each event, in microseconds since the run's origin.

        The times never descend, even if the machine's clock was set back.
        """
        # callers search and subtract ascending times, but the times of a wall clock
        # that was set back do not ascend
        return (
            np.maximum.accumulate(self.us("t_s"))
            if len(self)
            else np.empty(0, np.int64)
        )

    @property
    def iteration(self) -> NDArray[np.int64]:
        return self["iteration"].astype(np.int64)


def join(names: tuple[str, ...], parts: Iterable[NDArray[np.float64]]) -> Columns:
    """Return the parts, one below the other.

    Args:
        names: The names of the columns.
        parts: The rows; no row lacks a number of `KEYS`.
    """
    return Columns(
        names=names, rows=np.concatenate([np.empty((0, len(names))), *parts])
    )
