"""What ranks receive as they enter a generation: few operations in the store, and few bytes beside 100 a rank."""

from __future__ import annotations

from benchmarks.control_plane import measure
from moe_ckpt.sim.hardware import STORE_OPERATIONS


def test_bytes_and_store_operations_of_a_rank_stay_few() -> None:
    rows = [measure(num_ranks, "small") for num_ranks in (128, 256)]
    assert all(row.total_bytes <= 65536 + 100 * row.ranks for row in rows)
    assert rows[0].join_operations == rows[1].join_operations == STORE_OPERATIONS
    assert rows[1].agree_bytes < 2 * rows[0].agree_bytes + 24, "a description for each kind of stage"
