"""FP8 linear layers on a CPU: what a GPU multiplies in FP8 is rounded to FP8 values
before it is multiplied here.

Owns: the rounding of weights and inputs (E4M3) and of gradients (E5M2), and which
layers round. Must not: change the tensors that it rounds. Three of Transformer Engine's
recipes:

    tensorwise  a scale is taken from the tensor itself. Scales are powers of two, so the values of an FP8 tensor are
                BF16 numbers: a weight that was stored in FP8 and read into its BF16 parameter is the same in the next
                forward pass. The rounding of such numbers returns them, though its scale may be half of the stored one.
    blockwise   the same for each 128 x 128 values of a weight, and for each 128 values in a row of other tensors. A
                GPU rounds a second copy of these along columns for the gradient of a weight; here it is the same copy.
    delayed     a scale is taken from the largest values of earlier passes, over all ranks of the stage: it is training
                state (`transformer_engine.named_scaling`), and weights are saved as BF16.

FP8 parameters (`cpu_fp8_tensors`) have FP8 values already, which are multiplied as they
are.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from moe_ckpt.megatron.cpu_fp8_tensors import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    QuantizedTensor,
)
from moe_ckpt.megatron.fp8_parameters import is_fp8_parameter, payload_of, scales_of
from moe_ckpt.megatron.transformer_engine import BACKWARD, FORWARD

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Block = tuple[int, int]
WEIGHT_BLOCK: Block = (128, 128)
_ROW_BLOCK: Block = (1, 128)
_BLOCKS, _SCALING = "forward_is_in_blocks", "fp8_scaling"
_LAYERS = "megatron.core.tensor_parallel.layers"
_FUNCTIONS = (
    "linear_with_grad_accumulation_and_async_allreduce",
    "linear_with_frozen_weight",
)


def to_fp8(
    values: torch.Tensor, dtype: torch.dtype = E4M3, block: Block | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the FP8 payload, of the same shape, and the scales, float32, that it is to
    be multiplied with.

    There is one scale, [1], or one for each `block` (rows, columns) of the values:
    [blocks of rows, blocks in a row].
    """
    largest, values = torch.finfo(dtype).max, values.detach().float()
    absmax = (
        values.abs().amax().reshape(1)
        if block is None
        else _largest_of_blocks(values, block)
    )
    # the least power of two with which the largest value fits: a mantissa of 0.5 is a
    # power of two itself
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
    """Return the values of an FP8 tensor as float32."""
    return payload.float() * spread(scale, payload.shape, block)


def spread(scale: torch.Tensor, shape: torch.Size, block: Block | None) -> torch.Tensor:
    """Return scales in a form that multiplies a tensor of this shape: one for each
    value, where there are blocks.
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
    """Let the linear layers of the decoder's layers multiply in FP8; router, embedding
    and output layer do not.

    Without `delayed` each tensor's scale is taken from itself, or each block's if there
    are `blocks`.
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
                setattr(weight, _BLOCKS, blocks)
    if delayed:
        delayed.follow(cast("Any", model).decoder.layers)


def quantizer_of(parameter: torch.Tensor) -> Float8CurrentScalingQuantizer | None:
    """Return how an FP8 parameter in this one's place is cast; None for a weight that
    no layer multiplies in FP8.
    """
    scaling = getattr(parameter, _SCALING, None)
    if scaling is not None:
        forward, _, index = scaling
        place = slice(3 * index + 1, 3 * index + 2)
        return Float8Quantizer(forward.scale[place], forward.amax_history[0, place])
    if not is_fp8(parameter):
        return None
    return (
        Float8BlockQuantizer()
        if block_of(parameter)
        else Float8CurrentScalingQuantizer()
    )


def is_fp8(parameter: torch.Tensor) -> bool:
    """Return whether forward passes use a parameter's values rounded to FP8 with scales
    of their own.
    """
    return hasattr(parameter, _BLOCKS)


def block_of(parameter: torch.Tensor) -> Block | None:
    """Return rows and columns of the blocks of a weight that have a scale each; None if
    all of it has one.
    """
    return WEIGHT_BLOCK if getattr(parameter, _BLOCKS, False) else None


