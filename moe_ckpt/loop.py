"""One training iteration, and the life of one worker, for every training loop.

The launcher, programs with their own loop (`moe_ckpt.own_loop`) and the loops of
Megatron-LM, Megatron-Bridge and ms-swift (`moe_ckpt.integrations`) are adapters over
this module.

An iteration (`TrainingIteration`), on every rank:

    begin         hook iteration_started
    the loop      clears gradients; runs forward and backward; reduces gradients
    finish_pass   norm and loss; hooks loss_known and gradients_ready: the last moment
                  to back out, as no rank has changed a parameter
    step          clip, Adam, schedule; hook update_applied; gather weights
    commit        hook step_committed; event IterationCommitted

A worker, the first of its rank or a replacement (`run_worker`; attached loops call
`join_run`, run the whole script, and call `train` where the script trains):

    fork          by the rank's supervisor (`elastic.supervisor`), which has ended the
                  dead worker's generation; status page, heartbeat (`elastic_worker`)
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
        start         if no rank has a state: `LoopAdapter.start` loads one, or the
                      built model is the state
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
from moe_ckpt.config import CkptConfig, is_on, require
from moe_ckpt.durable.course import RunCourse
from moe_ckpt.elastic.backend_choice import use_gpu
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.elastic.torchrun_variables import Launch, job_name
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
from moe_ckpt.exactness import BITWISE, describe, require_kept, with_recovery
from moe_ckpt.job_config import JobConfig
from moe_ckpt.linux import age_s
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
from moe_ckpt.run_elastic import run_elastic
from moe_ckpt.run_folder import RunFolder, require_lasting
from moe_ckpt.standins import gpu
from moe_ckpt.supervised_rank import SupervisedRank
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
"""Loss reports of an iteration's micro-batches, as Megatron's schedules return them.

