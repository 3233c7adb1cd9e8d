"""Where everybody is to be: tables, and properties over random standings and over jobs that die at any moment."""

from __future__ import annotations

from collections import Counter
from random import Random

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


def test_where_nobody_has_state_there_is_no_target() -> None:
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


def stopped_step(random: Random) -> tuple[list[list[Row]], bool]:
    """Stop a job in the middle of iteration 8, kill some ranks, and tell whether the vote had passed.

    A rank may have taken the step only when all ranks are prepared, and have whole weights only when all ranks of its
    stage have taken it.
    """
    num_stages, num_ranks = random.randint(1, 5), random.randint(1, 4)
    passed, is_dead = random.random() < 0.6, random.choice([0.1, 0.4])

    def rank(all_stepped: bool) -> Row:
        if not passed:
            return 7, random.choice(["w", "pw"])
        if all_stepped:
            return 8, random.choice(["", "w"])
        return random.choice([HALF_8, READY_7])

    stages = []
    for _ in range(num_stages):
        all_stepped = random.random() < 0.5
        stages.append([DEAD if random.random() < is_dead else rank(all_stepped) for _ in range(num_ranks)])
    return stages, passed


def test_only_the_stages_of_the_dead_are_lost_whenever_a_step_stops() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(3000):
        stages, passed = stopped_step(Random(seed))
        target = plan_target(standings_of(*stages))
        if target is None:
            assert all(row == DEAD for ranks in stages for row in ranks)
            continue
        assert target.lost_stages == {stage for stage, ranks in enumerate(stages) if DEAD in ranks}, f"job {seed}"
        stepped = any(reached == 8 for ranks in stages for reached, _ in ranks)
        assert target.iteration == (8 if stepped else 7), f"job {seed}"
        outcomes["stepped"] += stepped
        outcomes["passed, but nobody that lives stepped"] += passed and not stepped
        outcomes["finishing"] += bool(target.finishing_stages)
        outcomes["lost"] += bool(target.lost_stages)
    assert len(outcomes) == 4, outcomes
    assert min(outcomes.values()) > 50, outcomes
