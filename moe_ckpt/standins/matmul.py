"""Matrix products of bfloat16 and float16 on CPUs without instructions for them.

Owns: replacing PyTorch's own loops, in this process, by float32 products whose result
is rounded once. On such CPUs the loops are about fifty times slower than PyTorch's
float32 products (AVX2: 1 and 57 GFLOPS a core). Both sum in float32, in different
orders. Must not: touch a processor, or a number format, for which PyTorch has fast
products.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import torch

_HAS_FAST_PRODUCTS: Final[dict[torch.dtype, Callable[[], bool]]] = {
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
}
_aten: Final[Any] = torch.ops.aten
_library: torch.library.Library | None = None


def slow_formats() -> frozenset[torch.dtype]:
    """Return the number formats whose products are slow on this processor."""
    return frozenset(
        dtype for dtype, is_fast in _HAS_FAST_PRODUCTS.items() if not is_fast()
    )


def multiply_in_float32(formats: frozenset[torch.dtype]) -> None:
    """Compute CPU products of these formats in float32 from now on.

    Other formats stay as they are. Only the first call in a process has an effect.
    """
    global _library
    if not formats or _library is not None:
        return
    # the global variable keeps the object for the life of the process, because torch
    # removes the kernels with the object
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*Overriding a previously registered kernel"
        )
        for name in ("mm", "bmm", "addmm", "baddbmm"):
            # The `out` overloads keep PyTorch's own kernels. The replaced functions
            # would call themselves without end
            _library.impl(name, _widened(getattr(_aten, name).out, formats), "CPU")


def _widened(
    product: Callable[..., torch.Tensor], formats: frozenset[torch.dtype]
) -> Callable[..., torch.Tensor]:
    """Return a function that multiplies its last two tensors as `product` does.

    The function multiplies tensors of these formats in float32.
    """

    def multiply(*tensors: torch.Tensor, **scalars: Any) -> torch.Tensor:
        left, right = tensors[-2:]
        shape = (*left.shape[:-1], right.shape[-1])
        if left.dtype not in formats:
            return product(*tensors, **scalars, out=left.new_empty(shape))
        wide = product(
            *(tensor.float() for tensor in tensors), **scalars, out=torch.empty(shape)
        )
        return wide.to(left.dtype)

    return multiply
