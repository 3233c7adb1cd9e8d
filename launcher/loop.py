"""One training iteration after another, through Megatron's own schedules.

`MegatronLoop.run_iteration` is the story of an iteration; everything else here is what it needs. The loop knows the
hooks of `moe_ckpt.ports.TrainingHooks` and nothing else of checkpointing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from launcher.data import Batches
from moe_ckpt.events import IterationCommitted
from moe_ckpt.megatron.pipeline import StageCommunicator
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
from moe_ckpt.ports import TrainingHooks
from moe_ckpt.types import Phase, ReadyGradients

T = TypeVar("T")
PhaseListener = Callable[[Phase], None]


class StageRunner:
    """Runs batches through one rank's stage, by Megatron's own schedule. Collective over all ranks."""

    def __init__(self, state: TrainingState, batches: Batches, on_phase: PhaseListener = lambda _: None) -> None:
        self.state = state
        self.batches = batches
        self.on_phase = on_phase
        self._groups = ProcessGroupCollection.use_mpu_process_groups()
        self.communicator = StageCommunicator(self._groups.pp, cast("Any", state.model[0]).config)
        self._schedule = get_forward_backward_func()

    def train_on(self, iteration: int) -> list[torch.Tensor]:
        """Leave the reduced gradients of the iteration's batch; return the micro-batches' losses on the last stage."""
        return self._forward_backward(lambda micro_batch: self.batches.training(iteration, micro_batch))

    def train_on_one_micro_batch(self) -> None:
        """Leave the reduced gradients of the first micro-batch of all."""
        self._forward_backward(lambda micro_batch: self.batches.training(1, micro_batch), num_micro_batches=1)

    def evaluate_on(self, batch: int) -> list[torch.Tensor]:
        """Return the losses of held-out global batch `batch` on the last stage."""
        draw = lambda micro_batch: self.batches.evaluation(batch, micro_batch)  # noqa: E731
        return self._forward_backward(draw, forward_only=True)

    def _forward_backward(
        self, draw: Callable[[int], torch.Tensor], *, forward_only: bool = False, num_micro_batches: int | None = None
    ) -> list[torch.Tensor]:
        """Run Megatron's schedule over all micro-batches; return their losses on the last stage, else nothing."""
        # stages in the middle look at no tokens
        on_edge = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
        device, count = torch.cuda.current_device(), self.batches.num_micro_batches
        outputs = self._schedule(
            forward_step_func=self._forward_step,
            data_iterator=(draw(number).to(device) if on_edge else None for number in range(count)),
            model=self.state.model if len(self.state.model) > 1 else self.state.model[0],
            num_microbatches=num_micro_batches or count,
            seq_length=self.batches.train.sequence_length,
            micro_batch_size=self.batches.train.micro_batch_size,
            forward_only=forward_only,
            p2p_communicator=self.communicator,
            pg_collection=self._groups,
        )
        return [output["loss"] for output in outputs]

    def _forward_step(self, micro_batches: Iterator[torch.Tensor | None], model: torch.nn.Module) -> tuple[Any, Any]:
        self.on_phase(Phase.FORWARD)
        output = _forward(next(micro_batches), model)
        if output.requires_grad:
            # Megatron's schedules call no function of a loop as backward begins
            output.register_hook(lambda _: self.on_phase(Phase.BACKWARD))
        return output, _mean_loss


class MegatronLoop:
    """Runs iterations of one rank's stage. All methods are collective over all ranks.

    `prepared` is the iteration whose gradients were last complete, as it is once it is committed: where others are lost
    between the two, it may be a recovery that commits it.
    """

    def __init__(self, runner: StageRunner, hooks: TrainingHooks) -> None:
        self._runner = runner
        self.state = runner.state
        self._hooks = hooks
        self._stall_s = 0.0
        self.prepared: IterationCommitted | None = None

    def run_iteration(self, iteration: int) -> IterationCommitted:
        """Train on the batch of `iteration`, which counts from 1, and commit the step.

        Raises RolledBackError on all ranks where that cannot be.
        """
        started_s, before = time.monotonic(), self._runner.communicator.observed
        self._stall_s = 0.0
        gradients = self._compute_gradients(iteration)
        apply_update(self.state, gradients)
        # before `update_applied`, after which a recovery repeats only the gather
        advance_schedule(self.state, gradients)
        self._timed(lambda: self._hooks.update_applied(iteration))
        # a rank that is cut off in here repeats it after the recovery: its own update is whole already
        gather_parameters(self.state)
        self._timed(lambda: self._hooks.step_committed(iteration))

        assert self.prepared is not None, iteration
        observed = self._runner.communicator.observed
        return replace(
            self.prepared,
            seconds=time.monotonic() - started_s,
            stall_s=self._stall_s + observed.logging_s - before.logging_s,
            sent_activation_bytes=observed.activation_bytes - before.activation_bytes,
            sent_gradient_bytes=observed.gradient_bytes - before.gradient_bytes,
        )

    def _compute_gradients(self, iteration: int) -> ReadyGradients:
        """Return the reduced gradients once all ranks have them; starts over when a state was rebuilt."""
        while True:
            self._timed(lambda: self._hooks.iteration_started(iteration))
            # cleared in each attempt: gradients of one that a rebuilt state has undone would be added to
            clear_gradients(self.state)
            losses = self._runner.train_on(iteration)
            self._runner.on_phase(Phase.REDUCE)
            gradients = finish_gradients(self.state)
            loss = mean_over_job([{"loss": loss} for loss in losses])
            self._timed(lambda loss=loss: self._hooks.loss_known(iteration, loss))
            self.prepared = describe_step(self.state, iteration, loss, gradients)
            # the last moment to back out: gradients are complete on all ranks, and no parameter has changed on any
            if self._timed(lambda gradients=gradients: self._hooks.gradients_ready(iteration, gradients)):
                return gradients

    @torch.no_grad()  # with gradients, Megatron's routers would count these tokens for the next update of their biases
    def evaluate(self, num_batches: int) -> float:
        """Return the mean cross-entropy, nats per token, over the held-out batches.

        Changes no state but the largest values that FP8 layers note; the next iteration drops these.
        """
        losses: list[torch.Tensor] = []
        for chunk in self.state.model:
            chunk.eval()
        try:
            for batch in range(num_batches):
                losses += self._runner.evaluate_on(batch)
        finally:
            for chunk in self.state.model:
                chunk.train()
        return mean_over_job([{"loss": loss} for loss in losses])

    def _timed(self, hook: Callable[[], T]) -> T:
        started_s = time.monotonic()
        outcome = hook()
        self._stall_s += time.monotonic() - started_s
        return outcome


def _forward(tokens: torch.Tensor | None, model: torch.nn.Module) -> torch.Tensor:
    if tokens is None:
        return model(input_ids=None, position_ids=None, attention_mask=None)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    return model(input_ids=inputs, position_ids=positions, attention_mask=None, labels=targets)


def _mean_loss(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = per_token.float().mean()
    return loss, {"loss": loss.detach().clone()}  # the schedule divides `loss` in place
