"""`ckpt=gemini` and `ckpt=checkfreq`: the whole state into host memory at an interval.

The module owns the interval and its changes. All ranks compute the same plan, from
sizes known at the start and from measurements that ranks agree on. The module must not
measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from moe_ckpt.config import AUTO, CheckfreqConfig, GeminiConfig
from moe_ckpt.policies.checkpoint_interval import (
    best_interval,
    capped_interval,
    copying_interval,
)
from moe_ckpt.policies.memory_forecast import (
    MemoryForecast,
    StageForecasts,
    forecast,
    require_budget,
)
from moe_ckpt.policies.stage_profile import StageProfile, everything_at, is_due
from moe_ckpt.policies.window_schedule import refit
from moe_ckpt.types import IntervalChoice, Measured, SnapshotPlan

_STALE_ITERS = 64


class WholeSnapshots(StageForecasts[StageProfile]):
    """Policy that takes a snapshot of everything at first, then one at every interval.

    Args:
        config: The settings.
        stages: The profiles of all stages.
        own_stage: The number of this rank's stage.
        num_copies: The number of other ranks whose snapshots a rank also keeps.

    Raises:
        ConfigError: The memory budget is too small; the message contains the numbers.
    """

    def __init__(
        self,
        config: GeminiConfig | CheckfreqConfig,
        stages: Sequence[StageProfile],
        own_stage: int,
        num_copies: int = 0,
    ) -> None:
        super().__init__(stages, own_stage)
        self._config = config
        self._num_copies = num_copies
        self._largest_bytes = max(stage.dense_bytes for stage in stages)
        self._aim, self._interval = _aim(config)
        self._every_iters = 0 if config.every_iters == AUTO else int(config.every_iters)
        self._is_measured = False
        self._newest_on_disk: int | None = None
        self._next: int | None = None
        require_budget(config.memory_budget_bytes, self.forecast())

    def plan(self, iteration: int, measure: Callable[[], Measured]) -> SnapshotPlan:
        """Return the plan after `iteration` steps: everything, or nothing.

        With every_iters=auto the plan asks for measurements when a snapshot is due.
        Until the cost of a snapshot is measured, the plan uses the wait predicted by
        the size of a snapshot and the rate of copies, and the interval is
        `profile_iters` or longer. If ranks copied in each of the last _STALE_ITERS
        iterations, the next snapshot comes one iteration later, because the time of an
        iteration without copies may have changed.

        Args:
            iteration: The number of steps of the state.
            measure: Returns the measurements. Collective.
        """
        every = self._config.durable_every_iters
        # no whole checkpoint at the first snapshot, which also follows a load
        durable = self._next is not None and every > 0 and iteration % every == 0
        if self._next is not None and iteration < self._next:
            return SnapshotPlan(durable=durable)
        choice, rest_iters = None, 0
        if self._is_auto:
            measured = measure()
            choice, rest_iters = (
                self._choose(measured),
                int(measured.iters_since_quiet >= _STALE_ITERS),
            )
        self._next = (
            iteration + (self._every_iters or self._config.profile_iters) + rest_iters
        )
        plan = everything_at(iteration, self._stage.table)
        to_disk = is_due(iteration, self._newest_on_disk, self._config.disk.every_iters)
        if to_disk:
            self._newest_on_disk = iteration
        return SnapshotPlan(
            durable=durable, sparse=plan, interval=choice, to_disk=to_disk
        )

    def notes(self) -> list[str]:
        """Return the costs, line by line, for the log."""
        every = f"every {self._every_iters} iterations"
        if self._is_auto:
            every = f"at the interval that {self._aim}"
        return [
            f"host memory of the largest rank, everything {every}:",
            *self.forecast().lines(),
        ]

    @property
    def _is_auto(self) -> bool:
        return self._config.every_iters == AUTO

    def _choose(self, measured: Measured) -> IntervalChoice | None:
        """Set the interval from measurements; without any, return None and set none."""
        if measured.iteration_s <= 0:
            return None
        cost_s, least_iters, is_measured = (
            measured.snapshot_cost_s,
            1,
            measured.snapshot_cost_s is not None,
        )
        if cost_s is None:
            cost_s, least_iters = self._wait_s(measured), self._config.profile_iters
            if cost_s == 0:  # the other costs of a snapshot are not known yet
                self._every_iters = 0
                return None
        copy_s = self._largest_bytes / measured.copy_bytes_per_s
        best = max(
            least_iters,
            copying_interval(iteration_s=measured.iteration_s, copy_s=copy_s),
            self._interval(iteration_s=measured.iteration_s, checkpoint_s=cost_s),
        )
        # hysteresis only between two measured or two predicted intervals: a predicted
        # interval must not hold back a measured one
        holds = self._every_iters > 0 and self._is_measured == is_measured
        self._every_iters = (
            refit(self._every_iters, best, drift=self._config.interval_drift)
            if holds
            else best
        )
        self._is_measured = is_measured
        return IntervalChoice(
            every_iters=self._every_iters,
            best=best,
            iteration_s=measured.iteration_s,
            copy_bytes_per_s=measured.copy_bytes_per_s,
            snapshot_cost_s=cost_s,
        )

    def _wait_s(self, measured: Measured) -> float:
        """Return the seconds that the update waits for a copy to host memory."""
        return max(
            0.0,
            self._largest_bytes / measured.host_bytes_per_s - measured.hidden_copy_s,
        )

    def _forecast(self, stage: StageProfile) -> MemoryForecast:
        return forecast(
            window_bytes=stage.dense_bytes,
            period_iters=1,
            # a snapshot that is being written to the local disk also stays in memory
            keep_windows=1 + (self._config.disk.every_iters > 1),
            log_bytes_per_iteration=0,
            dense_bytes=stage.dense_bytes,
            step_log_bytes_per_iteration=stage.step_log_bytes,
            num_copies=self._num_copies,
            largest_window_bytes=self._largest_bytes,
        )


def _aim(config: GeminiConfig | CheckfreqConfig) -> tuple[str, Callable[..., int]]:
    """Return the aim of an interval in words, and the function for the interval.

    The function takes the seconds of an iteration and of a checkpoint.
    """
    match config:
        case GeminiConfig(mtbf_s=mtbf_s):
            return f"is best for ckpt.mtbf_s={mtbf_s:g}", partial(
                best_interval, mtbf_s=mtbf_s
            )
        case CheckfreqConfig(overhead=overhead):
            return f"keeps to ckpt.overhead={overhead:g}", partial(
                capped_interval, overhead=overhead
            )
