"""FP8 parameters on a CPU: tensors with the attributes of Transformer Engine's.

Owns: payload and scales of a weight (`_data`, `_scale_inv`; `_rowwise_data`,
`_rowwise_scale_inv`), casts of master weights with the scales of each recipe, and the
names under which Megatron-Core looks for the tensors. Class names, attributes and the
order of a cast follow Transformer Engine 2.9 to 2.11. Must not: multiply. `fp8_linear`
multiplies the values of `dequantize`.

A tensor keeps a copy of its dequantized values, as a tensor on a GPU keeps a transposed
copy. The copy follows a change of payload or scales in place only when `_reset_caches`
or `update_usage` is called.
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
    """Tensorwise scaling: one scale, from the largest value of the whole tensor."""

    def scale_shape(self, _shape: torch.Size, /) -> tuple[int, ...]:
        """Return the shape of the scales of a weight of this shape."""
        return (1,)

    def scale_indices(
        self, start: int, end: int, _shape: torch.Size, /
    ) -> torch.Tensor:
        """Return the index of the scale of each element in a range.

        Args:
            start: First element of the range, in the flattened tensor.
            end: End of the range.
        """
        return torch.zeros(end - start, dtype=torch.int64)

    def scales(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the factors that multiply values before the cast.

        Args:
            amax: The largest absolute value for each scale, over all ranks, float32.
        """
        factors = (_LARGEST / amax).clamp(max=torch.finfo(torch.float32).max)
        return torch.where((amax > 0) & torch.isfinite(amax), factors, 1.0)


class Float8Quantizer(Float8CurrentScalingQuantizer):
    """Delayed scaling: the scale is known before the tensor.

    Args:
        scale: The scale from earlier passes, float32 [1].
        amax: Memory in which a cast notes the largest value for later scales, [1].
    """

    def __init__(self, scale: torch.Tensor, amax: torch.Tensor) -> None:
        self.scale, self.amax = scale, amax

    def scales(self, amax: torch.Tensor) -> torch.Tensor:
        self.amax.copy_(torch.maximum(self.amax, amax))
        return self.scale.clone()


class Float8BlockQuantizer(Float8CurrentScalingQuantizer):
    """Blockwise scaling: one scale for each square of `block_len` rows and columns.

    Scales are powers of two.
    """

    block_len = 128

    def scale_shape(self, shape: torch.Size, /) -> tuple[int, ...]:
        rows, columns = (math.ceil(size / self.block_len) for size in shape)
        return rows, math.ceil(columns / _ALIGNED_SCALES) * _ALIGNED_SCALES

    def scale_indices(self, start: int, end: int, shape: torch.Size, /) -> torch.Tensor:
        position, in_row = torch.arange(start, end), self.scale_shape(shape)[1]
        return (
            position // shape[1] // self.block_len * in_row
            + position % shape[1] // self.block_len
        )

    def scales(self, amax: torch.Tensor) -> torch.Tensor:
        # a float32 without its mantissa is a power of two
        return (super().scales(amax).view(torch.int32) & 0x7F800000).view(torch.float32)


class QuantizedTensor(torch.Tensor):
    """An FP8 weight that appears as a tensor of `dtype`, with dequantized values.

    The values are those of `dequantize`.
    """

    _quantizer: Float8CurrentScalingQuantizer
    _dequantized: torch.Tensor | None
    _stored_as: tuple[str, str]  # attributes of payload and scales
    _views: tuple[Any, ...] = (_aten.detach.default,)
    # PyTorch's default would wrap results in this class, without a payload
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
        """Return the values in the nominal type, from the kept copy if there is one."""
        if self._dequantized is None:
            payload, scale_inv = self._stored()
            indices = self._quantizer.scale_indices(0, payload.numel(), self.shape)
            values = payload.view(E4M3).float().view(-1) * scale_inv.view(-1)[indices]
            self._dequantized = values.to(self.dtype).view(self.shape)
        return self._dequantized

    def get_high_precision_init_val(self) -> torch.Tensor:
        """Return the values before the first cast.

        Megatron makes its master weights from these values.
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
        # an update in place would change the dequantized copy only, and would be lost
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
    """An FP8 tensor with one scale: tensorwise and delayed scaling."""

    _views = (_aten.detach.default, _aten.view.default, _aten.slice.Tensor)
    _stored_as = ("_data", "_scale_inv")

    def _reset_caches(self) -> None:
        self._dequantized = None


class Float8BlockwiseQTensor(QuantizedTensor):
    """An FP8 tensor with one scale for each block of 128 rows and columns.

    Views of a part of the tensor are not supported.
    """

    _stored_as = ("_rowwise_data", "_rowwise_scale_inv")

    def update_usage(self, rowwise_usage: bool, columnwise_usage: bool) -> None:
        assert rowwise_usage
        if not columnwise_usage:
            self._dequantized = None


def to_fp8_parameter(
    parameter: torch.nn.Parameter, quantizer: Float8CurrentScalingQuantizer
) -> torch.nn.Parameter:
    """Return an FP8 parameter with the values and attributes of `parameter`.

    Args:
        parameter: Weights, [rows, columns].
        quantizer: Selects the recipe, and computes the scales.
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
    """Replace all parameters of a model that have a quantizer by FP8 parameters.

    Args:
        model: The model, which is changed in place.
        quantizer_of: Returns the quantizer of a parameter; None leaves the parameter as
            it is.
    """
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
    """Cast this rank's parts of master weights to FP8 weights. Collective in `group`.

    Each master is rounded to the nominal type of its weight first.

    Args:
        weights: The FP8 weights, which are changed in place.
        masters: This rank's part of each master, float32, flattened; None: no part.
        starts: The first element of each part in the flattened weight; None: no part.
        group: The ranks that hold parts of the masters; None: the masters are whole.
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
        indices = weight._quantizer.scale_indices(start, end, weight.shape)
        scaled = values * scales[indices]
        payload.view(-1)[start:end] = (
            scaled.clamp_(-_LARGEST, _LARGEST).to(E4M3).view(torch.uint8)
        )
        weight._dequantized = None


def _largest(weight: QuantizedTensor, values: torch.Tensor, start: int) -> torch.Tensor:
    """Return the largest absolute value for each scale of a weight, float32, flattened.

    The value is 0 for a scale of which this rank has no elements.
    """
    indices = weight._quantizer.scale_indices(
        start, start + values.numel(), weight.shape
    )
    return torch.zeros(weight._stored()[1].numel()).scatter_reduce_(
        0, indices, values.abs(), "amax"
    )


def _replace_raw_data(weight: QuantizedTensor, raw: torch.Tensor) -> None:
    payload, scale_inv = weight._stored()
    raw.detach().copy_(payload)
    weight._put(raw, scale_inv)


def _install() -> None:
    """Make Megatron-Core treat these tensors as Transformer Engine's in this process.

    Idempotent.
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
        # a name that Megatron has changed raises AttributeError here; `setattr` alone
        # would have no effect
        getattr(module, name)
        setattr(module, name, value)


def _one_by_one(
    group: Any, *arguments: Any, async_ops: bool = False, **options: Any
) -> Any:
    """Make gloo gather FP8 and BF16 buffers in separate operations.

    In one operation gloo converts the bytes of one buffer to the other buffer's type.
    """
    if async_ops:
        return _coalescing_manager(group, *arguments, async_ops=async_ops, **options)
    return contextlib.nullcontext()