def rounded(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return payload and scales of a weight that forward passes use rounded to FP8."""
    return to_fp8(parameter, block=block_of(parameter))


def read_rounded(
    parameter: torch.Tensor, payload: torch.Tensor, scale: torch.Tensor, owned: slice
) -> torch.Tensor:
    """Return the values, float32, of the elements `owned` of a flattened weight: their
    payload, and all its scales.
    """
    block = block_of(parameter)
    if block is None:
        return payload.float() * scale
    blocks = [
        math.ceil(size / length)
        for size, length in zip(parameter.shape, block, strict=True)
    ]
    return (
        payload.float()
        * spread(scale.view(blocks), parameter.shape, block).reshape(-1)[owned]
    )


def forward_tensors(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the weights that forward passes compute with, by a suffix of their name:
    values, or payload and scales.
    """
    if is_fp8_parameter(parameter):
        return {"": payload_of(parameter), ".scale": scales_of(parameter)}
    weights = parameter.detach()
    if not is_fp8(parameter):
        return {"": weights}
    return {"": from_fp8(*rounded(parameter), block_of(parameter)).to(weights.dtype)}


class ScalingState:
    """Scales of a layer's tensors: `scale`, float32 [tensors], and `amax_history`,
    float32 [updates, tensors].
    """

    def __init__(self, num_tensors: int, history_len: int, dtype: torch.dtype) -> None:
        self.scale = torch.ones(num_tensors)
        self.amax_history = torch.zeros(history_len, num_tensors)
        self._dtype = dtype

    def round(self, values: torch.Tensor, *, tensor: int) -> torch.Tensor:
        """Return a tensor's values rounded with its scale, in their type; the largest
        one is noted, also without gradients.
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
        """Take scales from the largest values, float32 [tensors], of the pass that is
        done, and of those remembered.

        Where there is none, or one is infinite, the scale stays.
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
    """Scales from the largest values of `history_len` earlier passes, over all ranks of
    `group`.

    As in Transformer Engine, scales of inputs and weights follow at the end of each
    forward pass through the decoder, those of gradients at the end of each backward
    pass. Activations must not be computed again in backward.
    """

    def __init__(
        self, group: Callable[[], dist.ProcessGroup], history_len: int
    ) -> None:
        self._group, self._history_len = group, history_len
        self._states: dict[str, list[ScalingState]] = {FORWARD: [], BACKWARD: []}

    def watch(self, module: torch.nn.Module, weights: Sequence[torch.Tensor]) -> None:
        """Give a layer scales, where Transformer Engine's layers have them."""
        # of an output there is none
        forward = ScalingState(3 * len(weights), self._history_len, E4M3)
        # nor of an input's gradient
        backward = ScalingState(2 * len(weights), self._history_len, E5M2)
        cast("Any", module).fp8_meta = {FORWARD: forward, BACKWARD: backward}
        self._states[FORWARD].append(forward)
        self._states[BACKWARD].append(backward)
        for index, weight in enumerate(weights):
            setattr(weight, _SCALING, (forward, backward, index))

    def follow(self, layers: Sequence[torch.nn.Module]) -> None:
        """Update scales as passes through these layers end."""

        def backward_ends(gradient: torch.Tensor) -> torch.Tensor:
            self._update(BACKWARD)
            return gradient

        def entered(_: Any, arguments: Any, options: Any) -> Any:
            # an evaluation moves no scale, as in Transformer Engine
            if not torch.is_grad_enabled():
                return None
            # the gradient of the first layer's input is the last one of a backward pass
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
    """Values that pass a function, as their gradient does on its way back; None leaves
    either as it is.
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
    """How a product's input, its weight and the gradient of its output are rounded."""

    input: Rounding
    weight: Rounding
    gradient: Rounding


def _round_alone(
    values: torch.Tensor, dtype: torch.dtype = E4M3, block: Block | None = None
) -> torch.Tensor:
    return from_fp8(*to_fp8(values, dtype, block), block).to(values.dtype)


def _roundings(weight: torch.Tensor) -> _Roundings | None:
    """Return what is rounded in products with a weight; None for none of it."""
    found = _roundings_of_values(weight)
    return (
        found._replace(weight=QuantizedTensor.dequantize)
        if found and is_fp8_parameter(weight)
        else found
    )


def _roundings_of_values(weight: torch.Tensor) -> _Roundings | None:
    if is_fp8(weight):
        block = block_of(weight)
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
    """Wrap Megatron's two linear functions, which its local layers call. Idempotent."""
    layers = importlib.import_module(_LAYERS)
    for name in _FUNCTIONS:
        function = getattr(layers, name)
        if not getattr(function, "multiplies_fp8", False):
            setattr(layers, name, multiplying_fp8(function))


def multiplying_fp8(
    function: Callable[..., torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """Return `function(input, weight, ...)`, a product, with FP8 values where forward
    passes use the weight in FP8.
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
            # in any case: it notes the largest value, as of one that overflowed
            rounded = roundings.gradient(gradient)
            return rounded if torch.isfinite(gradient).all() else gradient

        output = function(*rounded, *arguments, **options)
        return _Passed.apply(output, None, round_gradient)  # type: ignore[return-value]

    multiply.multiplies_fp8 = True  # type: ignore[attr-defined]
    # Megatron's function looks for its own mark under the name that is this wrapper's
    # now
    multiply.warned = True  # type: ignore[attr-defined]
    return multiply
