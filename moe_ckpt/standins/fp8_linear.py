"""FP8 linear layers on a CPU: operands are rounded to FP8 values before a product.

Owns: the rounding of weights and inputs (E4M3) and of gradients (E5M2), and which
layers round. Must not: change the tensors that it rounds. Three of Transformer Engine's
recipes are supported:

    tensorwise  The scale comes from the tensor itself. Scales are powers of two, so
                the values of an FP8 tensor are BF16 numbers: a weight that was stored
                in FP8 and read into its BF16 parameter is the same in the next forward
                pass. Rounding such numbers returns the same numbers, although the
                scale may be half of the stored scale.
    blockwise   As tensorwise, with a scale for each 128 x 128 values of a weight, and
                for each 128 values in a row of other tensors. For the gradient of a
                weight a GPU rounds a second copy of other tensors along columns; this
                module uses the same copy.
    delayed     The scale comes from the largest values of earlier passes, over all
                ranks of the stage. Scales are training state
                (`transformer_engine.named_scaling`), and weights are saved as BF16.

FP8 parameters (`fp8_tensors`) hold FP8 values already, which are multiplied without
rounding.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from moe_ckpt.megatron.fp8_parameters import is_fp8_parameter
from moe_ckpt.megatron.rounded_weights import mark_rounded, rounding_of
from moe_ckpt.megatron.transformer_engine import BACKWARD, FORWARD
from moe_ckpt.standins.fp8_tensors import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    QuantizedTensor,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Block = tuple[int, int]
WEIGHT_BLOCK: Block = (128, 128)
_ROW_BLOCK: Block = (1, 128)
_SCALING = "fp8_scaling"
_LAYERS = "megatron.core.tensor_parallel.layers"
_FUNCTIONS = (
    "linear_with_grad_accumulation_and_async_allreduce",
    "linear_with_frozen_weight",
)


def to_fp8(
    values: torch.Tensor, dtype: torch.dtype = E4M3, block: Block | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast values to FP8, with scales from the values.

    Args:
        values: The values, of any floating-point type.
        dtype: The FP8 type.
        block: Rows and columns of a block that has a scale of its own; None: one scale
            for all values.

    Returns:
        The payload, of the same shape as `values`, and the scales that multiply the
        payload: float32 [1], or [blocks of rows, blocks in a row].
    """
    largest, values = torch.finfo(dtype).max, values.detach().float()
    absmax = (
        values.abs().amax().reshape(1)
        if block is None
        else _largest_of_blocks(values, block)
    )
    # The scale is the least power of two with which the largest value fits. For a
    # quotient that is itself a power of two, `frexp` returns the mantissa 0.5 and the
    # next higher exponent
    mantissa, exponent = torch.frexp(absmax / largest)
    scale = torch.exp2(
        (exponent - (mantissa == 0.5).int()).float().clamp_(-126.0, 127.0)
    )
    scale = torch.where(absmax > 0, scale, 1.0)
    return (values / spread(scale, values.shape, block)).clamp_(-largest, largest).to(
        dtype
    ), scale


def from_fp8(
    payload: torch.Tensor, scale: torch.Tensor, block: Block | None = None
) -> torch.Tensor:
    """Return the float32 values of a payload and scales of `to_fp8`."""
    return payload.float() * spread(scale, payload.shape, block)


def spread(scale: torch.Tensor, shape: torch.Size, block: Block | None) -> torch.Tensor:
    """Return scales in a form that multiplies a tensor of shape `shape`.

    With blocks, the result has one scale for each value.
    """
    if block is None:
        return scale
    num_rows = math.prod(shape[:-1])
    rows = scale.repeat_interleave(block[0], 0)[:num_rows]
    return rows.repeat_interleave(block[1], 1)[:, : shape[-1]].reshape(shape)


def _largest_of_blocks(values: torch.Tensor, block: Block) -> torch.Tensor:
    matrix = values.abs().view(-1, values.shape[-1])
    rows, columns = (
        math.ceil(size / length)
        for size, length in zip(matrix.shape, block, strict=True)
    )
    missing = (
        0,
        columns * block[1] - matrix.shape[1],
        0,
        rows * block[0] - matrix.shape[0],
    )
    return F.pad(matrix, missing).view(rows, block[0], columns, block[1]).amax((1, 3))


def use_fp8(
    model: torch.nn.Module,
    delayed: DelayedScaling | None = None,
    *,
    blocks: bool = False,
) -> None:
    """Make the linear layers of the decoder's layers multiply in FP8.

    Router, embedding and output layer do not multiply in FP8.

    Args:
        model: The model, whose layers are changed in place.
        delayed: Scales from earlier passes; None: scales come from the tensors
            themselves.
        blocks: Without `delayed`, whether each block has a scale of its own.
    """
    _install()
    layer = importlib.import_module(_LAYERS)
    for name, module in model.named_modules():
        is_linear = isinstance(
            module, (layer.ColumnParallelLinear, layer.RowParallelLinear)
        )
        weights: Any = [module.weight] if is_linear else getattr(module, "weights", ())
        if ".layers." not in f".{name}" or not weights:
            continue
        if delayed:
            delayed.watch(module, weights)
        else:
            for weight in weights:
                mark_rounded(weight, FP8Rounding(WEIGHT_BLOCK if blocks else None))
    if delayed:
        delayed.follow(cast("Any", model).decoder.layers)


