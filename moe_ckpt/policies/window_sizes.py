"""`ckpt=moevement`: bytes of windows over all stages, and those that fit in memory.

The module computes copies and memory for each number of slots. Pure: every rank
computes the same from the profiles of all stages. Sizes are those of the order without
popularity. MoEvement, section 3.2.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moe_ckpt.config import AUTO, MoevementConfig
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies import window_schedule as schedule
from moe_ckpt.policies.memory_forecast import MemoryForecast, forecast
from moe_ckpt.policies.stage_profile import StageProfile, have_equal_bytes
from moe_ckpt.policies.window_cost import WindowSize
from moe_ckpt.types import IntArray

# factor between the numbers of slots that are compared, beyond the first few
_GROWTH = 1.25
MOST_PAUSE_ITERS = 1024  # a longer pause saves less than a thousandth of a snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWindow:
    """The bytes of a window of one stage."""

    slot_bytes: IntArray
    """Bytes of each slot on the rank that copies most in that slot, int64 [slots]."""

    window_bytes: int
    """Bytes of the window on the rank with the most bytes."""


class StageKind:
    """Stages with equal bytes, which have equal windows until a popularity is known.

    Args:
        stage: One of the stages.
        is_paper_exact: Whether slots are those of Algorithm 1, which counts operators.
    """

    def __init__(self, stage: StageProfile, *, is_paper_exact: bool) -> None:
        self.stage = stage
        fixed = schedule.fixed_order(stage.table.operators)
        # the order until a popularity is known, and for comparing numbers of slots
        self.natural = schedule.order_operators(fixed, np.zeros(len(fixed.experts)))
        self._is_paper_exact = is_paper_exact
        self._bytes = schedule.StageBytes(stage.table)
        self._middles = self._bytes.middles(self.natural)
        self._windows: dict[int, StageWindow] = {}

    def cut(self, order: IntArray, num_slots: int) -> schedule.WindowSchedule:
        """Return the slots of operators in an order."""
        if self._is_paper_exact:
            num_active = -(-len(order) // num_slots)
            return schedule.paper_schedule(
                order, num_slots=num_slots, num_active=num_active
            )
        middles = self._middles if order is self.natural else self._bytes.middles(order)
        return middles.cut(num_slots)

    def window(self, num_slots: int) -> StageWindow:
        """Return the bytes of a window in the order without popularity."""
        if num_slots not in self._windows:
            self._windows[num_slots] = self.window_in(self.natural, num_slots)
        return self._windows[num_slots]

    def window_in(self, order: IntArray, num_slots: int) -> StageWindow:
        """Return the bytes of a window in an order."""
        slots = self._bytes.slot_bytes(self.cut(order, num_slots))
        return StageWindow(
            slot_bytes=slots.max(axis=1), window_bytes=int(slots.sum(axis=0).max())
        )


class WindowSizes:
    """Bytes of the windows of all stages, computed once for each kind of stage.

    Args:
        config: The settings.
        stages: The profiles of all stages.
        num_copies: The number of other ranks whose windows each rank also keeps.

    Raises:
        ConfigError: The configured window has more slots than the largest stage has
            operators, or the memory budget allows no window.
    """

    def __init__(
        self, config: MoevementConfig, stages: Sequence[StageProfile], num_copies: int
    ) -> None:
        self._config = config
        self._num_copies = num_copies
        # a window that is being written to the local disk stays in memory beside the
        # kept windows
        self._keep_windows = config.keep_windows + (config.disk.every_iters > 0)
        self.kinds: list[StageKind] = []
        """All kinds of stages."""
        self.kind_of = [self._find(stage) for stage in stages]
        """The kind of each stage."""
        self.max_slots = self._fitting_in_memory()

    def _find(self, stage: StageProfile) -> StageKind:
        for kind in self.kinds:
            if have_equal_bytes(kind.stage, stage):
                return kind
        self.kinds.append(StageKind(stage, is_paper_exact=self._config.paper_exact))
        return self.kinds[-1]

    @cached_property
    def candidates(self) -> Sequence[WindowSize]:
        """The windows to choose from, with the pauses that memory allows.

        The windows have some of the numbers of slots up to `max_slots`.
        """
        return [self._size(num_slots) for num_slots in _trials(self.max_slots)]

    @cached_property
    def dense_bytes(self) -> int:
        """The bytes of the whole state on the rank with the most bytes."""
        return max(kind.stage.dense_bytes for kind in self.kinds)

    def size(self, num_slots: int) -> WindowSize:
        """Return the size of windows of `num_slots` slots."""
        return next(
            (each for each in self.candidates if each.num_slots == num_slots), None
        ) or self._size(num_slots)

    def forecast(self, num_slots: int, pause_iters: int = 0) -> MemoryForecast:
        """Return the host memory of the rank that needs the most."""
        forecasts = [
            self._forecast_of(kind, num_slots, pause_iters) for kind in self.kinds
        ]
        return max(forecasts, key=lambda forecast: forecast.total_bytes)

    def forecast_of(
        self, stage: int, num_slots: int, pause_iters: int = 0
    ) -> MemoryForecast:
        """Return the host memory of the rank of one stage that needs the most."""
        return self._forecast_of(self.kind_of[stage], num_slots, pause_iters)

    def _forecast_of(
        self, kind: StageKind, num_slots: int, pause_iters: int = 0
    ) -> MemoryForecast:
        return forecast(
            window_bytes=kind.window(num_slots).window_bytes,
            period_iters=num_slots + pause_iters,
            keep_windows=self._keep_windows,
            log_bytes_per_iteration=kind.stage.boundary_log_bytes,
            dense_bytes=kind.stage.dense_bytes,
            step_log_bytes_per_iteration=kind.stage.shared_log_bytes,
            num_copies=self._num_copies,
            largest_window_bytes=max(
                each.window(num_slots).window_bytes for each in self.kinds
            ),
            audit_every_iters=self._config.audit_every_iters,
        )

    def _size(self, num_slots: int) -> WindowSize:
        windows = [kind.window(num_slots) for kind in self.kinds]
        least_pause_iters, most_pause_iters = self._pauses(num_slots)
        return WindowSize(
            slot_bytes=tuple(
                np.max([each.slot_bytes for each in windows], axis=0).tolist()
            ),
            window_bytes=max(each.window_bytes for each in windows),
            least_pause_iters=least_pause_iters,
            most_pause_iters=most_pause_iters,
        )

    def _pauses(self, num_slots: int) -> tuple[int, int]:
        """Return the shortest and the longest pause.

        Both are the configured pause, or the limits that memory allows.
        """
        if self._config.pause_iters != AUTO:
            return int(self._config.pause_iters), int(self._config.pause_iters)
        return 0, min(self._most_pause_of(kind, num_slots) for kind in self.kinds)

    def _most_pause_of(self, kind: StageKind, num_slots: int) -> int:
        profile, shortest = kind.stage, self._forecast_of(kind, num_slots)
        budget = self._config.memory_budget_bytes
        num_windows = self._keep_windows + 1  # kept, and the window in progress
        log_bytes = profile.boundary_log_bytes + profile.shared_log_bytes
        # without a budget, logs may take as many bytes as the whole state: a pause
        # needs no more memory than a second dense snapshot
        if budget is None:
            free_bytes = (
                profile.dense_bytes
                - shortest.boundary_log_bytes
                - shortest.step_log_bytes
            )
        else:
            free_bytes = budget - shortest.total_bytes
            log_bytes += self._num_copies * profile.shared_log_bytes
        if log_bytes == 0:
            return MOST_PAUSE_ITERS
        return min(MOST_PAUSE_ITERS, max(0, free_bytes // (num_windows * log_bytes)))

    def _fitting_in_memory(self) -> int:
        """Return the most slots that operators and the memory budget allow.

        Raises:
            ConfigError: The configured window has too many slots, or no window fits.
        """
        most = max(len(kind.natural) for kind in self.kinds)
        window, budget = self._config.window, self._config.memory_budget_bytes
        pause_iters = (
            0 if self._config.pause_iters == AUTO else int(self._config.pause_iters)
        )
        if window != AUTO and int(window) > most:
            raise ConfigError(
                f"ckpt.window: got {window}, wanted at most {most}, the operators of"
                " the largest stage"
            )
        fewest, most = (1, most) if window == AUTO else (int(window), int(window))
        if budget is None:
            return most

        def needed_bytes(num_slots: int) -> int:
            return self.forecast(num_slots, pause_iters).total_bytes

        # Bisection needs monotone memory. With more slots, no operator's slot comes
        # earlier (each step of `Middles.cut` rounds monotonically), so its compute
        # weights are in no fewer slots: windows do not shrink, and logs do not reach
        # less far back.
        num_fitting = bisect_right(range(fewest, most + 1), budget, key=needed_bytes)
        if num_fitting:
            return fewest + num_fitting - 1
        needed = self.forecast(fewest, pause_iters)
        wanted = (
            f"with a window of {fewest} at least {needed.total_bytes}:\n  "
            + "\n  ".join(needed.lines())
        )
        raise ConfigError(f"ckpt.memory_budget_bytes: got {budget}, wanted {wanted}")


def _trials(limit: int) -> Iterator[int]:
    """Yield numbers of slots to compare: the first few, then each a quarter more."""
    num_slots = 1
    while num_slots < limit:
        yield num_slots
        num_slots = min(limit, math.ceil(_GROWTH * num_slots))
    yield limit
