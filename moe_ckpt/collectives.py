"""The interface to collective communication, and torch's implementation.

Every method but `send` and `receive` is collective over the group. `engine/` calls
`torch.distributed` only through this module, so the ranks of a job can also be threads
of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist

from moe_ckpt.errors import MoeCkptError

T = TypeVar("T")
Reduction = Literal["sum", "min", "max"]
"""Name of a reduction over ranks."""

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class Ranks(Protocol):
    """One rank's connection to the ranks of its group.

    Ranks are counted within the group. Every method raises PeersLostError if a rank of
    the group is lost.
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        ...

    def reduce(self, tensor: torch.Tensor, operation: Reduction) -> None:
        """Replace the tensor on all ranks by the element-wise reduction.

        Args:
            tensor: A tensor on the device on which the group communicates.
            operation: The reduction.
        """
        ...

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on all ranks."""
        ...

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0 on all ranks."""
        ...

    def barrier(self) -> None:
        """Return once all ranks have called this method."""
        ...

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send to one rank, which receives a tensor of the same shape and type.

        Args:
            tensor: A tensor in host memory.
            rank: The rank that receives the tensor.
        """
        ...

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        """Overwrite the tensor with the next tensor that `rank` sends to this rank.

        Args:
            tensor: A tensor in host memory.
            rank: The rank that sends.
        """
        ...

    def confirm(self) -> None:
        """Return once all operations awaited so far have right results on all ranks.

        Operations of other groups of these ranks, or of some of these ranks, are
        included. All other methods but `send` and `receive` confirm their own results.
        """
        ...


@runtime_checkable
class ConfirmingGroup(Protocol):
    """A process group whose operations may complete with wrong data after a cut.

    Another rank may cut an operation off.
    """

    def confirm(self) -> bool:
        """Return once all results so far are right on all ranks. Collective.

        Returns:
            Whether ranks have met for the confirmation.

        Raises:
            PeersLostError: A rank was lost.
        """
        ...


class TorchRanks:
    """Implements `Ranks` for a process group of torch.

    Args:
        group: The group; None: the default group, which may be formed later.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group)

    def reduce(self, tensor: torch.Tensor, operation: Reduction) -> None:
        dist.all_reduce(tensor, op=_OPERATIONS[operation], group=self._group)
        self.confirm()

    def gather(self, value: T) -> list[T]:
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value, group=self._group)
        self.confirm()
        return values

    def broadcast(self, value: T) -> T:
        values = [value]
        dist.broadcast_object_list(values, group=self._group, group_src=0)
        self.confirm()
        return values[0]

    def barrier(self) -> None:
        if not self._have_met():
            dist.barrier(group=self._group)

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self._require_host(tensor)
        dist.send(tensor, group=self._group, group_dst=rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        self._require_host(tensor)
        dist.recv(tensor, group=self._group, group_src=rank)

    def confirm(self) -> None:
        # ranks decide by these values, so none may come from an operation that was cut
        # off
        self._have_met()

    def _have_met(self) -> bool:
        """Confirm earlier results if the group needs that.

        Returns:
            Whether all ranks have met for the confirmation.
        """
        group = self._group or dist.group.WORLD
        return isinstance(group, ConfirmingGroup) and group.confirm()

    def _require_host(self, tensor: torch.Tensor) -> None:
        # two ranks cannot confirm a transfer: a confirmation takes all ranks of the
        # group
        assert tensor.device.type == "cpu", (
            f"transfers: got a tensor on {tensor.device}, wanted one in host memory"
        )


def broadcast_result(
    ranks: Ranks, compute: Callable[[], T], failure: type[MoeCkptError]
) -> T:
    """Compute on rank 0 and return the value on all ranks. Collective.

    Args:
        ranks: The ranks.
        compute: Returns the value.
        failure: The class of the error on all ranks.

    Raises:
        MoeCkptError: Of class `failure`: `compute` raised OSError or MoeCkptError on
            rank 0.
    """
    outcome = ranks.broadcast(_outcome(compute) if ranks.rank == 0 else None)
    assert outcome is not None
    value, reason = outcome
    if reason is not None:
        raise failure(reason)
    return value  # type: ignore[return-value]


def gather_results(
    ranks: Ranks, compute: Callable[[], T], failure: type[MoeCkptError]
) -> list[T]:
    """Compute on every rank and return all values, by rank, on all ranks. Collective.

    Args:
        ranks: The ranks.
        compute: Returns this rank's value.
        failure: The class of the error on all ranks.

    Raises:
        MoeCkptError: Of class `failure`: `compute` raised OSError or MoeCkptError on a
            rank. The message is the one of the first such rank.
    """
    outcomes = ranks.gather(_outcome(compute))
    for _, reason in outcomes:
        if reason is not None:
            raise failure(reason)
    return [value for value, _ in outcomes]  # type: ignore[misc]


def reduce_extremes(
    ranks: Ranks,
    device: torch.device,
    *,
    largest: Mapping[str, float],
    smallest: Mapping[str, float],
) -> dict[str, float]:
    """Return the largest and smallest values over all ranks, by name, on all ranks.

    Collective: one reduction.

    Args:
        ranks: The ranks.
        device: The device on which the ranks communicate.
        largest: Values of this rank of which the largest is returned.
        smallest: Values of this rank of which the smallest is returned.
    """
    # float64: starts of windows and counts are among the values, and must be exact
    worst = torch.tensor(
        [*largest.values(), *(-value for value in smallest.values())],
        dtype=torch.float64,
        device=device,
    )
    ranks.reduce(worst, "max")
    found = dict(zip((*largest, *smallest), worst.tolist(), strict=True))
    return {
        name: -value if name in smallest else value for name, value in found.items()
    }


def send_buffers(ranks: Ranks, buffers: Sequence[torch.Tensor], rank: int) -> None:
    """Send flat uint8 tensors of any sizes to a rank that calls `receive_buffers`."""
    # the number and the sizes come first: sequences may differ in length
    ranks.send(torch.tensor([len(buffers)]), rank)
    if buffers:
        ranks.send(torch.tensor([buffer.numel() for buffer in buffers]), rank)
    for buffer in buffers:
        ranks.send(buffer, rank)


def receive_buffers(
    ranks: Ranks, rank: int, *, pinned: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return the tensors that a rank sends by `send_buffers`, in host memory.

    Args:
        ranks: The ranks.
        rank: The rank that sends.
        pinned: Whether the tensors are in pinned memory.
    """
    count = torch.zeros(1, dtype=torch.int64)
    ranks.receive(count, rank)
    sizes = torch.zeros(int(count), dtype=torch.int64)
    if len(sizes):
        ranks.receive(sizes, rank)
    received = tuple(
        torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        for size in sizes.tolist()
    )
    for buffer in received:
        ranks.receive(buffer, rank)
    return received


def _outcome(compute: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the value, or the reason why there is none."""
    try:
        return compute(), None
    # kept, not raised: the other ranks would wait for this rank in the collective
    except (OSError, MoeCkptError) as error:
        return None, str(error)
