"""FP8 linear layers on a CPU: what a GPU multiplies in FP8 is rounded to FP8 values before it is multiplied here.

Owns: the rounding of weights and inputs (E4M3) and of gradients (E5M2) with one scale a tensor, and which layers round.
Must not: change the tensors that it rounds. Two of Transformer Engine's recipes:

    tensorwise  a scale is taken from the tensor itself. Scales are powers of two, so the values of an FP8 tensor are
                BF16 numbers: a weight that was stored in FP8 and read into its BF16 parameter is the same in the next
                forward pass. The rounding of such numbers returns them, though its scale may be half of the stored one.
    delayed     a scale is taken from the largest values of earlier passes, over all ranks of the stage: it is training
                state (`te.named_scaling`), and weights are saved as BF16.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from moe_ckpt.megatron.transformer_engine import BACKWARD, FORWARD

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_MARK, _SCALING = "forward_is_fp8", "fp8_scaling"
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


def use_fp8(model: torch.nn.Module, delayed: DelayedScaling | None = None) -> None:
    """Let the linear layers of the decoder's layers multiply in FP8; router, embedding and output layer do not.

    Without `delayed` each tensor's scale is taken from itself.
    """
    _install()
    layer = importlib.import_module(_LAYERS)
    for name, module in model.named_modules():
        is_linear = isinstance(module, (layer.ColumnParallelLinear, layer.RowParallelLinear))
        weights: Any = [module.weight] if is_linear else getattr(module, "weights", ())
        if ".layers." not in f".{name}" or not weights:
            continue
        if delayed:
            delayed.watch(module, weights)
        else:
            for weight in weights:
                setattr(weight, _MARK, True)
    if delayed:
        delayed.follow(cast("Any", model).decoder.layers)


def is_fp8(parameter: torch.Tensor) -> bool:
    """Return whether forward passes use a parameter's values rounded to FP8 with a scale of their own."""
    return getattr(parameter, _MARK, False)


def forward_values(parameter: torch.Tensor) -> torch.Tensor:
    """Return the weights that forward passes compute with, in the parameter's type."""
    weights = parameter.detach()
    return from_fp8(*to_fp8(weights)).to(weights.dtype) if is_fp8(parameter) else weights


class ScalingState:
    """Scales of a layer's tensors: `scale`, float32 [tensors], and `amax_history`, float32 [updates, tensors]."""

    def __init__(self, num_tensors: int, history_len: int, dtype: torch.dtype) -> None:
        self.scale = torch.ones(num_tensors)
        self.amax_history = torch.zeros(history_len, num_tensors)
        self._dtype = dtype

    def round(self, values: torch.Tensor, *, tensor: int, is_noted: bool) -> torch.Tensor:
        """Return a tensor's values rounded with its scale, in their type; its largest value may be noted."""
        wide, scale, largest = values.detach().float(), self.scale[tensor], torch.finfo(self._dtype).max
        if is_noted:
            self.amax_history[0, tensor] = torch.maximum(self.amax_history[0, tensor], wide.abs().amax())
        inverse = torch.where(scale > 0, scale.reciprocal(), 0.0)
        return ((wide * scale).clamp_(-largest, largest).to(self._dtype).float() * inverse).to(values.dtype)

    def update(self, amax: torch.Tensor) -> None:
        """Take scales from the largest values, float32 [tensors], of the pass that is done, and of those remembered.

        Where there is none, or one is infinite, the scale stays.
        """
        self.amax_history[0] = amax
        largest, past = torch.finfo(self._dtype).max, self.amax_history.amax(dim=0)
        scale = (largest / past).clamp(max=torch.finfo(torch.float32).max)
        self.scale.copy_(torch.where((past > 0) & torch.isfinite(past), scale, self.scale))
        self.amax_history.copy_(self.amax_history.roll(-1, dims=0))
        self.amax_history[0] = 0.0


