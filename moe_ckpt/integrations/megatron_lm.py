"""Attaches to Megatron-LM's unmodified training loop, `megatron.training.training`, which a script's `pretrain` calls.

    attach_to_training(training, worker, settings, folder)     in a worker, before the script runs

Owns: the functions that stand in for the loop's (`megatron_lm_seams` names them), and entering `train` again after a
recovery. The loop itself stays Megatron-LM's: forward and backward of a step, logs, evaluation, checkpoints.

    train        join, come to one state with all ranks, enter Megatron-LM's `train`; again after each loss of ranks
    train_step   iteration_started; forward and backward; gradients_ready; the step in halves; step_committed
"""

from __future__ import annotations

import collections
import functools
import hashlib
import inspect
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine

from moe_ckpt.attach import TrainingLoop, attach
from moe_ckpt.config import require
from moe_ckpt.elastic.process_groups import BACKEND, CPU_BACKEND
from moe_ckpt.engine.session import Session
from moe_ckpt.errors import RolledBackError
from moe_ckpt.events import EventLog, IterationCommitted, ModelBuilt, RunFinished, TrainerStarted
from moe_ckpt.integrations.megatron_lm_data import IterationBatches, build_in_turns
from moe_ckpt.integrations.megatron_lm_options import require_alone, require_supported
from moe_ckpt.integrations.megatron_lm_seams import mark_attached
from moe_ckpt.megatron.checks import StateChecks
from moe_ckpt.megatron.initial_weights import synchronize_fresh
from moe_ckpt.megatron.overlapped import gathers_in_forward
from moe_ckpt.megatron.pipeline import Observed, StageCommunicator
from moe_ckpt.megatron.state import TrainingState, digest_of
from moe_ckpt.megatron.step import (
    advance_schedule,
    apply_update,
    finish_gradients,
    gather_late_parameters,
    gather_parameters,
    mean_over_job,
)
from moe_ckpt.run_elastic import Worker
from moe_ckpt.run_folder import RunFolder
from moe_ckpt.run_settings import RunSettings
from moe_ckpt.types import ParallelLayout, Phase, ReadyGradients, RunIdentity

_SHAPING = (  # arguments that shape the saved tensors
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("num_experts", "moe_ffn_hidden_size", "moe_layer_freq", "moe_shared_expert_intermediate_size"),
    *("padded_vocab_size", "seq_length", "untie_embeddings_and_output_weights", "params_dtype", "optimizer"),
    *("use_distributed_optimizer", "global_batch_size"),
)


def attach_to_training(training: ModuleType, worker: Worker, settings: RunSettings, folder: RunFolder) -> AttachedLoop:
    """Let the loop of this worker's process checkpoint and recover; the script that runs next calls it as always.

    Process groups that are created from here on outlive the loss of ranks. Raises ConfigError for a second attachment.
    """
    mark_attached(training)
    _route_groups()
    seams: Any = training
    batches = IterationBatches(training, settings.keep_batches_bytes)
    loop = AttachedLoop(training, worker, settings, folder, batches)
    seams.initialize_megatron = _checked(seams.initialize_megatron, seams.get_args, settings)
    seams.build_train_valid_test_datasets = batches.build_datasets
    build = seams.build_train_valid_test_data_iterators
    seams.build_train_valid_test_data_iterators = build_in_turns(build, worker.turn)
    seams.load_checkpoint = loop.hold_load
    seams.get_forward_backward_func = loop.schedule
    seams.train_step = loop.train_step
    seams.train = loop.train
    return loop


