"""Both implementations of `Ranks` keep one contract.

Threads also fail where real processes would fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ckpt.collectives import (
    Ranks,
    TorchRanks,
    broadcast_result,
    gather_results,
    receive_buffers,
    send_buffers,
)
from moe_ckpt.errors import CheckpointLoadError, PeersLostError
from tests.harness.gloo.ranks import rank_store, run_ranks
from tests.harness.threads.ranks import run_threads


def _use_everything(ranks: Ranks) -> list[Any]:
    """Call the methods of `ranks`, and return all results."""
    tensor = torch.tensor([ranks.rank + 1.0, -ranks.rank])
    reduced = {operation: tensor.clone() for operation in ("sum", "min", "max")}
    for operation, result in reduced.items():
        ranks.reduce(result, operation)  # type: ignore[arg-type]
    ranks.barrier()
    received = torch.zeros(2, dtype=torch.bfloat16)
    sent, other = torch.full((2,), ranks.rank, dtype=torch.bfloat16), 1 - ranks.rank
    transfers = [
        lambda: ranks.send(sent, other),
        lambda: ranks.receive(received, other),
    ]
    # a send may wait for the receiver if ranks are processes
    for transfer in transfers if ranks.rank == 0 else reversed(transfers):
        transfer()
    return [
        ranks.size,
        {operation: result.tolist() for operation, result in reduced.items()},
        [
            (of_rank["rank"], of_rank["tensor"].tolist())
            for of_rank in ranks.gather({"rank": ranks.rank, "tensor": tensor})
        ],
        ranks.broadcast(f"from {ranks.rank}"),
        received.tolist(),
    ]


def _send_buffers(ranks: Ranks) -> list[list[int]]:
    """Send buffers of several sizes to the other rank, then none.

    Returns:
        The contents of the received buffers.
    """
    other = 1 - ranks.rank
    sent = [torch.arange(size, dtype=torch.uint8) for size in (5, 0, 2)]
    if ranks.rank == 0:
        send_buffers(ranks, sent, other)
        send_buffers(ranks, [], other)
        return []
    received = [*receive_buffers(ranks, other), *receive_buffers(ranks, other)]
    assert [buffer.tolist() for buffer in received] == [
        buffer.tolist() for buffer in sent
    ]
    return [buffer.tolist() for buffer in received]


def _fail_on_rank_one(ranks: Ranks) -> tuple[str, str]:
    """Compute a value on each rank, which fails on rank 1.

    Returns:
        The error if all ranks compute, and the value if only rank 0 computes.
    """

    def compute() -> int:
        if ranks.rank == 1:
            raise OSError("rank 1 has no disk")
        return 7

    with pytest.raises(CheckpointLoadError) as error:
        gather_results(ranks, compute, CheckpointLoadError)
    return str(error.value), str(broadcast_result(ranks, compute, CheckpointLoadError))


def _in_process(function: Callable[[Ranks], Any]) -> Any:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=rank_store(), rank=rank, world_size=2)
    return function(TorchRanks())


@pytest.mark.parametrize(
    "function", [_use_everything, _send_buffers, _fail_on_rank_one]
)
def test_threads_and_processes_return_the_same(
    function: Callable[[Ranks], Any],
) -> None:
    in_threads, in_processes = (
        run_threads(2, function),
        run_ranks(2, _in_process, function),
    )
    assert repr(in_threads) == repr(in_processes)
    assert in_threads[1]


def test_a_gathered_value_is_a_copy() -> None:
    shared: list[int] = []
    gathered = run_threads(2, lambda ranks: ranks.gather(shared))
    assert all(value is not shared for values in gathered for value in values)


def test_ranks_in_different_collectives_are_reported() -> None:
    with pytest.raises((AssertionError, PeersLostError), match="disagree"):
        run_threads(2, lambda ranks: ranks.barrier() if ranks.rank else ranks.gather(1))
