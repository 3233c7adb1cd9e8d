"""Brings device tensors to the host during an iteration with few waits.

For logs, counts of tokens, states of generators and digests, of `moe_ckpt.megatron` and
of this package. Each `.cpu()` makes the host wait once more. Owns: the packing of small
tensors into one transfer, copies of larger tensors for which the host waits later, and
the count of transfers, by which a test without a GPU checks how often the host waits.
Must not: serve snapshots (`copier` does).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HostTransfers:
    """Brings tensors to the host.

    Attributes:
        num_transfers: How often `fetch` has made the host wait. Waits of
            `PendingCopy.result` are not counted.
    """

    def __init__(self) -> None:
        self.num_transfers = 0

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of tensors on the host, in one transfer.

        Args:
            tensors: Tensors, all on one device.

        Returns:
            The copies in the same order, each in memory of its own.
        """
        if not tensors:
            return []
        flat = [bytes_of(tensor) for tensor in tensors]
        # larger elements first: each part is then aligned to its element size
        order = sorted(
            range(len(tensors)), key=lambda index: -tensors[index].element_size()
        )
        self.num_transfers += 1
        packed = torch.cat([flat[index] for index in order]).to("cpu", copy=True)
        parts = packed.split([flat[index].numel() for index in order])
        on_host = dict(zip(order, parts, strict=True))
        # cloned: otherwise the smallest tensor would keep the whole transfer in memory
        return [
            on_host[index].view(tensor.dtype).view(tensor.shape).clone()
            for index, tensor in enumerate(tensors)
        ]


class PendingCopy:
    """A copy on the host that the device makes in the order of the current stream.

    The host waits only in `result`.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        pinned = tensor.is_cuda  # with pageable memory the host would wait at once
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
    """Return a tensor's elements as flat uint8 bytes; a view of contiguous elements."""
    # contiguous first: a reshape of a one-dimensional slice with a step copies nothing,
    # and a view as bytes needs contiguous elements
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


TRANSFERS = HostTransfers()
"""Transfers of this process."""
