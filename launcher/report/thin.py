"""Fewer points that look the same: what a plot shows of a million iterations. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_POINTS = 2000


def thin(values: NDArray[np.float64], most: int = MOST_POINTS) -> NDArray[np.int64]:
    """Return which points to keep, in order: all, or the first, the last, and the
    extremes of each equal stretch.

    At most `most` where there are more. NaN are no points.
    """
    known = np.flatnonzero(np.isfinite(values))
    if len(known) <= most:
        return known
    # extremes, not averages: an iteration that took ten times as long must not vanish
    # among a thousand others
    stretches = np.array_split(known[1:-1], (most - 2) // 2)
    extremes = [
        stretch[pick(values[stretch])]
        for stretch in stretches
        for pick in (np.argmin, np.argmax)
    ]
    return np.unique([known[0], known[-1], *extremes])


def evenly(count: int, most: int) -> NDArray[np.int64]:
    """Return which of `count` to keep, first and last among them, at equal distances."""
    return (
        np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))
        if count
        else np.empty(0, np.int64)
    )


def in_steps(numbers: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return which to keep, in order, at most `most`: in each step of the numbers the
    last that came.

    Steps are powers of two: for numbers that reach about as far it is the same ones
    that are kept.
    """
    if not len(numbers):
        return np.empty(0, np.int64)
    step = 1
    while numbers.max() // step >= most:
        step *= 2
    _, from_behind = np.unique(numbers[::-1] // step, return_index=True)
    return np.sort(len(numbers) - 1 - from_behind)
