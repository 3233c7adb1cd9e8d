"""`ckpt=moevement`: which operators each iteration's snapshot takes (MoEvement, section 3.5 and Algorithm 1).

Owns: the window, its order, and when either changes. Every rank decides for itself and comes to the same: from the
sizes of all stages' operators, known from the start, and from measurements that ranks agree on. Must not: measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from moe_ckpt import schedule
from moe_ckpt.config import MoevementConfig
from moe_ckpt.errors import ConfigError
from moe_ckpt.footprint import MemoryForecast, forecast
from moe_ckpt.policies.profile import AUTO, StageProfile, is_due
from moe_ckpt.popularity import has_shifted
from moe_ckpt.types import Measured, OperatorTable, SlotPlan, SnapshotPlan, WindowChoice


class SparseWindows:
    """One window after another: a base that holds everything, then sparse ones. `num_copies` others' are kept, too.

    Raises ConfigError where the window or the memory budget cannot be had, with the numbers.
    """

    def __init__(
        self, config: MoevementConfig, stages: Sequence[StageProfile], own_stage: int, num_copies: int = 0
    ) -> None:
        self._config = config
        self._num_copies = num_copies
        self._stages = stages
        self._own = stages[own_stage]
        self._own_stage = own_stage
        self._table = self._own.table
        self._fixed = schedule.fixed_order(self._table.operators)
        self._natural = [_natural_order(stage.table) for stage in stages]
        self.max_slots = self._fitting_in_memory()
        self._order = self._own_natural = self._natural[own_stage]
        self._reference: npt.NDArray[np.float64] | None = None
        self._window: schedule.WindowSchedule | None = None
        self._start = 0
        self._next_iteration: int | None = None
        self._known: Measured | None = None
        self._newest_on_disk: int | None = None
        self._num_slots = 1 if config.window == AUTO else int(config.window)

    def plan(self, iteration: int, measure: Callable[[], Measured]) -> SnapshotPlan:
        """Return what to take of the state after `iteration` steps: everything at first, then slot after slot.

        Asks for measurements where a window begins, and for window=auto at first: where nothing has been measured yet,
        windows begin after `profile_iters` iterations. An iteration that does not follow the last begins a window, too.
        """
        if self._next_iteration is None:
            return self._base(iteration, measure)
        every = self._config.durable_every_iters
        durable = every > 0 and iteration % every == 0
        if iteration < self._next_iteration:
            return SnapshotPlan(durable=durable)
        choice = None
        if self._window is None or iteration != self._next_iteration or iteration == self._start + self._num_slots:
            measured, self._known = self._known or measure(), None
            choice = self._begin(iteration, measured)
        assert self._window is not None
        self._next_iteration = iteration + 1
        slot = iteration - self._start
        to_disk = slot == 0 and is_due(iteration, self._newest_on_disk, self._config.disk_every_iters)
        if to_disk:
            self._newest_on_disk = iteration
        full, compute = self._window.full(slot), self._window.compute(slot)
        plan = SlotPlan(window_start=self._start, slot=slot, num_slots=self._num_slots, full=full, compute=compute)
        return SnapshotPlan(durable=durable, sparse=plan, window=choice, to_disk=to_disk)

    def forecast(self, num_slots: int) -> MemoryForecast:
        """Return the host memory that the rank with the most of it needs."""
        forecasts = (self.forecast_of(stage, num_slots) for stage in range(len(self._stages)))
        return max(forecasts, key=lambda forecast: forecast.total_bytes)

    def _base(self, iteration: int, measure: Callable[[], Measured]) -> SnapshotPlan:
        profile_iters = 0
        if self._config.window == AUTO:
            measured = measure()
            if measured.iteration_s > 0:  # before a fault
                self._known = measured
            else:
                profile_iters = self._config.profile_iters
        self._next_iteration = iteration + 1 + profile_iters
        everything = tuple(range(len(self._table.operators)))
        return SnapshotPlan(sparse=SlotPlan(window_start=iteration, slot=0, num_slots=1, full=everything, compute=()))

    def _begin(self, iteration: int, measured: Measured) -> WindowChoice:
        fitting = self._num_slots
        if self._config.window == AUTO:
            fitting = self._fitting_in_time(measured)
            is_first = self._window is None
            kept = schedule.refit(self._num_slots, fitting, drift=self._config.window_drift)
            self._num_slots = fitting if is_first else kept
        reordered = self._reorder(measured.popularity)
        self._start = iteration
        self._window = self._cut(self._order, self._table, self._num_slots)
        return WindowChoice(
            num_slots=self._num_slots,
            fitting=fitting,
            iteration_s=measured.iteration_s,
            copy_bytes_per_s=measured.copy_bytes_per_s,
            reordered=reordered,
        )

    def _reorder(self, popularity: npt.NDArray[np.float64]) -> bool:
        change, share = self._config.reorder_change, self._config.reorder_share
        if self._reference is not None and not has_shifted(self._reference, popularity, change=change, share=share):
            return False
        order = schedule.order_operators(self._fixed, popularity)
        if not self._is_within_forecast(order):
            return False
        self._reference, self._order = popularity, order
        return True

    def _is_within_forecast(self, order: npt.NDArray[np.int64]) -> bool:
        """Return whether a budget allows an order: windows of one may take more than the forecast for another."""
        if self._config.memory_budget_bytes is None:
            return True
        taken, forecast = (self._window_bytes(each, self._table, self.max_slots) for each in (order, self._own_natural))
        return taken <= forecast

    def _cut(self, order: npt.NDArray[np.int64], table: OperatorTable, num_slots: int) -> schedule.WindowSchedule:
        if self._config.paper_exact:
            return schedule.paper_schedule(order, num_slots=num_slots, num_active=-(-len(order) // num_slots))
        return schedule.cut_slots(order, table, num_slots)

    def _window_bytes(self, order: npt.NDArray[np.int64], table: OperatorTable, num_slots: int) -> int:
        return int(schedule.window_bytes(table, self._cut(order, table, num_slots)).max())

    def _fitting_in_time(self, measured: Measured) -> int:
        if self._config.paper_exact:
            return min(self.max_slots, max(_paper_window(stage.table, measured) for stage in self._stages))
        budget_bytes = measured.iteration_s * measured.copy_bytes_per_s
        return max(
            schedule.fitting_window(stage.table, order, budget_bytes, max_slots=self.max_slots)
            for stage, order in zip(self._stages, self._natural, strict=True)
        )

    def _fitting_in_memory(self) -> int:
        """Return the most slots that operators and the memory budget allow."""
        most = max(len(stage.table.operators) for stage in self._stages)
        window, budget = self._config.window, self._config.memory_budget_bytes
        if window != AUTO and int(window) > most:
            raise ConfigError(f"ckpt.window: got {window}, wanted at most {most}, the operators of the largest stage")
        candidates = range(1, most + 1) if window == AUTO else [int(window)]
        if budget is None:
            return candidates[-1]
        for num_slots in reversed(candidates):
            if self.forecast(num_slots).total_bytes <= budget:
                return num_slots
        needed = self.forecast(candidates[0])
        wanted = f"with a window of {candidates[0]} at least {needed.total_bytes}:\n  " + "\n  ".join(needed.lines())
        raise ConfigError(f"ckpt.memory_budget_bytes: got {budget}, wanted {wanted}")

    def own_forecast(self) -> MemoryForecast:
        """Return the host memory that the rank with the most of it needs in this rank's stage."""
        return self.forecast_of(self._own_stage, self.max_slots)

    def notes(self) -> list[str]:
        """Return what this will cost, line by line, for people."""
        slots, later = self.max_slots, ""
        if self._config.window == AUTO:
            slots, later = 1, f", up to {slots} once iterations have been measured"
        return [f"host memory of the largest rank, window {slots}{later}:", *self.forecast(slots).lines()]

    def forecast_of(self, stage: int, num_slots: int) -> MemoryForecast:
        """Return the host memory that the rank with the most of one stage needs."""
        profile = self._stages[stage]
        windows = [
            self._window_bytes(order, each.table, num_slots)
            for order, each in zip(self._natural, self._stages, strict=True)
        ]
        return forecast(
            window_bytes=windows[stage],
            num_slots=num_slots,
            keep_windows=self._config.keep_windows,
            log_bytes_per_iteration=profile.boundary_log_bytes,
            dense_bytes=int(profile.table.full_bytes.sum(axis=1).max()),
            step_log_bytes_per_iteration=profile.step_log_bytes,
            num_copies=self._num_copies,
            largest_window_bytes=max(windows),
        )


def _paper_window(table: OperatorTable, measured: Measured) -> int:
    """Return W of Algorithm 1 for the rank with the most, whose operators all count as equal in size."""
    num_operators = len(table.operators)
    window, _ = schedule.paper_window(
        num_operators=num_operators,
        compute_bytes=float(table.compute_bytes.sum(axis=1).max()) / num_operators,
        master_bytes=float(table.full_bytes.sum(axis=1).max()) / num_operators,
        optimizer_bytes=0.0,  # in the above
        iteration_s=measured.iteration_s,
        copy_bytes_per_s=measured.copy_bytes_per_s,
    )
    return window


def _natural_order(table: OperatorTable) -> npt.NDArray[np.int64]:
    """Return the order before any popularity is known, which also serves to compare numbers of slots."""
    fixed = schedule.fixed_order(table.operators)
    return schedule.order_operators(fixed, np.zeros(len(fixed.experts)))
