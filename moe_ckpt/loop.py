"""One training iteration, and one worker's life, for every training loop.

The launcher, loops of one's own (`moe_ckpt.own_loop`) and the loops of Megatron-LM,
Megatron-Bridge and ms-swift (`moe_ckpt.integrations`) are adapters over this module.

An iteration (`TrainingIteration`), on every rank:

    begin         hook iteration_started
    the loop      clears gradients; runs forward and backward; reduces gradients
    finish_pass   norm and loss; hooks loss_known and gradients_ready: the last moment to
                  back out, as no rank has changed a parameter
    step          clip, Adam, schedule; hook update_applied; gather weights
    commit        hook step_committed; event IterationCommitted

A worker, the first of its rank or a replacement (`run_worker`; attached loops call
`join_run`, run the whole script, and call `train` where the script trains):

    fork          by the rank's supervisor (`elastic.supervisor`), which has ended the
                  dead worker's generation; status page and heartbeat (`run_elastic`)
    join_run      device; a world in which no other rank is yet; run folder; events
    build         the loop's part: groups, model, optimizer; a supervised rank waits for
                  no other
    train         attach a session (`moe_ckpt.attach`); then, in each generation, with
                  all ranks (`engine.worker_loop`):
        join          all ranks meet, and form the process groups anew
        enter         the session's policy and in-memory tier of this generation, over
                      the host memory that the worker before has left
        recover       the session plans, fetches windows, and replays lost stages, until
                      all ranks have one state
        start         if no rank has a state: `LoopAdapter.start` loads one, or the built
                      model is the state
        run_from      iterations from that state on, until the last one; once ranks are
                      lost: leave the generation, and join the next one
        finish        digests of all ranks; rank 0 writes result.json
    retire        the worker leaves the run folder, and ends
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from moe_ckpt.attach import TrainingLoop, attach
from moe_ckpt.collectives import TorchRanks, gather_results
from moe_ckpt.config import is_on, require
from moe_ckpt.durable.course import RunCourse
from moe_ckpt.elastic.backend_choice import use_gpu
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.elastic.torchrun import Launch, job_name
from moe_ckpt.engine.inputs import Inputs
from moe_ckpt.engine.session import LeftState, Session
from moe_ckpt.engine.worker_loop import TrainingRun
from moe_ckpt.errors import ConfigError, RolledBackError
from moe_ckpt.events import (
    CheckpointSaved,
    Event,
    EventLog,
    IterationCommitted,
    LastSaveDone,
    ModelBuilt,
    RunFinished,
    WindowPersisted,
    WorkerStarted,
    read_events,
)
from moe_ckpt.exactness import BITWISE, describe, require_kept
from moe_ckpt.job_config import JobConfig
from moe_ckpt.linux import age_s
from moe_ckpt.megatron import cpu_stand_in
from moe_ckpt.megatron.checks import StateChecks, job_digest
from moe_ckpt.megatron.determinism import make_deterministic, require_repeatable
from moe_ckpt.megatron.initial_weights import synchronize_fresh
from moe_ckpt.megatron.layer_split import require_recoverable
from moe_ckpt.megatron.pipeline import StageCommunicator
from moe_ckpt.megatron.read_batches import ReadBatches
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.megatron.step import (
    advance_schedule,
    apply_update,
    clear_gradients,
    describe_step,
    finish_gradients,
    gather_parameters,
    mean_over_job,
)
from moe_ckpt.plain_worker import PlainWorker
from moe_ckpt.ports import TrainingHooks
from moe_ckpt.run_elastic import RankPlace, run_elastic
from moe_ckpt.run_folder import RunFolder, require_lasting
from moe_ckpt.types import ParallelLayout, Phase, ReadyGradients, RunIdentity

_log = logging.getLogger(__name__)
T = TypeVar("T")

_OF_EARLIER = (
    "WorkerStarted",
    "Evaluated",
    "CheckpointSaved",
    "WindowPersisted",
    "LastSaveDone",
    "RunFinished",
)

Losses = Sequence[dict[str, torch.Tensor]]
"""Loss reports of an iteration's micro-batches, as Megatron's schedules return them:
on the last stage one report for each micro-batch, on all others none."""


class TrainingIteration:
    """One rank's training iteration. All methods are collective over all ranks.

    A loop that owns its iteration calls `run`. A loop that does not calls `begin`,
    `finish_pass`, `step` and `commit` at these points of its own iteration.

    Attributes:
        hooks: The session. `train` sets the hooks before the first iteration.
        on_commit: Receives the event of each iteration that all ranks have finished.
        communicator: Carries the tensors between stages; logs and replays them.
        batches: Sees the micro-batches that an iteration reads.
        schedule_options: The arguments with which Megatron's schedules use the
            communicator.
        gradients: The gradients that `finish_pass` has accepted and `step` has not
            taken; None in between.
        prepared: The event of the newest iteration with complete gradients. If ranks
            are lost then, a recovery may be what commits this iteration.
    """

    hooks: TrainingHooks

    def __init__(
        self,
        state: TrainingState,
        enter_phase: Callable[[Phase], None] = lambda _: None,
    ) -> None:
        """Prepare the iterations of a built model.

        Args:
            state: The training state of this rank's stage.
            enter_phase: Marks a phase of the iteration on the rank's status page.
        """
        groups = ProcessGroupCollection.use_mpu_process_groups()
        config: Any = state.model[0].config
        # Megatron's schedules scale losses and reduce gradients through these
        # functions, and a recovery runs schedules before an attached loop sets them
        config.grad_scale_func = config.grad_scale_func or state.optimizer.scale_loss
        config.finalize_model_grads_func = (
            config.finalize_model_grads_func or finalize_model_grads
        )
        self.state = state
        self.communicator = StageCommunicator(groups.pp, config)
        self.batches = ReadBatches()
        # both: schedules refuse a communicator without groups
        self.schedule_options: dict[str, Any] = {
            "p2p_communicator": self.communicator,
            "pg_collection": groups,
        }
        self.on_commit: Callable[[IterationCommitted], None] = lambda _: None
        self.gradients: ReadyGradients | None = None
        self.prepared: IterationCommitted | None = None
        self.number = 0
        self._enter_phase = enter_phase
        self._started_s = self._stall_s = 0.0
        self._observed_before = self.communicator.observed

    def run(
        self, number: int, forward_backward: Callable[[int], Losses]
    ) -> IterationCommitted:
        """Train one iteration.

        Args:
            number: The iteration, counted from 1.
            forward_backward: Runs forward and backward of an iteration's batch, leaves
                the reduced gradients, and returns the loss reports.

        Returns:
            The event of the iteration.

        Raises:
            RolledBackError: All ranks are at an earlier state.
        """
        is_repeated = False
        while True:
            self.begin(number, is_repeated=is_repeated)
            # in each attempt: gradients of an undone attempt would be added to
            clear_gradients(self.state)
            losses = forward_backward(number)
            if self.finish_pass(losses):
                break
            is_repeated = True
        self.step()
        return self.commit()

    def begin(self, number: int, *, is_repeated: bool = False) -> None:
        """Begin an iteration, before its gradients are cleared.

        Args:
            number: The iteration, counted from 1.
            is_repeated: Whether the iteration starts over, because lost state was
                rebuilt; the first attempt then counts as part of the iteration's time.
        """
        if not is_repeated:
            self._started_s, self._stall_s = time.monotonic(), 0.0
            self._observed_before = self.communicator.observed
        self.number = number
        self.gradients = None  # of an iteration that was cut off
        self.batches.begin()
        self._timed(lambda: self.hooks.iteration_started(number))

    def finish_pass(self, losses: Losses) -> bool:
        """Measure the reduced gradients, and let all ranks agree on the step.

        Args:
            losses: The loss reports of this rank's micro-batches.

        Returns:
            Whether the loop may step. If not, lost state was rebuilt: the state is
            that at the beginning of the iteration, which starts over.

        Raises:
            RolledBackError: All ranks are at an earlier state.
        """
        self._enter_phase(Phase.REDUCE)
        gradients = finish_gradients(self.state)
        loss = mean_over_job(losses)
        # before the vote: after a load that led to this loss, all ranks go back, and no
        # rank may take the step
        self._timed(lambda: self.hooks.loss_known(self.number, loss))
        # before the vote: a rank that is cut off after the vote takes the step in the
        # next generation, and logs the iteration then
        self.prepared = describe_step(self.state, self.number, loss, gradients)
        if not self._timed(lambda: self.hooks.gradients_ready(self.number, gradients)):
            return False
        self.gradients = gradients
        return True

    def step(self) -> ReadyGradients:
        """Take the optimizer's step with the gradients of `finish_pass`; return them."""
        gradients, self.gradients = self.gradients, None
        assert gradients is not None, "finish_pass comes first"
        apply_update(self.state, gradients)
        # before `update_applied`, after which a recovery repeats the gather alone
        advance_schedule(self.state, gradients)
        self._timed(lambda: self.hooks.update_applied(self.number))
        # a rank that is cut off in the gather repeats it after the recovery: the rank's
        # own update is whole by then
        gather_parameters(self.state)
        return gradients

    def commit(self) -> IterationCommitted:
        """Finish the iteration: parameters and schedule are those after the step.

        Returns:
            The event of the iteration, with its time and the bytes sent.
        """
        self._timed(lambda: self.hooks.step_committed(self.number))
        assert self.prepared is not None, self.number
        before, after = self._observed_before, self.communicator.observed
        committed = replace(
            self.prepared,
            seconds=time.monotonic() - self._started_s,
            stall_s=self._stall_s + after.logging_s - before.logging_s,
            sent_activation_bytes=after.activation_bytes - before.activation_bytes,
            sent_gradient_bytes=after.gradient_bytes - before.gradient_bytes,
        )
        self.on_commit(committed)
        return committed

    def run_schedule(self, **options: Any) -> Losses:
        """Run Megatron's schedule over micro-batches, with this rank's communicator.

        Args:
            options: The arguments of the schedule.
        """
        return get_forward_backward_func()(**options, **self.schedule_options)

    def marking_phases(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward step that marks where forward and backward begin, and lets
        `batches` see what it reads.
        """

        @functools.wraps(forward_step)
        def marked(*arguments: Any, **options: Any) -> Any:
            self._enter_phase(Phase.FORWARD)
            output, loss = forward_step(
                *map(self.batches.observed, arguments), **options
            )
            if isinstance(output, torch.Tensor) and output.requires_grad:
                # schedules call no function of a loop as backward begins
                output.register_hook(lambda _: self._enter_phase(Phase.BACKWARD))
            return output, loss

        return marked

    def _timed(self, hook: Callable[[], T]) -> T:
        started_s = time.monotonic()
        outcome = hook()
        self._stall_s += time.monotonic() - started_s
        return outcome


class LoopAdapter(Protocol):
    """A training loop, as `train` drives it.

    All methods but `committed` are collective over all ranks.
    """

    session: Session
    """The session of this worker, which `train` sets first."""

    def start(self) -> int:
        """Load the state that a run without state in memory begins with.

        A start may be called again, after a fault before the first iteration.

        Returns:
            The iteration of the state; 0: the built model is the state.
        """
        ...

    def run_from(self, done: int, notes: Sequence[str]) -> None:
        """Train from the state after `done` iterations to the last iteration.

        Called again after each rollback and in each generation; `notes` are lines for
        the log.

        Raises:
            RolledBackError: All ranks are at an earlier state.
        """
        ...

    def committed(self, event: IterationCommitted) -> None:
        """All ranks have finished an iteration. Must not communicate.

        After a fault some ranks see an iteration here once others are beyond it, and a
        replacement sees none of the iterations before its own.
        """
        ...

    def result(self) -> dict[str, object]:
        """Return the loop's own entries of result.json."""
        ...

    def close(self) -> None:
        """Training is done: close everything that belongs to the iterations."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """One rank's built training, which `train` attaches to and runs."""

    loop: LoopAdapter
    """The loop's part of the worker's life."""

    iteration: TrainingIteration
    """The iterations of this rank."""

    replay: TrainingLoop
    """The passes that a replay runs."""

    model: str
    """The model, and everything else that shapes the saved state: other states are
    refused."""

    layout: ParallelLayout
    """The degrees of parallelism."""

    last_iteration: int
    """The iteration after which the run is finished."""

    length_setting: str
    """The name of the setting that gives `last_iteration`, for an error."""

    exactness: str
    """What recoveries promise: `bitwise` or `state`."""

    inputs: Inputs = field(default_factory=dict)
    """The contents that this process has read, which all ranks must have read alike."""

    course: RunCourse | None = None
    """The settings that decide the states of the run; None: the loop keeps no account.
    """

    asked_lengths: Mapping[str, str] = field(default_factory=dict)
    """The settings that ask for a length of the schedule by a number, by the length's
    name (`megatron.schedule.LENGTHS`). Other lengths stay as the run began.
    """

    check_pass: Callable[[], object] | None = None
    """The pass that the check of determinism repeats; None: a replay's pass of the
    first iteration.
    """

    check_setting: str = "check_determinism"
    """The name of the setting that turns the check on, for an error."""


class WorkerProcess(Protocol):
    """A process that trains one rank: supervised (`Worker`) or not (`PlainWorker`)."""

    job: JobConfig
    is_supervised: bool

    @property
    def launch(self) -> Launch:
        """This rank's place in the job."""
        ...

    @property
    def is_first_start(self) -> bool:
        """Whether no process of this job has trained before the current generation."""
        ...

    def join_world(self, *, on_gpu: bool) -> None:
        """Make `torch.distributed` usable: with all ranks, or alone if supervised."""
        ...

    def open_folder(self) -> RunFolder:
        """Return the run folder, the same on all ranks."""
        ...

    def context(self, layout: ParallelLayout) -> ElasticContext | None:
        """Return the means to survive the loss of ranks, if there are any."""
        ...

    def enter_phase(self, phase: Phase) -> None:
        """Show where in an iteration this rank is."""
        ...

    def run(
        self,
        session: Session,
        training: TrainingRun,
        events: EventLog,
        *,
        start: Callable[[], int],
        finish: Callable[[int], dict[str, Any]],
    ) -> dict[str, Any]:
        """Train to the end; return the result of `finish(deaths)`."""
        ...

    def retire(self, folder: RunFolder) -> None:
        """Training is done, and this process is about to end."""
        ...


W = TypeVar("W", bound=WorkerProcess)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class JoinedWorker(Generic[W]):
    """A worker that has joined its run, and has no model yet."""

    worker: W
    """The process."""

    folder: RunFolder
    """The run folder."""

    events: EventLog
    """The event file of this rank, open."""

    incarnation: int
    """The processes that this rank had in this run before this one."""

    num_faults: int
    """The processes among these that did not finish the run."""

    earlier: tuple[Event, ...]
    """The events of these processes that say what a run has done: starts, evaluations,
    states on disks, ends."""

    began_s: float
    """When the worker began, on the monotonic clock."""

    @property
    def is_first_rank(self) -> bool:
        """Whether this is global rank 0, which prints and writes for all."""
        return self.worker.launch.global_rank == 0

    @property
    def left_by_earlier(self) -> frozenset[LeftState]:
        """The states that earlier processes of this rank have left on disks, and the
        ends of the run.
        """
        left: set[LeftState] = set()
        for event in self.earlier:
            if isinstance(event, CheckpointSaved):
                left.add(LeftState(event.iteration, "saved a checkpoint"))
            elif isinstance(event, WindowPersisted):
                left.add(LeftState(event.window_start, "saved a window on local disks"))
            elif isinstance(event, LastSaveDone):
                left.add(
                    LeftState(
                        event.iteration,
                        "saved windows on local disks as it was stopped",
                    )
                )
            elif isinstance(event, RunFinished):
                left.add(LeftState(event.iteration, "finished"))
        return frozenset(left)

    def retire(self) -> None:
        """Training is done, and this process is about to end."""
        self.worker.retire(self.folder)


def start_rank(
    job: JobConfig,
    launch: Launch,
    work: Callable[[WorkerProcess], object],
    *,
    beside: Callable[[RankPlace], None] = lambda _: None,
) -> int:
    """Be one rank of a job: supervise the rank's workers, or train in this process.

    Args:
        job: The settings. `runtime.guard` and the policy choose between the two.
        launch: This rank's place in the job.
        work: Trains, in each worker.
        beside: May start processes that live as long as the supervisor at most.

    Returns:
        The exit status.

    Raises:
        MoeCkptError: Settings that cannot work; without a supervisor also data and
            checkpoints, on all ranks.
    """

    def work_to_the_end(worker: WorkerProcess) -> int:
        work(worker)
        return 0

    if job.is_supervised:
        return run_elastic(job, launch, work_to_the_end, beside=beside)
    if job_name():  # torchrun may start all ranks again
        require_lasting(job.folder)
    return work_to_the_end(PlainWorker(job, launch))


def run_worker(
    worker: WorkerProcess,
    build: Callable[[JoinedWorker[Any]], Training],
    *,
    use_cpu: Callable[[], bool] = cpu_stand_in.enable,
    around_hooks: Callable[[TrainingHooks], TrainingHooks] = lambda hooks: hooks,
) -> dict[str, Any]:
    """Be one worker, from its start to the end of the run.

    Args:
        worker: This process.
        build: Returns the loop's part; a supervised worker must not wait for other
            ranks there.
        use_cpu: Makes Megatron-Core run without a GPU if there is none; returns whether
            there is none.
        around_hooks: May wrap the hooks that the iteration calls.

    Returns:
        The contents of result.json.

    Raises:
        MoeCkptError: Settings, data or checkpoints that cannot work.
    """
    joined = join_run(worker, use_cpu=use_cpu)
    result = train(joined, build(joined), around_hooks=around_hooks)
    joined.retire()
    return result


def join_run(
    worker: W, *, use_cpu: Callable[[], bool] = cpu_stand_in.enable
) -> JoinedWorker[W]:
    """Choose the device, join the world and the run folder, and open the event file.

    At the first start of a job, a supervised worker waits here for the run folder of
    global rank 0, and else for no other rank.

    Args:
        worker: This process.
        use_cpu: As in `run_worker`.

    Raises:
        ConfigError: `runtime.backend`, `runtime.share_gpus` or `run.dir` cannot work.
    """
    began_s = time.monotonic()
    worker.join_world(on_gpu=choose_device(worker.job, worker.launch, use_cpu))
    folder = worker.open_folder()
    path = folder.events(worker.launch.global_rank)
    logged = read_events(path, only=_OF_EARLIER) if path.exists() else ()
    earlier = tuple(each.event for each in logged)
    incarnation = sum(isinstance(event, WorkerStarted) for event in earlier)
    num_finished = sum(isinstance(event, RunFinished) for event in earlier)
    events = _open_events(folder, worker.launch)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    # a supervised worker is a fork of the process that torchrun has started
    started = os.getppid() if worker.is_supervised else os.getpid()
    events.append(
        WorkerStarted(
            pid=os.getpid(),
            host=socket.gethostname(),
            incarnation=incarnation,
            device=device,
            launch_s=None if incarnation else round(age_s(started), 3),
        )
    )
    return JoinedWorker(
        worker=worker,
        folder=folder,
        events=events,
        incarnation=incarnation,
        # a start after a finished run, with more iterations, has survived no fault
        num_faults=incarnation - num_finished,
        earlier=earlier,
        began_s=began_s,
    )


def choose_device(
    job: JobConfig, launch: Launch, use_cpu: Callable[[], bool] = cpu_stand_in.enable
) -> bool:
    """Choose this process's device, a GPU where there is CUDA; return whether it is
    one.

    Raises:
        ConfigError: There is a GPU, and `runtime.backend` or `runtime.share_gpus` does
            not fit.
    """
    if use_cpu():
        return False
    if job.exactness == BITWISE:
        make_deterministic()
    use_gpu(launch, job.runtime.backend, share_gpus=job.runtime.share_gpus)
    return True


def train(
    joined: JoinedWorker[Any],
    training: Training,
    *,
    around_hooks: Callable[[TrainingHooks], TrainingHooks] = lambda hooks: hooks,
) -> dict[str, Any]:
    """Attach a built training, and train with all other ranks until all have finished.

    Args:
        joined: This worker.
        training: The loop's part.
        around_hooks: May wrap the hooks that the iteration calls.

    Returns:
        The contents of result.json.

    Raises:
        MoeCkptError: Settings or checkpoints that cannot work.
    """
    worker, job, events = joined.worker, joined.worker.job, joined.events
    require_kept(training.exactness, job.ckpt, job.losses, job.check_determinism)
    if job.ckpt.in_memory is not None:
        require_recoverable(
            training.iteration.state, is_supervised=worker.is_supervised
        )
    session = attach(
        ckpt=job.ckpt,
        identity=RunIdentity(
            run_id=joined.folder.run_id, model=training.model, layout=training.layout
        ),
        folder=joined.folder.checkpoints,
        state=training.iteration.state,
        loop=training.replay,
        events=events,
        last_iteration=training.last_iteration,
        losses=job.losses,
        elastic=worker.context(training.layout),
        suspect_iters=job.runtime.suspect_iters,
        on_divergence=job.runtime.on_divergence,
        inputs=training.inputs,
        course=training.course,
        asked_lengths=training.asked_lengths,
        left=joined.left_by_earlier,
    )
    events.append(
        ModelBuilt(
            seconds=time.monotonic() - joined.began_s, exactness=training.exactness
        )
    )
    run = _Run(joined, training)
    training.loop.session = session
    training.iteration.hooks = around_hooks(session)
    training.iteration.on_commit = run.commit
    result = worker.run(session, run, events, start=run.start, finish=run.finish)
    # first: the script of an attached loop goes on, and a death is a fault again
    training.loop.close()
    session.finish()
    last, digest = training.last_iteration, result["digest"]
    events.append(RunFinished(iteration=last, digest=digest))
    events.close()
    return result


class _Run:
    """One rank's way through the iterations; implements `worker_loop.TrainingRun`."""

    def __init__(self, joined: JoinedWorker[Any], training: Training) -> None:
        self._joined = joined
        self._training = training
        self._loop, self._iteration = training.loop, training.iteration
        checks = joined.worker.job.checks
        self._checks = StateChecks(checks, self._iteration.state, joined.events)
        self._committed: IterationCommitted | None = None
        self._noted = 0  # the newest iteration that this process has no need to log
        self._beginning: list[str] = []  # lines of a start, for the log

    def start(self) -> int:
        """Return the iteration that a run without state in memory begins with."""
        state, job = self._iteration.state, self._joined.worker.job
        # ranks may have built their models alone, each with its own draws and its own
        # copy of the tied embedding
        synchronize_fresh(state)
        course = self._training.course
        if course:
            course.begin_anew()
        done = self._loop.start()
        if course:
            course.write()
        self._beginning = self._describe_beginning(done)
        by_default = self._training.exactness == BITWISE and torch.cuda.is_available()
        if is_on(job.check_determinism, by_default=by_default):
            replay, setting = self._training.replay, self._training.check_setting
            run_pass = self._training.check_pass or functools.partial(
                replay.forward_backward, done + 1
            )
            require_repeatable(TorchRanks(), state, run_pass, setting=setting)
        return done

    def run(self, done: int, notes: Sequence[str]) -> None:
        """Train from the state after `done` iterations to the last iteration."""
        last, setting = self._training.last_iteration, self._training.length_setting
        require(done <= last, setting, last, f"at least {done}, done")
        notes, self._beginning = [*notes, *self._beginning], []
        prepared = self._iteration.prepared
        if prepared and prepared.iteration == done > self._noted:
            self._note(prepared)  # ranks were lost before this rank could log the event
        while True:
            # iterations after this one belong to a history that all ranks have left
            self._iteration.prepared, self._noted = None, done
            self._begin_checks(done)
            try:
                self._loop.run_from(done, notes)
                return
            except RolledBackError as back:
                done = back.iteration
                notes = [f"iteration {self._iteration.number:>6}: {back}"]

    def _describe_beginning(self, done: int) -> list[str]:
        """Return where a start begins and why, what recoveries promise, and whether
        nothing outlives torchrun.
        """
        ckpt = self._joined.worker.job.ckpt
        promises = (
            [] if ckpt.policy == "none" else [describe(self._training.exactness, ckpt)]
        )
        if done:
            source = self._loop.session.loaded_from or "a checkpoint of the loop's own"
            return [
                f"training goes on after iteration {done}, from {source}",
                *promises,
            ]
        is_new = self._joined.incarnation == 0
        why = (
            "a new run"
            if is_new
            else "earlier processes of this run have left no state"
        )
        lines = [f"training begins with iteration 1: {why}", *promises]
        in_memory = ckpt.in_memory
        if in_memory and not (
            in_memory.disk_every_iters or in_memory.durable_every_iters
        ):
            settings = "ckpt.disk_every_iters=0, ckpt.durable_every_iters=0"
            lines.append(
                "no state goes to disk: a run whose torchrun is killed begins anew"
                f" ({settings})"
            )
        return lines

    def commit(self, committed: IterationCommitted) -> None:
        """All ranks have finished an iteration."""
        self._note(committed)
        self._checks.log_where_due(committed.iteration)

    def finish(self, deaths: int) -> dict[str, Any]:
        """Write result.json; return its contents. Collective over all ranks."""
        digest, digests = job_digest(self._iteration.state)
        folder = self._joined.folder
        is_supervised = self._joined.worker.is_supervised
        result = {
            "iteration": self._training.last_iteration,
            # None where an earlier incarnation had done all iterations
            "loss": self._committed.loss if self._committed else None,
            **self._loop.result(),
            "wall_s": round(time.time() - folder.clock_origin_unix_s, 3),
            "faults_survived": deaths if is_supervised else self._joined.num_faults,
            "exactness": self._training.exactness,
            "digest": digest,
            "digest_per_rank": digests,
        }
        if self._joined.is_first_rank:
            folder.write_result(result)
        return result

    def _note(self, committed: IterationCommitted) -> None:
        self._committed, self._noted = committed, committed.iteration
        self._joined.events.append(committed)
        self._loop.committed(committed)

    def _begin_checks(self, done: int) -> None:
        is_replacement = (
            self._joined.worker.is_supervised and self._joined.incarnation > 0
        )
        self._checks.begin(done, is_replacement=is_replacement)


def _open_events(folder: RunFolder, launch: Launch) -> EventLog:
    """Open this rank's event file.

    Raises:
        ConfigError: On all ranks of the world, if a file cannot be opened: the other
            ranks would wait for one that raised alone.
    """
    opened: list[EventLog] = []
    gather_results(
        TorchRanks(),
        lambda: opened.append(folder.open_events(launch.global_rank)),
        ConfigError,
    )
    return opened[0]
