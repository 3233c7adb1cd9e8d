"""One rank's iterations in a training loop that is not ours: the hooks around a `train_step` in Megatron-LM's form.

Owns: the stand-ins of optimizer and schedule that split the step, the schedule with this rank's communicator, replays,
and entering the loop again after a rollback. Loops of this form: Megatron-LM's, Megatron-Bridge's, ms-swift's.

    train_step   iteration_started; forward and backward; gradients_ready; the step in halves; step_committed
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine

from moe_ckpt.attach import TrainingLoop
from moe_ckpt.engine.session import Session
from moe_ckpt.errors import RolledBackError
from moe_ckpt.events import EventLog, IterationCommitted
from moe_ckpt.integrations.consumed_samples import ConsumedSamples, ReplayedSamples
from moe_ckpt.megatron.checks import StateChecks
from moe_ckpt.megatron.overlapped import gathers_in_forward
from moe_ckpt.megatron.pipeline import Observed, StageCommunicator
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.megatron.step import (
    advance_schedule,
    apply_update,
    describe_step,
    finish_gradients,
    gather_parameters,
    mean_over_job,
)
from moe_ckpt.run_elastic import Worker
from moe_ckpt.types import Phase, ReadyGradients


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationShape:
    """The lengths of samples, on all context-parallel ranks together, and the samples of a micro-batch on one rank."""

    micro_batch_size: int
    sequence_length: int
    decoder_sequence_length: int | None

    @property
    def samples_of_micro_batches(self) -> int:
        """The samples of a micro-batch of each rank, on all ranks together."""
        return self.micro_batch_size * parallel_state.get_data_parallel_world_size()

    def num_samples(self) -> int:
        """Return the samples of the current iteration on all ranks together."""
        return get_num_microbatches() * self.samples_of_micro_batches


class LoopBatches(Protocol):
    """The training samples of each iteration, on this rank."""

    consumed: ConsumedSamples

    def iteration_started(self, iteration: int, oldest: int | None) -> None:
        """An iteration begins; no recovery runs one before `oldest` again (None: any may be run)."""

    def draw_seeds(self, iteration: int) -> None:
        """Draw from the generators as the loop's own reading of samples does, before forward of an iteration."""

    def training_after(self, done: int) -> Any:
        """Return an iterator from the first sample of iteration `done + 1` on, as the schedule takes it."""

    def forecast(self, iteration: int) -> list[str]:
        """Return lines for the log after the first iteration."""
        ...


