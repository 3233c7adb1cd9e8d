"""FP8 parameters on a CPU: tensors with the attributes of Transformer Engine's, and its
cast of master weights.

Owns: payload and scales of a weight (`_data`, `_scale_inv`; `_rowwise_data`,
`_rowwise_scale_inv`), casts with the scales of each recipe, and the names under which
Megatron-Core looks for them. Class names, attributes and the order of a cast follow
Transformer Engine 2.9 to 2.11. Must not: multiply; `fp8_linear` does, with the values
of `dequantize`.

A tensor keeps its dequantized values, as those on a GPU keep a transposed copy: they
follow a change in place only when `_reset_caches` or `update_usage` is called.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.utils._pytree import tree_map

E4M3: Final = torch.float8_e4m3fn
_LARGEST: Final = torch.finfo(E4M3).max
_ALIGNED_SCALES = 4  # in a row of blocks, for cuBLAS
_aten: Any = torch.ops.aten


class Float8CurrentScalingQuantizer:
    """Tensorwise: one scale, from the largest value of the whole tensor."""

    def scale_shape(self, _shape: torch.Size, /) -> tuple[int, ...]:
        return (1,)

    def places(self, start: int, end: int, _shape: torch.Size, /) -> torch.Tensor:
        """Return, for the elements `start` to `end` of a flattened tensor, the position
        of the scale of each.
        """
        return torch.zeros(end - start, dtype=torch.int64)

    def scales(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the factors that values are multiplied with, for largest values over
        all ranks.
        """
        factors = (_LARGEST / amax).clamp(max=torch.finfo(torch.float32).max)
        return torch.where((amax > 0) & torch.isfinite(amax), factors, 1.0)


class Float8Quantizer(Float8CurrentScalingQuantizer):
    """Delayed: `scale`, float32 [1], is there before the tensor; `amax`, [1], notes its
    largest value for later.
    """

    def __init__(self, scale: torch.Tensor, amax: torch.Tensor) -> None:
        self.scale, self.amax = scale, amax

    def scales(self, amax: torch.Tensor) -> torch.Tensor:
        self.amax.copy_(torch.maximum(self.amax, amax))
        return self.scale.clone()


class Float8BlockQuantizer(Float8CurrentScalingQuantizer):
    """Blockwise: one scale, a power of two, for each square of `block_len` rows and
    columns.
    """

    block_len = 128

    def scale_shape(self, shape: torch.Size, /) -> tuple[int, ...]:
        rows, columns = (math.ceil(size / self.block_len) for size in shape)
        return rows, math.ceil(columns / _ALIGNED_SCALES) * _ALIGNED_SCALES

    def places(self, start: int, end: int, shape: torch.Size, /) -> torch.Tensor:
        position, in_row = torch.arange(start, end), self.scale_shape(shape)[1]
        return (
            position // shape[1] // self.block_len * in_row
            + position % shape[1] // self.block_len
        )

    def scales(self, amax: torch.Tensor) -> torch.Tensor:
        # without the mantissa
        return (super().scales(amax).view(torch.int32) & 0x7F800000).view(torch.float32)


class QuantizedTensor(torch.Tensor):
    """A weight in FP8 that shows itself as a tensor of `dtype`, with the values of
    `dequantize`.
    """

    _quantizer: Float8CurrentScalingQuantizer
    _dequantized: torch.Tensor | None
    _stored_as: tuple[str, str]  # of payload and scales
    _views: tuple[Any, ...] = (_aten.detach.default,)
    # the default would return results as this class again, without a payload
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor],
        payload: torch.Tensor,
        scale_inv: torch.Tensor,
        quantizer: Float8CurrentScalingQuantizer,
        dtype: torch.dtype,
    ) -> QuantizedTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, payload.shape, dtype=dtype, device=payload.device
        )
        made._quantizer, made._dequantized = quantizer, None
        made._put(payload, scale_inv)
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def _put(self, payload: torch.Tensor, scale_inv: torch.Tensor) -> None:
        for name, tensor in zip(self._stored_as, (payload, scale_inv), strict=True):
            setattr(self, name, tensor)

    def _stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        payload, scale_inv = (getattr(self, name) for name in self._stored_as)
        return payload, scale_inv

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.dequantize()})"

    def _get_quantizer(self) -> Float8CurrentScalingQuantizer:
        return self._quantizer

    def dequantize(self, *_: Any, **__: Any) -> torch.Tensor:
        """Return the values, in the nominal type, from the kept copy if there is one."""
        if self._dequantized is None:
            payload, scale_inv = self._stored()
            places = self._quantizer.places(0, payload.numel(), self.shape)
            values = payload.view(E4M3).float().view(-1) * scale_inv.view(-1)[places]
            self._dequantized = values.to(self.dtype).view(self.shape)
        return self._dequantized

    def get_high_precision_init_val(self) -> torch.Tensor:
        """Return the values that the tensor was first cast from: Megatron makes its
        master weights of them.
        """
        return cast("Any", self).high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        vars(self).pop("high_precision_init_val", None)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        first = arguments[0]
        if isinstance(first, cls) and function in cls._views:
            payload, scale_inv = first._stored()
            return cls(
                function(payload, *arguments[1:]),
                scale_inv,
                first._quantizer,
                first.dtype,
            )
        if function is _aten.copy_.default and isinstance(first, QuantizedTensor):
            source = (
                arguments[1].dequantize()
                if isinstance(arguments[1], QuantizedTensor)
                else arguments[1]
            )
            cast_master_weights_to_fp8([first], [source.float().view(-1)], [0], None)
            return first
        # a change would reach the dequantized copy, and be lost with it
        assert not function._schema.is_mutable, (
            f"{function} of an FP8 parameter: got an update in place, wanted none"
        )
        plain = tree_map(
            lambda each: (
                each.dequantize() if isinstance(each, QuantizedTensor) else each
            ),
            arguments,
        )
        return function(*plain, **(options or {}))


