"""`ckpt=flowcheck`: checkpoint servers compute every iteration's state from gradients.

The module owns the plan, which takes everything in every iteration, and the forecast of
host memory. All ranks compute the same plan. The module must not know how a state
reaches the servers. FlowCheck.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moe_ckpt.config import FlowcheckConfig
from moe_ckpt.policies.memory_forecast import (
    MemoryForecast,
    StageForecasts,
    require_budget,
)
from moe_ckpt.policies.stage_profile import StageProfile, everything_at
from moe_ckpt.types import Measured, SnapshotPlan

GRADIENT_SHARE = 3
"""Bytes of FP32 masters and moments, as a multiple of the bytes of FP32 gradients."""


class ServerSnapshots(StageForecasts[StageProfile]):
    """Policy that keeps each rank's state on checkpoint servers.

    The state of a rank is on the server of the rank's own node and on the servers of
    `num_copies` other nodes, or on servers that train nothing (`config.on_hosts`).

    Args:
        config: The settings.
        stages: The profiles of all stages.
        own_stage: The number of this rank's stage.
        num_copies: The number of other nodes whose servers hold the state of a rank.

    Raises:
        ConfigError: The memory budget is too small; the message contains the numbers.
    """

    def __init__(
        self,
        config: FlowcheckConfig,
        stages: Sequence[StageProfile],
        own_stage: int,
        num_copies: int = 0,
    ) -> None:
        super().__init__(stages, own_stage)
        self._config = config
        # states that servers on training nodes hold for each rank: the rank's own state
        # and those of other nodes' ranks
        self._num_servers = 0 if config.on_hosts else 1 + num_copies
        self._has_begun = False
        require_budget(config.memory_budget_bytes, self.forecast())

    # ARG002: the plan depends on no measurements
    def plan(self, iteration: int, measure: Callable[[], Measured]) -> SnapshotPlan:  # noqa: ARG002
        """Return the plan after `iteration` steps: servers get all state."""
        every = self._config.durable_every_iters
        # no whole checkpoint at the first snapshot, which also follows a load
        durable = self._has_begun and every > 0 and iteration % every == 0
        self._has_begun = True
        return SnapshotPlan(
            durable=durable, sparse=everything_at(iteration, self._stage.table)
        )

    def notes(self) -> list[str]:
        """Return the costs, line by line, for the log."""
        lag, copies = self._config.max_lag_iters, self._config.server_copies
        where = f"its own node's and {self._num_servers - 1} on other nodes"
        if self._config.on_hosts:
            where = f"{copies} on machines that train nothing"
        waits = f"which may lag {lag} iterations" if lag else "which training waits for"
        servers = "each iteration servers make a rank's state of its gradients"
        return [
            f"{servers}: {where}, {waits}",
            "host memory of the largest rank:",
            *self.forecast().lines(),
        ]

    def _forecast(self, stage: StageProfile) -> MemoryForecast:
        """Return the memory of a rank.

        A rank holds at most two whole snapshots, and gradients on their way to servers
        that lag. A server holds the states from the newest state that all servers have
        up to its own newest state, and the state in progress.
        """
        size, largest = (
            stage.dense_bytes,
            max(each.dense_bytes for each in self._stages),
        )
        under_way = self._config.max_lag_iters + 1
        snapshots_bytes = 2 * size + under_way * size // GRADIENT_SHARE
        step_log_bytes = (under_way + 2) * stage.step_log_bytes
        copies_bytes = self._num_servers * ((under_way + 2) * largest + step_log_bytes)
        return MemoryForecast(
            snapshots_bytes=snapshots_bytes,
            boundary_log_bytes=0,
            step_log_bytes=step_log_bytes,
            copies_bytes=copies_bytes,
            total_bytes=snapshots_bytes + step_log_bytes + copies_bytes,
            double_buffered_dense_bytes=2 * size,
        )
