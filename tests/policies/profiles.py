"""Settings, stages and measurements for tests of policies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_ckpt.policies.stage_profile import StageProfile
from moe_ckpt.run_settings import ckpt_config
from moe_ckpt.types import (
    Measured,
    OperatorId,
    OperatorKind,
    OperatorTable,
    SnapshotPlan,
)

NOTHING = SnapshotPlan()


def config(policy: str, **changes: Any) -> Any:
    """Return the settings of conf/ckpt/<policy>.yaml with changes, by key."""
    return ckpt_config(policy, **changes)


def profile(
    parameters: Sequence[Sequence[int]],
    num_experts: int = 0,
    boundary_log_bytes: int = 0,
    step_log_bytes: int = 0,
) -> StageProfile:
    """Return a stage whose operators are blocks, then the experts of one layer.

    Args:
        parameters: Parameters of each operator on each rank, [ranks][operators].
        num_experts: The number of operators that are experts.
        boundary_log_bytes: Bytes that the boundary logs of an iteration take.
        step_log_bytes: Bytes that the step log of an iteration takes.
    """
    full_bytes = 12 * np.array(parameters, np.int64)
    blocks = [
        OperatorId(kind=OperatorKind.BLOCK, layer=i)
        for i in range(full_bytes.shape[1] - num_experts)
    ]
    experts = [
        OperatorId(kind=OperatorKind.EXPERT, layer=0, expert=i)
        for i in range(num_experts)
    ]
    table = OperatorTable(
        operators=[*blocks, *experts],
        full_bytes=full_bytes,
        compute_bytes=full_bytes // 6,
    )
    return StageProfile(
        table=table,
        boundary_log_bytes=boundary_log_bytes,
        step_log_bytes=step_log_bytes,
    )


def equal(num_operators: int, **logs: int) -> StageProfile:
    return profile([[1] * num_operators], **logs)


def unasked() -> Measured:
    raise AssertionError("nothing is measured here")


def nothing_yet() -> Measured:
    return Measured(iteration_s=0.0, copy_bytes_per_s=math.inf, popularity=np.zeros(0))
