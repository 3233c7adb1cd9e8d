"""Connections of a group of all ranks on the host grow with the operations.

The connections do not grow with the number of ranks.
"""

from __future__ import annotations

from benchmarks.world_group import ALL_TO_ALL, AS_NEEDED, Row, lines, measure
from moe_ckpt.sim.hardware import connecting_operations

NUM_RANKS = 24


def test_a_rank_connects_to_those_that_its_operations_need() -> None:
    # processes: the benchmark counts the sockets of processes. The other group connects
    # in torch's own way, for comparison
    needed, all_to_all = measure(NUM_RANKS, AS_NEEDED), measure(NUM_RANKS, ALL_TO_ALL)
    assert all_to_all.num_sockets == NUM_RANKS
    assert needed.num_sockets <= NUM_RANKS / 2
    # the simulator charges `connecting_operations`
    assert connecting_operations(NUM_RANKS) >= needed.to_work > 0 == all_to_all.to_work
    assert all_to_all.to_form >= 2 * NUM_RANKS


def test_the_store_serves_all_ranks_one_after_another() -> None:
    row = Row(
        num_ranks=1000,
        way=AS_NEEDED,
        to_form=10,
        to_work=90,
        num_sockets=12.5,
        seconds=3.0,
    )
    assert lines([row])[-1] == "| 1,000 | as needed | 10 | 90 | 1.70 | 12.5 | 3.00 |"