class DelayedScaling:
    """Scales from the largest values of `history_len` earlier passes, over all ranks of `group`.

    As in Transformer Engine, scales of inputs and weights follow at the end of each forward pass through the decoder,
    those of gradients at the end of each backward pass. Activations must not be computed again in backward.
    """

    def __init__(self, group: Callable[[], dist.ProcessGroup], history_len: int) -> None:
        self._group, self._history_len = group, history_len
        self._states: dict[str, list[ScalingState]] = {FORWARD: [], BACKWARD: []}

    def watch(self, module: torch.nn.Module, weights: Sequence[torch.Tensor]) -> None:
        """Give a layer scales, where Transformer Engine's layers have them."""
        forward = ScalingState(3 * len(weights), self._history_len, E4M3)  # of an output there is none
        backward = ScalingState(2 * len(weights), self._history_len, E5M2)  # nor of an input's gradient
        cast("Any", module).fp8_meta = {FORWARD: forward, BACKWARD: backward}
        self._states[FORWARD].append(forward)
        self._states[BACKWARD].append(backward)
        for index, weight in enumerate(weights):
            setattr(weight, _SCALING, (forward, backward, index))

    def follow(self, layers: Sequence[torch.nn.Module]) -> None:
        """Update scales as passes through these layers end."""

        def entered(_: Any, arguments: Any, options: Any) -> Any:
            if not torch.is_grad_enabled():
                return None
            hidden, *rest = arguments or (options.pop("hidden_states"),)
            return (_AtEndOfBackward.apply(hidden, partial(self._update, BACKWARD)), *rest), options

        def left(*_: Any) -> None:
            if torch.is_grad_enabled():
                self._update(FORWARD)

        layers[0].register_forward_pre_hook(entered, with_kwargs=True)
        layers[-1].register_forward_hook(left)

    @torch.no_grad()
    def _update(self, direction: str) -> None:
        states = self._states[direction]
        amaxes = torch.cat([state.amax_history[0] for state in states])
        dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=self._group())
        for state, amax in zip(states, amaxes.split([state.scale.numel() for state in states]), strict=True):
            state.update(amax)


class _AtEndOfBackward(torch.autograd.Function):
    """Passes values and gradient as they are, and calls back once the gradient is there."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, callback: Callable[[], None]) -> torch.Tensor:  # type: ignore[override]
        context.callback = callback
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        context.callback()
        return gradient, None


class _Rounded(torch.autograd.Function):
    """Rounds to FP8 values; the gradient passes as it is."""

    @staticmethod
    def forward(_: Any, values: torch.Tensor, rounding: Rounding) -> torch.Tensor:  # type: ignore[override]
        return rounding(values)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


class _RoundedGradient(torch.autograd.Function):
    """Passes values as they are, and rounds the gradient to FP8 values; one that overflowed stays as it is."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, rounding: Rounding) -> torch.Tensor:  # type: ignore[override]
        context.rounding = rounding
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        rounded = context.rounding(gradient)
        return (rounded if torch.isfinite(gradient).all() else gradient), None


Rounding = Callable[[torch.Tensor], torch.Tensor]


class _Roundings(NamedTuple):
    """How a product's input, its weight and the gradient of its output are rounded."""

    input: Rounding
    weight: Rounding
    gradient: Rounding


def _round_alone(values: torch.Tensor, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return from_fp8(*to_fp8(values, dtype)).to(values.dtype)


def _roundings(weight: torch.Tensor) -> _Roundings | None:
    """Return what is rounded in products with a weight; None for none of it."""
    if is_fp8(weight):
        return _Roundings(_round_alone, _round_alone, partial(_round_alone, dtype=E5M2))
    scaling = getattr(weight, _SCALING, None)
    if scaling is None:
        return None
    forward, backward, index = scaling
    is_noted = torch.is_grad_enabled()
    return _Roundings(
        partial(forward.round, tensor=3 * index, is_noted=is_noted),
        partial(forward.round, tensor=3 * index + 1, is_noted=is_noted),
        partial(backward.round, tensor=2 * index, is_noted=True),
    )


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
        roundings = _roundings(weight)
        if roundings is None or not input.numel():
            return function(input, weight, *arguments, **options)
        rounded = [_Rounded.apply(input, roundings.input), _Rounded.apply(weight, roundings.weight)]
        output = function(*rounded, *arguments, **options)
        return _RoundedGradient.apply(output, roundings.gradient)  # type: ignore[return-value]

    multiply.multiplies_fp8 = True  # type: ignore[attr-defined]
    multiply.warned = True  # type: ignore[attr-defined]
    return multiply
