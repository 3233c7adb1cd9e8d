"""Staged groups compute as gloo does, and only the waiting thread writes to tensors.

A staged group is gloo through host memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ckpt.config import STAGED
from moe_ckpt.elastic.process_groups import ELASTIC
from moe_ckpt.elastic.staged import register_staged, staged_backend
from tests.harness.gloo.collectives import (
    call_all,
    make_groups,
    ones,
    outcome_of,
    over_generations,
    with_plain_gloo,
)
from tests.harness.gloo.ranks import rank_store, run_ranks
from tests.harness.gloo.workers import (
    meet,
    open_groups,
    open_store,
    own_rank,
    wait_until,
)

CPU = torch.device("cpu")


def staged_over_generations(folder: str, device: str) -> list[dict[str, Any]]:
    torch.set_default_device(device)
    return over_generations(
        folder, ELASTIC, (1, 2), staged_backend(torch.device(device))
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_staged_groups_compute_the_same_as_gloo_in_every_generation(
    tmp_path: Path, device: str
) -> None:
    wanted = run_ranks(3, with_plain_gloo)
    assert run_ranks(3, staged_over_generations, str(tmp_path), device) == [
        [want] * 2 for want in wanted
    ]


def without_generations(device: str) -> dict[str, Any]:
    torch.set_default_device(device)
    register_staged()
    register_staged()
    dist.init_process_group(STAGED, store=rank_store(), rank=own_rank(), world_size=3)
    assert dist.get_backend() == STAGED
    return call_all(make_groups(STAGED))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_staged_is_a_backend_of_torch(device: str) -> None:
    assert run_ranks(3, without_generations, device) == run_ranks(3, with_plain_gloo)


def write_into_views() -> tuple[list[float], list[float]]:
    """Return the gradients and weights in the buffers of a sharded optimizer.

    A rank's shard is a view of the buffer that is the source of the shard.
    """
    register_staged()
    dist.init_process_group(STAGED, store=rank_store(), rank=own_rank(), world_size=2)
    gradients, weights = ones(4), torch.zeros(4)
    shard = slice(2 * own_rank(), 2 * own_rank() + 2)
    dist.reduce_scatter_tensor(gradients[shard], gradients)
    weights[shard] = gradients[shard]
    dist.all_gather_into_tensor(weights, weights[shard])
    return gradients.tolist(), weights.tolist()


def test_a_result_that_is_a_view_of_its_source_is_kept() -> None:
    summed = [11.0, 22.0, 33.0, 44.0]
    first, second = run_ranks(2, write_into_views)
    assert first == ([11.0, 22.0, 3.0, 4.0], summed)
    assert second == ([10.0, 20.0, 33.0, 44.0], summed)


def wait_after_a_leave(
    folder: str,
) -> tuple[list[float], list[float], str, list[float]]:
    """Wait for one operation in its generation, and for another one after a leave.

    Returns:
        The first operation's tensor before and after the wait, the outcome of the
        second wait, and the second operation's tensor.
    """
    groups = open_groups(own_rank(), 2, backend=staged_backend(CPU))
    groups.form(open_store(folder), 1)
    in_time, late = ones(2), ones(2)
    begun: list[Any] = [
        dist.all_reduce(tensor, async_op=True) for tensor in (in_time, late)
    ]
    assert wait_until(lambda: all(work.is_completed() for work in begun))
    before = in_time.tolist()
    begun[0].wait()
    meet(open_store(folder), "the host has all results", 2)
    groups.leave()
    outcome = outcome_of(begun[1].wait)
    meet(open_store(folder), "both have waited", 2)
    return before, in_time.tolist(), outcome, late.tolist()


def test_an_operation_of_an_ended_generation_writes_to_no_tensor(
    tmp_path: Path,
) -> None:
    for rank, found in enumerate(run_ranks(2, wait_after_a_leave, str(tmp_path))):
        mine = [10.0**rank, 2 * 10.0**rank]
        assert found == (mine, [11.0, 22.0], "PeersLostError", mine)