class RankTraining:
    """One rank's iterations, as the loop's `train_step` runs them. All methods are collective over all ranks.

    `forward_step` takes an iterator and a model; `forward_backward` is Megatron's schedule.
    """

    session: Session
    enter: Callable[[int], Any]
    checks: StateChecks

    def __init__(
        self,
        shape: IterationShape,
        state: TrainingState,
        forward_step: Callable[..., Any],
        forward_backward: Callable[..., Any],
        batches: LoopBatches,
        worker: Worker,
        events: EventLog,
    ) -> None:
        self.state = state
        self.events = events
        self.committed: IterationCommitted | None = None
        self.result: Any = None
        self._shape = shape
        self._forward_backward = forward_backward
        self._batches = batches
        self._replayed = ReplayedSamples(batches.training_after)
        self._worker = worker
        self._groups = ProcessGroupCollection.use_mpu_process_groups()
        self.communicator = StageCommunicator(self._groups.pp, state.model[0].config)
        self.forward_step = self._marking_phases(forward_step)
        self._losses: Sequence[dict[str, torch.Tensor]] = ()
        self._gradients: ReadyGradients | None = None
        self._prepared: IterationCommitted | None = None

    def as_training_loop(self) -> TrainingLoop:
        """Return the parts of the loop that a replay uses."""
        return TrainingLoop(
            communicator=self.communicator,
            forward_backward=self.run_pass,
            # of the largest batch: the forecast of boundary logs counts by it
            num_micro_batches=self._batches.consumed.largest_batch // self._shape.samples_of_micro_batches,
            micro_batch_size=self._shape.micro_batch_size,
            sequence_length=self._shape.sequence_length // parallel_state.get_context_parallel_world_size(),
        )

    def run(self, done: int, notes: Sequence[str]) -> None:
        """Train from the state after `done` iterations to the last; implements `worker_loop.TrainingRun`."""
        self._say(notes)
        prepared = self._prepared
        if prepared and prepared.iteration == done and (self.committed is None or self.committed.iteration < done):
            self._commit(prepared)  # other ranks were lost before this rank could log it
        while True:
            self.checks.begin(done, is_replacement=self._worker.incarnation > 0)
            try:
                self.result = self.enter(done)
                return
            except RolledBackError as back:
                done = back.iteration

    def close(self) -> None:
        """End the observation of transfers, and the iterator of replays: training is done."""
        self.communicator.log = self.communicator.bubbles = None
        self._replayed.close()

    def _say(self, notes: Sequence[str]) -> None:
        for note in notes if self._worker.launch.global_rank == 0 else ():
            print(f"moe_ckpt: {note}", flush=True)

    def observed(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a schedule that uses this rank's communicator, and keeps the losses of a training pass."""

        def run(**options: Any) -> Any:
            # both: schedules refuse a communicator without groups
            options |= {"p2p_communicator": self.communicator, "pg_collection": self._groups}
            outputs = forward_backward(**options)
            if not options.get("forward_only"):
                self._losses = outputs
            return outputs

        return run

    def train_step(self, number: int, run: Callable[[Stepping, Stepping], Any]) -> Any:
        """Run iteration `number` with the hooks around forward and backward and around both halves of the step.

        `run` is the loop's `train_step`, given an optimizer and a schedule. Raises RolledBackError on all ranks after a
        rollback.
        """
        started_s, before = time.monotonic(), self.communicator.observed
        self._gradients = None  # of an iteration that was cut off
        self._batches.iteration_started(number, self.session.oldest_start)  # first: the session saves the position
        self.session.iteration_started(number)
        self._batches.draw_seeds(number)  # after generators are saved: a replay restores them, and draws again
        machine = get_rerun_state_machine()
        run_again = machine.should_run_forward_backward

        def run_again_or_go_on(data_iterator: Any) -> bool:
            again = run_again(data_iterator)
            if not again:
                self._pass_is_done(number)
            return again

        moved_by = self.state.increment_of_this_iteration

        def require_advanced(increment: int) -> None:  # the first half of the step has advanced the schedule already
            assert increment == moved_by, f"the schedule moved by {moved_by} samples, wanted {increment}"

        # loops call it once gradients are reduced, and before the optimizer's step; the attribute hides the method
        machine.should_run_forward_backward = run_again_or_go_on
        try:
            split = Stepping(self.state.optimizer, lambda: self._step(number))
            outcome = run(split, Stepping(self.state.scheduler, require_advanced))
        finally:
            del machine.should_run_forward_backward
        if self._gradients is not None:  # the rerun machine found a wrong result, and the loop ends without this step
            self._gradients = None
            return outcome
        self.session.step_committed(number)
        if self.committed is None and self._worker.incarnation == 0:
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
        # before the vote: after a load that led to this loss, all ranks go back, and none may take the step
        self.session.loss_known(iteration, loss)
        # before the vote: a rank that is cut off after it takes the step in the next generation, and logs it then
        self._prepared = describe_step(self.state, iteration, loss, gradients)
        if not self.session.gradients_ready(iteration, gradients):
            raise RolledBackError(iteration - 1)

    def _step(self, iteration: int) -> tuple[bool, float | None, None]:
        """Take the optimizer's step, as `MegatronOptimizer.step` does: success, gradient norm, no count of zeros."""
        if self._gradients is None:  # a loop without the rerun machine steps as soon as its pass is done
            self._pass_is_done(iteration)
        assert self._gradients is not None
        gradients, self._gradients = self._gradients, None
        apply_update(self.state, gradients)
        advance_schedule(self.state, gradients)
        self.session.update_applied(iteration)  # before the gather: if that is cut off, only the gather is repeated
        gather_parameters(self.state)
        return not gradients.overflow, gradients.total_norm, None

    def run_pass(self, iteration: int) -> None:
        """Run forward and backward of an iteration without the optimizer's step: a replay, or a check at the start."""
        machine = get_rerun_state_machine()
        mode, machine.mode = machine.mode, RerunMode.DISABLED  # it would compare this pass with the one it saw last
        self._batches.consumed.set_batch_size(iteration)
        self._batches.draw_seeds(iteration)
        try:
            with self._replayed.of(iteration) as batches:
                self._forward_backward(
                    forward_step_func=self.forward_step,
                    data_iterator=batches,
                    model=self.state.model,
                    num_microbatches=get_num_microbatches(),
                    seq_length=self._shape.sequence_length,
                    micro_batch_size=self._shape.micro_batch_size,
                    decoder_seq_length=self._shape.decoder_sequence_length,
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


class Stepping:
    """An optimizer or a learning-rate schedule with another `step`; all other attributes are its own."""

    def __init__(self, original: Any, step: Callable[..., Any]) -> None:
        self._original = original
        self.step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def reset_loop(timers: Any, state: TrainingState) -> None:
    """Reset Megatron's rerun machine, timers and hooks to their state at the beginning of a loop."""
    machine = get_rerun_state_machine()
    # cut off in a pass, the machine would take its next call for the end of that pass, and run none
    machine.state, machine.data_iterator_checkpoints = RerunState.NOT_RUNNING_YET, None
    for timer in timers._timers.values():
        if timer._started:  # a timer that still runs fails at its next start
            timer.stop()
        timer.reset()
    for chunk in state.model:
        chunk.train()
        wrapper = cast("Any", chunk)
        # loops disable the hooks that gather weights until their first iteration is done
        if gathers_in_forward(chunk) and not wrapper.remove_forward_pre_hook_handles:
            wrapper.enable_forward_pre_hook()
