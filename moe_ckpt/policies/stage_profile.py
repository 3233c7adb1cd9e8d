"""What a policy knows of a stage before training: its operators, and bytes of logs.

Used by all policies with snapshots in host memory. `is_due` says after which iterations
a policy with a fixed interval acts. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_ckpt.types import OperatorTable, OwnedBytes, SlotPlan, UnitPlan


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageProfile:
    """A stage before training: its operators, and the bytes that its ranks log."""

    table: OperatorTable
    """The operators of the stage, and each rank's bytes of them."""

    boundary_log_bytes: int
    """Bytes that one rank of the stage adds to the boundary log in an iteration."""

    step_log_bytes: int
    """Bytes that one rank of the stage adds to the step log in an iteration."""

    gradient_bytes: int = 0
    """Bytes that one rank of the stage adds to the gradient log in an iteration."""

    @property
    def shared_log_bytes(self) -> int:
        """Bytes that one rank of the stage logs in shared memory in an iteration."""
        return self.step_log_bytes + self.gradient_bytes

    @property
    def dense_bytes(self) -> int:
        """The bytes of the whole state on the rank with the most bytes."""
        owned = self.table.owned
        return int(owned.by_rank(owned.full).max())


def have_equal_bytes(one: StageProfile, other: StageProfile) -> bool:
    """Return whether two stages have equal kinds of operators, bytes and logs."""
    kinds = [
        [operator.kind for operator in each.table.operators] for each in (one, other)
    ]
    return (
        one.boundary_log_bytes == other.boundary_log_bytes
        and one.step_log_bytes == other.step_log_bytes
        and one.gradient_bytes == other.gradient_bytes
        and kinds[0] == kinds[1]
        and _are_equal(one.table.owned, other.table.owned)
    )


def _are_equal(one: OwnedBytes, other: OwnedBytes) -> bool:
    # stages with the same description share one `OwnedBytes`
    if one is other:
        return True
    fields = ("ranks", "operators", "full", "compute")
    return one.num_ranks == other.num_ranks and all(
        np.array_equal(getattr(one, field), getattr(other, field)) for field in fields
    )


def is_due(iteration: int, newest: int | None, every_iters: int) -> bool:
    """Return whether an action every `every_iters` iterations (0: never) is due now.

    Args:
        iteration: The present iteration.
        newest: The iteration of the previous action; None: there was none.
        every_iters: The iterations between two actions.
    """
    return every_iters > 0 and (newest is None or iteration - newest >= every_iters)


def everything_at(iteration: int, table: OperatorTable) -> SlotPlan:
    """Return the plan of a snapshot of all operators: a window of one slot."""
    return SlotPlan(
        window_start=iteration,
        units=(UnitPlan(full=tuple(range(len(table.operators)))),),
    )
