"""Ranks receive and keep few bytes as they enter a generation.

A job of 16,384 ranks enters a generation after each fault. The limit of received bytes,
64 KiB and 100 bytes per rank of the job, is 1.7 MB there.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.control_plane import kept_bytes, measure, profiles_of, shared_by_stages
from moe_ckpt.sim.hardware import STORE_OPERATIONS


def test_bytes_and_store_operations_of_a_rank_stay_few() -> None:
    rows = [measure(num_ranks, "small") for num_ranks in (128, 256)]
    assert all(row.total_bytes <= 65536 + 100 * row.ranks for row in rows)
    assert rows[0].join_operations == rows[1].join_operations == STORE_OPERATIONS
    assert rows[1].agree_bytes < 2 * rows[0].agree_bytes + 24, (
        "a description for each kind of stage"
    )


def test_a_rank_keeps_less_than_numbers_of_all_ranks_and_operators() -> None:
    """The kept bytes include names.

    Most of 64 ranks own nothing of most of 73 operators.
    """
    profiles = profiles_of("small", 128)
    dense_bytes = sum(3 * profile.table.full_bytes.nbytes for profile in profiles)
    assert kept_bytes(shared_by_stages(profiles)) < dense_bytes / 4


def test_numbers_that_several_values_keep_are_counted_once() -> None:
    numbers = np.zeros(1000, np.int64)
    one, view = kept_bytes([numbers]), kept_bytes([numbers, numbers[:10]])
    assert 8000 < one < view < one + 200


@pytest.mark.parametrize("num_ranks", [4, 32, 128])
def test_a_job_of_few_ranks_has_two_stages(num_ranks: int) -> None:
    profiles = profiles_of("small", num_ranks)
    assert [profile.table.owned.num_ranks for profile in profiles] == [
        num_ranks // 2
    ] * 2
