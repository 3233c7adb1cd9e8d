"""Adam with master weights and moments stored in FP16 or FP8, on a CPU.

Owns: the arithmetic of a step (FP32; a state is rounded when the step stores the
state), the scale of each stored tensor, and the names under which Megatron-Core looks
for its Adam.

This Adam is the CPU reference of Transformer Engine's FusedAdam. Constructor arguments,
state names and numerics follow FusedAdam of Transformer Engine 2.9, which runs on a GPU
only. `state[parameter]` has the payloads, and `_scales[parameter]` has their scales,
float32 [1] each. A parameter group has the step count, from the first step on.

FusedAdam itself has no FP8 master weight (MoEvement, Table 7, last row). With such
masters, compute weights are rounded from the stored master. All other compute weights
are rounded from the master before the master is stored.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from moe_ckpt.megatron.optimizer_state import MASTER_PARAM, decode

E4M3 = torch.float8_e4m3fn
_STATES = (MASTER_PARAM, "exp_avg", "exp_avg_sq")
# as in FusedAdam's `dtype_to_range_map`, which has half of FP16's range
_LARGEST = {E4M3: 448.0, torch.float16: torch.finfo(torch.float16).max / 2}
"""The largest element of a scaled tensor, by type."""


def encode(values: torch.Tensor, payload: torch.Tensor, scale: torch.Tensor) -> None:
    """Store float32 values, scaled if the payload is FP16 or FP8.

    A tensor of zeros gets a scale of 0 (FP16) or 1 (FP8); FusedAdam divides by zero
    there.

    Args:
        values: The values.
        payload: Memory for the stored values, of any type.
        scale: Memory for the scale, float32 [1]; not changed for other types.
    """
    largest = _LARGEST.get(payload.dtype)
    if largest is None:
        payload.copy_(values)
        return
    absmax = (
        values.abs().amax().reshape(1) if values.numel() else torch.zeros_like(scale)
    )
    step = absmax / largest
    inverse = torch.where(
        step > 0, step.reciprocal(), 0.0 if payload.dtype == torch.float16 else 1.0
    )
    scale.copy_(step if payload.dtype == torch.float16 else inverse.reciprocal())
    scaled = values * inverse
    payload.copy_(scaled.clamp_(-largest, largest) if payload.dtype == E4M3 else scaled)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split float32 masters into bfloat16 weights and int16 remainders.

    Both together are the master. Ties round away from zero.
    """
    bits = master.view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int32)
    remainder = torch.where(low >= 0x8000, low - 0x10000, low).to(torch.int16)
    high = (bits >> 16).to(torch.int16) + (remainder < 0).to(torch.int16)
    return high.view(torch.bfloat16), remainder


