"""Megatron's calls on process groups, and the results of each call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from tests.harness.gloo.ranks import rank_store
from tests.harness.gloo.workers import meet, open_groups, open_store, own_rank
from tests.waits import WAIT_S

_HAS_ALL_TO_ALL = TorchVersion(torch.__version__) >= "2.13"
"""gloo of torch 2.11 cannot exchange lists of tensors. Megatron makes no such exchange.
"""


def ones(*sizes: int) -> torch.Tensor:
    """Return a tensor of the given sizes, with values that no other rank has."""
    return (
        torch.arange(1.0, 1 + torch.Size(sizes).numel()).reshape(sizes)
        * 10 ** own_rank()
    )


def parts(size: int) -> list[torch.Tensor]:
    return list(ones(size, 2).unbind())


def zeros(size: int) -> list[torch.Tensor]:
    return [torch.zeros(2) for _ in range(size)]


# Megatron's calls. Each takes a group that contains the calling rank, and `ranks`, the
# global ranks of the group's members.


def all_reduce(group: Any, ranks: list[int]) -> Any:
    dist.all_reduce(total := ones(3), group=group)
    return total


def all_reduce_later(group: Any, ranks: list[int]) -> Any:
    work = dist.all_reduce(
        largest := ones(3), op=dist.ReduceOp.MAX, group=group, async_op=True
    )
    assert work is not None
    work.wait()
    return largest, work.is_completed()


def all_reduce_coalesced(group: Any, ranks: list[int]) -> Any:
    with dist._coalescing_manager(group=group):
        dist.all_reduce(first := ones(2), group=group)
        dist.all_reduce(second := ones(3), group=group)
    return first, second


def broadcast(group: Any, ranks: list[int]) -> Any:
    dist.broadcast(tensor := ones(3), src=ranks[-1], group=group)
    return tensor


def broadcast_object(group: Any, ranks: list[int]) -> Any:
    dist.broadcast_object_list(
        objects := [f"of rank {own_rank()}"], src=ranks[-1], group=group
    )
    return objects


def reduce(group: Any, ranks: list[int]) -> Any:
    dist.reduce(total := ones(3), dst=ranks[-1], group=group)
    # gloo leaves the tensors of the other ranks undefined
    return total if own_rank() == ranks[-1] else None


def barrier(group: Any, ranks: list[int]) -> Any:
    dist.barrier(group)


def all_gather(group: Any, ranks: list[int]) -> Any:
    dist.all_gather(gathered := zeros(len(ranks)), ones(2), group=group)
    return gathered


def all_gather_into_tensor(group: Any, ranks: list[int]) -> Any:
    dist.all_gather_into_tensor(
        gathered := torch.zeros(2 * len(ranks)), ones(2), group=group
    )
    return gathered


def all_gather_coalesced(group: Any, ranks: list[int]) -> Any:
    first, second = torch.zeros(2 * len(ranks)), torch.zeros(len(ranks))
    with dist._coalescing_manager(group=group):
        dist.all_gather_into_tensor(first, ones(2), group=group)
        dist.all_gather_into_tensor(second, ones(1), group=group)
    return first, second


def all_gather_object(group: Any, ranks: list[int]) -> Any:
    objects: list[Any] = [None] * len(ranks)
    dist.all_gather_object(objects, {"rank": own_rank()}, group=group)
    return objects


def gather(group: Any, ranks: list[int]) -> Any:
    gathered = zeros(len(ranks)) if own_rank() == ranks[-1] else None
    dist.gather(ones(2), gathered, dst=ranks[-1], group=group)
    return gathered


def gather_object(group: Any, ranks: list[int]) -> Any:
    objects: list[Any] | None = [None] * len(ranks) if own_rank() == ranks[-1] else None
    dist.gather_object({"rank": own_rank()}, objects, dst=ranks[-1], group=group)
    return objects


def scatter(group: Any, ranks: list[int]) -> Any:
    mine = torch.zeros(2)
    dist.scatter(
        mine,
        parts(len(ranks)) if own_rank() == ranks[-1] else None,
        src=ranks[-1],
        group=group,
    )
    return mine


def reduce_scatter(group: Any, ranks: list[int]) -> Any:
    dist.reduce_scatter(mine := torch.zeros(2), parts(len(ranks)), group=group)
    return mine


def reduce_scatter_tensor(group: Any, ranks: list[int]) -> Any:
    dist.reduce_scatter_tensor(
        mine := torch.zeros(2), ones(2 * len(ranks)), group=group
    )
    return mine


def reduce_scatter_coalesced(group: Any, ranks: list[int]) -> Any:
    first, second = torch.zeros(2), torch.zeros(1)
    with dist._coalescing_manager(group=group):
        dist.reduce_scatter_tensor(first, ones(2 * len(ranks)), group=group)
        dist.reduce_scatter_tensor(second, ones(len(ranks)), group=group)
    return first, second


def all_to_all(group: Any, ranks: list[int]) -> Any:
    dist.all_to_all(received := zeros(len(ranks)), parts(len(ranks)), group=group)
    return received


def all_to_all_single(group: Any, ranks: list[int]) -> Any:
    """Exchange tokens in uneven parts.

    Every rank sends one token to the group's first rank, two to the second, and so on.
    """
    index, size = ranks.index(own_rank()), len(ranks)
    sent, received = [1 + other for other in range(size)], [1 + index] * size
    dist.all_to_all_single(
        output := torch.zeros(sum(received)),
        ones(sum(sent)),
        received,
        sent,
        group=group,
    )
    return output


def send(group: Any, ranks: list[int]) -> Any:
    index, tensor = ranks.index(own_rank()), ones(2)
    if index > 0:
        dist.recv(tensor, ranks[index - 1], group=group)
    if index < len(ranks) - 1:
        dist.send(tensor, ranks[index + 1], group=group)
    return tensor


def send_around(group: Any, ranks: list[int]) -> Any:
    index = ranks.index(own_rank())
    to, source = ranks[(index + 1) % len(ranks)], ranks[index - 1]
    sending = dist.P2POp(dist.isend, ones(2), to, group)
    receiving = dist.P2POp(dist.irecv, received := torch.zeros(2), source, group)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()
    return received


COLLECTIVES = (
    *(
        all_reduce,
        all_reduce_later,
        all_reduce_coalesced,
        broadcast,
        broadcast_object,
        reduce,
        barrier,
    ),
    *(
        all_gather,
        all_gather_into_tensor,
        all_gather_coalesced,
        all_gather_object,
        gather,
        gather_object,
    ),
    *(
        scatter,
        reduce_scatter,
        reduce_scatter_tensor,
        reduce_scatter_coalesced,
        all_to_all_single,
    ),
    *((all_to_all,) if _HAS_ALL_TO_ALL else ()),
    *(send, send_around),
)


def plain(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.tolist()
    return (
        [plain(part) for part in result] if isinstance(result, list | tuple) else result
    )


def call_all(group_ranks: list[tuple[Any, list[int]]]) -> dict[str, Any]:
    """Return each collective's results, by name, in all groups that have this rank."""
    mine = [(group, ranks) for group, ranks in group_ranks if own_rank() in ranks]
    return {
        call.__name__: [plain(call(group, ranks)) for group, ranks in mine]
        for call in COLLECTIVES
    }


