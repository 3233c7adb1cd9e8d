"""`ckpt=moevement`: the operators of each iteration's snapshot in a sparse window.

MoEvement, section 3.5 and Algorithm 1. The module owns the window, the pause after the
window, the order of operators, and all changes of the three. All ranks compute the same
plan, from the sizes of all stages' operators and from measurements that ranks agree on.
The module must not measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from moe_ckpt.config import AUTO, MoevementConfig
from moe_ckpt.policies import window_schedule as schedule
from moe_ckpt.policies.checkpoint_interval import copying_interval
from moe_ckpt.policies.expert_popularity import has_shifted
from moe_ckpt.policies.memory_forecast import MemoryForecast
from moe_ckpt.policies.stage_profile import StageProfile, everything_at, is_due
from moe_ckpt.policies.window_cost import (
    JobCost,
    WindowTerms,
    cheapest_window,
    shortest_pause,
    window_terms,
)
from moe_ckpt.policies.window_sizes import WindowSizes
from moe_ckpt.types import (
    IntArray,
    Measured,
    OperatorTable,
    SlotPlan,
    SnapshotPlan,
    UnitPlan,
    WindowChoice,
)

# pause after a trial window: iterations without copies, for comparison
_TRIAL_PAUSE_ITERS = 2
# every other trial window has this many times the slots, to separate the cost of a
# byte from the cost of a snapshot
_TRIAL_FACTOR = 4
# share of the time that trials may take: small, for a choice that serves the rest of
# the job
_TRIAL_SHARE = 0.03
_STALE_ITERS = 16


class SparseWindows:
    """Policy that takes a base snapshot of everything, then sparse windows.

    With `window=auto`, the window and the pause after it are those that lose the least
    time. The first windows are trials, which measure the costs of windows.

    Args:
        config: The settings.
        stages: The profiles of all stages.
        own_stage: The number of this rank's stage.
        num_copies: The number of other ranks whose windows a rank also keeps.
        alone_share: The expected time in which a stage replays an iteration by itself,
            as a share of an iteration. Used until a replay has been measured.
        sizes: The sizes of the same stages, if an earlier policy has computed them.

    Raises:
        ConfigError: The operators or the memory budget do not allow the configured
            window; the message contains the numbers.
    """

    def __init__(
        self,
        config: MoevementConfig,
        stages: Sequence[StageProfile],
        own_stage: int,
        num_copies: int = 0,
        alone_share: float = 1.0,
        sizes: WindowSizes | None = None,
    ) -> None:
        self._config = config
        own = stages[own_stage]
        self._own_stage = own_stage
        # without boundary logs all stages replay together, and stages wait for each
        # other as in training
        self._alone_share = alone_share if config.logs_boundaries else 1.0
        self._table = own.table
        self._fixed = schedule.fixed_order(self._table.operators)
        self._sizes = sizes or WindowSizes(config, stages, num_copies)
        self._kind = self._sizes.kind_of[own_stage]
        self._order = self._kind.natural
        self._reference: npt.NDArray[np.float64] | None = None
        self._window: schedule.WindowSchedule | None = None
        self._start = 0
        self._next_iteration: int | None = None
        self._known: Measured | None = None
        self._newest_on_disk: int | None = None
        self._num_slots = 1 if config.window == AUTO else int(config.window)
        self._pause_iters = 0 if config.pause_iters == AUTO else int(config.pause_iters)
        self._num_trials = 0
        self._terms: WindowTerms | None = None

    @property
    def max_slots(self) -> int:
        """The most slots that operators and the memory budget allow."""
        return self._sizes.max_slots

    def plan(self, iteration: int, measure: Callable[[], Measured]) -> SnapshotPlan:
        """Return the plan for the state after `iteration` steps.

        The first plan takes everything; later plans take slot after slot. The policy
        asks for measurements at the start of a window, and with window=auto also at the
        first plan. Without earlier measurements, windows then begin after
        `profile_iters` iterations. With earlier measurements and a window that all
        ranks still keep, windows continue from that window, without a base. An
        iteration that does not follow the previous one also begins a window.

        Args:
            iteration: The number of steps of the state.
            measure: Returns the measurements. Collective.
        """
        choice = None
        every = self._config.durable_every_iters
        durable = every > 0 and iteration % every == 0
        if self._next_iteration is None:
            measured = measure() if self._config.window == AUTO else None
            if measured is None or not self._can_go_on(measured):
                return self._base(iteration, measured)
            choice, durable = self._go_on(iteration, measured), False
            self._next_iteration = self._start
        if iteration < self._next_iteration:
            return SnapshotPlan(durable=durable, window=choice)
        if (
            self._window is None
            or iteration != self._next_iteration
            or iteration >= self._start + self._num_slots
        ):
            # measurements that the base asked for serve only the first window after it
            measured, self._known = self._known or measure(), None
            choice = self._begin(iteration, measured)
        assert self._window is not None
        slot = iteration - self._start
        compute = () if self._config.logs_gradients else self._window.compute(slot)
        is_last = slot == self._num_slots - 1
        self._next_iteration = iteration + 1 + (self._pause_iters if is_last else 0)
        to_disk = slot == 0 and is_due(
            iteration, self._newest_on_disk, self._config.disk.every_iters
        )
        if to_disk:
            self._newest_on_disk = iteration
        plan = SlotPlan(
            window_start=self._start,
            slot=slot,
            num_slots=self._num_slots,
            units=(UnitPlan(full=self._window.full(slot), compute=compute),),
            pause_iters=self._pause_iters,
        )
        return SnapshotPlan(
            durable=durable, sparse=plan, window=choice, to_disk=to_disk
        )

    @property
    def sizes(self) -> WindowSizes:
        """The sizes of windows, for the policy of a later generation."""
        return self._sizes

    def forecast(self, num_slots: int, pause_iters: int = 0) -> MemoryForecast:
        """Return the host memory of the rank that needs the most."""
        return self._sizes.forecast(num_slots, pause_iters)

    def own_forecast(self) -> MemoryForecast:
        """Return the host memory of the rank of this stage that needs the most."""
        return self._sizes.forecast_of(
            self._own_stage, self.max_slots, self._pause_iters
        )

    def start_forecast(self) -> MemoryForecast:
        """Return the host memory that a rank of this stage needs as training begins.

        The windows are those that training begins with.
        """
        return self._sizes.forecast_of(
            self._own_stage, self._first_slots, self._pause_iters
        )

    @property
    def _first_slots(self) -> int:
        return 1 if self._config.window == AUTO else self.max_slots

    def notes(self) -> list[str]:
        """Return the costs, line by line, for the log."""
        slots, later = self._first_slots, ""
        if self._config.window == AUTO:
            later = f", up to {self.max_slots} once iterations have been measured"
        lines = self._sizes.forecast(slots, self._pause_iters).lines()
        return [f"host memory of the largest rank, window {slots}{later}:", *lines]

    def _base(self, iteration: int, measured: Measured | None) -> SnapshotPlan:
        plan, before_window_iters = everything_at(iteration, self._table), 0
        if measured is not None:
            if measured.iteration_s > 0:  # measured before a fault
                before_window_iters = self._copying_pause(1, measured)
                plan = replace(plan, pause_iters=before_window_iters)
                self._known = None if before_window_iters else measured
            else:
                before_window_iters = self._config.profile_iters
        self._next_iteration = iteration + 1 + before_window_iters
        return SnapshotPlan(sparse=plan)

    def _can_go_on(self, measured: Measured) -> bool:
        """Return whether windows can continue without a base.

        All ranks must keep a window of the last generation and have measured
        iterations.
        """
        return (
            measured.kept_since is not None
            and measured.iteration_s > 0
            and not self._config.paper_exact
        )

    def _go_on(self, iteration: int, measured: Measured) -> WindowChoice:
        """Choose the window that follows the newest window of the last generation.

        A base would stop training for longer. The next window begins one period after
        the newest window, or now if that time is past. The next window has fewer slots
        if it would not end within two periods of the newest window, for which memory
        has room for logs.
        """
        assert measured.kept_since is not None
        choice = self._begin(iteration, measured)
        period_iters = self._num_slots + self._pause_iters
        self._start = max(iteration, measured.kept_since + period_iters)
        num_slots = max(1, measured.kept_since + 2 * period_iters - self._start)
        if num_slots < self._num_slots:
            self._num_slots = num_slots
            self._pause_iters = max(
                self._pause_iters, self._copying_pause(num_slots, measured)
            )
            self._window = self._kind.cut(self._order, num_slots)
        return replace(choice, num_slots=self._num_slots, pause_iters=self._pause_iters)

    def _copying_pause(self, num_slots: int, measured: Measured) -> int:
        """Return the pause in which a window of `num_slots` slots reaches peers.

        Without this pause the next window would wait for replication to finish. Returns
        0 if replication already keeps up. The pause is at most the longest that memory
        allows.
        """
        if self._config.paper_exact:
            return 0
        size = self._sizes.size(num_slots)
        copy_s = size.window_bytes / measured.peer_bytes_per_s
        iters = copying_interval(iteration_s=measured.iteration_s, copy_s=copy_s)
        return (
            min(iters + 1 - num_slots, size.most_pause_iters)
            if iters > num_slots
            else 0
        )

    def _begin(self, iteration: int, measured: Measured) -> WindowChoice:
        terms = self._choose(measured) if self._config.window == AUTO else None
        reordered = self._reorder(measured.popularity)
        self._start = iteration
        if (
            reordered
            or self._window is None
            or self._window.num_slots != self._num_slots
        ):
            # a cut depends only on the order and the number of slots, and is expensive:
            # it sorts all pairs of a rank and an operator
            self._window = self._kind.cut(self._order, self._num_slots)
        return WindowChoice(
            num_slots=self._num_slots,
            iteration_s=measured.iteration_s,
            copy_bytes_per_s=measured.copy_bytes_per_s,
            reordered=reordered,
            pause_iters=self._pause_iters,
            snapshot_share=terms.snapshot_share if terms else None,
            replay_share=terms.replay_share if terms else None,
        )

    def _choose(self, measured: Measured) -> WindowTerms | None:
        """Set the slots and the pause; return their expected costs once known."""
        if self._config.paper_exact:
            windows = [
                _paper_window(kind.stage.table, measured) for kind in self._sizes.kinds
            ]
            fitting = min(self.max_slots, max(windows))
            is_first = self._window is None
            kept = schedule.refit(
                self._num_slots, fitting, drift=self._config.window_drift
            )
            self._num_slots = fitting if is_first else kept
            return None
        job = self._job_cost(measured)
        if measured.dense_snapshot_s is None or not measured.costs_are_settled:
            self._try(job)
            return None
        best = cheapest_window(
            self._sizes.candidates, job, overhead=self._config.overhead
        )
        # the current window is priced by the present measurements, not by earlier ones
        if self._terms:
            current = window_terms(
                self._sizes.size(self._terms.num_slots), job, self._terms.pause_iters
            )
            is_allowed = current.snapshot_share <= max(
                self._config.overhead, best.snapshot_share
            )
            if (
                is_allowed
                and (1 - self._config.window_drift) * current.lost_share
                <= best.lost_share
            ):
                best = current
        self._terms, self._num_slots = best, best.num_slots
        # the time of an iteration without copies may have changed since the last
        # iteration without copies
        is_stale = best.pause_iters == 0 and measured.iters_since_quiet >= _STALE_ITERS
        self._pause_iters = self._within_pauses(1) if is_stale else best.pause_iters
        return best

    def _try(self, job: JobCost) -> None:
        """Set a trial window, whose cost will be measured, and the pause after it.

        The slots are the best for the costs so far, or four times as many in every
        other trial. The pause keeps trials within a share of the time.
        """
        share = min(_TRIAL_SHARE, self._config.overhead)
        best = cheapest_window(
            self._sizes.candidates, job, overhead=self._config.overhead
        )
        longer = self._sizes.size(min(_TRIAL_FACTOR * best.num_slots, self.max_slots))
        # faults may be so frequent that replays of a longer trial take more than the
        # share
        is_longer = (
            self._num_trials % 2 == 1
            and window_terms(longer, job, 0).replay_share <= share
        )
        self._num_slots = longer.num_slots if is_longer else best.num_slots
        size = self._sizes.size(self._num_slots)
        best = cheapest_window([size], job, overhead=self._config.overhead)
        # at the first trial only the waits for copies are known, not the other costs
        pause_iters = min(best.pause_iters, shortest_pause(size, job, overhead=share))
        self._pause_iters = self._within_pauses(max(_TRIAL_PAUSE_ITERS, pause_iters))
        self._num_trials += 1

    def _within_pauses(self, pause_iters: int) -> int:
        size = self._sizes.size(self._num_slots)
        return min(max(pause_iters, size.least_pause_iters), size.most_pause_iters)

    def _job_cost(self, measured: Measured) -> JobCost:
        """Return the costs of the job.

        A snapshot whose cost is unmeasured costs nothing except waits for copies.
        """
        empty_s, dense_s = (
            measured.empty_snapshot_s or 0.0,
            measured.dense_snapshot_s or 0.0,
        )
        replayed_s = measured.replayed_iteration_s
        replay_share = (
            self._alone_share
            if replayed_s is None
            else replayed_s / measured.iteration_s
        )
        return JobCost(
            iteration_s=measured.iteration_s,
            overlap_s=measured.hidden_copy_s,
            per_snapshot_s=empty_s,
            per_byte_s=(dense_s - empty_s) / max(1, self._sizes.dense_bytes),
            host_bytes_per_s=measured.host_bytes_per_s,
            peer_bytes_per_s=measured.peer_bytes_per_s,
            replay_share=replay_share,
            mtbf_s=self._config.mtbf_s,
        )

    def _reorder(self, popularity: npt.NDArray[np.float64]) -> bool:
        # compare with the popularity of the last order: from window to window, a slow
        # drift would never exceed the limit
        change, share = self._config.reorder_change, self._config.reorder_share
        if self._reference is not None and not has_shifted(
            self._reference, popularity, change=change, share=share
        ):
            return False
        order = schedule.order_operators(self._fixed, popularity)
        if not self._is_within_forecast(order):
            return False
        self._reference, self._order = popularity, order
        return True

    def _is_within_forecast(self, order: IntArray) -> bool:
        """Return whether the memory budget allows an order.

        The windows of the order may be larger than those of the order in the forecast.
        """
        if self._config.memory_budget_bytes is None:
            return True
        taken = self._kind.window_in(order, self.max_slots)
        return taken.window_bytes <= self._kind.window(self.max_slots).window_bytes


def _paper_window(table: OperatorTable, measured: Measured) -> int:
    """Return W of Algorithm 1 for the rank with the most bytes.

    All operators count as equally large.
    """
    num_operators, owned = len(table.operators), table.owned
    window, _ = schedule.paper_window(
        num_operators=num_operators,
        compute_bytes=float(owned.by_rank(owned.compute).max()) / num_operators,
        master_bytes=float(owned.by_rank(owned.full).max()) / num_operators,
        optimizer_bytes=0.0,  # included in master_bytes
        iteration_s=measured.iteration_s,
        copy_bytes_per_s=measured.copy_bytes_per_s,
    )
    return window
