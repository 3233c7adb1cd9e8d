"""Rows of settings that cover every pair of values.

A row describes a job, and the fault in one of the job's iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from allpairspy import AllPairs

from tests.harness.threads.job import Fault
from tests.harness.threads.model import Shape

Axes = Mapping[str, Sequence[Any]]


def rows_of(axes: Axes, is_possible: Callable[[Mapping[str, Any]], bool]) -> list[Any]:
    """Return rows that cover every pair of the axes' values, as named tuples.

    Args:
        axes: The values of each axis.
        is_possible: Whether a row may exist. Also called with the beginnings of rows,
            in which later axes are missing.
    """
    row = NamedTuple("Row", [(name, Any) for name in axes])  # type: ignore[misc]
    found = AllPairs(
        list(axes.values()),
        filter_func=lambda values: is_possible(dict(zip(axes, values, strict=False))),
    )
    return [row(*values) for values in found]


def shape_of(row: Any) -> Shape:
    return replace(row.shape, skips=row.skips)


def fault_of(row: Any, iteration: int) -> Fault:
    """Return the fault of a row: the row's ranks die in the row's phase."""
    ranks = range(row.shape.world_size)
    victims = {
        "first": ranks[:1],
        "last": ranks[-1:],
        "a stage": ranks[-row.shape.dp :],
        "all": ranks,
    }[row.dead]
    (phase, skip), first, also = row.phase, victims[0], tuple(victims[1:])
    return Fault(
        rank=first,
        phase=phase,
        iteration=iteration,
        skip=skip,
        also=also,
        loses_memory=row.loses_memory,
    )
