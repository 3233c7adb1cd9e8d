"""The gradients of an update, from the sums that a server has captured.

Owns: the way from a parameter's offset in a bucket to the parameter's gradient. Must
not: capture sums (`capture` does). FlowCheck, section 4.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.flowcheck.mirror.plan import Mirrored, MirroredSums
from moe_ckpt.snapshot.adam_update import ObservedGradients
from moe_ckpt.snapshot.arriving_update import OpenGradients, ReadGradient

CapturedSums = Callable[[MirroredSums], list[bytearray]]
"""Returns the bytes of each bucket that a server has captured. Raises
CheckpointLoadError if bytes of a bucket are missing.
"""


def from_sums(captured: CapturedSums) -> OpenGradients:
    """Return the opener of gradients for a server that captures sums.

    Args:
        captured: Returns the captured sums of a group.
    """

    def open_gradients(observed: ObservedGradients) -> ReadGradient:
        try:
            mirrored = Mirrored.from_json(observed.source)
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointLoadError(
                f"captured gradients of an update: {error!r}"
            ) from error
        if len(mirrored.offsets) != sum(observed.weights):
            raise CheckpointLoadError(
                f"captured gradients of an update: got {len(mirrored.offsets)} places,"
                f" wanted {sum(observed.weights)}"
            )
        return _CapturedGradients(mirrored, captured).read

    return open_gradients


class _CapturedGradients:
    """Captured sums of an update. Each group is requested with its first gradient."""

    def __init__(self, mirrored: Mirrored, captured: CapturedSums) -> None:
        self._mirrored = mirrored
        self._captured = captured
        self._buckets: dict[int, list[torch.Tensor]] = {}

    def read(self, number: int, numel: int) -> torch.Tensor:
        """Return a captured gradient in float32, as the optimizer uses the gradient.

        Args:
            number: Number of the gradient among the captured gradients.
            numel: Number of elements.

        Raises:
            CheckpointLoadError: The gradient was not captured, or the gradient's offset
                lies outside the bucket.
        """
        offset = self._mirrored.offsets[number]
        if offset.group not in self._buckets:
            self._buckets[offset.group] = self._request(offset.group)
        bucket = self._buckets[offset.group][offset.bucket]
        if offset.start + numel > bucket.numel():
            raise CheckpointLoadError(
                f"got {offset} for {numel} elements, wanted a place within"
                f" {bucket.numel()}"
            )
        return bucket[offset.start : offset.start + numel].float()

    def _request(self, number: int) -> list[torch.Tensor]:
        # requested only now: captured frames may still arrive during the steps of
        # tapped gradients
        group = self._mirrored.groups[number]
        dtype = getattr(torch, group.dtype)
        return [torch.frombuffer(each, dtype=dtype) for each in self._captured(group)]
