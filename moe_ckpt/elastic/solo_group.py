"""A process group that only one rank uses.

For groups of size one, and for a process that builds its model alone. Must not: serve
an exchange that needs other ranks' data; such an exchange fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class FinishedWork(dist.Work):
    """The work of an operation that was complete as the call returned."""

    # the signature is torch's
    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        return True

    def is_completed(self) -> bool:
        return True


class SoloGroup:
    """The operations of a group of `size` ranks, as one rank alone performs them.

    Reductions and broadcasts leave tensors unchanged. Gathers return this rank's part
    in place of each rank's part.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def _leave_as_is(self, *_: Any, **__: Any) -> FinishedWork:
        return FinishedWork()

    allreduce = allreduce_coalesced = reduce = broadcast = barrier = _leave_as_is

    def allgather(self, outputs: Any, inputs: Any, *_: Any, **__: Any) -> FinishedWork:
        for gathered, own in zip(outputs, inputs, strict=True):
            for output in gathered:
                output.copy_(own)
        return FinishedWork()

    def _allgather_base(
        self, output: torch.Tensor, own: torch.Tensor, *_: Any, **__: Any
    ) -> FinishedWork:
        output.view(self._size, -1).copy_(own.reshape(1, -1).expand(self._size, -1))
        return FinishedWork()

    def allgather_into_tensor_coalesced(
        self, outputs: Any, inputs: Any, *_: Any, **__: Any
    ) -> FinishedWork:
        for output, own in zip(outputs, inputs, strict=True):
            self._allgather_base(output, own)
        return FinishedWork()

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs: Any, inputs: Any, *_: Any, **__: Any) -> FinishedWork:
        return self.allgather(outputs, inputs) if outputs else FinishedWork()

    def scatter(self, outputs: Any, inputs: Any, *_: Any, **__: Any) -> FinishedWork:
        return self._exchange(outputs, [group[0] for group in inputs])

    reduce_scatter = scatter

    def reduce_scatter_tensor_coalesced(
        self, outputs: Any, inputs: Any, *_: Any, **__: Any
    ) -> FinishedWork:
        return self._exchange(outputs, inputs)

    alltoall = reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall_base(
        self, output: torch.Tensor, own: torch.Tensor, *_: Any, **__: Any
    ) -> FinishedWork:
        return self._exchange([output], [own])

    _reduce_scatter_base = reduce_scatter_single = all_to_all_single = alltoall_base

    def send(self, *_: Any, **__: Any) -> FinishedWork:
        raise RuntimeError(
            f"process groups are not formed yet: got a message among {self._size} ranks"
        )

    recv = recv_anysource = send

    def _exchange(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> FinishedWork:
        # this rank's part in place of the other ranks' parts would silently give
        # another model
        if self._size != 1:
            raise RuntimeError(
                f"process groups are not formed yet: got an exchange among {self._size}"
                " ranks"
            )
        for output, own in zip(outputs, inputs, strict=True):
            output.copy_(own)
        return FinishedWork()
