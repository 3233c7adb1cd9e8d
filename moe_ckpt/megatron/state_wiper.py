"""Loses a rank's training state on purpose, as if the process had been replaced.

Owns: overwriting all state that is trained or counted with values that training never
has, at a chosen moment of an iteration (`fault=state_loss`). Snapshots in host memory
stay, because they outlive a worker.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from moe_ckpt.megatron.buffers import named_buffers
from moe_ckpt.megatron.fp8_parameters import refresh, weights_of
from moe_ckpt.megatron.operator_names import bare_model
from moe_ckpt.megatron.optimizer_state import named_tensors, torch_optimizer
from moe_ckpt.megatron.state import (
    DATA,
    TrainingState,
    restore_small_state,
    small_state,
)

around_hooks: Callable[[], contextlib.AbstractContextManager[object]] = (
    contextlib.nullcontext
)
"""Returns the context of a hook of backward; `standins.gpu` has one of its own."""

# like fresh weights, so that values stay finite that reach other stages from a stage
# that lost its state
_LOST_STD = 0.02


class StateWiper:
    """Implements `engine.interfaces.FaultInjector`.

    Overwrites parameters, masters, moments, step counts, buffers, gradients,
    generators, scalers and schedule.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._layer = bare_model(state.model[0]).get_submodule("decoder.layers.0")

    def wipe(self) -> None:
        """Overwrite the state now."""
        state = self._state
        generator = torch.Generator().manual_seed(random.SystemRandom().getrandbits(32))
        parameters = [
            parameter for chunk in state.model for parameter in chunk.parameters()
        ]
        tensors = [
            tensor for parameter in parameters for tensor in weights_of(parameter)
        ]
        tensors += [
            cast("Any", parameter).main_grad
            for parameter in parameters
            if hasattr(parameter, "main_grad")
        ]
        for optimizer in state.inner_optimizers:
            tensors += [tensor for _, tensor in named_tensors(optimizer)]
            for group in getattr(torch_optimizer(optimizer), "param_groups", []):
                group.update({"step": 0} if "step" in group else {})
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * _LOST_STD)
        # the copies that backward reads must be lost as well
        refresh(parameters)
        for chunk in state.model:
            for _, buffer in named_buffers(chunk):
                buffer.zero_()
        _forget_small_state(state)

    def arm(self, phase: str, callback: Callable[[], None]) -> None:
        """Call back once, in the next forward or backward pass.

        Args:
            phase: `forward`: before the first micro-batch enters the stage's first
                layer. `backward`: when the first gradient comes back to the output of
                this layer.
            callback: Called without arguments.
        """

        def entered(*_: Any) -> None:
            handle.remove()
            callback()

        def came_back(_: torch.Tensor) -> None:
            with around_hooks():
                callback()

        def left(_: Any, __: Any, outputs: Any) -> None:
            hidden = outputs[0] if isinstance(outputs, tuple) else outputs
            # skip a pass that is recomputed later
            if hidden.requires_grad and torch.is_grad_enabled():
                handle.remove()
                hidden.register_hook(came_back)

        forward = phase == "forward"
        handle = (
            self._layer.register_forward_pre_hook(entered)
            if forward
            else self._layer.register_forward_hook(left)
        )


def _forget_small_state(state: TrainingState) -> None:
    random.seed(0)
    np.random.seed(0)
    fresh = torch.Generator().manual_seed(0).get_state()
    lost = {
        name: _forgotten(name, tensor, fresh)
        for name, tensor in small_state(state).items()
    }
    restore_small_state(state, lost)


def _forgotten(name: str, tensor: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    if name.startswith(("rng.cpu", "rng.cuda", "rng.tracker.")):
        return fresh if tensor.shape == fresh.shape else torch.zeros_like(tensor)
    if name.startswith(("rng.", f"{DATA}.")):
        # generators of Python and NumPy are seeded above; the data loader is not in
        # device memory
        return tensor
    return torch.ones_like(tensor)  # scalers, position in the schedule
