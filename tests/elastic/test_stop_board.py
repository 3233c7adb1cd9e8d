"""Ranks of a stopping job find the newest iteration that all ranks have saved.

No rank waits for another rank.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from moe_ckpt.elastic.stop_board import StopBoard


@pytest.fixture
def board() -> StopBoard:
    store = dist.HashStore()
    # limits the wait for a key that is not there
    store.set_timeout(timedelta(seconds=1))
    return StopBoard(store, 3)


def test_the_last_rank_finds_the_newest_that_all_have(board: StopBoard) -> None:
    assert board.report(2, [4, 6]) is None
    assert board.report(0, [2, 4, 6]) is None
    assert board.report(1, [2, 4]) == 4


def test_one_of_two_ranks_that_see_all_reports_is_told(board: StopBoard) -> None:
    for rank in range(3):
        board.report(rank, [4])
    assert board.report(1, [4]) is None, (
        "as a rank that has written before the last, and looks after it"
    )


def test_ranks_without_a_common_iteration_find_none(board: StopBoard) -> None:
    assert [board.report(rank, [rank]) for rank in range(3)] == [None] * 3


def test_reports_of_an_earlier_stop_are_void_once_their_rank_is_started(
    board: StopBoard,
) -> None:
    for rank in range(3):
        board.report(rank, [4])
    for rank in range(3):
        board.begin(rank)
    assert [board.report(rank, [8]) for rank in range(3)] == [None, None, 8]
