"""Where all ranks are to be: a table, and a property over random standings. Jobs that stop anywhere: modelled.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.recovery.target import Standing, Target, plan_target

Row = tuple[int | None, str]
"""What a rank reached, and whether it is prepared for one more ("p") and whole ("w")."""


def standings_of(*stages: list[Row]) -> list[Standing]:
    return [
        Standing(stage=stage, reached=reached, prepared="p" in flags, whole="w" in flags)
        for stage, rows in enumerate(stages)
        for reached, flags in rows
    ]


DEAD: Row = (None, "")
AT_7: Row = (7, "w")
READY_7: Row = (7, "pw")
HALF_8: Row = (8, "")
AT_8: Row = (8, "w")


@pytest.mark.parametrize(
    ("stages", "iteration", "lost", "finishing"),
    [
        pytest.param([[AT_8], [AT_8, AT_8]], 8, [], [], id="all are there"),
        pytest.param([[AT_8, READY_7]], 8, [], [0], id="one rank has to take it, too"),
        pytest.param([[READY_7, AT_8], [AT_8, DEAD], [AT_8, AT_8]], 8, [1], [0], id="the one in the docstring"),
        pytest.param([[AT_7, AT_8], [AT_8, DEAD], [AT_8, AT_8]], 8, [0, 1], [], id="and the other"),
        pytest.param([[HALF_8, AT_8], [AT_8]], 8, [], [0], id="weights to be gathered"),
        pytest.param([[HALF_8, DEAD], [AT_8]], 8, [0], [], id="a lost stage has nothing to finish"),
        pytest.param([[(1, "")], [DEAD, (0, "p")]], 1, [1], [0], id="no state is not state 0"),
        pytest.param([[(0, "p")], [(None, "p")]], 0, [1], [0], id="who has no state is prepared for nothing"),
    ],
)
def test_target(stages: list[list[Row]], iteration: int, lost: list[int], finishing: list[int]) -> None:
    expected = Target(iteration=iteration, lost_stages=frozenset(lost), finishing_stages=frozenset(finishing))
    assert plan_target(standings_of(*stages)) == expected


def test_without_any_state_there_is_no_target() -> None:
    assert plan_target(standings_of([DEAD, DEAD], [(None, "pw")])) is None


rows = st.tuples(st.none() | st.integers(0, 3), st.sampled_from(["", "p", "w", "pw"]))


@given(stages=st.lists(st.lists(rows, min_size=1, max_size=3), min_size=1, max_size=5))
def test_a_stage_stays_if_each_of_its_ranks_can(stages: list[list[Row]]) -> None:
    target = plan_target(standings_of(*stages))
    reached = [row[0] for ranks in stages for row in ranks if row[0] is not None]
    if target is None:
        assert not reached
        return
    assert target.iteration == max(reached)
    for stage, ranks in enumerate(stages):
        can = [at == target.iteration or (at == target.iteration - 1 and "p" in flags) for at, flags in ranks]
        there = [at == target.iteration and "w" in flags for at, flags in ranks]
        assert (stage in target.lost_stages) == (not all(can))
        assert (stage in target.finishing_stages) == (all(can) and not all(there))
