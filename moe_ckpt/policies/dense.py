"""Policies that save the whole state at an interval, or never."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_ckpt.config import CkptConfig, DenseConfig, NoneConfig
from moe_ckpt.ports import Policy
from moe_ckpt.types import Measured, SnapshotPlan


@dataclass(frozen=True, slots=True)
class Never:
    """`ckpt=none`."""

    def plan(self, iteration: int, measure: Callable[[], Measured]) -> SnapshotPlan:  # noqa: ARG002 - whatever they are
        return SnapshotPlan(durable=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class EveryInterval:
    """`ckpt=dense`: after every `every_iters`-th iteration, and after the last one."""

    every_iters: int
    last_iteration: int

    def plan(self, iteration: int, measure: Callable[[], Measured]) -> SnapshotPlan:  # noqa: ARG002 - needs nothing
        return SnapshotPlan(
            durable=iteration % self.every_iters == 0
            or iteration == self.last_iteration
        )


def make_policy(config: CkptConfig, *, last_iteration: int) -> Policy:
    """Return the policy of a configuration with whole checkpoints or none."""
    match config:
        case NoneConfig():
            return Never()
        case DenseConfig():
            return EveryInterval(
                every_iters=config.every_iters, last_iteration=last_iteration
            )
        case _:
            raise AssertionError(f"{config.policy} keeps snapshots in host memory")
