"""A step of torch's Adam as numbers with which another process can take the same step.

Owns: the numbers of the coming step, and its gradients. Must not: take it. Clipped
gradients stay until the next iteration.
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
    """Return whether a process without a GPU can take Adam's step of these master
    weights bit for bit.
    """
    # kernels of a GPU use fused multiply-adds: a peer's step differs in its last bits,
    # after gradients were sent for it
    return master.device.type == "cpu"


class AdamSteps:
    """The steps of all inner optimizers that are torch's Adam or AdamW; those of other
    optimizers are unknown.
    """

    def __init__(self, state: TrainingState) -> None:
        self._optimizers = [
            torch_optimizer(optimizer) for optimizer in state.inner_optimizers
        ]
        self._iteration: int | None = None
        # optimizer, masters, numbers
        self._groups: list[tuple[Any, list[torch.Tensor], Mapping[str, Any]]] = []
        # of that iteration, on request
        self._known: Mapping[int, AdamStep] | None = None

    def note(self, iteration: int, *, overflow: bool) -> None:
        """The step of `iteration` follows, or is skipped because of an `overflow`."""
        self._iteration, self._known = None if overflow else iteration, None
        # copies of numbers: Megatron advances learning rate and weight decay right
        # after the step
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
        """Raise ConfigError unless the steps of all optimizers will be known, and their
        states are FP32.
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
        """Return the steps that were taken in `iteration`, by the id of the master
        weights.
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
        # the step has been taken, and has counted itself
        steps=float(inner.state[master]["step"]) - 1,
    )
