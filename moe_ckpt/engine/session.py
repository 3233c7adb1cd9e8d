"""One run's checkpointing, as the training loop uses it: resume, hooks, finish.

Owns: asking the policy after every iteration, executing the policy's plan in the
durable tier and the in-memory tier, and recovering lost state. A failed save is
reported and training continues, unless the configuration is strict. Must not: decide
which state is saved, or touch Megatron.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from moe_ckpt.collectives import Ranks, gather_results
from moe_ckpt.durable.course import RunCourse
from moe_ckpt.durable.tier import DurableTier
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.engine.fallback import (
    HOST_MEMORY,
    Fallback,
    Source,
    Suspects,
    UsableState,
)
from moe_ckpt.engine.in_memory import InMemoryCheckpointing
from moe_ckpt.engine.inputs import Inputs, require_equal
from moe_ckpt.engine.job_recovery import JobRecovery, RecoveredState
from moe_ckpt.engine.step_state import StepState
from moe_ckpt.errors import (
    CheckpointLoadError,
    CheckpointSaveError,
    NothingLeftError,
    RolledBackError,
)
from moe_ckpt.events import (
    CorruptionFound,
    EventLog,
    ExpertsChosen,
    IntervalChosen,
    LossNotFinite,
    WindowChosen,
)
from moe_ckpt.ports import Policy
from moe_ckpt.types import Measured, Phase, ReadyGradients, SnapshotPlan

_log = logging.getLogger(__name__)

_MOST_ENTRIES = 1000
"""Most times that a generation may go back to a better state (`loss_known`)."""


class LeftState(NamedTuple):
    """A state that a process of this rank has left, according to the run's events."""

    iteration: int
    """Number of optimizer steps in the state."""

    what: str
    """The action of the process, for messages: `saved a checkpoint`, `finished`."""


