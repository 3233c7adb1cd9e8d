"""Fewer points that look the same, for plots of a million iterations. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_POINTS = 2000
"""Number of points that a plot shows of one series, at most."""


def thin(values: NDArray[np.float64], most: int = MOST_POINTS) -> NDArray[np.int64]:
    """Return the indices of the points to keep, in order.

    If there are more than `most` points, the function keeps the first, the last and the
    extremes of stretches of equal length.

    Args:
        values: The points; NaN and infinity are no points.
        most: The number of points to keep at most.
    """
    known = np.flatnonzero(np.isfinite(values))
    if len(known) <= most:
        return known
    # extremes, not averages: an iteration of ten times the usual length must not vanish
    # among a thousand others
    stretches = np.array_split(known[1:-1], (most - 2) // 2)
    extremes = [
        stretch[pick(values[stretch])]
        for stretch in stretches
        for pick in (np.argmin, np.argmax)
    ]
    return np.unique([known[0], known[-1], *extremes])


def evenly(count: int, most: int) -> NDArray[np.int64]:
    """Return indices at equal distances, the first and the last included.

    Args:
        count: The number of items.
        most: The number of indices at most.
    """
    return (
        np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))
        if count
        else np.empty(0, np.int64)
    )


def in_steps(numbers: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return the indices of the numbers to keep: of each step, the last index.

    Steps are powers of two, so series of about the same range keep the same steps.

    Args:
        numbers: The numbers, not negative.
        most: The number of indices at most.

    Returns:
        The indices, in order.
    """
    if not len(numbers):
        return np.empty(0, np.int64)
    step = 1
    while numbers.max() // step >= most:
        step *= 2
    _, from_behind = np.unique(numbers[::-1] // step, return_index=True)
    return np.sort(len(numbers) - 1 - from_behind)