def join_master(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the float32 masters that `split_master` split."""
    high = (weight.view(torch.int16) - (remainder < 0).to(torch.int16)).to(torch.int32)
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


class PrecisionAwareAdam(torch.optim.Optimizer):
    """Adam with the arguments and state types of FusedAdam.

    Types of states are float32, bfloat16, float16, or uint8, which stands for FP8
    (E4M3). Arguments that are not listed are those of Adam.

    Args:
        adam_w_mode: Whether weight decay is decoupled, as in AdamW.
        master_weights: Whether the parameters are compute weights, and the optimizer
            holds their masters. If not, the parameters are the masters.
        use_decoupled_grad: Whether to read gradients from `parameter.decoupled_grad`.
        store_param_remainders: Whether float32 masters of bfloat16 weights are stored
            as int16 remainders.
        master_weight_dtype: Type of the masters.
        exp_avg_dtype: Type of the first moments.
        exp_avg_sq_dtype: Type of the second moments.
        capturable: Must be false: CUDA graphs are not supported.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        *,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        capturable: bool = False,  # an argument of megatron-core 0.19
    ) -> None:
        assert not capturable, "CUDA graphs"
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders
        self._dtypes = dict(
            zip(
                _STATES,
                (master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype),
                strict=True,
            )
        )
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def initialize_state(self, param: torch.Tensor, *_: object) -> None:
        """Give a parameter zero moments, and a master from its compute weight."""
        for name in _STATES if self.master_weights else _STATES[1:]:
            dtype = self._dtypes[name]
            if name == MASTER_PARAM and self._has_remainder(param):
                dtype = torch.int16
            payload = torch.zeros(
                param.shape,
                dtype=E4M3 if dtype == torch.uint8 else dtype,
                device=param.device,
            )
            self.state[param][name] = payload
            self._scales.setdefault(param, {})[name] = torch.ones(
                1, dtype=torch.float32, device=param.device
            )
        # a remainder of zero is the weight itself
        if self.master_weights and not self._has_remainder(param):
            self.set_scaled_state(param, MASTER_PARAM, param.float())

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """Return a state as float32 values.

        Float32 states are returned in place, other states in memory of their own. The
        int16 remainder of a master is returned as stored, as Transformer Engine does.
        """
        payload = self.state[param][name]
        is_plain = payload.dtype in (torch.float32, torch.int16)
        return payload if is_plain else decode(payload, self._scales[param][name])

    @torch.no_grad()
    def set_scaled_state(
        self, param: torch.Tensor, name: str, values: torch.Tensor
    ) -> None:
        """Store values as a state, with a scale from these values.

        The scale may differ from the scale of a state that was read.

        Args:
            param: The parameter.
            name: The name of the state.
            values: float32 values; int16 values for a remainder.
        """
        if name not in self.state[param]:
            self.initialize_state(param)
        payload = self.state[param][name]
        if payload.dtype == torch.int16:
            assert values.dtype == torch.int16, (
                f"remainder: got {values.dtype}, wanted torch.int16"
            )
            payload.copy_(values.view(param.shape))
        else:
            assert values.dtype == torch.float32, (
                f"{name}: got {values.dtype}, wanted torch.float32"
            )
            encode(values.view(payload.shape), payload, self._scales[param][name])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over settings, and states as stored.

        torch's own method would cast the states to the parameters' type.
        """
        super().load_state_dict({**state_dict, "state": {}})  # groups only
        for index, param in enumerate(
            each for group in self.param_groups for each in group["params"]
        ):
            for name, payload in state_dict["state"].get(index, {}).items():
                if name not in self.state[param]:
                    self.initialize_state(param)
                self.state[param][name] = payload

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step with the gradients that are present."""
        loss = closure() if closure else None
        for group in self.param_groups:
            if not group["params"]:  # FusedAdam counts no steps of an empty group
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                gradient = (
                    getattr(param, "decoupled_grad", None)
                    if self.use_decoupled_grad
                    else param.grad
                )
                if gradient is not None:
                    self._update(param, gradient.float(), group)
        return loss

    def _update(
        self, param: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        if "exp_avg" not in self.state[param]:
            self.initialize_state(param)
        beta1, beta2 = group["betas"]
        steps = group["step"] if group["bias_correction"] else None
        master = self._master(param) if self.master_weights else param
        if not self.adam_w_mode:
            gradient = gradient + group["weight_decay"] * master
        exp_avg = (
            beta1 * self.get_unscaled_state(param, "exp_avg") + (1.0 - beta1) * gradient
        )
        exp_avg_sq = (
            beta2 * self.get_unscaled_state(param, "exp_avg_sq")
            + (1.0 - beta2) * gradient * gradient
        )
        mean = exp_avg if steps is None else exp_avg / (1.0 - beta1**steps)
        spread = exp_avg_sq if steps is None else exp_avg_sq / (1.0 - beta2**steps)
        update = mean / (spread.sqrt() + group["eps"])
        if self.adam_w_mode:
            update = update + group["weight_decay"] * master
        self._store(param, master - group["lr"] * update, exp_avg, exp_avg_sq)

    def _store(
        self,
        param: torch.Tensor,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
    ) -> None:
        self.set_scaled_state(param, "exp_avg", exp_avg)
        self.set_scaled_state(param, "exp_avg_sq", exp_avg_sq)
        if not self.master_weights:
            param.copy_(master)
            return
        if self._has_remainder(param):
            weight, remainder = split_master(master)
            param.copy_(weight)
            self.set_scaled_state(param, MASTER_PARAM, remainder)
            return
        self.set_scaled_state(param, MASTER_PARAM, master)
        is_fp8 = self.state[param][MASTER_PARAM].dtype == E4M3
        param.copy_(self._master(param) if is_fp8 else master)

    def _master(self, param: torch.Tensor) -> torch.Tensor:
        stored = self.get_unscaled_state(param, MASTER_PARAM)
        return (
            join_master(param.detach(), stored)
            if stored.dtype == torch.int16
            else stored
        )

    def _has_remainder(self, param: torch.Tensor) -> bool:
        is_float32 = self._dtypes[MASTER_PARAM] == torch.float32
        return (
            self.store_param_remainders and is_float32 and param.dtype == torch.bfloat16
        )


def install() -> None:
    """Make Megatron-Core use this Adam in this process. Idempotent.

    Megatron-Core treats the class as Transformer Engine's Adam.

    Raises:
        RuntimeError: Transformer Engine is installed, whose own Adam must be used.
    """
    optimizer = importlib.import_module("megatron.core.optimizer")
    sharded = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    config = importlib.import_module("megatron.core.optimizer.optimizer_config")
    if (
        getattr(sharded, "USING_TE_OPTIMIZER", False)
        and sharded.Adam is not PrecisionAwareAdam
    ):
        raise RuntimeError("Transformer Engine is installed: its FusedAdam is used")
    names: dict[ModuleType, dict[str, object]] = {
        optimizer: {
            "Adam": PrecisionAwareAdam,
            "USING_PYTORCH_OPTIMIZER": False,
            "is_te_min_version": _is_new_enough,
        },
        sharded: {
            "Adam": PrecisionAwareAdam,
            "HAVE_APEX_OR_TE": True,
            "USING_TE_OPTIMIZER": True,
        },
        config: {"is_te_min_version": _is_new_enough},
    }
    for module, values in names.items():
        for name, value in values.items():
            # a name that Megatron has changed raises AttributeError here; `setattr`
            # alone would have no effect
            getattr(module, name)
            setattr(module, name, value)


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Provide this Adam as Transformer Engine's FusedAdam, within the context.

    Megatron imports `transformer_engine.pytorch.optimizers.FusedAdam`.
    """
    names = (
        "transformer_engine",
        "transformer_engine.pytorch",
        "transformer_engine.pytorch.optimizers",
    )
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].FusedAdam = PrecisionAwareAdam  # type: ignore[attr-defined]
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)


def _is_new_enough(*_: object, **__: object) -> bool:
    return True
