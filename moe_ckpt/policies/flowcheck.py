"""`ckpt=flowcheck`: every iteration's state on checkpoint servers, which compute it
from gradients (FlowCheck).

Owns: the plan, which is everything in every iteration, and the host memory for it. All
ranks compute the same plan. Must not: know how a state reaches the servers.
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
"""The bytes of FP32 masters and moments, as a multiple of those of FP32 gradients."""


class ServerSnapshots(StageForecasts[StageProfile]):
    """Each rank's state is on its own node's server and on those of `num_copies` other
    nodes, or on hosts of their own.

    Raises ConfigError, with the numbers, if the memory budget does not allow that.
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
        # on a training node, of a rank's own and others'
        self._num_servers = 0 if config.on_hosts else 1 + num_copies
        self._has_begun = False
        require_budget(config.memory_budget_bytes, self.forecast())

    def plan(self, iteration: int, measure: Callable[[], Measured]) -> SnapshotPlan:  # noqa: ARG002 - nothing varies
        """Return the plan for the state after `iteration` steps: servers get all of it."""
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
        return [
            (
                "each iteration servers make a rank's state of its gradients:"
                f" {where}, "
                f"{f'which may lag {lag} iterations' if lag else 'which training waits for'}"
            ),
            "host memory of the largest rank:",
            *self.forecast().lines(),
        ]

    def _forecast(self, stage: StageProfile) -> MemoryForecast:
        """Return the memory of a rank: at most two whole snapshots, and gradients on
        their way to servers that lag.

        A server holds the states from the newest that all servers have to its own
        newest, and the one in progress.
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