class AttachedLoop:
    """Megatron-LM's `train` of one rank, entered again after each recovery; implements `worker_loop.TrainingRun`."""

    def __init__(
        self, training: Any, worker: Worker, settings: RunSettings, folder: RunFolder, batches: IterationBatches
    ) -> None:
        self._training = training
        self._train, self._train_step = training.train, training.train_step
        self._schedule_of, self._load_checkpoint = training.get_forward_backward_func, training.load_checkpoint
        self._worker = worker
        self._settings = settings
        self._folder = folder
        self._batches = batches
        self._built_s = time.monotonic()
        self._load: Callable[[], tuple[int, Any]] | None = None
        self._rank: RankTraining | None = None
        self._digest = ""
        self.has_trained = False

    def hold_load(self, *arguments: Any, **options: Any) -> tuple[int, int]:
        """Stand in for `load_checkpoint` while a rank builds alone: all ranks load together, if no memory is left."""
        self._load = functools.partial(self._load_checkpoint, *arguments, **options)
        return 0, 0

    def schedule(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        """Stand in for `get_forward_backward_func`: transfers between stages go through the attachment."""
        forward_backward = self._schedule_of(*arguments, **options)
        return self._rank.observed(forward_backward) if self._rank else forward_backward

    def train_step(self, *arguments: Any, **options: Any) -> Any:
        """Stand in for `train_step`."""
        assert self._rank is not None, "train comes first"
        return self._rank.train_step(self._train_step, *arguments, **options)

    def train(self, forward_step: Any, model: Any, optimizer: Any, scheduler: Any, *rest: Any, **options: Any) -> Any:
        """Stand in for `train`: return what it returns, once all ranks have done all iterations."""
        for name in ("p2p_communicator", "pg_collection"):
            require(options.get(name) is None, f"pretrain: {name}", options.get(name), "None with moe_ckpt.run")
        _, _, process_non_loss, config, *others = rest
        args = self._training.get_args()
        samples = functools.partial(_batch_size, args)
        state = TrainingState(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            schedule_increment=samples,
            data=self._batches.data,
        )
        for inner in state.inner_optimizers:  # not an option of the command line, and the split step would ignore it
            threshold = getattr(inner.config, "grad_norm_skip_threshold", math.inf)
            require(math.isinf(threshold), "OptimizerConfig.grad_norm_skip_threshold", threshold, "inf")
        events = self._open_events()
        _set_schedule_hooks(config, args, self._training.get_timers(), state)
        layout = _layout()
        rank = RankTraining(args, state, forward_step, self._schedule_of(), self._batches, self._worker, events)
        self._rank = rank
        rank.session = attach(
            ckpt=self._settings.ckpt,
            identity=RunIdentity(run_id=self._folder.run_id, model=_fingerprint(args), layout=layout),
            folder=self._folder.checkpoints,
            state=state,
            loop=rank.as_training_loop(),
            events=events,
            last_iteration=args.train_iters,
            losses=self._settings.losses,
            elastic=self._worker.context(layout),
            suspect_iters=self._settings.runtime.suspect_iters,
            on_divergence=self._settings.runtime.on_divergence,
        )
        rank.checks = StateChecks(self._settings.checks, state, events)
        events.append(ModelBuilt(seconds=time.monotonic() - self._built_s))

        def enter(done: int) -> Any:
            gather_late_parameters(state)
            _reset(self._training, config, state, done)
            self._reset_samples(done)
            iterators = self._batches.training_after(done), self._batches.validation_after(done)
            return self._train(
                rank.forward_step, model, optimizer, scheduler, *iterators, process_non_loss, config, *others, **options
            )

        rank.enter = enter
        self._worker.run(rank.session, rank, events, start=lambda: self._start(state), finish=self._finish)
        self._close(rank)
        return rank.result

    def _start(self, state: TrainingState) -> int:
        """Return the iteration that a run without state in memory starts from: of a local disk, or of `--load`."""
        assert self._rank is not None
        synchronize_fresh(state)
        done = self._rank.session.resume(None)
        if done == 0 and self._load is not None:
            done, _ = self._load()
            got, wanted = self._training.get_args().consumed_train_samples, self._batches.consumed.after(done)
            require(got == wanted, "--load: consumed samples", got, f"{wanted}, which {done} iterations consume")
        return done

    def _reset_samples(self, done: int) -> None:
        args, consumed = self._training.get_args(), self._batches.consumed
        args.consumed_train_samples = consumed.after(done)
        consumed.set_batch_size(done + 1)
        operations = self._training.num_floating_point_operations
        sizes = (consumed.after(iteration) - consumed.after(iteration - 1) for iteration in range(1, done + 1))
        args.num_floating_point_operations_so_far = sum(
            times * operations(args, size) for size, times in collections.Counter(sizes).items()
        )

    def _finish(self, faults: int) -> dict[str, Any]:
        """Write and return the contents of result.json. Collective."""
        assert self._rank is not None
        digests: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(digests, digest_of(self._rank.state))
        committed = self._rank.committed
        result = {
            "iteration": self._training.get_args().train_iters,
            "loss": committed.loss if committed else None,
            "wall_s": round(time.time() - self._folder.clock_origin_unix_s, 3),
            "faults_survived": faults,
            "digest": hashlib.sha256("\n".join(digests).encode()).hexdigest(),
            "digest_per_rank": digests,
        }
        if self._worker.launch.global_rank == 0:
            self._folder.write_result(result)
        self._digest = str(result["digest"])
        return result

    def _close(self, rank: RankTraining) -> None:
        """End the session; later work of the script, such as evaluation, is not protected."""
        self._worker.page.enter(Phase.BETWEEN)
        rank.session.finish()
        rank.communicator.log = rank.communicator.bubbles = None
        self._batches.drop_replay()
        iteration = self._training.get_args().train_iters
        rank.events.append(RunFinished(iteration=iteration, digest=self._digest))
        rank.events.close()
        self.has_trained = True
        if self._worker.launch.global_rank == 0:
            print(f"moe_ckpt: iteration {iteration}, digest {self._digest}", flush=True)

    def _open_events(self) -> EventLog:
        launch = self._worker.launch
        path, origin = self._folder.events(launch.global_rank), self._folder.clock_origin_unix_s
        events = EventLog(path, global_rank=launch.global_rank, clock_origin_unix_s=origin)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        started = TrainerStarted(pid=os.getpid(), host=socket.gethostname(), life=self._worker.life, device=device)
        events.append(started)
        return events


class RankTraining:
    """One rank's iterations, as Megatron-LM's `train_step` runs them. All methods are collective over all ranks."""

    session: Session
    enter: Callable[[int], Any]
    checks: StateChecks

    def __init__(
        self,
        args: Any,
        state: TrainingState,
        forward_step: Callable[..., Any],
        forward_backward: Callable[..., Any],
        batches: IterationBatches,
        worker: Worker,
        events: EventLog,
    ) -> None:
        self.state = state
        self.events = events
        self.committed: IterationCommitted | None = None
        self.result: Any = None
        self._args = args
        self._forward_backward = forward_backward
        self._batches = batches
        self._worker = worker
        self._groups = ProcessGroupCollection.use_mpu_process_groups()
        self.communicator = StageCommunicator(self._groups.pp, _config(state))
        self.forward_step = self._marking_phases(forward_step)
        self._losses: Sequence[dict[str, torch.Tensor]] = ()
        self._gradients: ReadyGradients | None = None
        self._prepared: IterationCommitted | None = None

    def as_training_loop(self) -> TrainingLoop:
        """Return the parts of the loop that a replay uses."""
        return TrainingLoop(
            communicator=self.communicator,
            forward_backward=self._replay,
            num_micro_batches=self._batches.consumed.largest_batch // _batch_size(self._args, num_micro_batches=1),
            micro_batch_size=self._args.micro_batch_size,
            sequence_length=self._args.seq_length // self._args.context_parallel_size,
        )

    def run(self, done: int, notes: Sequence[str]) -> None:
        """Train from the state after `done` iterations to the last; implements `worker_loop.TrainingRun`."""
        self._say(notes)
        prepared = self._prepared
        if prepared and prepared.iteration == done and (self.committed is None or self.committed.iteration < done):
            self._commit(prepared)  # other ranks were lost before this rank could log it
        while True:
            self.checks.begin(done, is_replacement=self._worker.life > 0)
            try:
                self.result = self.enter(done)
                return
            except RolledBackError as back:
                done = back.iteration

    def _say(self, notes: Sequence[str]) -> None:
        for note in notes if self._worker.launch.global_rank == 0 else ():
            print(f"moe_ckpt: {note}", flush=True)

    def observed(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a schedule that uses this rank's communicator, and keeps the losses of a training pass."""

        def run(**options: Any) -> Any:
            options |= {"p2p_communicator": self.communicator, "pg_collection": self._groups}
            outputs = forward_backward(**options)
            if not options.get("forward_only"):
                self._losses = outputs
            return outputs

        return run

    def train_step(
        self,
        train_step: Callable[..., Any],
        forward_step: Any,
        batches: Any,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        *rest: Any,
        iteration: int,
        **options: Any,
    ) -> Any:
        """Run Megatron-LM's `train_step` with the hooks around forward and backward and around both halves of the step.

        `iteration` counts from 0, as in Megatron-LM. Raises RolledBackError on all ranks after a rollback.
        """
        started_s, number, before = time.monotonic(), iteration + 1, self.communicator.observed
        self._batches.iteration_started(number, self.session.oldest_start)
        self.session.iteration_started(number)
        machine = get_rerun_state_machine()
        run_again = machine.should_run_forward_backward

        def run_again_or_go_on(data_iterator: Any) -> bool:
            again = run_again(data_iterator)
            if not again:
                self._pass_is_done(number)
            return again

        machine.should_run_forward_backward = run_again_or_go_on
        try:
            stepping = SplitStep(optimizer, lambda: self._step(number))
            held = HeldSchedule(scheduler, self.state.increment_of_this_iteration)
            outcome = train_step(forward_step, batches, model, stepping, held, *rest, iteration=iteration, **options)
        finally:
            del machine.should_run_forward_backward
        self.session.step_committed(number)
        if self.committed is None and self._worker.life == 0:
            self._say(self._batches.forecast(number))
        self._commit_measured(started_s, before)
        self.checks.log_where_due(number)
        return outcome

    def _pass_is_done(self, iteration: int) -> None:
        """Gradients are reduced: measure them, and let all ranks agree to go on. Raises RolledBackError."""
        self._worker.page.enter(Phase.REDUCE)
        self._gradients = gradients = finish_gradients(self.state)
        loss = mean_over_job(self._losses)
        self._losses = ()
        self.session.loss_known(iteration, loss)
        self._prepared = self._describe(iteration, loss, gradients)
        if not self.session.gradients_ready(iteration, gradients):
            raise RolledBackError(iteration - 1)

    def _step(self, iteration: int) -> tuple[bool, float | None, None]:
        """Take the optimizer's step, as `MegatronOptimizer.step` does: success, gradient norm, no count of zeros."""
        assert self._gradients is not None
        gradients, self._gradients = self._gradients, None
        apply_update(self.state, gradients)
        advance_schedule(self.state, gradients)
        self.session.update_applied(iteration)
        gather_parameters(self.state)
        return not gradients.overflow, gradients.total_norm, None

    def _replay(self, iteration: int) -> None:
        machine = get_rerun_state_machine()
        mode, machine.mode = machine.mode, RerunMode.DISABLED  # it would compare this pass with the one it saw last
        self._batches.consumed.set_batch_size(iteration)
        try:
            with self._batches.replaying(iteration) as batches:
                self._forward_backward(
                    forward_step_func=self.forward_step,
                    data_iterator=batches,
                    model=self.state.model,
                    num_microbatches=get_num_microbatches(),
                    seq_length=self._args.seq_length,
                    micro_batch_size=self._args.micro_batch_size,
                    decoder_seq_length=self._args.decoder_seq_length,
                    forward_only=False,
                    p2p_communicator=self.communicator,
                    pg_collection=self._groups,
                )
        finally:
            machine.mode = mode

    def _marking_phases(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward step that marks, on the status page, where forward and backward begin."""
        page = self._worker.page

        def enter(phase: Phase) -> None:
            page.enter(Phase.RECOVERY if page.phase is Phase.RECOVERY else phase)

        @functools.wraps(forward_step)
        def marked(*arguments: Any, **options: Any) -> Any:
            enter(Phase.FORWARD)
            output, loss = forward_step(*arguments, **options)
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(lambda _: enter(Phase.BACKWARD))
            return output, loss

        return marked

    def _describe(self, iteration: int, loss: float, gradients: ReadyGradients) -> IterationCommitted:
        return IterationCommitted(
            iteration=iteration,
            loss=loss,
            grad_norm=gradients.total_norm,
            loss_scale=gradients.loss_scale,
            learning_rate=max((float(group["lr"]) for group in self.state.optimizer.param_groups), default=0.0),
            skipped=gradients.overflow,
            seconds=0.0,
            stall_s=0.0,
            sent_activation_bytes=0,
            sent_gradient_bytes=0,
        )

    def _commit_measured(self, started_s: float, before: Observed) -> None:
        assert self._prepared is not None
        observed = self.communicator.observed
        committed = replace(
            self._prepared,
            seconds=time.monotonic() - started_s,
            sent_activation_bytes=observed.activation_bytes - before.activation_bytes,
            sent_gradient_bytes=observed.gradient_bytes - before.gradient_bytes,
        )
        self._commit(committed)

    def _commit(self, committed: IterationCommitted) -> None:
        self.committed = committed
        self.events.append(committed)


class SplitStep:
    """An optimizer with another `step`; all other attributes are the optimizer's own."""

    def __init__(self, optimizer: Any, step: Callable[[], Any]) -> None:
        self._optimizer = optimizer
        self.step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class HeldSchedule:
    """A learning-rate schedule that the first half of the step has advanced already."""

    def __init__(self, scheduler: Any, increment: int) -> None:
        self._scheduler = scheduler
        self._increment = increment

    def step(self, increment: int) -> None:
        """Check that Megatron-LM would advance the schedule as far as the attachment has."""
        assert increment == self._increment, f"the schedule moved by {self._increment} samples, wanted {increment}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def _checked(initialize: Callable[..., Any], get_args: Callable[[], Any], settings: RunSettings) -> Callable[..., Any]:
    """Return an `initialize_megatron` that first refuses unsupported options."""

    def checked(*arguments: Any, **options: Any) -> Any:
        require_alone(os.environ, sys.modules)
        require_supported(get_args())
        if settings.ckpt.loses_tokens:  # their account of lost tokens counts iterations
            growth = getattr(get_args(), "step_batch_size_schedule", None)
            require(growth is None, "--step-batch-size-schedule", growth, f"None with --ckpt {settings.ckpt.policy}")
        boost = settings.ckpt.capacity_boost
        require(not boost, "ckpt.boost", boost, "0 with moe_ckpt.run: routers are the script's own")
        return initialize(*arguments, **options)

    return checked


def _route_groups() -> None:
    """Make all process groups that the script creates outlive the loss of ranks."""
    plain = dist.new_group

    @functools.wraps(plain)
    def new_group(*arguments: Any, **options: Any) -> Any:
        wanted = inspect.signature(plain).bind(*arguments, **options).arguments
        backend = wanted.pop("backend", None)
        if backend not in (BACKEND, CPU_BACKEND):
            backend = CPU_BACKEND if backend and "gloo" in backend else BACKEND
        for name in ("timeout", "pg_options"):  # NCCL's options; the runtime has timeouts of its own
            wanted.pop(name, None)
        return plain(**wanted, backend=backend)

    dist.new_group = dist.distributed_c10d.new_group = new_group


def _set_schedule_hooks(config: Any, args: Any, timers: Any, state: TrainingState) -> None:
    """Set the hooks of `train` for its schedules: a recovery runs these before a new process enters `train`."""
    model: list[Any] = list(state.model)
    config.grad_scale_func = state.optimizer.scale_loss
    config.timers = timers
    config.finalize_model_grads_func = config.finalize_model_grads_func or finalize_model_grads
    if args.overlap_grad_reduce:
        config.no_sync_func = _by_chunk([chunk.no_sync for chunk in model])
        starts = [chunk.start_grad_sync for chunk in model]
        config.grad_sync_func = _by_chunk(starts) if args.align_grad_reduce else None
    for chunk in state.model:
        chunk.train()


def _reset(training: Any, config: Any, state: TrainingState, done: int) -> None:
    """Reset Megatron-LM's globals to the values that `train` expects when it begins after iteration `done`."""
    args = training.get_args()
    args.iteration = args.curr_iteration = done
    config.no_sync_func = config.grad_sync_func = config.param_sync_func = None
    machine = get_rerun_state_machine()
    machine.state, machine.data_iterator_checkpoints = RerunState.NOT_RUNNING_YET, None
    for timer in training.get_timers()._timers.values():
        if timer._started:
            timer.stop()
        timer.reset()
    if args.num_experts:
        training.get_moe_metrics_tracker().clear()
    for chunk in state.model:
        chunk.train()
        _enable_gathering(chunk)


def _enable_gathering(chunk: Any) -> None:
    """Enable the hooks that gather weights in forward: `train` disables them until its first iteration is done."""
    if gathers_in_forward(chunk) and not chunk.remove_forward_pre_hook_handles:
        chunk.enable_forward_pre_hook()


def _by_chunk(functions: list[Any]) -> Any:
    """Return functions of model chunks as Megatron's configuration holds them: a single one is no list."""
    return functions[0] if len(functions) == 1 else functions


def _batch_size(args: Any, num_micro_batches: int | None = None) -> int:
    """Return the samples of the current iteration, or of so many micro-batches, on all ranks together."""
    return (num_micro_batches or get_num_microbatches()) * args.micro_batch_size * args.data_parallel_size


def _layout() -> ParallelLayout:
    return ParallelLayout(
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        dp=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        ep=parallel_state.get_expert_model_parallel_world_size(),
        tp=parallel_state.get_tensor_model_parallel_world_size(),
    )


def _fingerprint(args: Any) -> str:
    """Return a short hash of all arguments that shape the saved state."""
    shaping = {name: str(getattr(args, name, None)) for name in _SHAPING}
    return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:16]


def _config(state: TrainingState) -> Any:
    return state.model[0].config
