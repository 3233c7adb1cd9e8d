"""One run's checkpointing, as the training loop sees it: resume, hooks, finish.

Owns: asking the policy after every iteration and executing its plan, in the durable tier and in the in-memory tier, and
recovering lost state. A failed save is reported and training continues, unless the configuration is strict. Must not:
decide which state is saved, or touch Megatron.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_ckpt.collectives import Ranks, gather_results
from moe_ckpt.durable.tier import DurableTier
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.engine.fallback import HOST_MEMORY, Fallback, Source, Suspects, UsableState
from moe_ckpt.engine.in_memory_tier import InMemoryTier
from moe_ckpt.engine.job_recovery import JobRecovery, RecoveredState
from moe_ckpt.engine.rank_parts import TierStores
from moe_ckpt.engine.stage_recovery import StageRecovery
from moe_ckpt.engine.state_loss import StateLosses
from moe_ckpt.engine.step_state import StepState
from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError, NothingLeftError, RolledBackError
from moe_ckpt.events import EventLog, ExpertsChosen, IntervalChosen, LossNotFinite, WindowChosen
from moe_ckpt.ports import Policy
from moe_ckpt.types import Measured, Phase, ReadyGradients, SnapshotPlan

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InMemoryParts:
    """The parts of a session with snapshots in host memory; `notes` forecast its cost, for the log.

    `rejoin` is None if the loss of a process ends the job, `recovery` if only the loss of a process can lose state.
    """

    tier: InMemoryTier
    stores: TierStores
    recovery: StageRecovery | None
    losses: StateLosses
    notes: Sequence[str]
    rejoin: JobRecovery | None = None

    def recover(self, target_iteration: int, *, undo: bool) -> bool:
        """Recover lost state; return whether any was lost.

        Then all ranks are at the state after the target iteration.
        """
        lost = self.losses.take()
        if lost is None:
            return False
        if undo:
            self.tier.stop_observing()
        self.tier.settle()  # the copier reads the tensors that the recovery is about to overwrite
        assert self.recovery is not None, lost
        self.recovery.recover(lost, target_iteration, undo=undo)
        # the loss tears the snapshot in flight: without its slot the window is complete on no rank
        self.tier.retake(target_iteration)
        return True


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parts:
    """The parts that all ranks build anew after a replacement, so that all decide from the same start."""

    policy: Policy
    sparse: InMemoryParts | None


class Session:
    """Implements `ports.TrainingHooks`. Every method is collective over all ranks.

    Call `enter` first, and again in every generation of an elastic job. `forget_evaluations` drops from this rank's
    state what passes outside of iterations have left in it: a recovery repeats none of them.
    """

    def __init__(
        self,
        make_parts: Callable[[], Parts],
        durable: DurableTier,
        ranks: Ranks,
        events: EventLog,
        *,
        strict: bool,
        suspect_iters: int,
        forget_evaluations: Callable[[], object],
        elastic: ElasticContext | None = None,
    ) -> None:
        self._make_parts = make_parts
        self._forget_evaluations = forget_evaluations
        self._durable = durable
        self._ranks = ranks
        self._fallback = Fallback(durable, ranks, events)
        self._suspects = Suspects(ranks, suspect_iters)
        self._events = events
        self._strict = strict
        self._elastic = elastic
        self._parts: Parts | None = None
        self._state = StepState()
        self._begins = False
        self._has_left_start: bool | None = None  # None: this process has begun at no start
        self._has_base = False
        self._logged_window: tuple[int, int] | None = None

    @property
    def sparse(self) -> InMemoryParts | None:
        return self._parts.sparse if self._parts else None

    @property
    def _rejoin(self) -> JobRecovery | None:
        return self.sparse.rejoin if self.sparse else None

    @property
    def notes(self) -> Sequence[str]:
        """A forecast of the cost of checkpointing, line by line, for the log."""
        return self.sparse.notes if self.sparse else ()

    @property
    def oldest_start(self) -> int | None:
        """The oldest iteration that a recovery from host memory may run again; None if there is no such recovery."""
        return self.sparse.stores.oldest_start() if self.sparse else None

    def enter(self) -> None:
        """Meet the other ranks, some of which may be replacements."""
        if self.sparse:
            self.sparse.tier.abort()
            # a save of the generation before: a replacement has no part in it, so it can never be complete
            self._durable.abandon()
        # new on all ranks: a replacement's policy has no history, and plans have to be the same everywhere
        self._parts = self._make_parts()
        self._has_base = False

    def rejoin(self) -> RecoveredState:
        """Bring all ranks to one state from the remaining sources; its iteration is None for a run that never saved.

        Then the caller starts from the beginning or from a checkpoint: `resume`. If memory leads to no common state,
        all ranks go back to the newest state on disk. Raises CheckpointLoadError on all ranks if there is none.
        """
        assert self.sparse is not None
        assert self.sparse.rejoin is not None
        self._enter_phase(Phase.RECOVERY)
        try:
            rejoined = self.sparse.rejoin.run(self._state)
        except NothingLeftError as error:
            rejoined = RecoveredState(iteration=self._go_back(error))
        else:
            if rejoined.went_back and rejoined.iteration is not None:  # else the state that was live goes on
                self._suspects.loaded(Source(place=HOST_MEMORY, iteration=rejoined.iteration))
        if rejoined.iteration is None:
            # no state of memory goes on; `resume` names the source if there is one on disk
            self._suspects.clear()
        else:  # first: a window of one slot needs it, and peers are about to drop earlier blobs
            self.sparse.tier.logs.log_start(rejoined.iteration + 1)
        self.sparse.rejoin.copies.resume_copying()
        self._begins = rejoined.iteration is None
        return rejoined

    def begin_at(self, iteration: int) -> None:
        """The whole state is that after `iteration` steps, on all ranks."""
        self._state.be_at(iteration)
        if self._begins:
            self._has_left_start = self._begins = False
        if self._elastic:
            # an exception that comes back before the next iteration then counts as a repetition, and ends the job
            self._elastic.page.begin_at(iteration)

    def resume(self, source: Path | None) -> int:
        """Load the newest state of this run on disk, or the checkpoint at `source`; return its iteration.

        Raises CheckpointLoadError on all ranks.
        """
        if source is not None:
            iteration = self._durable.resume_from(source)
            self._suspects.loaded(Source(place=str(source), iteration=iteration))
            return iteration
        loaded = self._load_best(self._fallback.look(self._rejoin))
        if loaded is None and self._rejoin:
            # marks each disk until its first save: snapshots on other disks are no error of a later start then
            self._rejoin.begin_on_disks()
        if self._rejoin:
            self._rejoin.copies.resume_copying()
        return loaded.iteration if loaded else 0

    def has_snapshots_on_disk(self) -> bool:
        """Whether local disks hold any snapshots. Collective."""
        rejoin = self._rejoin
        return rejoin is not None and any(newest is not None for newest in rejoin.look_at_disks().of_each)

    def iteration_started(self, iteration: int) -> None:
        self._forget_evaluations()
        if self.sparse is None:
            return
        # not in `enter`: the state to begin with is loaded, or broadcast, only after it
        if not self._has_base:
            self._take_base(self.sparse, iteration - 1)
        self.sparse.tier.started(iteration)
        self.sparse.losses.arm(iteration)
        self._enter_phase(Phase.FORWARD, iteration)

    def loss_known(self, iteration: int, loss: float) -> None:
        bad = self._suspects.source_of(iteration, loss)
        if bad is None:
            return
        reason = f"loss {loss} in iteration {iteration}"
        # states of these iterations descend from the bad one; states of later ones are older than the load, and good
        since = range(bad.iteration + 1, iteration)
        better = self._step_down(bad, since, reason) if self._suspects.is_first_at(iteration, bad) else None
        action = "training goes on as it is: nothing else leads elsewhere" if better is None else f"back to {better}"
        self._events.append(LossNotFinite(iteration=iteration, loss=str(loss), source=str(bad), action=action))
        if self._ranks.rank == 0:
            _log.warning("%s, soon after all ranks went on from %s: %s", reason, bad, action)
        if better is not None:
            raise RolledBackError(better.iteration)
        self._suspects.clear()

    def gradients_ready(self, iteration: int, gradients: ReadyGradients) -> bool:
        if self.sparse is None:
            return True
        # the last moment to back out: no rank has changed a parameter yet
        if self.sparse.recover(iteration - 1, undo=True):
            return False
        self.sparse.tier.ready(iteration, gradients)
        # ranks that all go back after a fault need no vote: no live state counts then
        if self._elastic and self.sparse.tier.recovers_locally:
            self._vote(self.sparse, iteration, gradients)
        self._has_left_start = True  # not after the step: a start that loads nothing would go on from it
        self._enter_phase(Phase.STEP)
        return True

    def update_applied(self, iteration: int) -> None:
        self._state.apply(iteration)
        self._enter_phase(Phase.STEP)

    def step_committed(self, iteration: int) -> None:
        if self._elastic:
            self._elastic.sync()  # NCCL has only queued the gather of weights: it may still fail
        self._state.be_at(iteration)
        self._enter_phase(Phase.SNAPSHOT)
        if self.sparse:
            self.sparse.tier.committed(iteration)
            self.sparse.losses.inject(iteration, "step")
            self.sparse.recover(iteration, undo=False)
        assert self._parts is not None
        plan = self._parts.policy.plan(iteration, self._measure)
        self._attempt(lambda: self._durable.poll(wait=plan.durable))  # one save at a time is in flight
        if plan.durable:
            self._attempt(lambda: self._durable.save(iteration))
        if self.sparse:
            self._take(self.sparse, iteration, plan)
            self.sparse.losses.inject(iteration, "between")
            self.sparse.recover(iteration, undo=False)
        self._enter_phase(Phase.BETWEEN)

    def wait_for_saves(self) -> None:
        """Wait for writes in progress."""
        if self.sparse:
            self.sparse.tier.finish_persisting()
        self._attempt(lambda: self._durable.poll(wait=True))

    def finish(self) -> None:
        """Wait for writes in progress, and end the copying threads."""
        self.wait_for_saves()
        if self.sparse:
            self.sparse.tier.close()

    def _go_back(self, error: NothingLeftError) -> int | None:
        """Load the newest state on disk; return its iteration, or None if all ranks are to start once more.

        They are if no state is on disk, and no rank has trained since its start, which may have loaded a checkpoint of
        another run. Raises `error` on all ranks if there is no state.
        """
        assert self._rejoin is not None
        found = self._fallback.look(self._rejoin)
        self._state.lose()  # first: a fault during the load must not find a state that is loaded in part live
        loaded = self._load_best(found, f"{HOST_MEMORY}: {error}")
        if loaded:
            return loaded.iteration
        have_left = gather_results(self._ranks, lambda: self._has_left_start, CheckpointLoadError)
        if True in have_left or False not in have_left:
            raise error
        self._rejoin.drop_memory()
        return None

    def _step_down(self, bad: Source, since: range, reason: str) -> Source | None:
        """Load the next best state, not of the iterations `since` and never `bad` again; None if there is no other."""
        self._attempt(lambda: self._durable.poll(wait=True))
        self._fallback.quarantine(bad)
        found = self._fallback.look(self._rejoin, tainted=since)
        if not found.sources:
            return None
        self.enter()  # only here: without another source training goes on with its state, parts and memory
        if self._rejoin:
            self._rejoin.copies.stop_copying(self._state)
        elif self.sparse:
            self.sparse.stores.clear()
        self._state.lose()
        loaded = self._load_best(found, f"{bad}: {reason}")
        assert loaded is not None, found
        self.begin_at(loaded.iteration)
        if self._rejoin:
            self._rejoin.copies.resume_copying()
        return loaded

    def _load_best(self, found: UsableState, *passed_over: str) -> Source | None:
        loaded = self._fallback.load(found, self._rejoin, passed_over)
        if loaded:
            self._suspects.loaded(loaded)
            if self.sparse:
                self.sparse.tier.logs.log_start(loaded.iteration + 1)
        return loaded

    def _vote(self, sparse: InMemoryParts, iteration: int, gradients: ReadyGradients) -> None:
        """Return once every rank has complete gradients: then all surviving ranks can take the step."""
        # peers hold this rank's start of the iteration before any rank steps: without it a lost memory cannot replay
        if sparse.stores.publisher:
            sparse.stores.publisher.has_copies_of_step(iteration)
        # before the barrier: other ranks may leave it and step while a death cuts this rank off inside it
        self._state.prepare(gradients)
        self._ranks.barrier()

    def _enter_phase(self, phase: Phase, iteration: int | None = None) -> None:
        if self._elastic:
            self._elastic.page.enter(phase, iteration)

    def _take_base(self, sparse: InMemoryParts, iteration: int) -> None:
        assert self._parts is not None
        plan = self._parts.policy.plan(iteration, self._measure)
        self._report(iteration, plan)
        sparse.tier.entered(iteration, plan.window.period_iters if plan.window else 0)
        if plan.sparse:
            sparse.tier.take_base(plan.sparse, to_disk=plan.to_disk)
        self._has_base = True

    def _take(self, sparse: InMemoryParts, iteration: int, plan: SnapshotPlan) -> None:
        self._report(iteration, plan)
        if plan.sparse:
            sparse.tier.take(plan.sparse, to_disk=plan.to_disk)

    def _report(self, iteration: int, plan: SnapshotPlan) -> None:
        if plan.window:
            self._events.append(WindowChosen(iteration=iteration, **asdict(plan.window)))
            before, self._logged_window = self._logged_window, (plan.window.num_slots, plan.window.pause_iters)
            if self._ranks.rank == 0 and plan.window.snapshot_share is not None and before != self._logged_window:
                _log.info("iteration %d: ckpt.window=auto is %s", iteration, plan.window.describe())
        if plan.interval:
            self._events.append(IntervalChosen(iteration=iteration, **asdict(plan.interval)))
        if plan.experts:
            self._events.append(ExpertsChosen(iteration=iteration, **asdict(plan.experts)))

    def _measure(self) -> Measured:
        assert self.sparse is not None
        return self.sparse.tier.measure()

    def _attempt(self, save: Callable[[], None]) -> None:
        try:
            save()
        except CheckpointSaveError as error:
            if self._strict:
                raise
            if self._ranks.rank == 0:
                _log.warning("checkpoint not saved, training goes on (ckpt.strict=false): %s", error)
