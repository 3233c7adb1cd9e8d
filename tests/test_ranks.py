"""Forked ranks are real processes, failures are readable, and nothing hangs.

The ranks are those of `tests.harness.gloo.ranks`.

Tests of status pages and of hanging devices prove that a killed rank fails its test.
"""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness.gloo.ranks import RankFailedError, rank_store, run_ranks


def _sum_of_ranks() -> tuple[int, int]:
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", store=rank_store(), rank=rank, world_size=int(os.environ["WORLD_SIZE"])
    )
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return os.getpid(), int(total)


def _raise_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("a message to be seen")


def _never_return() -> None:
    print(os.getpid())
    time.sleep(3600)


def test_ranks_are_processes_of_their_own_that_can_communicate() -> None:
    results = run_ranks(3, _sum_of_ranks)
    assert [total for _, total in results] == [3, 3, 3]
    assert len({pid for pid, _ in results} | {os.getpid()}) == 4


def test_a_raising_rank_fails_the_test_with_its_traceback() -> None:
    with pytest.raises(
        RankFailedError, match=r"(?s)rank 1 raised.*a message to be seen"
    ):
        run_ranks(2, _raise_on_rank_1)


def test_a_hung_rank_is_killed_at_the_deadline() -> None:
    with pytest.raises(RankFailedError, match="rank 0 unfinished"):
        run_ranks(1, _never_return, timeout_s=1.0)
