"""What simulated ranks know of their iterations, windows and replays."""

from __future__ import annotations

import pytest

from moe_ckpt.sim.measuring import SETTLED, Beginning, Known
from moe_ckpt.types import ENOUGH_WINDOWS, RECENT_ITERS


def test_ranks_know_the_median_of_their_last_iterations() -> None:
    begin = Beginning(measured=(9.0, 9.0), coming=(5.0, 1.0, 2.0, 4.0), unmeasured=2)
    lengths = [known.length for offset in range(6) if (known := begin.known(offset, 0))]
    assert lengths == [9.0, 9.0, 9.0, 9.0, 6.5, 4.0], "iterations 1 and 2 do not count, and 1 follows 4"
    assert begin.known(4 + RECENT_ITERS, 0) == Known(length=1.0, num_costs=0, replayed=None, kept_since=None)
    assert Beginning(unmeasured=2).known(2, 0) is None


def test_costs_are_those_of_windows_that_others_surround() -> None:
    begin = Beginning(measured=(1.0,), num_costs=1, age_iters=4)
    knowns = [begin.known(9, num_begun) for num_begun in (0, 1, 2, 3, 99)]
    assert [known.num_costs for known in knowns if known] == [1, 1, 1, 2, ENOUGH_WINDOWS]
    assert {known.kept_since for known in knowns if known} == {-4}


@pytest.mark.parametrize(
    ("begin", "settles_after"),
    [
        (SETTLED, 0),
        (Beginning(num_costs=ENOUGH_WINDOWS, coming=(1.0, 0.5)), 2 + RECENT_ITERS),
        (Beginning(num_costs=ENOUGH_WINDOWS, measured=(1.0, 0.5)), RECENT_ITERS),
    ],
)
def test_all_is_settled_once_different_iterations_are_forgotten(begin: Beginning, settles_after: int) -> None:
    assert [begin.is_settled(offset, 0) for offset in (settles_after - 1, settles_after)] == [settles_after == 0, True]


def test_nothing_is_settled_before_the_costs_of_windows_are() -> None:
    are_settled = [Beginning(measured=(1.0,)).is_settled(9, num_begun) for num_begun in range(ENOUGH_WINDOWS + 3)]
    assert are_settled.index(True) == ENOUGH_WINDOWS + 2
