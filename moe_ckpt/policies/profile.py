"""What all policies with snapshots in host memory know before training, and when something is due. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_ckpt.types import OperatorKind, OperatorTable

AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageProfile:
    """What is known of a stage before training: its operators, and the bytes a rank of it logs an iteration.

    `expert_capacity` is float64 [experts in the table's order], relative to each other; None where experts take any
    number of tokens.
    """

    table: OperatorTable
    boundary_log_bytes: int
    step_log_bytes: int
    expert_capacity: npt.NDArray[np.float64] | None = None

    @property
    def has_unlimited_experts(self) -> bool:
        has_experts = any(operator.kind is OperatorKind.EXPERT for operator in self.table.operators)
        return has_experts and self.expert_capacity is None


def is_due(iteration: int, newest: int | None, every_iters: int) -> bool:
    """Return whether what is to happen every `every_iters` iterations (0: never) happens now."""
    return every_iters > 0 and (newest is None or iteration - newest >= every_iters)
