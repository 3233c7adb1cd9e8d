"""Small tensors of a device brought to the host in one transfer: each `.cpu()` makes the host wait for the device anew.

Owns: packing, and the counts by which a test without a GPU sees how often the host waits. Must not: serve large
tensors (`copier` does): packing takes a copy of all of them on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ALIGN_BYTES = 16  # at least the size of any number


class HostTransfers:
    """Brings tensors to the host; `num_transfers` counts how often the host has waited for that."""

    def __init__(self) -> None:
        self.num_transfers = 0

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies on the host, in order, each in memory of its own. All tensors are on one device."""
        if not tensors:
            return []
        padded = [_padded_bytes(tensor) for tensor in tensors]
        self.num_transfers += 1
        packed = torch.cat(padded).to("cpu", copy=True)
        parts = packed.split([part.numel() for part in padded])
        return [_restored(part, tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _padded_bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % _ALIGN_BYTES))


def _restored(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return part[: like.nbytes].view(like.dtype).reshape(like.shape).clone()


TRANSFERS = HostTransfers()
"""Those of this process."""
