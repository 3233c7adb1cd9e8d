"""The stored optimizer state of Megatron's parameters: payloads and scales, in place.

Owns: the places of master weights, moments, their scales and step counts in an inner
optimizer, and raw access to them: a state that is read as numbers and stored again gets
another scale. Must not: know models or snapshots.

Three kinds of optimizers store them in different places:

    torch's Adam, AdamW      FP32 masters of Megatron's; moments and a step count for each parameter in `state`
    a fused Adam             as torch's, but a step count for each group; moments may have scales in `_scales`
    ... that holds masters   its parameters are compute weights: `state` has the masters as well
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from moe_ckpt.megatron.precision_adam import MASTER_PARAM, decode
from moe_ckpt.snapshot.codec import MASTER, MOMENTS, scale_of

_TORCH_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_SCALED = (
    torch.float16,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def torch_optimizer(optimizer: MegatronOptimizer) -> torch.optim.Optimizer | None:
    """Return the inner optimizer; None on a rank without parameters of its kind."""
    return optimizer.optimizer


def counts_steps_per_parameter(optimizer: MegatronOptimizer) -> bool:
    """Return whether the inner optimizer is torch's, or there is none."""
    inner = torch_optimizer(optimizer)
    return inner is None or isinstance(inner, _TORCH_ADAMS)


def holds_masters(optimizer: MegatronOptimizer) -> bool:
    """Return whether the inner optimizer's parameters are compute weights, with masters
    among its states.
    """
    decoupled = getattr(
        optimizer.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False
    )
    return isinstance(optimizer, DistributedOptimizer) and bool(decoupled)


def is_rounded(optimizer: MegatronOptimizer) -> bool:
    """Return whether masters or moments may be stored in fewer than 32 bits. Alike on
    all ranks.
    """
    return bool(getattr(optimizer.config, "use_precision_aware_optimizer", False))


def updated_tensor(
    optimizer: MegatronOptimizer, parameter: torch.nn.Parameter
) -> torch.Tensor:
    """Return the tensor of a parameter in the inner optimizer's groups: this rank's
    shard, or the whole.
    """
    if isinstance(optimizer, DistributedOptimizer):
        group, position = optimizer.model_param_group_index_map[parameter]
        return cast("Any", optimizer.optimizer).param_groups[group]["params"][position]
    return getattr(parameter, "main_param", parameter)


def stored_state(
    optimizer: MegatronOptimizer, parameter: torch.nn.Parameter
) -> dict[str, torch.Tensor]:
    """Return this rank's master weights and moments of a parameter, flattened, by role,
    with their scales.

    The tensors are the optimizer's own memory. A scale, float32 [1], has the role
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
    """Return the numbers of stored master weights that are rounded to compute weights,
    flattened.
    """
    master, scale = stored[MASTER], stored.get(scale_of(MASTER))
    return master if scale is None else decode(master, scale)


def derives_compute(optimizer: MegatronOptimizer) -> bool:
    """Return whether compute weights are the rounding of the stored master weights. See
    `StateFormat`.
    """
    if not holds_masters(optimizer):
        return True
    return optimizer.config.main_params_dtype in (
        torch.float32,
        torch.uint8,
    ) and not keeps_remainders(optimizer)


def keeps_remainders(optimizer: MegatronOptimizer) -> bool:
    """Return whether a master is stored as the part, int16, that its BF16 weight lacks."""
    inner, config = torch_optimizer(optimizer), cast("Any", optimizer.config)
    is_float32 = config.main_params_dtype == torch.float32
    keeps = getattr(inner, "store_param_remainders", False)
    return bool(keeps and is_float32 and config.bf16 and holds_masters(optimizer))


def named_tensors(optimizer: MegatronOptimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors that a step depends on, under names that are stable over
    restarts.

    These are rates and step counts, as copies, and masters, states and scales, in
    place.
    """
    inner: Any = torch_optimizer(optimizer)
    # of a group that torch's Adam updates, a loader leaves a stale step count
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
            # else it is part of a parameter of the model
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
    """Return the number of updates of an inner optimizer; 0 if it has no parameters on
    this rank.
    """
    inner: Any = torch_optimizer(optimizer)
    for group in inner.param_groups if inner else []:
        if group["params"]:  # fused Adams do not count the steps of an empty group
            if not counts_steps_per_parameter(optimizer):
                return float(group.get("step", 0))
            return float(inner.state[group["params"][0]]["step"])
    return 0.0


def write_step_count(
    optimizer: MegatronOptimizer, parameter: torch.nn.Parameter, steps: float
) -> None:
    """Set the number of updates of a parameter; fused Adams count for all of them
    together.
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
    """Give a fresh Adam zero moments and step 0, as its first step would."""
    inner: Any = torch_optimizer(optimizer)
    for group in inner.param_groups if inner else []:
        if group["params"] and not counts_steps_per_parameter(optimizer):
            group.setdefault("step", 0)
        for updated in group["params"]:
            if not inner.state[updated]:
                _allocate(inner, updated)


def renew_masters(optimizer: MegatronOptimizer) -> None:
    """Let the masters that an inner optimizer holds be its parameters' weights, if it
    has taken no step.

    Megatron makes them in the first step, of the weights that are there then, and does
    not renew them.
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
    """Return the memory of a parameter's state `name` under `role` and, if it has one,
    of its scale.
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
