"""Batched pipeline transfers for groups of other types than torch's `ProcessGroup`.

Must not: begin a batch for an inner group that cannot batch transfers, such as gloo's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def batch_transfers_of(handles: type[Any]) -> None:
    """Let `torch.distributed.batch_isend_irecv` also batch transfers of a group type.

    Args:
        handles: The type of the groups.
    """
    if not isinstance(dist.batch_isend_irecv, BatchedTransfers):
        dist.batch_isend_irecv = BatchedTransfers(dist.batch_isend_irecv, handles)


class BatchedTransfers:
    """A `torch.distributed.batch_isend_irecv` that also batches transfers of handles.

    Before torch 2.14, torch's own function begins the transfers one after another
    unless the group's type is exactly `ProcessGroup`.
    """

    def __init__(
        self, plain: Callable[[list[dist.P2POp]], list[dist.Work]], handles: type[Any]
    ) -> None:
        """Wrap torch's function.

        Args:
            plain: torch's own `batch_isend_irecv`, for all other groups.
            handles: The type of the groups whose transfers are batched here.
        """
        self._plain = plain
        self._handles = handles

    def __call__(self, p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        group: Any = (p2p_op_list[0].group or dist.group.WORLD) if p2p_op_list else None
        if not isinstance(group, self._handles):
            return self._plain(p2p_op_list)
        device = p2p_op_list[0].tensor.device
        if not group._get_backend(device).supports_coalescing:
            return [
                work for operation in p2p_op_list if (work := _begin(operation, group))
            ]
        group._start_coalescing(device)
        try:
            for operation in p2p_op_list:
                _begin(operation, group)
        except BaseException:
            group.drop_batch()
            raise
        return [group._end_coalescing(device)]


def _begin(transfer: dist.P2POp, group: dist.ProcessGroup) -> dist.Work | None:
    peer = "group_dst" if transfer.op is dist.isend else "group_src"
    return transfer.op(
        transfer.tensor, group=group, tag=transfer.tag, **{peer: transfer.group_peer}
    )
