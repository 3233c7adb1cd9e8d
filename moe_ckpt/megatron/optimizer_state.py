"""The stored optimizer state of Megatron's parameters: payloads and scales, in place.

Owns: the locations of master weights, moments, scales and step counts in an inner
optimizer, and raw access to the stored tensors. A state that is read as numbers and
stored again gets another scale. Must not: know models or snapshots.

Three kinds of optimizers store the state in different locations:

    torch's Adam, AdamW    The parameters are Megatron's FP32 masters. `state` has
                           moments and a step count for each parameter.
    a fused Adam           As torch's Adam, but with a step count for each group.
                           Moments may have scales in `_scales`.
    a fused Adam that      The parameters are compute weights. `state` has the masters
    holds masters          as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from moe_ckpt.snapshot.codec import MASTER, MOMENTS, scale_of
from moe_ckpt.state_format import DERIVING_MASTERS

MASTER_PARAM = "master_param"
"""The state of a fused Adam that has the master weights."""

FORMAT_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,
}
"""Types by which Megatron's settings name number formats; uint8 stands for FP8."""

_FORMAT_NAMES = {dtype: name for name, dtype in FORMAT_DTYPES.items()}
_TORCH_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_SCALED = (
    torch.float16,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def decode(payload: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return stored values as float32, in memory of their own.

    Transformer Engine's FP8 payloads are bytes without a type, which are not decoded.
    """
    assert payload.is_floating_point(), payload.dtype
    values = payload.to(torch.float32, copy=True)
    is_scaled = payload.dtype in _SCALED
    return values.mul_(scale) if scale is not None and is_scaled else values


def torch_optimizer(optimizer: MegatronOptimizer) -> torch.optim.Optimizer | None:
    """Return the inner optimizer; None on a rank without parameters of its kind."""
    return optimizer.optimizer


def counts_steps_per_parameter(optimizer: MegatronOptimizer) -> bool:
    """Return whether the inner optimizer is torch's Adam or AdamW.

    True as well if this rank has no inner optimizer.
    """
    inner = torch_optimizer(optimizer)
    return inner is None or isinstance(inner, _TORCH_ADAMS)


def holds_masters(optimizer: MegatronOptimizer) -> bool:
    """Return whether masters are among the states of the inner optimizer.

    The parameters of such an optimizer are compute weights.
    """
    decoupled = getattr(
        optimizer.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False
    )
    return isinstance(optimizer, DistributedOptimizer) and bool(decoupled)


def gradient_dtype(optimizer: MegatronOptimizer) -> torch.dtype:
    """Return the type of the gradients that the inner optimizer reads."""
    return (
        optimizer.config.main_grads_dtype if holds_masters(optimizer) else torch.float32
    )


def is_rounded(optimizer: MegatronOptimizer) -> bool:
    """Return whether masters or moments may be stored in fewer than 32 bits.

    The result is the same on all ranks.
    """
    return bool(getattr(optimizer.config, "use_precision_aware_optimizer", False))


def updated_tensor(
    optimizer: MegatronOptimizer, parameter: torch.nn.Parameter
) -> torch.Tensor:
    """Return the tensor of a parameter in the parameter groups of the inner optimizer.

    A sharded optimizer has this rank's shard, any other the whole.
    """
    if isinstance(optimizer, DistributedOptimizer):
        group, position = optimizer.model_param_group_index_map[parameter]
        return cast("Any", optimizer.optimizer).param_groups[group]["params"][position]
    return getattr(parameter, "main_param", parameter)


def stored_state(
    optimizer: MegatronOptimizer, parameter: torch.nn.Parameter
) -> dict[str, torch.Tensor]:
    """Return this rank's master weights, moments and scales of a parameter, by role.

    Returns:
        The optimizer's own memory, flattened. A scale, float32 [1], has the role
        `scale_of(role)`.
    """
    inner, updated = torch_optimizer(optimizer), updated_tensor(optimizer, parameter)
    states = cast("Any", inner).state[updated]
    found = (
        payload_and_scale(inner, updated, MASTER_PARAM, MASTER)
        if holds_masters(optimizer)
        else {MASTER: updated.data}
    )
    for name in MOMENTS:
        found |= payload_and_scale(inner, updated, name, name) if name in states else {}
    return {role: tensor.view(-1) for role, tensor in found.items()}


def master_values(stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the numbers from which compute weights are rounded, flattened.

    Args:
        stored: A result of `stored_state`.
    """
    master, scale = stored[MASTER], stored.get(scale_of(MASTER))
    return master if scale is None else decode(master, scale)


def derives_compute(optimizer: MegatronOptimizer) -> bool:
    """Return whether compute weights are the rounding of the stored master weights.

    See `DERIVING_MASTERS`.
    """
    if not holds_masters(optimizer):
        return True
    stored = _FORMAT_NAMES.get(optimizer.config.main_params_dtype)
    return stored in DERIVING_MASTERS and not keeps_remainders(optimizer)


def keeps_remainders(optimizer: MegatronOptimizer) -> bool:
    """Return whether masters are stored as int16 remainders of BF16 weights.

    A remainder is the part of the master that the weight lacks.
    """
    inner, config = torch_optimizer(optimizer), cast("Any", optimizer.config)
    is_float32 = config.main_params_dtype == torch.float32
    keeps = getattr(inner, "store_param_remainders", False)
    return bool(keeps and is_float32 and config.bf16 and holds_masters(optimizer))


def named_tensors(optimizer: MegatronOptimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors on which a step depends, by name.

    Names are stable over restarts. Rates and step counts are copies. Masters, states
    and scales are in place.
    """
    inner: Any = torch_optimizer(optimizer)
    # for a group that torch's Adam updates, a loader leaves a stale step count
    settings = ("lr",) if counts_steps_per_parameter(optimizer) else ("lr", "step")
    for group_index, group in enumerate(inner.param_groups if inner else []):
        for key in settings:
            # empty groups count no steps
            if key in group and (key != "step" or group["params"]):
                yield (
                    f"{group_index}.{key}",
                    torch.tensor(float(group[key]), dtype=torch.float64),
                )
        for index, updated in enumerate(group["params"]):
            name = f"{group_index}.{index}"
            # otherwise the tensor is part of a parameter of the model
            if not holds_masters(optimizer):
                yield f"{name}.master", updated.data
            for key, value in sorted(inner.state[updated].items()):
                stored = (
                    payload_and_scale(inner, updated, key, key)
                    if torch.is_tensor(value)
                    else {key: torch.as_tensor(value)}
                )
                yield from (
                    (f"{name}.{role}", tensor) for role, tensor in stored.items()
                )


def step_count(optimizer: MegatronOptimizer) -> float:
    """Return the number of updates of an inner optimizer.

    The number is 0 if the optimizer has no parameters on this rank.
    """
    inner: Any = torch_optimizer(optimizer)
    for group in inner.param_groups if inner else []:
        if group["params"]:  # fused Adams count no steps of an empty group
            if not counts_steps_per_parameter(optimizer):
                return float(group.get("step", 0))
            return float(inner.state[group["params"][0]]["step"])
    return 0.0


def write_step_count(
    optimizer: MegatronOptimizer, parameter: torch.nn.Parameter, steps: float
) -> None:
    """Set the number of updates of a parameter.

    A fused Adam has one number for all parameters, which the call sets.
    """
    inner: Any = torch_optimizer(optimizer)
    if inner is not None and counts_steps_per_parameter(optimizer):
        slots = inner.state[updated_tensor(optimizer, parameter)]
        # a new tensor: Megatron's load, if it was cut off, has given one tensor to all
        # parameters
        slots["step"] = torch.full_like(slots["step"], steps)
        return
    for group in inner.param_groups if inner else []:
        if group["params"]:
            group["step"] = int(steps)


def allocate(optimizer: MegatronOptimizer) -> None:
    """Give a fresh Adam zero moments and step 0, as the first step would."""
    inner: Any = torch_optimizer(optimizer)
    for group in inner.param_groups if inner else []:
        if group["params"] and not counts_steps_per_parameter(optimizer):
            group.setdefault("step", 0)
        for updated in group["params"]:
            if not inner.state[updated]:
                _allocate(inner, updated)


def renew_masters(optimizer: MegatronOptimizer) -> None:
    """Set the masters of an inner optimizer that has taken no step to the weights.

    Megatron makes these masters in the first step from the weights at that time, and
    does not renew the masters. Without effect on an optimizer that does not hold
    masters.
    """
    inner: Any = torch_optimizer(optimizer)
    if inner is None or not holds_masters(optimizer) or step_count(optimizer):
        return
    for updated in (
        updated for group in inner.param_groups for updated in group["params"]
    ):
        # a remainder of zero is the weight itself
        if inner.state[updated][MASTER_PARAM].dtype != torch.int16:
            inner.set_scaled_state(
                updated, MASTER_PARAM, updated.detach().clone().float()
            )


def _allocate(inner: Any, updated: torch.Tensor) -> None:
    if hasattr(inner, "initialize_state"):
        keeps_remainder = (
            getattr(inner, "store_param_remainders", False)
            and updated.dtype == torch.bfloat16
        )
        inner.initialize_state(updated, keeps_remainder)
        return
    slots = inner.state[updated]
    if isinstance(inner, _TORCH_ADAMS):
        slots["step"] = torch.tensor(0.0, dtype=torch.float32)
    slots.update({name: torch.zeros_like(updated) for name in MOMENTS})


def payload_and_scale(
    inner: Any, updated: torch.Tensor, name: str, role: str
) -> dict[str, torch.Tensor]:
    """Return the memory of a state and, if there is one, of the scale.

    Args:
        inner: The inner optimizer.
        updated: The tensor that the optimizer updates.
        name: The name of the state in the optimizer.
        role: The role of the payload in the result.
    """
    state = inner.state[updated][name]
    if hasattr(state, "_scale_inv"):  # Transformer Engine's Float8Tensor
        return {role: state._data, scale_of(role): state._scale_inv}
    scale = (
        getattr(inner, "_scales", {}).get(updated, {}).get(name)
        if state.dtype in _SCALED
        else None
    )
    return {role: state} if scale is None else {role: state, scale_of(role): scale}