On the last stage one report for each micro-batch, on all other stages none.
"""


class TrainingIteration:
    """One rank's training iteration. All methods are collective over all ranks.

    A loop without an iteration of its own calls `run`. A loop with its own iteration
    calls `begin`, `finish_pass`, `step` and `commit` at the points named in the module.

    Attributes:
        hooks: The session. `train` sets the hooks before the first iteration.
        on_commit: Called with the event of each iteration that all ranks have finished.
        communicator: Carries tensors between stages; logs and replays them.
        batches: Sees the micro-batches that an iteration reads.
        schedule_options: Arguments with which Megatron's schedules use the
            communicator.
        gradients: The gradients that `finish_pass` has accepted and `step` has not yet
            taken; otherwise None.
        prepared: Log record of the newest iteration with complete gradients. Kept
            because a recovery may commit that iteration after a rank is lost.
        number: The iteration, counted from 1.
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
        # functions; a recovery runs schedules before an attached loop sets the
        # functions
        config.grad_scale_func = config.grad_scale_func or state.optimizer.scale_loss
        config.finalize_model_grads_func = (
            config.finalize_model_grads_func or finalize_model_grads
        )
        self.state = state
        self.communicator = StageCommunicator(groups.pp, config)
        self.batches = ReadBatches()
        # both arguments: schedules refuse a communicator without groups
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
            # in each attempt: otherwise the new gradients would be added to those of an
            # undone attempt
            clear_gradients(self.state)
            losses = forward_backward(number)
            if self.finish_pass(losses):
                break
            is_repeated = True
        self.step()
        return self.commit()

    def begin(self, number: int, *, is_repeated: bool = False) -> None:
        """Begin an iteration, before gradients are cleared.

        Args:
            number: The iteration, counted from 1.
            is_repeated: Whether the iteration starts over because lost state was
                rebuilt. The first attempt then counts as part of the iteration's time.
        """
        if not is_repeated:
            self._started_s, self._stall_s = time.monotonic(), 0.0
            self._observed_before = self.communicator.observed
        self.number = number
        # an iteration that was cut off may have left gradients
        self.gradients = None
        self.batches.begin()
        self._timed(lambda: self.hooks.iteration_started(number))

    def finish_pass(self, losses: Losses) -> bool:
        """Measure the reduced gradients, and let all ranks agree on the step.

        Args:
            losses: The loss reports of this rank's micro-batches.

        Returns:
            Whether the loop may step. If not, lost state was rebuilt: the state is the
            one at the beginning of the iteration, and the iteration starts over.

        Raises:
            RolledBackError: All ranks are at an earlier state.
        """
        self._enter_phase(Phase.REDUCE)
        gradients = finish_gradients(self.state)
        loss = mean_over_job(losses)
        # before the vote: if a load led to this loss, all ranks roll back, and no rank
        # may take the step
        self._timed(lambda: self.hooks.loss_known(self.number, loss))
        # before the vote: a rank that is cut off after the vote takes the step in the
        # next generation, and logs the iteration there
        self.prepared = describe_step(self.state, self.number, loss, gradients)
        if not self._timed(lambda: self.hooks.gradients_ready(self.number, gradients)):
            return False
        self.gradients = gradients
        return True

    def step(self) -> ReadyGradients:
        """Take the optimizer's step, and return the gradients.

        The gradients are those that `finish_pass` has accepted.
        """
        gradients, self.gradients = self.gradients, None
        assert gradients is not None, "finish_pass comes first"
        apply_update(self.state, gradients)
        # before `update_applied`: after that hook a recovery repeats only the gather
        advance_schedule(self.state, gradients)
        self._timed(lambda: self.hooks.update_applied(self.number))
        # a rank that is cut off in the gather repeats the gather after the recovery:
        # the rank's own update is complete by then
        gather_parameters(self.state)
        return gradients

    def commit(self) -> IterationCommitted:
        """Finish the iteration; parameters and schedule are those after the step.

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
            **options: The other arguments of the schedule.
        """
        return get_forward_backward_func()(**options, **self.schedule_options)

    def marking_phases(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward step that marks the phases forward and backward.

        The returned function also shows `batches` the data that the forward step reads.
        """

        @functools.wraps(forward_step)
        def marked(*arguments: Any, **options: Any) -> Any:
            self._enter_phase(Phase.FORWARD)
            output, loss = forward_step(
                *map(self.batches.observed, arguments), **options
            )
            if isinstance(output, torch.Tensor) and output.requires_grad:
                # schedules call no function of the loop when backward begins
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
    """The session of this worker; `train` sets the session first."""

    def start(self) -> int:
        """Load the state from which a run without state in memory begins.

        `train` may call this method again, after a fault before the first iteration.

        Returns:
            The iteration of the state; 0: the built model is the state.
        """
        ...

    def run_from(self, done: int, notes: Sequence[str]) -> None:
        """Train from the state after `done` iterations to the last iteration.

        Called again after each rollback and in each generation.

        Args:
            done: The iterations already done.
            notes: Lines for the log.

        Raises:
            RolledBackError: All ranks are at an earlier state.
        """
        ...

    def committed(self, event: IterationCommitted) -> None:
        """Called when all ranks have finished an iteration. Must not communicate.

        After a fault some ranks get this call only when others are beyond the
        iteration. A replacement gets no call for iterations before the first one that
        it finishes.
        """
        ...

    def result(self) -> dict[str, object]:
        """Return the loop's own entries of result.json."""
        ...

    def close(self) -> None:
        """Close everything that belongs to the iterations; training is done."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """One rank's built training, for `train`."""

    loop: LoopAdapter
    """The loop's part of the worker's life."""

    iteration: TrainingIteration
    """The iterations of this rank."""

    replay: TrainingLoop
    """The passes that a replay runs."""

    model: str
    """Fingerprint of the model and everything else that shapes the saved state.

    A state with another fingerprint is refused.
    """

    layout: ParallelLayout
    """The degrees of parallelism."""

    last_iteration: int
    """The iteration after which the run is finished."""

    length_setting: str
    """Name of the setting that gives `last_iteration`, for an error."""

    exactness: str
    """Promise of recoveries: `bitwise` or `state`."""

    inputs: Inputs = field(default_factory=dict)
    """Contents that this process has read; all ranks must have read the same."""

    course: RunCourse | None = None
    """Settings that decide the states of the run; None: the loop keeps no account of
    them.
    """

    asked_lengths: Mapping[str, str] = field(default_factory=dict)
    """Settings that ask for a number as a length of the schedule, by the length's name.

    Names are those of `megatron.schedule.LENGTHS`. Other lengths stay as the run began.
    """

    check_pass: Callable[[], object] | None = None
    """Pass that the determinism check repeats; None: a replay's pass of the first
    iteration.
    """

    check_setting: str = "check_determinism"
    """Name of the setting that turns the check on, for an error."""


class WorkerProcess(Protocol):
    """A process that trains one rank: supervised (`Worker`) or not (`PlainWorker`)."""

    job: JobConfig
    """The settings."""

    is_supervised: bool
    """Whether a supervisor replaces this process after its death."""

    @property
    def launch(self) -> Launch:
        """This rank's position in the job."""
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
        """Return the means to survive the loss of ranks; None: there are none."""
        ...

    def enter_phase(self, phase: Phase) -> None:
        """Show this rank's phase of the iteration."""
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
        """Train to the end, and return the result of `finish(deaths)`.

        Args:
            session: The session of this worker.
            training: The rank's iterations.
            events: The log of this rank's events.
            start: Returns the iteration from which a run without state in memory
                begins.
            finish: Receives the number of deaths in the job.
        """
        ...

    def retire(self, folder: RunFolder) -> None:
        """Called when training is done and this process is about to end."""
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
    """Number of earlier processes of this rank in this run."""

    num_faults: int
    """Number of earlier processes of this rank that did not finish the run."""

    earlier: tuple[Event, ...]
    """Events of the earlier processes that record progress of the run.

    Starts, evaluations, states on disks, and ends.
    """

    began_s: float
    """Time at which the worker began, on the monotonic clock."""

    @property
    def is_first_rank(self) -> bool:
        """Whether this is global rank 0, which prints and writes for all ranks."""
        return self.worker.launch.global_rank == 0

    @property
    def left_by_earlier(self) -> frozenset[LeftState]:
        """States that earlier processes of this rank left on disks, and run ends."""
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
        """Retire the worker: training is done, and this process is about to end."""
        self.worker.retire(self.folder)


def start_rank(
    job: JobConfig,
    launch: Launch,
    work: Callable[[WorkerProcess], object],
    *,
    beside: Callable[[SupervisedRank], None] = lambda _: None,
    use_cpu: Callable[[], bool] = gpu.enable,
) -> int:
    """Run one rank of a job: supervise the rank's workers, or train in this process.

    Args:
        job: The settings. `runtime.guard` and the policy choose between the two.
        launch: This rank's position in the job.
        work: Trains, in each worker.
        beside: May start processes that live at most as long as the supervisor.
        use_cpu: As in `run_worker`.

    Returns:
        The exit status.

    Raises:
        MoeCkptError: Settings that cannot work. Without a supervisor also errors of
            data and checkpoints, on all ranks.
    """

    def work_to_the_end(worker: WorkerProcess) -> int:
        work(worker)
        return 0

    if job.is_supervised:
        return run_elastic(
            job,
            launch,
            work_to_the_end,
            beside=beside,
            warm_up=lambda: warm_up(job, launch, use_cpu),
        )
    # torchrun may start all ranks again
    if job_name():
        require_lasting(job.folder)
    return work_to_the_end(PlainWorker(job, launch))


def run_worker(
    worker: WorkerProcess,
    build: Callable[[JoinedWorker[Any]], Training],
    *,
    use_cpu: Callable[[], bool] = gpu.enable,
    around_hooks: Callable[[TrainingHooks], TrainingHooks] = lambda hooks: hooks,
) -> dict[str, Any]:
    """Run one worker, from its start to the end of the run.

    Args:
        worker: This process.
        build: Returns the loop's part. A supervised worker must not wait for other
            ranks in this function.
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


def join_run(worker: W, *, use_cpu: Callable[[], bool] = gpu.enable) -> JoinedWorker[W]:
    """Choose the device, join the world and the run folder, and open the event file.

    At the first start of a job, a supervised worker waits here for the run folder of
    global rank 0. A supervised worker waits for no other rank.

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
    # a supervised worker is a fork of the process that torchrun started
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
        # a start after a finished run, with more iterations, did not follow a fault
        num_faults=incarnation - num_finished,
        earlier=earlier,
        began_s=began_s,
    )


