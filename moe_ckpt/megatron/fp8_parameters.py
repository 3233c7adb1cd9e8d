"""FP8 parameters: weights that are kept, gathered and computed with in FP8 (Megatron's
`fp8_param_gather`), in place.

Owns: where such a parameter keeps its payload and scales, and casting master weights to
it. Must not: know snapshots. Written against Transformer Engine 2.9 to 2.11; on a CPU,
tensors of the same shape (`cpu_fp8_tensors`) stand in.

    recipe       payload            scales                                               cast of masters
    delayed      `_data`            `_scale_inv`, [1], from earlier passes               with the scale that is there
    tensorwise   `_data`            `_scale_inv`, [1]                                    scale of the whole parameter
    blockwise    `_rowwise_data`    `_rowwise_scale_inv`, [rows / 128, columns / 128]    scales of whole blocks

A scale belongs to the whole parameter, so each cast reduces largest values over all
ranks that keep a part of it. The transposed copy for backward follows from payload and
scales.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

# of delayed scaling; the other recipes have quantizers of other classes
_HISTORY_QUANTIZER = "Float8Quantizer"
_SUPPORTED_QUANTIZERS = (
    _HISTORY_QUANTIZER,
    "Float8CurrentScalingQuantizer",
    "Float8BlockQuantizer",
)


class Shard(NamedTuple):
    """A part of a parameter's master weights: float32, flattened, from `start` on; both
    None on a rank without one.
    """

    parameter: torch.Tensor
    master: torch.Tensor | None
    start: int | None


def is_fp8_parameter(parameter: torch.Tensor) -> bool:
    """Return whether a parameter keeps its weights in FP8, and no others."""
    return hasattr(parameter, "_scale_inv") or hasattr(parameter, "_rowwise_scale_inv")


def is_supported(parameter: torch.Tensor) -> bool:
    """Return whether the payload and scales of an FP8 parameter are where this module
    looks for them.
    """
    return _quantizer_of(parameter) in _SUPPORTED_QUANTIZERS


def has_history(parameter: torch.Tensor) -> bool:
    """Return whether an FP8 parameter was cast with a scale from earlier passes:
    masters alone do not give it.
    """
    return _quantizer_of(parameter) == _HISTORY_QUANTIZER


def payload_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the payload, uint8, flattened, in place."""
    whole: Any = parameter
    return cast(
        "torch.Tensor",
        whole._rowwise_data if hasattr(whole, "_rowwise_data") else whole._data,
    ).view(-1)


def scales_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the factors of payloads, float32, in place: [1], or one a block.

    Rows of blocks are padded to four scales; those without a block are left out.
    """
    whole: Any = parameter
    if not hasattr(whole, "_rowwise_scale_inv"):
        return cast("torch.Tensor", whole._scale_inv).view(-1)
    blocks_in_row = math.ceil(whole.shape[-1] / whole._get_quantizer().block_len)
    return cast("torch.Tensor", whole._rowwise_scale_inv)[:, :blocks_in_row]


def weights_of(parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that are a parameter's weights, in place: values, or payload
    and scales.
    """
    return (
        (payload_of(parameter), scales_of(parameter))
        if is_fp8_parameter(parameter)
        else (parameter.data,)
    )


def cast_masters(shards: Sequence[Shard], group: dist.ProcessGroup) -> None:
    """Cast master weights to the parts of FP8 parameters that they belong to.
    Collective in `group`.

    All ranks name the same parameters, in one order.
    """
    utilities: Any = importlib.import_module("megatron.core.fp8_utils")
    columns = zip(*shards, strict=True)
    if shards:
        utilities.quantize_param_shard(*map(list, columns), group)


def refresh(parameters: Iterable[torch.Tensor]) -> None:
    """Let copies in another order follow payloads and scales that were changed in
    place.
    """
    changed = [parameter for parameter in parameters if is_fp8_parameter(parameter)]
    for parameter in changed:
        whole: Any = parameter
        if hasattr(whole, "_rowwise_data"):
            whole.update_usage(rowwise_usage=True, columnwise_usage=False)
        else:
            whole._reset_caches()
    utilities: Any = importlib.import_module("megatron.core.fp8_utils")
    if changed:  # before Transformer Engine 2.10 the next forward pass does it
        utilities.post_all_gather_processing(changed)


def _quantizer_of(parameter: torch.Tensor) -> str:
    return (
        type(cast("Any", parameter)._get_quantizer()).__name__
        if is_fp8_parameter(parameter)
        else ""
    )
