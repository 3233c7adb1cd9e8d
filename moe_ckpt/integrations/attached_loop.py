"""One rank's iterations inside a third-party training loop.

An adapter over `moe_ckpt.loop` for a `train_step` in Megatron-LM's form: the loops of
Megatron-LM, Megatron-Bridge and ms-swift. Owns: the stand-ins of optimizer and
scheduler that split the step, the pipeline schedule with this rank's communicator,
replays, and entering the loop.

    train_step   begin; forward and backward; finish_pass; the step in halves; commit
                 (`moe_ckpt.loop`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import (
    RerunMode,
    RerunState,
    get_rerun_state_machine,
)

from moe_ckpt.attach import TrainingLoop
from moe_ckpt.engine.session import Session
from moe_ckpt.errors import RolledBackError
from moe_ckpt.events import IterationCommitted
from moe_ckpt.integrations.consumed_samples import ConsumedSamples, ReplayedSamples
from moe_ckpt.loop import JoinedWorker, Losses, TrainingIteration
from moe_ckpt.megatron.optimizer_state import renew_masters
from moe_ckpt.megatron.overlapped import gathers_in_forward
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.types import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationShape:
    """The sizes of an iteration."""

    micro_batch_size: int
    """Samples of a micro-batch on one rank."""

    sequence_length: int
    """Tokens of a sample, on all context-parallel ranks together."""

    decoder_sequence_length: int | None
    """Tokens of a decoder sample, on all context-parallel ranks together; None if the
    loop has no separate length for the decoder.
    """

    @property
    def samples_of_micro_batches(self) -> int:
        """Samples of one micro-batch of each rank, on all ranks together."""
        return self.micro_batch_size * parallel_state.get_data_parallel_world_size()

    def num_samples(self) -> int:
        """Return the samples of the current iteration, on all ranks together."""
        return get_num_microbatches() * self.samples_of_micro_batches


class LoopBatches(Protocol):
    """The training samples of each iteration, on this rank."""

    consumed: ConsumedSamples
    """The numbers of samples that iterations consume."""

    def iteration_started(self, iteration: int, oldest: int | None) -> None:
        """Note that an iteration begins.

        Args:
            iteration: The iteration, counted from 1.
            oldest: The oldest iteration that a recovery may still run again; None: any
                iteration.
        """

    def draw_seeds(self, iteration: int) -> None:
        """Draw from the random generators as the loop's own reading of samples does.

        Called before the forward pass of an iteration, in training and in a replay.
        """

    def training_after(self, done: int) -> Any:
        """Return an iterator over training samples, as the pipeline schedule takes it.

        Args:
            done: The iterations before the iterator's first sample, which belongs to
                iteration `done + 1`.
        """

    def forecast(self, iteration: int) -> list[str]:
        """Return lines for the log after the first iteration."""
        ...


class AttachedLoop:
    """One rank's part of a loop that has its own `train_step`.

    Implements `moe_ckpt.loop.LoopAdapter`. All methods are collective over all ranks.

    Attributes:
        enter: Enters the loop with the state after some iterations.
        load: Loads a checkpoint in the loop's own format; returns the checkpoint's
            iteration, or 0 without a checkpoint.
        outcome: The return value of the loop.
    """

    session: Session
    enter: Callable[[int], Any]
    load: Callable[[], int]

    def __init__(
        self,
        shape: IterationShape,
        state: TrainingState,
        forward_step: Callable[..., Any],
        forward_backward: Callable[..., Any],
        batches: LoopBatches,
        joined: JoinedWorker[Any],
    ) -> None:
        """Prepare the loop of one rank.

        Args:
            shape: The sizes of an iteration.
            state: The training state of this rank's stage.
            forward_step: The loop's forward step, called with an iterator and a model.
            forward_backward: Megatron's pipeline schedule.
            batches: This rank's samples.
            joined: This worker.
        """
        self.iteration = TrainingIteration(state, joined.worker.enter_phase)
        self.forward_step = self.iteration.marking_phases(forward_step)
        self.outcome: Any = None
        self._state = state
        self._shape = shape
        self._forward_backward = forward_backward
        self._batches = batches
        self._replayed = ReplayedSamples(batches.training_after)
        self._joined = joined
        self._has_forecast = joined.incarnation > 0
        self._losses: Losses = ()
        self._rerun_mode: RerunMode | None = None

    def as_training_loop(self) -> TrainingLoop:
        """Return the parts of the loop that a replay uses."""
        return TrainingLoop(
            communicator=self.iteration.communicator,
            forward_backward=self.run_pass,
            batches=self.iteration.batches,
            # of the largest batch, because the forecast of boundary logs is computed
            # from this number
            num_micro_batches=self._batches.consumed.largest_batch
            // self._shape.samples_of_micro_batches,
            micro_batch_size=self._shape.micro_batch_size,
            sequence_length=self._shape.sequence_length
            // parallel_state.get_context_parallel_world_size(),
        )

    def start(self) -> int:
        """Load the state that a run without state in memory begins with.

        Loads the newest state of this run on disk. Without one, loads the checkpoint
        that the loop's own options name.

        Returns:
            The iteration of the state; 0: the built model is the state.
        """
        if done := self.session.resume(None):
            return done
        # loading a checkpoint adds to `num_steps`, and `start` may run again after a
        # fault
        self._state.scheduler.num_steps = 0
        done = self.load()
        for optimizer in self._state.inner_optimizers:
            renew_masters(optimizer)  # the checkpoint may hold weights only
        return done

    def run_from(self, done: int, notes: Sequence[str]) -> None:
        """Enter the loop with the state after `done` iterations."""
        machine = get_rerun_state_machine()
        if self._rerun_mode is None:
            self._rerun_mode = machine.get_mode()
        # evaluations disable the machine, also one that a fault has cut off: other
        # ranks would then wait for this one in the machine's collectives
        machine.set_mode(self._rerun_mode)
        self._print(notes)
        self.outcome = self.enter(done)

    def committed(self, event: IterationCommitted) -> None:
        """Print the samples' forecast after the first iteration."""
        if not self._has_forecast:
            self._has_forecast = True
            self._print(self._batches.forecast(event.iteration))

    def result(self) -> dict[str, object]:
        """Return no entries: the loop adds nothing to result.json."""
        return {}

    def close(self) -> None:
        """Stop observing transfers, and drop the iterator of replays."""
        # The script continues after training. From here on the death of a worker is a
        # fault again.
        self._joined.worker.enter_phase(Phase.BETWEEN)
        self.iteration.communicator.log = self.iteration.communicator.bubbles = None
        self._replayed.close()

    def observed(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a pipeline schedule with this rank's communicator.

        The wrapped schedule also keeps the losses of a training pass for `finish_pass`.

        Args:
            forward_backward: Megatron's pipeline schedule.
        """

        def run(**options: Any) -> Any:
            if not options.get("forward_only"):
                # again after `TrainingIteration.begin`: Megatron's rerun machine may
                # repeat a pass
                self.iteration.batches.begin()
            outputs = forward_backward(**options | self.iteration.schedule_options)
            if not options.get("forward_only"):
                self._losses = outputs
            return outputs

        return run

    def train_step(self, number: int, run: Callable[[Stepping, Stepping], Any]) -> Any:
        """Run one iteration of the loop, with the hooks of `moe_ckpt.loop`.

        Hooks run around forward and backward, and around both halves of the optimizer's
        step.

        Args:
            number: The iteration, counted from 1.
            run: The loop's own `train_step`, called with stand-ins of optimizer and
                scheduler.

        Returns:
            The return value of the loop's `train_step`.

        Raises:
            RolledBackError: All ranks are at an earlier state.
        """
        # before `begin`, in which the session saves the position of the samples
        self._batches.iteration_started(number, self.session.oldest_start)
        self.iteration.begin(number)
        # after `begin`, which saves the generators: a replay restores the generators
        # and draws again
        self._batches.draw_seeds(number)
        machine = get_rerun_state_machine()
        run_again = machine.should_run_forward_backward

        def run_again_or_go_on(data_iterator: Any) -> bool:
            again = run_again(data_iterator)
            if not again:
                self._finish_pass()
            return again

        moved_by = self._state.increment_of_this_iteration

        # `TrainingIteration.step` has already advanced the scheduler
        def require_advanced(increment: int) -> None:
            assert increment == moved_by, (
                f"the schedule moved by {moved_by} samples, wanted {increment}"
            )

        # Loops call `should_run_forward_backward` once gradients are reduced, and
        # before the optimizer's step. The attribute of the instance hides the method.
        machine.should_run_forward_backward = run_again_or_go_on
        try:
            split = Stepping(self._state.optimizer, self._step)
            outcome = run(split, Stepping(self._state.scheduler, require_advanced))
        finally:
            del machine.should_run_forward_backward
        if self.iteration.gradients is None:
            self.iteration.commit()
        # otherwise the rerun machine has found a wrong result, and the loop ends
        # without this step
        return outcome

    def run_pass(self, iteration: int) -> None:
        """Run forward and backward of an iteration, without the optimizer's step.

        Runs in a replay, and in the check of determinism at the start.

        Args:
            iteration: The iteration, counted from 1.
        """
        machine = get_rerun_state_machine()
        # the rerun machine would compare this pass with the last pass of training
        mode, machine.mode = machine.mode, RerunMode.DISABLED
        self._batches.consumed.set_batch_size(iteration)
        self._batches.draw_seeds(iteration)
        try:
            with self._replayed.of(iteration) as batches:
                self._forward_backward(
                    forward_step_func=self.forward_step,
                    data_iterator=batches,
                    model=self._state.model,
                    num_microbatches=get_num_microbatches(),
                    seq_length=self._shape.sequence_length,
                    micro_batch_size=self._shape.micro_batch_size,
                    decoder_seq_length=self._shape.decoder_sequence_length,
                    forward_only=False,
                    **self.iteration.schedule_options,
                )
        finally:
            machine.mode = mode

    def _finish_pass(self) -> None:
        losses, self._losses = self._losses, ()
        if not self.iteration.finish_pass(losses):
            # the loop's `train_step` cannot start over, so the loop is entered again
            raise RolledBackError(self.iteration.number - 1)

    def _step(self) -> tuple[bool, float | None, None]:
        """Take the optimizer's step, with the results of `MegatronOptimizer.step`.

        Returns:
            Success, the gradient norm, and None in place of the count of zeros.
        """
        # a loop without the rerun machine steps as soon as the pass is done
        if self.iteration.gradients is None:
            self._finish_pass()
        gradients = self.iteration.step()
        return not gradients.overflow, gradients.total_norm, None

    def _print(self, lines: Sequence[str]) -> None:
        for line in lines if self._joined.is_first_rank else ():
            print(f"moe_ckpt: {line}", flush=True)


class Stepping:
    """A stand-in of an optimizer or a scheduler, with another `step`.

    All other attributes are the original's.
    """

    def __init__(self, original: Any, step: Callable[..., Any]) -> None:
        self._original = original
        self.step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def reset_loop(timers: Any, state: TrainingState) -> None:
    """Reset Megatron's rerun machine, timers and hooks to the beginning of a loop.

    Args:
        timers: Megatron's timers.
        state: The training state of this rank's stage.
    """
    machine = get_rerun_state_machine()
    # A fault may have cut the machine off in a pass. The machine would then take its
    # next call for the end of that pass, and the loop would run no pass.
    machine.state, machine.data_iterator_checkpoints = RerunState.NOT_RUNNING_YET, None
    for timer in timers._timers.values():
        if timer._started:  # a timer that still runs fails at the next start
            timer.stop()
        timer.reset()
    for chunk in state.model:
        chunk.train()
        wrapper = cast("Any", chunk)
        # loops disable the hooks that gather weights until the first iteration is done
        if gathers_in_forward(chunk) and not wrapper.remove_forward_pre_hook_handles:
            wrapper.enable_forward_pre_hook()