def warm_up(
    job: JobConfig, launch: Launch, use_cpu: Callable[[], bool] = gpu.enable
) -> bool:
    """Do the generic first work of a worker, in a process that waits to become one.

    A process's first operations start the device and load kernels, which took 1.3 s of
    a recovery of 2.3 s on an H200.

    Args:
        job: The settings.
        launch: The position of a rank with the same device.
        use_cpu: As in `run_worker`.

    Returns:
        Whether the device is a GPU.
    """
    on_gpu = choose_device(job, launch, use_cpu)
    # no random numbers: the generators belong to training
    matrix = torch.ones(
        256, 256, dtype=torch.bfloat16, device="cuda" if on_gpu else "cpu"
    ).requires_grad_()
    torch.softmax(matrix @ matrix, dim=-1).sum().backward()
    if on_gpu:
        torch.cuda.synchronize()
    return on_gpu


def choose_device(
    job: JobConfig, launch: Launch, use_cpu: Callable[[], bool] = gpu.enable
) -> bool:
    """Choose this process's device, and return whether the device is a GPU.

    The device is a GPU if CUDA is available.

    Args:
        job: The settings.
        launch: This rank's position in the job.
        use_cpu: As in `run_worker`.

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
    ckpt = with_recovery(job.ckpt, training.exactness)
    require_kept(training.exactness, ckpt, job.losses, job.check_determinism)
    if ckpt.in_memory is not None:
        require_recoverable(
            training.iteration.state, is_supervised=worker.is_supervised
        )
    session = attach(
        ckpt=ckpt,
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
    run = _Run(joined, training, ckpt)
    training.loop.session = session
    training.iteration.hooks = around_hooks(session)
    training.iteration.on_commit = run.commit
    result = worker.run(session, run, events, start=run.start, finish=run.finish)
    # first: the script of an attached loop continues, and a death then counts as a
    # fault again
    training.loop.close()
    session.finish()
    last, digest = training.last_iteration, result["digest"]
    events.append(RunFinished(iteration=last, digest=digest))
    events.close()
    return result


class _Run:
    """One rank's way through the iterations; implements `worker_loop.TrainingRun`."""

    def __init__(
        self, joined: JoinedWorker[Any], training: Training, ckpt: CkptConfig
    ) -> None:
        self._joined = joined
        self._training = training
        self._ckpt = ckpt
        self._loop, self._iteration = training.loop, training.iteration
        checks = joined.worker.job.checks
        self._checks = StateChecks(checks, self._iteration.state, joined.events)
        self._committed: IterationCommitted | None = None
        # newest iteration that this process need not log
        self._noted = 0
        # lines about the start, for the log
        self._beginning: list[str] = []

    def start(self) -> int:
        """Return the iteration from which a run without state in memory begins."""
        state, job = self._iteration.state, self._joined.worker.job
        # ranks may have built their models alone, each with its own random draws and
        # its own copy of the tied embedding
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
            # ranks were lost before this rank could log the event
            self._note(prepared)
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
        """Return lines about a start, for the log.

        The lines state the first iteration and the reason, the promise of recoveries,
        and whether no state outlives torchrun.
        """
        ckpt = self._ckpt
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
            in_memory.disk.every_iters or in_memory.durable_every_iters
        ):
            settings = "ckpt.disk_every_iters=0, ckpt.durable_every_iters=0"
            lines.append(
                "no state goes to disk: a run whose torchrun is killed begins anew"
                f" ({settings})"
            )
        return lines

    def commit(self, committed: IterationCommitted) -> None:
        """Log an iteration that all ranks have finished."""
        self._note(committed)
        self._checks.log_where_due(committed.iteration)

    def finish(self, deaths: int) -> dict[str, Any]:
        """Write result.json, and return its contents. Collective over all ranks."""
        digest, digests = job_digest(self._iteration.state)
        folder = self._joined.folder
        is_supervised = self._joined.worker.is_supervised
        result = {
            "iteration": self._training.last_iteration,
            # None if an earlier process of this rank had done all iterations
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
        ConfigError: On all ranks of the world, if a file cannot be opened on any rank:
            the other ranks would wait for one that raised alone.
    """
    opened: list[EventLog] = []
    gather_results(
        TorchRanks(),
        lambda: opened.append(folder.open_events(launch.global_rank)),
        ConfigError,
    )
    return opened[0]
