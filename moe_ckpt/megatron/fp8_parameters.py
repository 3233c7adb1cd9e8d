"""FP8 parameters: weights that Megatron keeps, gathers and multiplies in FP8.

Owns: where an FP8 parameter (`fp8_param_gather`) keeps payload and scales, and casting
master weights to the parameter, in place. Must not: know snapshots. Written against
Transformer Engine 2.9 to 2.11; on a CPU, tensors with the same attributes
(`standins.fp8_tensors`) stand in.

    recipe      payload          scales                cast of masters, with
    delayed     `_data`          `_scale_inv`          the scale of earlier passes
    tensorwise  `_data`          `_scale_inv`          a scale of the whole parameter
    blockwise   `_rowwise_data`  `_rowwise_scale_inv`  scales of whole blocks

`_scale_inv` is [1], `_rowwise_scale_inv` is [rows / 128, columns / 128]. A scale
belongs to the whole parameter, so each cast reduces largest values over all ranks that
keep a part of the parameter. The transposed copy for backward follows from payload and
scales.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

# quantizer of delayed scaling; the other recipes have quantizers of other classes
_HISTORY_QUANTIZER = "Float8Quantizer"
_SUPPORTED_QUANTIZERS = (
    _HISTORY_QUANTIZER,
    "Float8CurrentScalingQuantizer",
    "Float8BlockQuantizer",
)


class Shard(NamedTuple):
    """One rank's part of a parameter's master weights."""

    parameter: torch.Tensor
    """The whole FP8 parameter."""

    master: torch.Tensor | None
    """The rank's master weights, float32, flattened; None on a rank without a part."""

    start: int | None
    """The first element of the part in the flattened parameter; None without a part."""


def is_fp8_parameter(parameter: torch.Tensor) -> bool:
    """Return whether a parameter keeps its weights in FP8 only."""
    return hasattr(parameter, "_scale_inv") or hasattr(parameter, "_rowwise_scale_inv")


def is_supported(parameter: torch.Tensor) -> bool:
    """Return whether this module can find payload and scales of an FP8 parameter."""
    return _quantizer_of(parameter) in _SUPPORTED_QUANTIZERS


def has_history(parameter: torch.Tensor) -> bool:
    """Return whether an FP8 parameter was cast with a scale from earlier passes.

    Master weights alone do not determine the values of such a parameter.
    """
    return _quantizer_of(parameter) == _HISTORY_QUANTIZER


def payload_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the payload of an FP8 parameter, uint8, flattened, in place."""
    whole: Any = parameter
    return cast(
        "torch.Tensor",
        whole._rowwise_data if hasattr(whole, "_rowwise_data") else whole._data,
    ).view(-1)


def scales_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the scales that multiply an FP8 payload, float32, in place.

    Returns:
        One scale, [1], or a scale for each block, [blocks of rows, blocks in a row].
        Stored rows are padded to a multiple of four scales; the padding is left out.
    """
    whole: Any = parameter
    if not hasattr(whole, "_rowwise_scale_inv"):
        return cast("torch.Tensor", whole._scale_inv).view(-1)
    blocks_in_row = math.ceil(whole.shape[-1] / whole._get_quantizer().block_len)
    return cast("torch.Tensor", whole._rowwise_scale_inv)[:, :blocks_in_row]


def weights_of(parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that hold a parameter's weights, in place.

    Returns:
        The values; of an FP8 parameter, payload and scales.
    """
    return (
        (payload_of(parameter), scales_of(parameter))
        if is_fp8_parameter(parameter)
        else (parameter.data,)
    )


def cast_masters(shards: Sequence[Shard], group: dist.ProcessGroup) -> None:
    """Cast master weights to their parts of FP8 parameters. Collective in `group`.

    Args:
        shards: This rank's parts. All ranks name the same parameters, in the same
            order.
        group: The ranks that keep parts of these parameters.
    """
    utilities: Any = importlib.import_module("megatron.core.fp8_utils")
    columns = zip(*shards, strict=True)
    if shards:
        utilities.quantize_param_shard(*map(list, columns), group)


def refresh(parameters: Iterable[torch.Tensor]) -> None:
    """Renew the transposed copies after a change of payloads and scales in place.

    Args:
        parameters: The changed parameters; parameters that are not FP8 are ignored.
    """
    changed = [parameter for parameter in parameters if is_fp8_parameter(parameter)]
    for parameter in changed:
        whole: Any = parameter
        if hasattr(whole, "_rowwise_data"):
            whole.update_usage(rowwise_usage=True, columnwise_usage=False)
        else:
            whole._reset_caches()
    utilities: Any = importlib.import_module("megatron.core.fp8_utils")
    # before Transformer Engine 2.10 the next forward pass makes the copies
    if changed:
        utilities.post_all_gather_processing(changed)


def _quantizer_of(parameter: torch.Tensor) -> str:
    return (
        type(cast("Any", parameter)._get_quantizer()).__name__
        if is_fp8_parameter(parameter)
        else ""
    )