def make_groups(name: str) -> list[tuple[Any, list[int]]]:
    members = [[0, 2], [1, 2], [0, 1, 2]]
    return [
        (dist.group.WORLD, [0, 1, 2]),
        *((dist.new_group(ranks, backend=name), ranks) for ranks in members),
    ]


def with_plain_gloo() -> dict[str, Any]:
    dist.init_process_group("gloo", store=rank_store(), rank=own_rank(), world_size=3)
    return call_all(make_groups("gloo"))


def over_generations(
    folder: str, name: str, generations: Sequence[int], backend: Any = None
) -> list[dict[str, Any]]:
    """Return this rank's results of each collective, for each generation.

    The world has three ranks.
    """
    groups = open_groups(own_rank(), 3, backend=backend)
    group_ranks, store = make_groups(name), open_store(folder)
    results = []
    for generation in generations:
        groups.form(open_store(folder), generation)
        results.append(call_all(group_ranks))
        assert group_ranks[0][0] is dist.group.WORLD
        meet(store, f"the end of {generation}", 3)
        groups.leave()
    return results


def outcome_of(call: Callable[[], object]) -> str:
    """Return how a call ended, with `late` at the end if the call took too long.

    A call is late after a third of WAIT_S. Only gloo's own time limits end such a call.
    """
    begun_s = time.monotonic()
    try:
        outcome = f"got {call()}"
    except Exception as error:  # tests compare the type of the error
        outcome = type(error).__name__
    return outcome if time.monotonic() - begun_s < WAIT_S / 3 else f"{outcome}, late"
