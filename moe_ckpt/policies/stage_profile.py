"""A stage before training, as all policies with snapshots in host memory use it, and due iterations. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_ckpt.types import IntArray, OperatorTable, SlotPlan, UnitPlan


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageProfile:
    """A stage before training: its operators, and the bytes that one of its ranks logs in an iteration."""

    table: OperatorTable
    boundary_log_bytes: int
    step_log_bytes: int

    @property
    def dense_bytes(self) -> int:
        """The whole state of the rank with the most bytes."""
        return int(self.table.full_bytes.sum(axis=1).max())


def have_equal_bytes(one: StageProfile, other: StageProfile) -> bool:
    """Return whether two stages have the same kinds of operators with the same bytes, and equal logs."""
    kinds = [[operator.kind for operator in each.table.operators] for each in (one, other)]
    return (
        one.boundary_log_bytes == other.boundary_log_bytes
        and one.step_log_bytes == other.step_log_bytes
        and kinds[0] == kinds[1]
        and _are_equal(one.table.full_bytes, other.table.full_bytes)
        and _are_equal(one.table.compute_bytes, other.table.compute_bytes)
    )


def _are_equal(one: IntArray, other: IntArray) -> bool:
    # stages of one description share their arrays
    return one is other or np.array_equal(one, other)


def is_due(iteration: int, newest: int | None, every_iters: int) -> bool:
    """Return whether an action every `every_iters` iterations (0: never) is due now."""
    return every_iters > 0 and (newest is None or iteration - newest >= every_iters)


def everything_at(iteration: int, table: OperatorTable) -> SlotPlan:
    """Return the plan of a snapshot of all operators: a window of one slot."""
    return SlotPlan(window_start=iteration, units=(UnitPlan(full=tuple(range(len(table.operators)))),))
