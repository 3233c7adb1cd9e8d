"""Megatron's optimizer step, split at the points that fault tolerance needs.

    finish_gradients    unscale, look for overflow, total gradient norm           (communicates)
    apply_update        clip by that norm, Adam                                   (local)
    gather_parameters   master -> own compute weights, and those of other ranks   (communicates; may be repeated)

Called one after another they equal `MegatronOptimizer.step`, bit for bit. A replay
calls `apply_update` with a logged norm in place of a measured one. FP8 parameters are
cast with scales that all ranks of the stage agree on, so masters become compute weights
in the part that communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from moe_ckpt.collectives import TorchRanks
from moe_ckpt.events import IterationCommitted
from moe_ckpt.megatron.overlapped import gathers_in_forward, mark_gathered
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.types import ReadyGradients


def clear_gradients(state: TrainingState) -> None:
    """Zero all gradients, for the first micro-batch of an iteration."""
    for chunk in state.model:
        cast("Any", chunk).zero_grad_buffer()
    state.optimizer.zero_grad()


def finish_gradients(state: TrainingState) -> ReadyGradients:
    """Finish the reduced gradients and measure them. Collective over all ranks."""
    # before scalers adapt to this iteration
    loss_scale = float(state.optimizer.get_loss_scale().item())
    # each alone: a chain of optimizers returns one flag, and each scaler adapts to its
    # own
    overflows = tuple(
        bool(cast("Any", optimizer).prepare_grads())
        for optimizer in state.inner_optimizers
    )
    total_norm = None if any(overflows) else float(state.optimizer.get_grad_norm())
    return ReadyGradients(
        overflows=overflows,
        total_norm=total_norm,
        loss_scale=loss_scale,
        schedule_increment=state.increment_of_this_iteration,
    )


def describe_step(
    state: TrainingState, iteration: int, loss: float, gradients: ReadyGradients
) -> IterationCommitted:
    """Return the event of the step that takes these gradients, as it is before the step
    has cost time or bytes.
    """
    return IterationCommitted(
        iteration=iteration,
        loss=loss,
        grad_norm=gradients.total_norm,
        loss_scale=gradients.loss_scale,
        learning_rate=max(
            (float(group["lr"]) for group in state.optimizer.param_groups), default=0.0
        ),
        skipped=gradients.overflow,
        seconds=0.0,
        stall_s=0.0,
        sent_activation_bytes=0,
        sent_gradient_bytes=0,
    )


def mean_over_job(losses: Sequence[dict[str, torch.Tensor]]) -> float:
    """Return the mean of the first reported loss over all micro-batches and ranks; only
    the last stage reports any.

    A report is a mean, or a sum and the number of tokens. Collective over all ranks.
    """
    total = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
    for reported in losses:
        value = next(iter(reported.values())).detach().view(-1).double()
        total += (
            value
            if value.numel() == 2
            else torch.stack([value.sum(), torch.ones_like(value.sum())])
        )
    TorchRanks().reduce(total, "sum")
    return float(total[0] / total[1])


def apply_update(state: TrainingState, gradients: ReadyGradients) -> None:
    """Clip by the given norm and update this rank's shard, unless the gradients
    overflowed. Without communication.
    """
    if gradients.overflow:
        return
    assert gradients.total_norm is not None
    for optimizer in state.inner_optimizers:
        config, parameters = (
            optimizer.config,
            cast("list[torch.Tensor]", optimizer.get_parameters()),
        )
        decoupled = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        name = "decoupled_grad" if decoupled else "grad"
        # in a replay all of one optimizer may be frozen; Transformer Engine's kernel
        # reads the first of an empty list
        updated = [
            parameter
            for parameter in parameters
            if getattr(parameter, name, None) is not None
        ]
        if updated and config.clip_grad > 0.0:
            # the norm of the whole job: by its own one each rank would scale its shard
            # differently
            clip_grad_by_total_norm_fp32(
                updated, config.clip_grad, gradients.total_norm, decoupled
            )
    for optimizer in state.inner_optimizers:
        if not isinstance(optimizer, DistributedOptimizer):
            optimizer.step_with_ready_grads()
        elif not optimizer.is_stub_optimizer:
            # its own step casts and gathers parameters as well
            cast("Any", optimizer).optimizer.step()


@torch.no_grad()
def gather_parameters(state: TrainingState) -> None:
    """Make compute weights of masters, and gather those of other ranks. Collective in
    the stage; may be repeated.

    Does nothing if no optimizer is sharded. Weights that the next forward pass gathers
    are left to it.
    """
    sharded: list[Any] = [
        inner
        for inner in state.inner_optimizers
        if isinstance(inner, DistributedOptimizer)
    ]
    for optimizer in sharded:
        if not optimizer.is_stub_optimizer:
            # each time: a gather that was cut off leaves anything here
            optimizer._copy_main_params_to_model_params()
    for chunk in state.model if sharded else ():
        if not gathers_in_forward(chunk):
            cast("Any", chunk).start_param_sync()


@torch.no_grad()
def gather_late_parameters(state: TrainingState) -> None:
    """Gather the weights that the next forward pass would gather; it then gathers none.
    Collective in the stage.
    """
    for chunk in filter(gathers_in_forward, state.model):
        mark_gathered([chunk])  # a handle may be there of a collective that was cut off
        cast("Any", chunk).start_param_sync(force_sync=True)


def advance_schedule(state: TrainingState, gradients: ReadyGradients) -> None:
    """Advance the learning rate after an update; a skipped update leaves it unchanged."""
    if not gradients.overflow:
        state.scheduler.step(increment=gradients.schedule_increment)


@torch.no_grad()
def unscale_gradients(state: TrainingState) -> None:
    """Finish the reduced gradients without measuring them: no communication, loss
    scalers stay as they are.
    """
    for optimizer in state.inner_optimizers:
        inner: Any = optimizer
        scaler = getattr(inner, "grad_scaler", None)
        if scaler is None:
            inner.prepare_grads()
            continue
        inner.grad_scaler = None  # Megatron would agree on overflows with all stages
        inner.prepare_grads()
        inner.grad_scaler = scaler
        if not inner.is_stub_optimizer:
            # of this stage alone: overflow is in the step's facts
            ignored = torch.zeros_like(scaler.inv_scale)
            gradients = inner._collect_main_grad_data_for_unscaling()
            torch._amp_foreach_non_finite_check_and_unscale_(
                gradients, ignored, scaler.inv_scale
            )


def advance_scalers(state: TrainingState, gradients: ReadyGradients) -> None:
    """Adapt the loss scalers to a step as `finish_gradients` does, from the step's
    facts alone.
    """
    # each by its own overflow: Megatron gives the optimizer of experts a scaler of its
    # own
    for optimizer, overflow in zip(
        state.inner_optimizers, gradients.overflows, strict=True
    ):
        scaler = getattr(optimizer, "grad_scaler", None)
        if scaler is not None:
            scaler.update(torch.tensor([float(overflow)]))
