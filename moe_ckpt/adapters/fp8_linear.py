"""FP8 linear layers on a CPU: what a GPU multiplies in FP8 is rounded to FP8 values before it is multiplied here.

Owns: the rounding of weights and inputs (E4M3) and of gradients (E5M2), one scale a tensor, taken from the tensor as it
is (Transformer Engine's current scaling), and which weights are rounded. Must not: change the tensors that it rounds.

Scales are powers of two, so the values of an FP8 tensor are BF16 numbers: a weight that was stored in FP8 and read into
its BF16 parameter is the same in the next forward pass. The rounding of a weight that is such numbers already returns
them, though its scale may be half of the one that they were stored with.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_MARK = "forward_is_fp8"
_LAYERS = "megatron.core.tensor_parallel.layers"
_FUNCTIONS = ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight")


def to_fp8(values: torch.Tensor, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the FP8 payload, of the same shape, and the scale, float32 [1], that it is to be multiplied with."""
    largest = torch.finfo(dtype).max
    absmax = values.detach().abs().amax().float().reshape(1)
    mantissa, exponent = torch.frexp(absmax / largest)
    scale = torch.exp2((exponent - (mantissa == 0.5).int()).float().clamp_(-126.0, 127.0))
    scale = torch.where(absmax > 0, scale, 1.0)
    return (values.detach().float() / scale).clamp_(-largest, largest).to(dtype), scale


def from_fp8(payload: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the values of an FP8 tensor as float32."""
    return payload.float() * scale


def use_fp8(model: torch.nn.Module) -> None:
    """Let the linear layers of the decoder's layers multiply in FP8; router, embedding and output layer do not."""
    _install()
    layer = importlib.import_module(_LAYERS)
    for name, module in model.named_modules():
        is_linear = isinstance(module, (layer.ColumnParallelLinear, layer.RowParallelLinear))
        if ".layers." in f".{name}":
            for weight in [module.weight] if is_linear else getattr(module, "weights", ()):
                setattr(weight, _MARK, True)


def is_fp8(parameter: torch.Tensor) -> bool:
    """Return whether forward passes use a parameter's values rounded to FP8."""
    return getattr(parameter, _MARK, False)


def forward_values(parameter: torch.Tensor) -> torch.Tensor:
    """Return the weights that forward passes compute with, in the parameter's type."""
    weights = parameter.detach()
    return from_fp8(*to_fp8(weights)).to(weights.dtype) if is_fp8(parameter) else weights


class _Rounded(torch.autograd.Function):
    """Rounds to FP8 values; the gradient passes as it is."""

    @staticmethod
    def forward(_: Any, values: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return from_fp8(*to_fp8(values)).to(values.dtype)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


class _RoundedGradient(torch.autograd.Function):
    """Passes values as they are, and rounds the gradient to FP8 values; one that overflowed stays as it is."""

    @staticmethod
    def forward(_: Any, values: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return values.view_as(values)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if not torch.isfinite(gradient).all():
            return gradient
        return from_fp8(*to_fp8(gradient, E5M2)).to(gradient.dtype)


def _install() -> None:
    """Wrap Megatron's two linear functions, which its local layers call. Idempotent."""
    layers = importlib.import_module(_LAYERS)
    for name in _FUNCTIONS:
        function = getattr(layers, name)
        if not getattr(function, "multiplies_fp8", False):
            setattr(layers, name, multiplying_fp8(function))


def multiplying_fp8(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `function(input, weight, ...)`, a product, with FP8 values where forward passes use the weight in FP8."""

    def multiply(input: torch.Tensor, weight: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        if not is_fp8(weight) or not input.numel():
            return function(input, weight, *arguments, **options)
        output = function(_Rounded.apply(input), _Rounded.apply(weight), *arguments, **options)
        return _RoundedGradient.apply(output)  # type: ignore[return-value]

    multiply.multiplies_fp8 = True  # type: ignore[attr-defined]
    multiply.warned = True  # type: ignore[attr-defined]
    return multiply
