"""Tensors of a device brought to the host in the course of an iteration: each `.cpu()` makes the host wait anew.

Owns: packing small tensors into one transfer, copies of larger ones for which the host waits later, and the counts by
which a test without a GPU sees how often it waits. Must not: serve snapshots (`copier` does).
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


class PendingCopy:
    """A copy on the host that the device makes in the order of the current stream; the host waits in `result`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        pinned = tensor.is_cuda  # from pageable memory the host would wait at once
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        self._host.copy_(tensor.detach(), non_blocking=True)
        self._copied = torch.cuda.Event() if pinned else None
        if self._copied:
            self._copied.record()

    def result(self) -> torch.Tensor:
        """Return the copy once it is complete."""
        if self._copied:
            self._copied.synchronize()
        return self._host


def _padded_bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % _ALIGN_BYTES))


def _restored(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return part[: like.nbytes].view(like.dtype).reshape(like.shape).clone()


TRANSFERS = HostTransfers()
"""Those of this process."""
