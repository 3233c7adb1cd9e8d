"""Tensors of a device brought to the host in the course of an iteration: each `.cpu()`
makes the host wait anew.

Owns: packing small tensors into one transfer, copies of larger ones for which the host
waits later, and the counts by which a test without a GPU sees how often it waits. Must
not: serve snapshots (`copier` does).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HostTransfers:
    """Brings tensors to the host; `num_transfers` counts how often the host has waited
    for that.
    """

    def __init__(self) -> None:
        self.num_transfers = 0

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies on the host, in order, each in memory of its own. All tensors
        are on one device.
        """
        if not tensors:
            return []
        flat = [bytes_of(tensor) for tensor in tensors]
        # larger elements first: each part is then aligned to its elements
        order = sorted(
            range(len(tensors)), key=lambda index: -tensors[index].element_size()
        )
        self.num_transfers += 1
        packed = torch.cat([flat[index] for index in order]).to("cpu", copy=True)
        parts = packed.split([flat[index].numel() for index in order])
        on_host = dict(zip(order, parts, strict=True))
        # a clone of each, or the smallest would keep the whole transfer in memory
        return [
            on_host[index].view(tensor.dtype).view(tensor.shape).clone()
            for index, tensor in enumerate(tensors)
        ]


class PendingCopy:
    """A copy on the host that the device makes in the order of the current stream; the
    host waits in `result`.
    """

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


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as flat bytes, uint8: a view, if they are contiguous."""
    # contiguous first: to reshape a slice with a step in one dimension copies nothing
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


TRANSFERS = HostTransfers()
"""Those of this process."""
