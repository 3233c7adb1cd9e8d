"""Adam's steps as numbers with which another process can take the same steps.

Owns: the numbers of the coming step. Must not: take the step. Clipped gradients stay in
memory until the next iteration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_ckpt.config import require
from moe_ckpt.megatron.optimizer_state import torch_optimizer
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.snapshot.adam_update import AdamStep

_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_CHANGED = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")
"""Options of torch's Adam that change its arithmetic."""


def repeats_on_a_host(master: torch.Tensor) -> bool:
    """Return whether a process without a GPU can repeat Adam's step bit for bit.

    Args:
        master: The master weights that the step changes.
    """
    # GPU kernels use fused multiply-adds: a peer's step would differ in the last bits,
    # after gradients were sent for the step
    return master.device.type == "cpu"


class AdamSteps:
    """The steps of all inner optimizers that are torch's Adam or AdamW.

    The steps of other optimizers are unknown.
    """

    def __init__(self, state: TrainingState) -> None:
        self._optimizers = [
            torch_optimizer(optimizer) for optimizer in state.inner_optimizers
        ]
        self._iteration: int | None = None
        # inner optimizer, master weights, numbers of the step
        self._groups: list[tuple[Any, list[torch.Tensor], Mapping[str, Any]]] = []
        # steps of `_iteration`, computed on request
        self._known: Mapping[int, AdamStep] | None = None

    def note(self, iteration: int, *, overflow: bool) -> None:
        """Record the numbers of the step that follows.

        Args:
            iteration: The iteration of the step.
            overflow: Whether gradients overflowed, so that the step is skipped.
        """
        self._iteration, self._known = None if overflow else iteration, None
        # copies, because Megatron advances learning rate and weight decay right after
        # the step
        self._groups = [
            (
                inner,
                group["params"],
                {name: value for name, value in group.items() if name != "params"},
            )
            for inner in self._optimizers
            if inner is not None and type(inner) in _ADAMS
            for group in inner.param_groups
        ]

    def require_known(self) -> None:
        """Check that the steps of all optimizers will be known.

        Raises:
            ConfigError: An optimizer is not torch's Adam or AdamW, whose states are
                FP32, or has an option that changes the arithmetic.
        """
        for inner in self._optimizers:
            wanted = (
                "torch's Adam or AdamW, without options that change its arithmetic,"
                " where ckpt=flowcheck"
            )
            name = type(inner).__name__
            require(inner is None or type(inner) in _ADAMS, "optimizer", name, wanted)
            for group in inner.param_groups if inner else []:
                changed = [option for option in _CHANGED if group.get(option)]
                require(
                    not changed,
                    "optimizer",
                    f"{name} with {', '.join(changed)}",
                    wanted,
                )

    def known(self, iteration: int) -> Mapping[int, AdamStep]:
        """Return the steps of an iteration, by the `id` of the master weights.

        Args:
            iteration: The iteration, whose steps have been taken.

        Returns:
            The steps; empty if the step was skipped, or belongs to another iteration
            than the noted one.
        """
        if self._iteration != iteration:
            return {}
        if self._known is None:
            self._known = {
                id(master): step
                for inner, masters, numbers in self._groups
                for master in masters
                if (step := _step(inner, master, numbers))
            }
        return self._known


def _step(
    inner: Any, master: torch.Tensor, numbers: Mapping[str, Any]
) -> AdamStep | None:
    if any(numbers.get(option) for option in _CHANGED) or master not in inner.state:
        return None
    beta1, beta2 = numbers["betas"]
    return AdamStep(
        learning_rate=float(numbers["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(numbers["eps"]),
        weight_decay=float(numbers["weight_decay"]),
        decoupled=isinstance(inner, torch.optim.AdamW)
        or bool(numbers.get("decoupled_weight_decay")),
        # the optimizer has counted the step already
        steps=float(inner.state[master]["step"]) - 1,
    )
