"""Policies that save the whole state at an interval, or never."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_ckpt.config import CkptConfig, DenseConfig, NoneConfig
from moe_ckpt.ports import Policy
from moe_ckpt.types import Measured, SnapshotPlan


@dataclass(frozen=True, slots=True)
class Never:
    """Policy of `ckpt=none`: saves nothing."""

    # ARG002: the plan is the same for all iterations and measurements
    def plan(self, iteration: int, measure: Callable[[], Measured]) -> SnapshotPlan:  # noqa: ARG002
        return SnapshotPlan(durable=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class EveryInterval:
    """Policy of `ckpt=dense`: saves at an interval, and after the last iteration."""

    every_iters: int
    """Iterations between two checkpoints, at least 1."""

    last_iteration: int
    """The last iteration of the run, after which a checkpoint is always saved."""

    # ARG002: the plan needs no measurements
    def plan(self, iteration: int, measure: Callable[[], Measured]) -> SnapshotPlan:  # noqa: ARG002
        return SnapshotPlan(
            durable=iteration % self.every_iters == 0
            or iteration == self.last_iteration
        )


def make_policy(config: CkptConfig, *, last_iteration: int) -> Policy:
    """Return the policy of a configuration with whole checkpoints or no checkpoints.

    Raises:
        AssertionError: The configured policy keeps snapshots in host memory.
    """
    match config:
        case NoneConfig():
            return Never()
        case DenseConfig():
            return EveryInterval(
                every_iters=config.every_iters, last_iteration=last_iteration
            )
        case _:
            raise AssertionError(f"{config.policy} keeps snapshots in host memory")