def quantizer_of(parameter: torch.Tensor) -> Float8CurrentScalingQuantizer | None:
    """Return the quantizer that casts this parameter to an FP8 parameter.

    None for a weight that no layer multiplies in FP8.
    """
    scaling = getattr(parameter, _SCALING, None)
    if scaling is not None:
        forward, _, index = scaling
        entry = slice(3 * index + 1, 3 * index + 2)
        return Float8Quantizer(forward.scale[entry], forward.amax_history[0, entry])
    rounding = rounding_of(parameter)
    if not isinstance(rounding, FP8Rounding):
        return None
    return Float8BlockQuantizer() if rounding.block else Float8CurrentScalingQuantizer()


@dataclass(frozen=True, slots=True)
class FP8Rounding:
    """Rounds a weight to E4M3; implements `megatron.rounded_weights.Rounding`."""

    block: Block | None
    """Rows and columns of the blocks that have a scale each; None: one scale."""

    def rounded(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return to_fp8(weight, block=self.block)

    def values(
        self,
        weight: torch.Tensor,
        payload: torch.Tensor,
        scale: torch.Tensor,
        owned: slice,
    ) -> torch.Tensor:
        if self.block is None:
            return payload.float() * scale
        blocks = [
            math.ceil(size / length)
            for size, length in zip(weight.shape, self.block, strict=True)
        ]
        scales = spread(scale.view(blocks), weight.shape, self.block)
        return payload.float() * scales.reshape(-1)[owned]


class ScalingState:
    """Scales of a layer's tensors, with the largest values of recent passes.

    `scale` is float32 [tensors]. `amax_history` is float32 [updates, tensors]; row 0
    collects the largest values of the running pass.

    Args:
        num_tensors: The tensors that have a scale each.
        history_len: The updates that the history remembers.
        dtype: The FP8 type.
    """

    def __init__(self, num_tensors: int, history_len: int, dtype: torch.dtype) -> None:
        self.scale = torch.ones(num_tensors)
        self.amax_history = torch.zeros(history_len, num_tensors)
        self._dtype = dtype

    def round(self, values: torch.Tensor, *, tensor: int) -> torch.Tensor:
        """Round a tensor with its scale, and note the largest value.

        The largest value is noted also while gradients are disabled.

        Args:
            values: The tensor.
            tensor: The position of its scale.

        Returns:
            The rounded values, in the type of `values`.
        """
        wide, scale, largest = (
            values.detach().float(),
            self.scale[tensor],
            torch.finfo(self._dtype).max,
        )
        self.amax_history[0, tensor] = torch.maximum(
            self.amax_history[0, tensor], wide.abs().amax()
        )
        inverse = torch.where(scale > 0, scale.reciprocal(), 0.0)
        return (
            (wide * scale).clamp_(-largest, largest).to(self._dtype).float() * inverse
        ).to(values.dtype)

    def update(self, amax: torch.Tensor) -> None:
        """Compute new scales from the pass that has ended and the remembered passes.

        A scale stays as it is if there is no largest value, or if one is infinite.

        Args:
            amax: The largest values of the pass over all ranks, float32 [tensors].
        """
        self.amax_history[0] = amax
        largest, past = torch.finfo(self._dtype).max, self.amax_history.amax(dim=0)
        scale = (largest / past).clamp(max=torch.finfo(torch.float32).max)
        self.scale.copy_(
            torch.where((past > 0) & torch.isfinite(past), scale, self.scale)
        )
        self.amax_history.copy_(self.amax_history.roll(-1, dims=0))
        self.amax_history[0] = 0.0


class DelayedScaling:
    """Scales from the largest values of earlier passes, over all ranks of a group.

    As in Transformer Engine, scales of inputs and weights change at the end of each
    forward pass through the decoder, and scales of gradients at the end of each
    backward pass. Activations must not be recomputed in backward.

    Args:
        group: Returns the group over which largest values are reduced.
        history_len: The updates that a history remembers.
    """

    def __init__(
        self, group: Callable[[], dist.ProcessGroup], history_len: int
    ) -> None:
        self._group, self._history_len = group, history_len
        self._states: dict[str, list[ScalingState]] = {FORWARD: [], BACKWARD: []}

    def watch(self, module: torch.nn.Module, weights: Sequence[torch.Tensor]) -> None:
        """Give a layer scales, where Transformer Engine's layers have scales.

        Args:
            module: The layer.
            weights: The weights of the layer, one for each product.
        """
        # input, weight and output of each product; the scale of an output is not used
        forward = ScalingState(3 * len(weights), self._history_len, E4M3)
        # gradients of output and input; the scale of an input's gradient is not used
        backward = ScalingState(2 * len(weights), self._history_len, E5M2)
        cast("Any", module).fp8_meta = {FORWARD: forward, BACKWARD: backward}
        self._states[FORWARD].append(forward)
        self._states[BACKWARD].append(backward)
        for index, weight in enumerate(weights):
            setattr(weight, _SCALING, (forward, backward, index))

    def follow(self, layers: Sequence[torch.nn.Module]) -> None:
        """Update the scales whenever a pass through these layers ends."""

        def backward_ends(gradient: torch.Tensor) -> torch.Tensor:
            self._update(BACKWARD)
            return gradient

        def entered(_: Any, arguments: Any, options: Any) -> Any:
            # an evaluation changes no scale, as in Transformer Engine
            if not torch.is_grad_enabled():
                return None
            # in a backward pass, the gradient of the first layer's input comes last
            hidden, *rest = arguments or (options.pop("hidden_states"),)
            return (_Passed.apply(hidden, None, backward_ends), *rest), options

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
        for state, amax in zip(
            states, amaxes.split([state.scale.numel() for state in states]), strict=True
        ):
            state.update(amax)


Rounding = Callable[[torch.Tensor], torch.Tensor]


class _Passed(torch.autograd.Function):
    """Applies a function to values, and another function to their gradient.

    None in place of a function leaves values or gradient as they are.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        context: Any,
        values: torch.Tensor,
        of_values: Rounding | None,
        of_gradient: Rounding | None,
    ) -> torch.Tensor:
        context.of_gradient = of_gradient
        return of_values(values) if of_values else values.view_as(values)

    @staticmethod
    def backward(  # type: ignore[override]
        context: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        return (
            (context.of_gradient(gradient) if context.of_gradient else gradient),
            None,
            None,
        )


class _Roundings(NamedTuple):
    """How the operands of a product are rounded."""

    input: Rounding
    """Rounds the input."""

    weight: Rounding
    """Rounds the weight."""

    gradient: Rounding
    """Rounds the gradient of the output."""


def _round_alone(
    values: torch.Tensor, dtype: torch.dtype = E4M3, block: Block | None = None
) -> torch.Tensor:
    return from_fp8(*to_fp8(values, dtype, block), block).to(values.dtype)


def _roundings(weight: torch.Tensor) -> _Roundings | None:
    """Return the roundings of a product with this weight; None: nothing is rounded."""
    found = _roundings_of_values(weight)
    return (
        found._replace(weight=QuantizedTensor.dequantize)
        if found and is_fp8_parameter(weight)
        else found
    )


def _roundings_of_values(weight: torch.Tensor) -> _Roundings | None:
    rounding = rounding_of(weight)
    if isinstance(rounding, FP8Rounding):
        block = rounding.block
        in_rows = partial(_round_alone, block=_ROW_BLOCK if block else None)
        return _Roundings(
            in_rows, partial(_round_alone, block=block), partial(in_rows, dtype=E5M2)
        )
    scaling = getattr(weight, _SCALING, None)
    if scaling is None:
        return None
    forward, backward, index = scaling
    return _Roundings(
        partial(forward.round, tensor=3 * index),
        partial(forward.round, tensor=3 * index + 1),
        partial(backward.round, tensor=2 * index),
    )


def _install() -> None:
    """Wrap the two linear functions that Megatron's local layers call. Idempotent."""
    layers = importlib.import_module(_LAYERS)
    for name in _FUNCTIONS:
        function = getattr(layers, name)
        if not getattr(function, "multiplies_fp8", False):
            setattr(layers, name, multiplying_fp8(function))


def multiplying_fp8(
    function: Callable[..., torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """Return a product `function(input, weight, ...)` that multiplies FP8 values.

    The product rounds to FP8 where forward passes use the weight in FP8.

    Args:
        function: The product to wrap.
    """

    def multiply(
        input: torch.Tensor, weight: torch.Tensor, *arguments: Any, **options: Any
    ) -> torch.Tensor:
        roundings = _roundings(weight)
        # an expert without tokens has no largest value
        if roundings is None or not input.numel():
            return function(input, weight, *arguments, **options)
        rounded = [
            _Passed.apply(input, roundings.input, None),
            _Passed.apply(weight, roundings.weight, None),
        ]

        def round_gradient(gradient: torch.Tensor) -> torch.Tensor:
            # round in any case, because rounding notes the largest value, for example
            # of a gradient that overflowed
            rounded = roundings.gradient(gradient)
            return rounded if torch.isfinite(gradient).all() else gradient

        output = function(*rounded, *arguments, **options)
        return _Passed.apply(output, None, round_gradient)  # type: ignore[return-value]

    multiply.multiplies_fp8 = True  # type: ignore[attr-defined]
    # Megatron's function reads its own attribute `warned` by its global name, which
    # refers to this wrapper now
    multiply.warned = True  # type: ignore[attr-defined]
    return multiply
