"""A run of a job under faults, from event to event.

The job trains until a fault, recovers and continues.

Between two faults, snapshots soon repeat, so any number of iterations is counted at
once. The effect of a fault follows from the plans of a real run (`recovering`). The
module owns the clock, replacements in progress, and the contents of disks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moe_ckpt.errors import NothingLeftError
from moe_ckpt.faults.schedule import Kill, TimedFault
from moe_ckpt.recovery.inventory import ReplayedState
from moe_ckpt.sim.faults import FaultQueue, LateKill, time_in_iteration
from moe_ckpt.sim.generation import Generation, Kept, Moment
from moe_ckpt.sim.measuring import MeasurementHistory
from moe_ckpt.sim.recovering import (
    Estimate,
    Losses,
    RollbackPath,
    estimate,
    plan_after,
    replay_s,
    replayed_by,
)
from moe_ckpt.sim.saving import Recovery, Saving, Setup
from moe_ckpt.sim.timeline import HOST_MEMORY, Ledger, Outcome, Recovered, Trained
from moe_ckpt.sim.units import go_back

_NO_RANKS: frozenset[int] = frozenset()
_BEGINNING = "the beginning"


def simulate(
    setup: Setup,
    saving: Saving,
    kills: Sequence[Kill],
    *,
    duration_s: float,
    last_iteration: int | None = None,
    in_order: bool = False,
) -> Outcome:
    """Return the outcome of a simulated job.

    The run ends with the first iteration that ends at or after `duration_s`. The same
    arguments give the same outcome.

    Args:
        setup: The job on its cluster.
        saving: The policy's saves and their costs.
        kills: The faults. Each kill has a rank.
        duration_s: Seconds of training to simulate.
        last_iteration: The iteration after which the run ends, if that is earlier.
        in_order: Whether kills at points strike one after another.
    """
    layout, per_node = setup.job.layout, setup.cluster.gpus_per_node
    faults = FaultQueue(
        kills, world_size=layout.world_size, ranks_per_node=per_node, in_order=in_order
    )
    return _Run(setup, saving, faults, duration_s, last_iteration).run()


@dataclass(kw_only=True, slots=True)
class _Attempt:
    """A recovery, together with the faults that interrupt it."""

    since_s: float
    """Start of the recovery, in seconds of the run."""

    reached: int
    """The iteration that ranks had completed before the fault."""

    kept: tuple[Kept, ...]
    """Windows that all ranks had when the fault struck, oldest first."""

    faults: list[TimedFault] = field(default_factory=list)
    """The faults so far."""

    losses: Losses = Losses(  # noqa: RUF009
        dead=_NO_RANKS, bare=_NO_RANKS, unreplicated=_NO_RANKS, rolling={}
    )
    """The losses of all faults so far."""

    detect_s: float = 0.0
    """Seconds until losses were detected."""

    rebuild_s: float = 0.0
    """Seconds until ranks met again."""

    fetch_s: float = 0.0
    """Seconds for fetching windows or state."""

    replay_s: float = 0.0
    """Seconds for replaying or loading."""

    @property
    def surveyed_s(self) -> float:
        """The time at which all ranks meet and compare their states."""
        return self.since_s + self.detect_s + self.rebuild_s

    @property
    def now_s(self) -> float:
        return self.surveyed_s + self.fetch_s + self.replay_s


def _safest(windows: Sequence[Kept], number: int, at_s: float) -> tuple[Kept, ...]:
    """Return up to `number` windows, preferring those that peers hold, oldest first.

    Among windows that are equally safe at time `at_s`, newer windows come first.
    """
    safest = sorted(windows, key=lambda kept: (kept.copied_at_s <= at_s, kept.start))[
        -number:
    ]
    return tuple(sorted(safest, key=lambda kept: kept.start))


class _Run:
    """A simulated run in progress."""

    def __init__(
        self,
        setup: Setup,
        saving: Saving,
        faults: FaultQueue,
        duration_s: float,
        last_iteration: int | None,
    ) -> None:
        self._setup, self._saving = setup, saving
        self._duration_s, self._last_iteration = duration_s, last_iteration
        self._faults = faults
        self._spares = [0.0] * setup.cluster.spares  # the time at which each is free
        self._ledger = Ledger()
        self._timeline: list[Trained | Recovered] = []
        self._on_disk: Kept | None = None
        self._unreplicated = _NO_RANKS
        self._num_faults = 0
        self._history = MeasurementHistory()
        self._completed = 0  # the highest iteration that live processes have completed
        self._epoch = saving.partial.first_epoch() if saving.partial else None

    def run(self) -> Outcome:
        generation = self._train_from(0, 0.0, ())
        while True:
            last = self._last(generation)
            fault = self._next_fault(
                generation, generation.since_s + generation.elapsed_s(last)
            )
            if fault is None:
                self._account(
                    generation, Moment(iterations=last, into_s=0.0, ready=False)
                )
                return self._outcome(generation.start + last)
            generation = self._live_through(generation, fault)
            if generation.since_s >= self._duration_s:
                return self._outcome(generation.start)

    def _last(self, generation: Generation) -> int:
        """Return the iterations of a generation until the run ends, at least 1."""
        in_time = generation.first_commit_after(self._duration_s)
        if self._last_iteration is None:
            return in_time
        return max(1, min(in_time, self._last_iteration - generation.start))

    def _outcome(self, iterations: int) -> Outcome:
        self._ledger.useful_s = (
            self._setup.pace.between(0, iterations) * self._setup.costs.iteration_s
        )
        plt = mlt = 0.0
        if self._saving.partial and self._epoch:
            plt, mlt = self._saving.partial.tokens.shares(
                self._epoch.account.lost, iterations
            )
        return Outcome(
            iterations=iterations,
            ledger=self._ledger,
            num_faults=self._num_faults,
            plt=plt,
            mlt=mlt,
            timeline=tuple(self._timeline),
        )

    def _train_from(
        self, start: int, since_s: float, carried: tuple[Kept, ...]
    ) -> Generation:
        newest = carried[-1] if carried else None
        kept_since, kept_slots = (
            (newest.start, newest.num_slots) if newest else (None, 0)
        )
        costs = self._setup.costs
        pace = self._setup.pace.rerun(self._completed, costs.rerun_ratio)
        begin = self._history.start(pace, start, kept_since, kept_slots)
        pattern = self._epoch.pattern if self._epoch else self._saving.pattern(begin)
        return Generation(
            costs, self._saving, pattern, start, since_s, carried, self._epoch, pace
        )

    def _next_fault(self, generation: Generation, until_s: float) -> TimedFault | None:
        """Return the next fault before a time, and remove the fault from the queue."""
        timed = next(reversed(self._faults.timed), None)
        reached = [
            (self._time_of(kill, generation), kill)
            for kill in self._faults.at_points
            if kill.phase != "recovery"
        ]
        at_s, kill = min(
            reached, key=lambda pair: pair[0], default=(float("inf"), None)
        )
        if timed is not None and timed.after_s <= at_s:
            if timed.after_s >= until_s:
                return None
            self._faults.timed.pop()
            return replace(timed, after_s=max(timed.after_s, generation.since_s))
        return (
            None if kill is None or at_s >= until_s else self._faults.meet(kill, at_s)
        )

    def _time_of(self, kill: Kill, generation: Generation) -> float:
        """Return the time at which training reaches the point of a kill.

        A point that training has passed before counts as reached in the first iteration
        of the generation.
        """
        number = max(1, (kill.iteration or generation.start + 1) - generation.start)
        if isinstance(kill, LateKill):
            number = generation.nearest_wait(kill.late_s, number)
        seconds = generation.iteration_s(number)
        into_s = time_in_iteration(
            kill.point_phase, self._setup.costs, seconds, generation.length(number)
        )
        if isinstance(kill, LateKill):
            # waits before the update may be longer or shorter here than in the real run
            latest_s = (
                into_s
                if kill.point_phase == "step"
                else seconds - self._setup.costs.update_s
            )
            into_s = min(max(into_s, kill.late_s), latest_s)
        return generation.since_s + generation.elapsed_s(number - 1) + into_s

    def _account(self, generation: Generation, moment: Moment) -> None:
        reached = generation.start + moment.iterations
        num_begun = generation.pattern.num_begun(moment.iterations)
        self._history.trained(
            generation.pace,
            generation.start,
            reached,
            num_begun,
            takes_base=not generation.carried,
        )
        self._completed = max(self._completed, reached)
        # a lost iteration was charged the time of its first run, but its rerun takes a
        # different time
        first, rerun = (
            pace.between(generation.start, reached)
            for pace in (self._setup.pace, generation.pace)
        )
        self._ledger.again_s += (rerun - first) * self._setup.costs.iteration_s
        self._ledger.stall_s += generation.stalls_s(moment.iterations)
        # the iteration that a fault cuts off is run again
        self._ledger.again_s += moment.into_s
        if moment.iterations or moment.into_s:
            self._timeline.append(
                Trained(generation=generation, iterations=moment.iterations)
            )

    def _live_through(self, generation: Generation, fault: TimedFault) -> Generation:
        """Recover, including faults during the recovery; return the next generation."""
        moment = generation.moment(fault.after_s)
        reached = generation.start + moment.iterations
        if generation.is_replicated(moment):
            self._unreplicated = _NO_RANKS
        # all ranks have complete gradients: live ranks take the step
        if moment.ready and self._saving.recovery is Recovery.LOCAL:
            rest_s = generation.iteration_s(moment.iterations + 1) - moment.into_s
            moment = Moment(iterations=moment.iterations + 1, into_s=0.0, ready=False)
            fault, reached = replace(fault, after_s=fault.after_s + rest_s), reached + 1
        self._account(generation, moment)
        self._on_disk = generation.on_disk(moment) or self._on_disk
        attempt = _Attempt(
            since_s=fault.after_s, reached=reached, kept=generation.kept(moment)
        )
        recovered, carried = self._recover(attempt, fault)
        self._timeline.append(recovered)
        self._ledger.recovery_s += recovered.seconds
        lost = self._setup.pace.between(recovered.iteration, reached)
        self._ledger.again_s += lost * self._setup.costs.iteration_s
        return self._train_from(recovered.iteration, attempt.now_s, carried)

    def _recover(
        self, attempt: _Attempt, fault: TimedFault
    ) -> tuple[Recovered, tuple[Kept, ...]]:
        """Try until no further fault interrupts.

        Returns:
            The recovery with its costs, and the remaining windows.
        """
        path: RollbackPath | None = None
        pending: TimedFault | None = fault
        while pending is not None:
            self._join(attempt, pending)
            path, pending = self._try(attempt)
        assert path is not None
        if path.estimate:
            for rollback in path.estimate.plan.rollbacks:
                if len(rollback.stages) == 1:
                    self._history.replayed(
                        self._setup.pace, rollback.starts_from, path.iteration
                    )
        restarts = (
            self._saving.recovery is Recovery.RESTART or path.source == _BEGINNING
        )
        if restarts or len(attempt.losses.dead) == self._setup.job.layout.world_size:
            # no process lives on
            self._history, self._completed = MeasurementHistory(), 0
        if self._epoch and self._saving.partial:
            self._epoch = self._saving.partial.next_epoch(
                self._epoch, path.account, path.iteration
            )
        recovered = Recovered(
            since_s=attempt.since_s,
            faults=tuple(attempt.faults),
            iteration=path.iteration,
            lost_iters=attempt.reached - path.iteration,
            source=path.source,
            plan=path.estimate.plan if path.estimate else None,
            detect_s=attempt.detect_s,
            rebuild_s=attempt.rebuild_s,
            fetch_s=attempt.fetch_s,
            replay_s=attempt.replay_s,
            lost=path.lost,
        )
        # windows that end later belong to iterations that are trained again, and a load
        # from disk drops all windows
        is_kept = path.source == HOST_MEMORY
        carried = (
            [kept for kept in attempt.kept if kept.end <= path.iteration]
            if is_kept
            else []
        )
        return recovered, _safest(
            carried, self._saving.keep_windows, attempt.surveyed_s
        )

    def _join(self, attempt: _Attempt, fault: TimedFault) -> None:
        """Detect the losses, replace lost ranks, and let all ranks meet again."""
        cluster, losses = self._setup.cluster, attempt.losses
        self._num_faults += 1
        attempt.faults.append(fault)
        bare = frozenset(fault.ranks) if fault.scope == "node" else _NO_RANKS
        hit = {self._setup.job.stage_of_rank(rank) for rank in fault.ranks}
        self._unreplicated |= bare
        attempt.losses = replace(
            losses,
            dead=losses.dead | frozenset(fault.ranks),
            bare=losses.bare | bare,
            unreplicated=self._unreplicated,
            rolling={
                stage: None if stage in hit else replayed
                for stage, replayed in losses.rolling.items()
            },
        )
        detect_s = cluster.hang_s if fault.signal == "STOP" else cluster.detect_s
        restarts = self._saving.recovery is Recovery.RESTART
        meets_s = cluster.restart_s if restarts else cluster.rebuild_s + cluster.join_s
        num_nodes = (
            len({rank // cluster.gpus_per_node for rank in fault.ranks})
            if fault.scope == "node"
            else 0
        )
        meets_s += self._replace(num_nodes, fault.after_s + detect_s)
        # a fault within a recovery costs only time that the recovery has not taken yet
        longer_s = max(0.0, fault.after_s + detect_s + meets_s - attempt.now_s)
        attempt.detect_s += min(detect_s, longer_s)
        attempt.rebuild_s += longer_s - min(detect_s, longer_s)

    def _replace(self, num_nodes: int, now_s: float) -> float:
        """Return the seconds until replacement nodes are available.

        Replacements are spare nodes, or the first nodes back from repair.
        """
        if num_nodes == 0:
            return 0.0
        cluster = self._setup.cluster
        free = sorted([*self._spares, *([now_s + cluster.repair_s] * num_nodes)])
        taken, self._spares = free[:num_nodes], free[num_nodes:]
        return max(0.0, taken[-1] - now_s) + cluster.spare_s

    def _try(self, attempt: _Attempt) -> tuple[RollbackPath | None, TimedFault | None]:
        """Return the way back, and the fault that interrupts the way back.

        The way back is None if the fault struck before ranks met. The fault is None if
        no fault interrupts.
        """
        begun_s = attempt.now_s
        interrupting = self._due(begun_s)
        if interrupting is not None:
            return None, interrupting
        path = self._choose(attempt)
        interrupting = self._due_within(attempt, begun_s + path.fetch_s + path.replay_s)
        spent_s = (
            path.fetch_s + path.replay_s
            if interrupting is None
            else max(0.0, interrupting.after_s - begun_s)
        )
        attempt.fetch_s += min(spent_s, path.fetch_s)
        attempt.replay_s += max(0.0, spent_s - path.fetch_s)
        if interrupting is not None and path.estimate is not None:
            attempt.losses = self._after(attempt.losses, path.estimate, spent_s)
        return path, interrupting

    def _due(self, until_s: float) -> TimedFault | None:
        """Return a timed fault before `until_s`, and remove it from the queue."""
        timed = next(reversed(self._faults.timed), None)
        if timed is None or timed.after_s >= until_s:
            return None
        self._faults.timed.pop()
        return timed

    def _due_within(self, attempt: _Attempt, end_s: float) -> TimedFault | None:
        """Return the fault that strikes a recovery that lasts from now to `end_s`.

        A kill in a recovery strikes as workers enter the recovery, or as long after the
        previous fault as in a real run.
        """
        kill = self._faults.in_recovery
        if kill is None:
            return self._due(end_s)
        strikes_s = (
            attempt.faults[-1].after_s + kill.late_s
            if isinstance(kill, LateKill)
            else attempt.now_s
        )
        at_s = min(strikes_s, end_s)
        return self._due(at_s) or self._faults.meet(kill, at_s)

    def _choose(self, attempt: _Attempt) -> RollbackPath:
        if self._saving.recovery is Recovery.RESTART:
            return self._from_disk(self._on_disk)
        if self._saving.partial:
            written = self._on_disk
            found = go_back(
                self._setup, self._saving, attempt.kept, written, attempt.losses
            )
            return found or self._from_disk(
                written if written and written.is_whole else None
            )
        try:
            plan = plan_after(
                self._setup,
                self._saving,
                attempt.kept,
                attempt.losses,
                attempt.reached,
                attempt.now_s,
            )
        except NothingLeftError:
            return self._from_disk(self._on_disk)
        found = estimate(self._setup, self._saving, plan)
        replays = any(
            rollback.starts_from < plan.target_iteration for rollback in plan.rollbacks
        )
        return RollbackPath(
            iteration=plan.target_iteration,
            fetch_s=found.fetch_s,
            # segments replay side by side, and all ranks wait for the longest;
            # `rerun_ratio` already covers the start of a replay
            replay_s=max(found.replay_s, default=0.0)
            + (0.0 if replays else self._setup.cluster.resume_s),
            source=HOST_MEMORY,
            estimate=found,
        )

    def _from_disk(self, kept: Kept | None) -> RollbackPath:
        """Return the way back by which all ranks load from disk, or begin anew.

        Without a state on disk, all ranks begin anew. If the policy did not restart
        processes in any case, beginning anew starts a new job.
        """
        cluster = self._setup.cluster
        if kept is None:
            again_s = (
                0.0 if self._saving.recovery is Recovery.RESTART else cluster.restart_s
            )
            return RollbackPath(
                iteration=0, fetch_s=0.0, replay_s=again_s, source=_BEGINNING
            )
        stages = range(self._setup.job.layout.pp)
        return RollbackPath(
            iteration=kept.end,
            fetch_s=self._setup.total_full_bytes / cluster.disk_read_bytes_per_s,
            replay_s=replay_s(self._setup, self._saving, stages, kept, kept.end),
            source="disk",
            account=kept.epoch.account if kept.epoch else None,
        )

    def _after(self, losses: Losses, plan: Estimate, spent_s: float) -> Losses:
        """Return the remaining losses after a recovery ran for `spent_s` seconds.

        Ranks of stages whose recovery was done are not lost.
        """
        done, under_way = set[int](), dict[int, ReplayedState | None]()
        for rollback, needed_s in zip(plan.plan.rollbacks, plan.replay_s, strict=True):
            if plan.fetch_s + needed_s <= spent_s:
                done.update(rollback.stages)
                continue
            replayed_s, target = spent_s - plan.fetch_s, plan.plan.target_iteration
            replayed = replayed_by(
                self._setup, self._saving, rollback, target, replayed_s
            )
            under_way |= dict.fromkeys(rollback.stages, replayed)
        fetched = spent_s >= plan.fetch_s
        return replace(
            losses,
            dead=frozenset(
                rank
                for rank in losses.dead
                if self._setup.job.stage_of_rank(rank) not in done
            ),
            # fetched windows are in the memory of ranks that had lost their own, even
            # if the replay was cut off
            bare=_NO_RANKS if fetched else losses.bare,
            rolling=under_way,
        )