class Session:
    """Implements `ports.TrainingHooks`. Every method is collective over all ranks.

    Lifetime: that of the process. `enter` begins a generation: call `enter` first, and
    again in every generation of an elastic job. `moe_ckpt.attach.attach` makes a
    session and, for a job that is not elastic, calls `enter`.

    Attributes:
        loaded_from: The source of the state that the last `resume` has loaded. None:
            the last `resume` found no state.

    Example:
        session = attach(...)
        first = session.resume(None) + 1
        ...  # in each iteration from `first` on, call the hooks of `TrainingHooks`
        session.finish()
    """

    def __init__(
        self,
        build_generation: Callable[[], tuple[Policy, InMemoryCheckpointing | None]],
        durable: DurableTier,
        ranks: Ranks,
        events: EventLog,
        *,
        strict: bool,
        suspect_iters: int,
        forget_evaluations: Callable[[], object],
        elastic: ElasticContext | None = None,
        inputs: Inputs | None = None,
        course: RunCourse | None = None,
        loaded: Callable[[int, Sequence[str]], object] = lambda _iteration, _changes: (
            None
        ),
        left: frozenset[LeftState] = frozenset(),
    ) -> None:
        """Put the session together.

        Args:
            build_generation: Returns the policy and the in-memory side of a new
                generation. The in-memory side is None without snapshots in host memory.
            durable: The tier of whole checkpoints.
            ranks: All ranks of the job.
            events: This rank's log of events.
            strict: Whether a failed save ends training.
            suspect_iters: Iterations after a load in which a loss that is not finite
                counts against the loaded source.
            forget_evaluations: Drops the traces of evaluations from this rank's state,
                because recoveries repeat no evaluation.
            elastic: This rank's means to survive the loss of ranks. None: such a loss
                ends the job.
            inputs: The contents that this process has read. All ranks must have read
                the same contents. None: contents are not compared.
            course: The settings with which this run has saved its states.
            loaded: Called for each state that is loaded from a disk, before training
                goes on, with the iteration of the state and the settings that differ
                from those of the run that saved the state.
            left: The states that earlier processes of this rank have left.
        """
        self._build_generation = build_generation
        self._forget_evaluations = forget_evaluations
        self._durable = durable
        self._ranks = ranks
        self._inputs = inputs
        self._course = course
        self._loaded = loaded
        self._left = left
        self._fallback = Fallback(durable, ranks, events, course)
        self._suspects = Suspects(ranks, suspect_iters)
        self._events = events
        self._strict = strict
        self._elastic = elastic
        self._policy: Policy | None = None
        self._in_memory: InMemoryCheckpointing | None = None
        self._state = StepState()
        self._branch = 0
        self._begins = False
        # None: this process has not begun at a start of the run
        self._has_left_start: bool | None = None
        self._has_base = False
        self._logged_window: tuple[int, int] | None = None
        self.loaded_from: str | None = None

    @property
    def in_memory(self) -> InMemoryCheckpointing | None:
        """The in-memory side of this generation.

        None before the first `enter`, and for policies without an in-memory side.
        """
        return self._in_memory

    @property
    def _job_recovery(self) -> JobRecovery | None:
        return self._in_memory.job_recovery if self._in_memory else None

    @property
    def notes(self) -> Sequence[str]:
        """A forecast of the cost of checkpointing, line by line, for the log."""
        return self._in_memory.notes if self._in_memory else ()

    @property
    def oldest_start(self) -> int | None:
        """The oldest iteration that a recovery from host memory may run again.

        None if there is no such recovery.
        """
        return self._in_memory.parts.memory.oldest_start() if self._in_memory else None

    def enter(self) -> None:
        """Meet the other ranks, some of which may be replacements.

        Raises:
            DataError: Ranks have read different inputs. Raised on all ranks.
        """
        if self._inputs is not None:
            require_equal(self._ranks, self._inputs)
        if self._in_memory:
            self._in_memory.tier.abort()
            # drop a save of the generation before: a replacement has no part in that
            # save, which can never be complete
            self._durable.abandon()
        # new on all ranks: a replacement's policy has no history, and plans have to be
        # equal on all ranks
        self._policy, self._in_memory = self._build_generation()
        self._has_base = False
        generation = self._elastic.page.generation if self._elastic else 0
        # the same on a replaced rank, which has entered no earlier generation
        self._branch = max(self._branch + 1, generation * _MOST_ENTRIES)

    def recover(self) -> RecoveredState:
        """Bring all ranks to one state, as a generation starts.

        The state comes from memory, or is the newest state on disk.

        Returns:
            The state of all ranks, with iteration None if the run has never saved. In
            that case the caller starts from the beginning, or from a checkpoint
            (`resume`).

        Raises:
            CheckpointLoadError: Neither memory nor disks lead to a common state. Raised
                on all ranks.
            ConfigError: Training is about to begin, and shared memory has less room
                than the snapshots will take. Raised on all ranks.
        """
        assert self._in_memory is not None
        job_recovery = self._in_memory.job_recovery
        assert job_recovery is not None
        self._enter_phase(Phase.RECOVERY)
        try:
            recovered = job_recovery.run(self._state)
        except NothingLeftError as error:
            source = self._go_back(error)
            recovered = RecoveredState(iteration=None)
            if source:
                recovered = RecoveredState(
                    iteration=source.iteration, lines=[f"all stages: load {source}"]
                )
        else:
            # if no rank went back, the live state goes on
            if recovered.went_back and recovered.iteration is not None:
                self._suspects.loaded(
                    Source(location=HOST_MEMORY, iteration=recovered.iteration)
                )
        if recovered.iteration is None:
            # no state in memory goes on; `resume` names the source if a state is on
            # disk
            self._suspects.clear()
            # only when training begins: later a full memory costs the protection, and
            # not the job
            self._in_memory.require_room()
        else:
            # first: a window of one slot needs this start, and peers are about to drop
            # earlier blobs
            self._in_memory.tier.logs.log_start(recovered.iteration + 1)
        job_recovery.copies.resume_copying()
        self._begins = recovered.iteration is None
        return recovered

    def begin_at(self, iteration: int) -> None:
        """Note that all ranks have the whole state after `iteration` steps."""
        # the state has a branch if a recovery has led to it through memory
        branch = self._state.branch if self._state.reached == iteration else None
        branch = self._branch if branch is None else branch
        self._state.be_at(iteration, branch)
        if self._in_memory:
            self._in_memory.tier.logs.begin_branch(self._branch, branch)
        if self._begins:
            self._has_left_start = self._begins = False
        if self._elastic:
            # an exception that comes back before the next iteration then counts as a
            # repetition, and ends the job
            self._elastic.page.begin_at(iteration)

    def resume(self, source: Path | None) -> int:
        """Load a state from disk.

        Args:
            source: The directory of a checkpoint. None: the newest state of this run on
                disk.

        Returns:
            The iteration of the loaded state. 0 if `source` is None and no state is on
            disk.

        Raises:
            CheckpointLoadError: No source could be loaded, or the run has saved a state
                and no state is on disk. Raised on all ranks.
            ConfigError: This run has saved its states with other settings.
        """
        if source is not None:
            changes = (
                [str(each) for each in self._course.changes_since(source)]
                if self._course
                else []
            )
            iteration = self._durable.resume_from(source)
            self._loaded(iteration, changes)
            self._suspects.loaded(Source(location=str(source), iteration=iteration))
            self.loaded_from = str(source)
            return iteration
        loaded = self._load_best(self._fallback.look(self._job_recovery))
        self.loaded_from = loaded.location if loaded else None
        if loaded is None:
            self._require_nothing_left()
        if loaded is None and self._job_recovery:
            # marks each disk until the first save on that disk: snapshots on other
            # disks are then no error of a later start
            self._job_recovery.begin_on_disks()
        if self._job_recovery:
            self._job_recovery.copies.resume_copying()
        return loaded.iteration if loaded else 0

    def _require_nothing_left(self) -> None:
        """Require that no state of this run was left by earlier processes of all ranks.

        Raises CheckpointLoadError on all ranks otherwise.
        """
        everywhere = frozenset.intersection(
            *gather_results(self._ranks, lambda: self._left, CheckpointLoadError)
        )
        if everywhere:
            newest = max(everywhere)
            wanted = "its checkpoints, or the local disks of all ranks, where they were"
            raise CheckpointLoadError(
                f"this run has {newest.what} at iteration {newest.iteration}, and no"
                f" state of it is on disk: wanted {wanted}; for a new start take"
                " another run.dir"
            )

    def has_snapshots_on_disk(self) -> bool:
        """Return whether local disks hold any snapshots. Collective."""
        job_recovery = self._job_recovery
        if job_recovery is None:
            return False
        return any(
            newest is not None for newest in job_recovery.look_at_disks().of_each
        )

    def iteration_started(self, iteration: int) -> None:
        self._forget_evaluations()
        if self._in_memory is None:
            return
        # not in `enter`: the state to begin with is loaded, or broadcast, only after
        # `enter`
        if not self._has_base:
            self._take_base(self._in_memory, iteration - 1)
        self._in_memory.tier.started(iteration)
        self._in_memory.losses.arm(iteration)
        self._enter_phase(Phase.FORWARD, iteration)

    def loss_known(self, iteration: int, loss: float) -> None:
        bad = self._suspects.source_of(iteration, loss)
        if bad is None:
            return
        reason = f"loss {loss} in iteration {iteration}"
        # states of these iterations descend from the bad state; states of later
        # iterations are older than the load, and good
        since = range(bad.iteration + 1, iteration)
        better = (
            self._step_down(bad, since, reason)
            if self._suspects.is_first_at(iteration, bad)
            else None
        )
        action = (
            "training goes on as it is: nothing else leads elsewhere"
            if better is None
            else f"back to {better}"
        )
        self._events.append(
            LossNotFinite(
                iteration=iteration, loss=str(loss), source=str(bad), action=action
            )
        )
        if self._ranks.rank == 0:
            _log.warning(
                "%s, soon after all ranks went on from %s: %s", reason, bad, action
            )
        if better is not None:
            raise RolledBackError(better.iteration)
        self._suspects.clear()

    def gradients_ready(self, iteration: int, gradients: ReadyGradients) -> bool:
        if self._in_memory is None:
            return True
        # the last moment to back out: no rank has changed a parameter yet
        if self._in_memory.recover_lost_state(iteration - 1, undo=True):
            return False
        self._in_memory.tier.ready(iteration, gradients)
        # no vote if all ranks go back after a fault: a recovery then uses no live state
        if self._elastic and self._in_memory.tier.recovers_locally:
            self._vote(self._in_memory, iteration, gradients)
        # set before the step: a start that loads nothing would go on from a changed
        # state
        self._has_left_start = True
        self._enter_phase(Phase.STEP)
        return True

    def update_applied(self, iteration: int) -> None:
        self._state.apply(iteration, self._branch)
        self._enter_phase(Phase.STEP)

    def step_committed(self, iteration: int) -> None:
        # NCCL has only queued the gather of weights, which may still fail
        if self._in_memory:
            self._in_memory.parts.adapter.position.stage_ranks.confirm()
        self._state.be_at(iteration, self._branch)
        self._enter_phase(Phase.SNAPSHOT)
        if self._in_memory:
            self._in_memory.tier.committed(iteration)
            self._in_memory.losses.inject(iteration, "step")
            self._in_memory.recover_lost_state(iteration, undo=False)
            self._audit(self._in_memory, iteration)
        assert self._policy is not None
        plan = self._policy.plan(iteration, self._measure)
        # one save at a time is in flight
        self._attempt(lambda: self._durable.poll(wait=plan.durable))
        if plan.durable:
            self._attempt(lambda: self._durable.save(iteration))
        if self._in_memory:
            self._take(self._in_memory, iteration, plan)
            self._in_memory.losses.inject(iteration, "between")
            self._in_memory.recover_lost_state(iteration, undo=False)
        self._enter_phase(Phase.BETWEEN)

    def wait_for_saves(self) -> None:
        """Wait for writes in progress.

        Raises:
            CheckpointSaveError: A write failed, and saves are strict.
        """
        if self._in_memory:
            self._in_memory.tier.finish_persisting()
        self._attempt(lambda: self._durable.poll(wait=True))

    def finish(self) -> None:
        """Wait for writes in progress, and end the copying threads.

        Raises:
            CheckpointSaveError: A write failed, and saves are strict.
        """
        self.wait_for_saves()
        if self._in_memory:
            self._in_memory.tier.close()

    def _go_back(self, error: NothingLeftError) -> Source | None:
        """Load the newest state on disk, as memory leads to no state.

        Returns:
            The source of the state. None: all ranks start once more, because no state
            is on disk and no rank has trained since its start. The start may have
            loaded a checkpoint of another run.

        Raises:
            NothingLeftError: There is no state, and all ranks cannot start once more.
                Raised on all ranks; the error is `error`.
        """
        assert self._job_recovery is not None
        found = self._fallback.look(self._job_recovery)
        # first: a fault during the load must not find a partly loaded state live
        self._state.lose()
        loaded = self._load_best(found, f"{HOST_MEMORY}: {error}")
        if loaded:
            return loaded
        have_left = gather_results(
            self._ranks, lambda: self._has_left_start, CheckpointLoadError
        )
        if True in have_left or False not in have_left:
            raise error
        self._job_recovery.drop_memory()
        return None

    def _step_down(self, bad: Source, since: range, reason: str) -> Source | None:
        """Load the next best state after a bad one.

        Args:
            bad: The source of the bad state, which is never loaded again.
            since: Iterations whose states are not loaded.
            reason: The reason against `bad`, for the log.

        Returns:
            The source of the loaded state. None: there is no other source.
        """
        self._attempt(lambda: self._durable.poll(wait=True))
        self._fallback.quarantine(bad)
        found = self._fallback.look(self._job_recovery, tainted=since)
        if not found.sources:
            return None

        def load() -> Source:
            loaded = self._load_instead_of_memory(found, f"{bad}: {reason}")
            assert loaded is not None, found
            return loaded

        # only here: without another source training goes on with the present state,
        # policy and memory
        return self._begin_anew(load)

    def _begin_anew(self, load: Callable[[], Source]) -> Source:
        """Let all ranks leave their state in living processes, and go on from another.

        Args:
            load: Brings all ranks to the other state, and returns its source.

        Returns:
            The source of the state.
        """
        self.enter()
        if self._job_recovery:
            self._job_recovery.copies.stop_copying(self._state)
        self._state.lose()
        source = load()
        self.begin_at(source.iteration)
        if self._job_recovery:
            self._job_recovery.copies.resume_copying()
        return source

    def _load_instead_of_memory(
        self, found: UsableState, *passed_over: str
    ) -> Source | None:
        """Load a state to which this rank's memory does not lead."""
        # with a job recovery the load itself drops the memory, and peers' copies
        if self._in_memory and not self._job_recovery:
            self._in_memory.parts.memory.clear()
        return self._load_best(found, *passed_over)

    def _audit(self, in_memory: InMemoryCheckpointing, iteration: int) -> None:
        """Audit the present state where due, and go back if any rank's state is wrong.

        Raises RolledBackError on all ranks in that case.
        """
        audits = in_memory.audits
        if audits is None or not audits.is_due(iteration):
            return
        # the copier reads the tensors that the audit overwrites
        in_memory.tier.finish_snapshot()
        # a fault meanwhile must not find a partly rebuilt state live
        self._state.lose()
        found = audits.compare(iteration, self._branch)
        if not found:
            self._state.be_at(iteration, self._branch)
            return
        where = [f"rank {rank}: {', '.join(names)}" for rank, names in found.items()]
        self._attempt(lambda: self._durable.poll(wait=True))
        source = self._begin_anew(lambda: self._load_audited(iteration))
        self._events.append(
            CorruptionFound(
                iteration=iteration, where=where, action=f"back to {source}"
            )
        )
        if self._ranks.rank == 0:
            _log.warning(
                "the state after iteration %d is not the one to which windows and"
                " logged gradients lead (%s): back to %s",
                *(iteration, "; ".join(where), source),
            )
        raise RolledBackError(source.iteration)

    def _load_audited(self, iteration: int) -> Source:
        """Bring all ranks to the newest state that is known to be good.

        Args:
            iteration: The iteration of the audit that has found another state.

        Returns:
            The source of the state: host memory, or else a disk.

        Raises:
            NothingLeftError: There is no such state. Raised on all ranks.
        """
        assert self._in_memory is not None
        audits, job_recovery = self._in_memory.audits, self._job_recovery
        assert audits is not None
        # a save since the audit before may have the wrong state
        for saved in self._fallback.look(job_recovery).sources:
            if saved.iteration > audits.before(iteration):
                self._fallback.quarantine(saved)
        try:
            plan = audits.go_back(iteration)
        except NothingLeftError as error:
            found = self._fallback.look(job_recovery)
            loaded = self._load_instead_of_memory(found, f"{HOST_MEMORY}: {error}")
            if loaded is None:
                raise
            return loaded
        self._state.be_at(plan.target_iteration, plan.branch)
        self._in_memory.tier.logs.log_start(plan.target_iteration + 1)
        return Source(location=HOST_MEMORY, iteration=plan.target_iteration)

    def _load_best(self, found: UsableState, *passed_over: str) -> Source | None:
        loaded = self._fallback.load(found, self._job_recovery, passed_over)
        if loaded:
            self._suspects.loaded(loaded)
            self._loaded(loaded.iteration, self._fallback.changed)
            if self._in_memory:
                self._in_memory.tier.logs.log_start(loaded.iteration + 1)
        return loaded

    def _vote(
        self,
        in_memory: InMemoryCheckpointing,
        iteration: int,
        gradients: ReadyGradients,
    ) -> None:
        """Return once every rank has complete gradients.

        From then on all surviving ranks can take the step.
        """
        # no rank steps before peers hold this rank's start of the iteration: without
        # the start a lost memory cannot replay. After a failed copy training goes on
        # without, and such a loss costs iterations
        publisher = in_memory.parts.memory.publisher
        if publisher:
            publisher.await_copies_of_step(iteration)
        # before the barrier: other ranks may leave the barrier and step while a death
        # cuts this rank off inside the barrier
        self._state.prepare(gradients)
        self._ranks.barrier()

    def _enter_phase(self, phase: Phase, iteration: int | None = None) -> None:
        if self._elastic:
            self._elastic.page.enter(phase, iteration)

    def _take_base(self, in_memory: InMemoryCheckpointing, iteration: int) -> None:
        assert self._policy is not None
        plan = self._policy.plan(iteration, self._measure)
        self._report(iteration, plan)
        in_memory.tier.entered(
            iteration, plan.window.period_iters if plan.window else 0
        )
        if plan.sparse:
            in_memory.tier.take_base(plan.sparse, to_disk=plan.to_disk)
        self._has_base = True

    def _take(
        self, in_memory: InMemoryCheckpointing, iteration: int, plan: SnapshotPlan
    ) -> None:
        self._report(iteration, plan)
        if plan.sparse:
            in_memory.tier.take(plan.sparse, to_disk=plan.to_disk)

    def _report(self, iteration: int, plan: SnapshotPlan) -> None:
        if plan.window:
            self._events.append(
                WindowChosen(iteration=iteration, **asdict(plan.window))
            )
            before, self._logged_window = (
                self._logged_window,
                (plan.window.num_slots, plan.window.pause_iters),
            )
            if (
                self._ranks.rank == 0
                and plan.window.snapshot_share is not None
                and before != self._logged_window
            ):
                _log.info(
                    "iteration %d: ckpt.window=auto is %s",
                    iteration,
                    plan.window.describe(),
                )
        if plan.interval:
            self._events.append(
                IntervalChosen(iteration=iteration, **asdict(plan.interval))
            )
        if plan.experts:
            self._events.append(
                ExpertsChosen(iteration=iteration, **asdict(plan.experts))
            )

    def _measure(self) -> Measured:
        assert self._in_memory is not None
        return self._in_memory.tier.measure()

    def _attempt(self, save: Callable[[], None]) -> None:
        try:
            save()
        except CheckpointSaveError as error:
            if self._strict:
                raise
            if self._ranks.rank == 0:
                _log.warning(
                    "checkpoint not saved, training goes on (ckpt.strict=false): %s",
                    error,
                )
