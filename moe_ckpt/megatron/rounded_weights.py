"""Weights that a layer rounds in each forward pass, without storing the result.

Owns: the mark of such weights, by which snapshots and digests get the values that
passes compute with. Must not: round. Transformer Engine stores FP8 weights as
parameters of their own (`fp8_parameters`); a layer of `moe_ckpt.standins` marks its
weights instead.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moe_ckpt.megatron.fp8_parameters import is_fp8_parameter, payload_of, scales_of

_ROUNDING = "moe_ckpt_rounding"


class Rounding(Protocol):
    """How forward passes round a weight."""

    def rounded(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the payload, of the shape of the weight, and all scales."""
        ...

    def values(
        self,
        weight: torch.Tensor,
        payload: torch.Tensor,
        scale: torch.Tensor,
        owned: slice,
    ) -> torch.Tensor:
        """Return the values of a part of a weight from payload and scales.

        Args:
            weight: The weight, of which only the shape is used.
            payload: The payload of the part, flattened.
            scale: All scales of the weight, flattened or not.
            owned: The part's elements in the flattened weight.

        Returns:
            The values of the part, float32, flattened.
        """
        ...


def mark_rounded(weight: torch.Tensor, rounding: Rounding) -> None:
    """Note how forward passes round a weight."""
    setattr(weight, _ROUNDING, rounding)


def rounding_of(weight: torch.Tensor) -> Rounding | None:
    """Return the `Rounding` of a weight; None if passes compute with the weight itself.

    Delayed scaling takes its scales from earlier passes, and has no rounding.
    """
    return getattr(weight, _ROUNDING, None)


def forward_tensors(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the weights with which forward passes compute, by a suffix of the name.

    Returns:
        Values under "", or a payload under "" and scales under ".scale".
    """
    if is_fp8_parameter(parameter):
        return {"": payload_of(parameter), ".scale": scales_of(parameter)}
    weights, rounding = parameter.detach(), rounding_of(parameter)
    if rounding is None:
        return {"": weights}
    payload, scale = rounding.rounded(weights)
    values = rounding.values(weights, payload.view(-1), scale, slice(None))
    return {"": values.view(weights.shape).to(weights.dtype)}
