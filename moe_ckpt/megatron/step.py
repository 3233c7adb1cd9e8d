"""Megatron's optimizer step, split at the points that fault tolerance needs.

    finish_gradients    unscale, detect overflow, gradient norm   (communicates)
    apply_update        clip by that norm, Adam                   (local)
    gather_parameters   master -> own compute weights, and those  (communicates;
                        of other ranks                            may be repeated)

Called one after another, the functions equal `MegatronOptimizer.step`, bit for bit. A
replay calls `apply_update` with a logged norm in place of a measured norm. FP8
parameters are cast with scales on which all ranks of the stage agree, so masters become
compute weights in the part that communicates.
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
    """Unscale the reduced gradients, detect overflow and compute the norm.

    Collective over all ranks.

    Returns:
        The facts that `apply_update` needs, equal on all ranks.

    Example:
        clear_gradients(state)
        forward_backward(...)  # Megatron's schedule, which reduces the gradients
        gradients = finish_gradients(state)
        apply_update(state, gradients)
        advance_schedule(state, gradients)
        gather_parameters(state)
    """
    # read before the scalers adapt to this iteration
    loss_scale = float(state.optimizer.get_loss_scale().item())
    # each optimizer alone: a chain of optimizers returns one flag, but each scaler
    # adapts to its own overflow
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
    """Return the event of the step that takes these gradients, before the step.

    The event has no time and no bytes yet.

    Args:
        state: The training state before the step.
        iteration: The iteration of the step.
        loss: The loss of the iteration.
        gradients: The result of `finish_gradients`.
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
    """Return the mean loss over all micro-batches and ranks. Collective over all ranks.

    Args:
        losses: The reports of this rank's micro-batches; only the last stage has any.
            The first loss of a report counts: a mean, or a sum and the number of
            tokens.
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
    """Clip gradients and update this rank's shard, without communication.

    Does nothing if the gradients overflowed.

    Args:
        state: This rank's training state.
        gradients: The facts of the step, with the norm by which gradients are clipped.
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
        # In a replay all parameters of one optimizer may be frozen. Transformer
        # Engine's kernel would read the first element of an empty list
        updated = [
            parameter
            for parameter in parameters
            if getattr(parameter, name, None) is not None
        ]
        if updated and config.clip_grad > 0.0:
            # the norm of the whole job: by norms of their own, ranks would scale their
            # shards differently
            clip_grad_by_total_norm_fp32(
                updated, config.clip_grad, gradients.total_norm, decoupled
            )
    for optimizer in state.inner_optimizers:
        if not isinstance(optimizer, DistributedOptimizer):
            optimizer.step_with_ready_grads()
        elif not optimizer.is_stub_optimizer:
            # the step of a sharded optimizer would cast and gather parameters as well
            cast("Any", optimizer).optimizer.step()


@torch.no_grad()
def gather_parameters(state: TrainingState) -> None:
    """Make compute weights from masters, and gather the weights of other ranks.

    Collective in the stage; may be repeated. Does nothing if no optimizer is sharded.
    Weights that the next forward pass gathers are left to that pass.
    """
    sharded: list[Any] = [
        inner
        for inner in state.inner_optimizers
        if isinstance(inner, DistributedOptimizer)
    ]
    for optimizer in sharded:
        if not optimizer.is_stub_optimizer:
            # cast each time: a gather that was cut off leaves arbitrary weights here
            optimizer._copy_main_params_to_model_params()
    for chunk in state.model if sharded else ():
        if not gathers_in_forward(chunk):
            cast("Any", chunk).start_param_sync()


@torch.no_grad()
def gather_late_parameters(state: TrainingState) -> None:
    """Gather the weights that the next forward pass would gather.

    The next forward pass then gathers none. Collective in the stage.
    """
    for chunk in filter(gathers_in_forward, state.model):
        # drops the handle of a collective that was cut off
        mark_gathered([chunk])
        cast("Any", chunk).start_param_sync(force_sync=True)


def advance_schedule(state: TrainingState, gradients: ReadyGradients) -> None:
    """Advance the learning rate after an update.

    A skipped update leaves the learning rate unchanged.

    Args:
        state: This rank's training state.
        gradients: The facts of the step, with the increment of the schedule.
    """
    if not gradients.overflow:
        state.scheduler.step(increment=gradients.schedule_increment)


@torch.no_grad()
def unscale_gradients(state: TrainingState) -> None:
    """Unscale the reduced gradients, without overflow check and norm.

    The function does not communicate, and leaves loss scalers as they are.
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
            # the result for this stage alone is ignored: the step's facts have the
            # overflow
            ignored = torch.zeros_like(scaler.inv_scale)
            gradients = inner._collect_main_grad_data_for_unscaling()
            torch._amp_foreach_non_finite_check_and_unscale_(
                gradients, ignored, scaler.inv_scale
            )


def advance_scalers(state: TrainingState, gradients: ReadyGradients) -> None:
    """Adapt the loss scalers to a step, from the facts of the step alone.

    The result is the same as that of `finish_gradients`.
    """
    # each scaler by its own overflow, because Megatron gives the experts' optimizer a
    # scaler of its own
    for optimizer, overflow in zip(
        state.inner_optimizers, gradients.overflows, strict=True
    ):
        scaler = getattr(optimizer, "grad_scaler", None)
        if scaler is not None:
            scaler.update(torch.tensor([float(overflow)]))