class Float8Tensor(QuantizedTensor):
    """One scale for the tensor: tensorwise and delayed."""

    _views = (_aten.detach.default, _aten.view.default, _aten.slice.Tensor)
    _stored_as = ("_data", "_scale_inv")

    def _reset_caches(self) -> None:
        self._dequantized = None


class Float8BlockwiseQTensor(QuantizedTensor):
    """A scale for each block of 128 rows and columns; no views but of the whole."""

    _stored_as = ("_rowwise_data", "_rowwise_scale_inv")

    def update_usage(self, rowwise_usage: bool, columnwise_usage: bool) -> None:
        assert rowwise_usage
        if not columnwise_usage:
            self._dequantized = None


def to_fp8_parameter(
    parameter: torch.nn.Parameter, quantizer: Float8CurrentScalingQuantizer
) -> torch.nn.Parameter:
    """Return an FP8 parameter with these values, [rows, columns], and the attributes of
    `parameter`.
    """
    weights = parameter.detach()
    kind = (
        Float8BlockwiseQTensor
        if isinstance(quantizer, Float8BlockQuantizer)
        else Float8Tensor
    )
    scale_inv = torch.ones(quantizer.scale_shape(weights.shape))
    made = kind(
        torch.zeros(weights.shape, dtype=torch.uint8),
        scale_inv,
        quantizer,
        weights.dtype,
    )
    cast_master_weights_to_fp8([made], [weights.float().view(-1)], [0], None)
    converted = torch.nn.Parameter(made)
    vars(converted).update(vars(parameter))
    cast("Any", converted).high_precision_init_val = weights.clone()
    return converted


def convert(
    model: torch.nn.Module,
    quantizer_of: Callable[[torch.Tensor], Float8CurrentScalingQuantizer | None],
) -> None:
    """Make FP8 parameters of all parameters of a model that have a quantizer."""
    _install()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            quantizer = quantizer_of(parameter)
            if quantizer is not None:
                module.register_parameter(name, to_fp8_parameter(parameter, quantizer))


@torch.no_grad()
def cast_master_weights_to_fp8(
    weights: Sequence[QuantizedTensor],
    masters: Sequence[torch.Tensor | None],
    starts: Sequence[int | None],
    group: dist.ProcessGroup | None,
    *_: Any,
) -> None:
    """Cast the parts that this rank has of float32 master weights, each rounded to the
    weight's type first.

    Collective in `group`; without one the masters are whole.
    """
    if not weights:
        return
    parts = [
        (
            weight,
            torch.empty(0) if master is None else master.to(weight.dtype).float(),
            start or 0,
        )
        for weight, master, start in zip(weights, masters, starts, strict=True)
    ]
    packed = torch.cat([_largest(*part) for part in parts])
    if group is not None:
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=group)
    sizes = [weight._stored()[1].numel() for weight in weights]
    for (weight, values, start), amax in zip(parts, packed.split(sizes), strict=True):
        payload, scale_inv = weight._stored()
        scales = weight._quantizer.scales(amax)
        scale_inv.view(-1).copy_(scales.reciprocal())
        end = start + values.numel()
        scaled = values * scales[weight._quantizer.places(start, end, weight.shape)]
        payload.view(-1)[start:end] = (
            scaled.clamp_(-_LARGEST, _LARGEST).to(E4M3).view(torch.uint8)
        )
        weight._dequantized = None


def _largest(weight: QuantizedTensor, values: torch.Tensor, start: int) -> torch.Tensor:
    """Return the largest values below each scale of a weight, float32, flattened; 0
    where this rank has none.
    """
    places = weight._quantizer.places(start, start + values.numel(), weight.shape)
    return torch.zeros(weight._stored()[1].numel()).scatter_reduce_(
        0, places, values.abs(), "amax"
    )


def _replace_raw_data(weight: QuantizedTensor, raw: torch.Tensor) -> None:
    payload, scale_inv = weight._stored()
    raw.detach().copy_(payload)
    weight._put(raw, scale_inv)


def _install() -> None:
    """Let Megatron-Core take these tensors for Transformer Engine's in this process
    from now on. Idempotent.
    """
    utilities: Any = importlib.import_module("megatron.core.fp8_utils")
    values: dict[str, object] = {
        "HAVE_TE_FP8_TENSOR_CLASS": True,
        "FP8_TENSOR_CLASS": QuantizedTensor,
        "_modify_underlying_storage_impl": _replace_raw_data,
        "_quantize_param_shard_impl": cast_master_weights_to_fp8,
        "is_te_min_version": lambda *_, **__: True,
    }
    buffers = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    seams = [(utilities, name, value) for name, value in values.items()]
    for module, name, value in [*seams, (buffers, "_coalescing_manager", _one_by_one)]:
        # a renamed seam is an AttributeError here, not a silent no-op
        getattr(module, name)
        setattr(module, name, value)


def _one_by_one(
    group: Any, *arguments: Any, async_ops: bool = False, **options: Any
) -> Any:
    """Let gloo gather buffers of FP8 and of BF16 apart: together, it converts the bytes
    of one to the other's type.
    """
    if async_ops:
        return _coalescing_manager(group, *arguments, async_ops=async_ops, **options)
    return contextlib.nullcontext()
