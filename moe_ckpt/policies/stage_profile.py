"""A stage before training, as all policies with snapshots in host memory use it, and
due iterations. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_ckpt.types import OperatorTable, OwnedBytes, SlotPlan, UnitPlan


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageProfile:
    """A stage before training: its operators, and the bytes that one of its ranks logs
    in an iteration.
    """

    table: OperatorTable
    """The operators, and each rank's bytes of them."""

    boundary_log_bytes: int
    """The bytes that one of its ranks adds to the boundary log in an iteration."""

    step_log_bytes: int
    """The bytes that one of its ranks adds to the step log in an iteration."""

    @property
    def dense_bytes(self) -> int:
        """The whole state of the rank with the most bytes."""
        owned = self.table.owned
        return int(owned.by_rank(owned.full).max())


def have_equal_bytes(one: StageProfile, other: StageProfile) -> bool:
    """Return whether two stages have the same kinds of operators with the same bytes,
    and equal logs.
    """
    kinds = [
        [operator.kind for operator in each.table.operators] for each in (one, other)
    ]
    return (
        one.boundary_log_bytes == other.boundary_log_bytes
        and one.step_log_bytes == other.step_log_bytes
        and kinds[0] == kinds[1]
        and _are_equal(one.table.owned, other.table.owned)
    )


def _are_equal(one: OwnedBytes, other: OwnedBytes) -> bool:
    # stages of one description share their bytes
    if one is other:
        return True
    fields = ("ranks", "operators", "full", "compute")
    return one.num_ranks == other.num_ranks and all(
        np.array_equal(getattr(one, field), getattr(other, field)) for field in fields
    )


def is_due(iteration: int, newest: int | None, every_iters: int) -> bool:
    """Return whether an action every `every_iters` iterations (0: never) is due now."""
    return every_iters > 0 and (newest is None or iteration - newest >= every_iters)


def everything_at(iteration: int, table: OperatorTable) -> SlotPlan:
    """Return the plan of a snapshot of all operators: a window of one slot."""
    return SlotPlan(
        window_start=iteration,
        units=(UnitPlan(full=tuple(range(len(table.operators)))),),
    )
