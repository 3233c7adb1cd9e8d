"""Bytes of windows over all stages: copies and memory for each number of slots, and the windows that a budget allows.

Pure: every rank computes the same from the profiles of all stages. Sizes are those of the order without popularity.
MoEvement, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from moe_ckpt.config import AUTO, MoevementConfig
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies import window_schedule as schedule
from moe_ckpt.policies.memory_forecast import MemoryForecast, forecast
from moe_ckpt.policies.stage_profile import StageProfile
from moe_ckpt.policies.window_cost import WindowSize
from moe_ckpt.types import IntArray, OperatorTable

MOST_PAUSE_ITERS = 1024  # a longer pause saves less than a thousandth of a snapshot


class WindowSizes:
    """Bytes of the windows of all stages. The windows of `num_copies` other ranks are kept, too.

    Raises ConfigError if the configured window has more slots than the largest stage has operators, or if the memory
    budget allows no window.
    """

    def __init__(self, config: MoevementConfig, stages: Sequence[StageProfile], num_copies: int) -> None:
        self._config = config
        self._stages = stages
        self._num_copies = num_copies
        # a window that is being written to the local disk stays in memory beside those that are kept
        self._keep_windows = config.keep_windows + (config.disk_every_iters > 0)
        fixed = [schedule.fixed_order(stage.table.operators) for stage in stages]
        # before any popularity is known, and to compare numbers of slots
        self.natural = [schedule.order_operators(each, np.zeros(len(each.experts))) for each in fixed]
        self.max_slots = self._fitting_in_memory()

    def cut(self, order: IntArray, table: OperatorTable, num_slots: int) -> schedule.WindowSchedule:
        """Return the slots of one stage's operators."""
        if self._config.paper_exact:
            return schedule.paper_schedule(order, num_slots=num_slots, num_active=-(-len(order) // num_slots))
        return schedule.cut_slots(order, table, num_slots)

    def window_bytes(self, order: IntArray, table: OperatorTable, num_slots: int) -> int:
        """Return the bytes of a window of one stage on the rank with the most bytes."""
        return int(schedule.window_bytes(table, self.cut(order, table, num_slots)).max())

    @cached_property
    def candidates(self) -> Sequence[WindowSize]:
        """The windows to choose from: some numbers of slots up to `max_slots`, with the pauses that memory allows."""
        return [self._size(num_slots) for num_slots in _trials(self.max_slots)]

    @cached_property
    def dense_bytes(self) -> int:
        """The whole state of the rank with the most bytes."""
        return max(stage.dense_bytes for stage in self._stages)

    def size(self, num_slots: int) -> WindowSize:
        """Return the size of windows of this many slots."""
        return next((each for each in self.candidates if each.num_slots == num_slots), None) or self._size(num_slots)

    def forecast(self, num_slots: int, pause_iters: int = 0) -> MemoryForecast:
        """Return the host memory of the rank that needs the most."""
        forecasts = (self.forecast_of(stage, num_slots, pause_iters) for stage in range(len(self._stages)))
        return max(forecasts, key=lambda forecast: forecast.total_bytes)

    def forecast_of(self, stage: int, num_slots: int, pause_iters: int = 0) -> MemoryForecast:
        """Return the host memory of the rank of one stage that needs the most."""
        profile = self._stages[stage]
        windows = [
            self.window_bytes(order, each.table, num_slots)
            for order, each in zip(self.natural, self._stages, strict=True)
        ]
        return forecast(
            window_bytes=windows[stage],
            period_iters=num_slots + pause_iters,
            keep_windows=self._keep_windows,
            log_bytes_per_iteration=profile.boundary_log_bytes,
            dense_bytes=profile.dense_bytes,
            step_log_bytes_per_iteration=profile.step_log_bytes,
            num_copies=self._num_copies,
            largest_window_bytes=max(windows),
        )

    def _size(self, num_slots: int) -> WindowSize:
        tables = [stage.table for stage in self._stages]
        slots = [
            schedule.slot_bytes(table, self.cut(order, table, num_slots))
            for table, order in zip(tables, self.natural, strict=True)
        ]
        least_pause_iters, most_pause_iters = self._pauses(num_slots)
        return WindowSize(
            slot_bytes=tuple(np.max([each.max(axis=1) for each in slots], axis=0).tolist()),
            window_bytes=int(max(each.sum(axis=0).max() for each in slots)),
            least_pause_iters=least_pause_iters,
            most_pause_iters=most_pause_iters,
        )

    def _pauses(self, num_slots: int) -> tuple[int, int]:
        """Return the shortest and the longest pause: the configured one, or those that memory allows."""
        if self._config.pause_iters != AUTO:
            return int(self._config.pause_iters), int(self._config.pause_iters)
        return 0, min(self._most_pause_of(stage, num_slots) for stage in range(len(self._stages)))

    def _most_pause_of(self, stage: int, num_slots: int) -> int:
        profile, shortest = self._stages[stage], self.forecast_of(stage, num_slots)
        budget = self._config.memory_budget_bytes
        num_windows = self._keep_windows + 1  # logs of the one in progress, too
        log_bytes = profile.boundary_log_bytes + profile.step_log_bytes
        if budget is None:  # logs up to the whole state: a pause needs no more memory than a second dense snapshot
            free_bytes = profile.dense_bytes - shortest.boundary_log_bytes - shortest.step_log_bytes
        else:
            free_bytes = budget - shortest.total_bytes
            log_bytes += self._num_copies * profile.step_log_bytes
        if log_bytes == 0:
            return MOST_PAUSE_ITERS
        return min(MOST_PAUSE_ITERS, max(0, free_bytes // (num_windows * log_bytes)))

    def _fitting_in_memory(self) -> int:
        """Return the most slots that operators and the memory budget allow."""
        most = max(len(stage.table.operators) for stage in self._stages)
        window, budget = self._config.window, self._config.memory_budget_bytes
        pause_iters = 0 if self._config.pause_iters == AUTO else int(self._config.pause_iters)
        if window != AUTO and int(window) > most:
            raise ConfigError(f"ckpt.window: got {window}, wanted at most {most}, the operators of the largest stage")
        candidates = range(1, most + 1) if window == AUTO else [int(window)]
        if budget is None:
            return candidates[-1]
        for num_slots in reversed(candidates):
            if self.forecast(num_slots, pause_iters).total_bytes <= budget:
                return num_slots
        needed = self.forecast(candidates[0], pause_iters)
        wanted = f"with a window of {candidates[0]} at least {needed.total_bytes}:\n  " + "\n  ".join(needed.lines())
        raise ConfigError(f"ckpt.memory_budget_bytes: got {budget}, wanted {wanted}")


def _trials(limit: int) -> Iterator[int]:
    """Yield numbers of slots to compare: all of the first few, then each a quarter larger."""
    num_slots = 1
    while num_slots < limit:
        yield num_slots
        num_slots = min(limit, math.ceil(schedule.GROWTH * num_slots))
    yield limit
