"""Which stages roll back, together or alone, to where, and who fetches what: tables. Random jobs: test_plan_random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.recovery.inventory import Inventory, WindowRef
from moe_ckpt.recovery.plan import Fetch, RecoveryPlan, Rollback, Segment, plan_recovery, plan_segments

Row = tuple[Sequence[int], int]
"""What a rank has: the starts of its windows, of 3 slots and with steps to 14, and where its log to 14 begins."""

TARGET = 14


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        pytest.param([], [], id="none"),
        pytest.param([2], [(2, 2)], id="one stage"),
        pytest.param([2, 1], [(1, 2)], id="neighbours recover together"),
        pytest.param([5, 1, 2], [(1, 2), (5, 5)], id="others on their own"),
        pytest.param([2, 2], [(2, 2)], id="a stage that is named twice"),
        pytest.param([0, 1, 2, 3], [(0, 3)], id="all stages"),
    ],
)
def test_segments(stages: list[int], expected: list[tuple[int, int]]) -> None:
    segments = plan_segments(stages)
    assert [(segment.first_stage, segment.last_stage) for segment in segments] == expected


@given(lost=st.sets(st.integers(0, 11)))
def test_segments_are_the_lost_stages_and_healthy_ones_lie_between(lost: set[int]) -> None:
    segments = plan_segments(lost)
    covered = [stage for segment in segments for stage in range(segment.first_stage, segment.last_stage + 1)]
    assert covered == sorted(lost)
    for before, after in pairwise(segments):
        assert after.first_stage >= before.last_stage + 2


@given(lost=st.sets(st.integers(0, 11), min_size=1), further=st.integers(0, 11))
def test_a_further_loss_leaves_segments_that_it_does_not_touch(lost: set[int], further: int) -> None:
    def untouched(segment: Segment) -> bool:
        return not segment.first_stage - 1 <= further <= segment.last_stage + 1

    before, after = (plan_segments(stages) for stages in (lost, lost | {further}))
    assert {segment for segment in before if untouched(segment)} <= set(after)
    assert len(set(after) - set(before)) <= 1


def window(start: int, *, num_slots: int = 3, steps_to: int = TARGET, cut: str = "a") -> WindowRef:
    return WindowRef(start=start, num_slots=num_slots, steps_to=steps_to, cut=cut)


def inventory(
    global_rank: int,
    stage: int,
    windows: Sequence[WindowRef] = (),
    *,
    held: Mapping[int, Sequence[WindowRef]] | None = None,
    logged: tuple[int, int] = (6, TARGET),
) -> Inventory:
    return Inventory(
        global_rank=global_rank,
        stage=stage,
        windows=tuple(windows),
        held={owner: tuple(copies) for owner, copies in (held or {}).items()},
        logged_from=logged[0],
        logged_to=logged[1],
    )


def inventories_of(*stages: Row | list[Row]) -> list[Inventory]:
    """What the ranks of each stage have; a row alone is a stage of one rank."""
    rows = [(stage, row) for stage, rows in enumerate(stages) for row in (rows if isinstance(rows, list) else [rows])]
    return [
        inventory(global_rank, stage, [window(start) for start in starts], logged=(logged_from, TARGET))
        for global_rank, (stage, (starts, logged_from)) in enumerate(rows)
    ]


def plan(
    lost: Sequence[int], inventories: Sequence[Inventory], target: int | None = TARGET, boundary_log: bool = True
) -> RecoveryPlan:
    return plan_recovery(lost, inventories, target_iteration=target, boundary_log=boundary_log)


def rollback(first_stage: int, last_stage: int, window_start: int, num_slots: int = 3) -> Rollback:
    segment = Segment(first_stage=first_stage, last_stage=last_stage)
    return Rollback(segment=segment, window_start=window_start, num_slots=num_slots)


def fetch(global_rank: int, source_rank: int, window_start: int = 10) -> Fetch:
    return Fetch(global_rank=global_rank, source_rank=source_rank, window_start=window_start)


BOTH: Row = ([10, 5], 6)  # two windows, and logs as far back as the older of them needs
NEW: Row = ([10], 11)
OLD: Row = ([5], 6)
LATE: Row = ([10, 5], 12)  # a log that is one iteration short for the newer window
NO_LOG: Row = ([10, 5], 15)  # past the target
NO_WINDOW: Row = ([], 6)


@pytest.mark.parametrize(
    ("lost", "stages", "expected"),
    [
        pytest.param([1], [BOTH] * 4, [rollback(1, 1, 10)], id="alone, to the newest window"),
        pytest.param([], [BOTH] * 4, [], id="nothing is lost"),
        pytest.param([], [NO_WINDOW] * 2, [], id="nothing is lost, and nothing there"),
        pytest.param([2, 1], [BOTH] * 4, [rollback(1, 2, 10)], id="neighbours jointly"),
        pytest.param([2, 2], [BOTH] * 4, [rollback(2, 2, 10)], id="a stage that is named twice"),
        pytest.param([5, 1, 2], [BOTH] * 8, [rollback(1, 2, 10), rollback(5, 5, 10)], id="others on their own"),
        pytest.param([0, 3], [BOTH] * 4, [rollback(0, 0, 10), rollback(3, 3, 10)], id="both ends"),
        pytest.param([0, 2], [BOTH] * 4, [rollback(0, 0, 10), rollback(2, 2, 10)], id="one between serves both"),
        pytest.param([0, 1, 2, 3], [BOTH] * 4, [rollback(0, 3, 10)], id="all stages"),
        pytest.param([0], [BOTH], [rollback(0, 0, 10)], id="a pipeline of one"),
        pytest.param([0], [NO_LOG], [rollback(0, 0, 10)], id="a pipeline of one needs no log"),
        pytest.param([1], [BOTH, OLD, BOTH], [rollback(1, 1, 5)], id="an older window where the newest is gone"),
        pytest.param([1], [BOTH, [NEW, BOTH], NEW], [rollback(1, 1, 10)], id="ranks of a stage share the newest"),
        pytest.param([1], [BOTH, [OLD, BOTH], BOTH], [rollback(1, 1, 5)], id="ranks of a stage share an older one"),
        pytest.param([1, 2], [BOTH, BOTH, OLD, BOTH], [rollback(1, 2, 5)], id="stages of a segment share a window"),
        pytest.param([0, 2], [OLD, BOTH, NEW], [rollback(0, 0, 5), rollback(2, 2, 10)], id="segments need not share"),
        pytest.param([1], [NO_WINDOW, BOTH, NO_WINDOW], [rollback(1, 1, 10)], id="others need no window"),
        pytest.param([1], [BOTH, BOTH, BOTH, NO_LOG], [rollback(1, 1, 10)], id="logs of others do not matter"),
        pytest.param([1], [BOTH, NO_LOG, BOTH], [rollback(1, 1, 10)], id="the lost stage's own log died with it"),
        pytest.param([1], [NEW, BOTH, BOTH], [rollback(1, 1, 10)], id="logs back to the newest window"),
        pytest.param([1], [NO_LOG, BOTH, BOTH, BOTH], [rollback(0, 1, 10)], id="no log before: that stage, too"),
        pytest.param([1], [BOTH, BOTH, NO_LOG, BOTH], [rollback(1, 2, 10)], id="no log behind: that stage, too"),
        pytest.param([1], [BOTH, BOTH, LATE, BOTH], [rollback(1, 2, 10)], id="a log one iteration short"),
        pytest.param([1], [BOTH, OLD, NEW, BOTH], None, id="who has no log has no window for it, either"),
        pytest.param([1], [[BOTH, NO_LOG], BOTH, BOTH], [rollback(0, 1, 10)], id="one rank of a neighbour has no log"),
        pytest.param([1], [BOTH, BOTH, LATE, LATE, BOTH], [rollback(1, 3, 10)], id="on and on"),
        pytest.param([2], [BOTH, LATE, BOTH, LATE, BOTH], [rollback(1, 3, 10)], id="on both sides"),
        pytest.param([1], [LATE] * 4, [rollback(0, 3, 10)], id="to the ends"),
        pytest.param([1, 3], [BOTH, BOTH, LATE, BOTH, BOTH], [rollback(1, 3, 10)], id="segments that grow together"),
        pytest.param(
            [1, 4], [BOTH, BOTH, LATE, BOTH, BOTH, BOTH], [rollback(1, 2, 10), rollback(4, 4, 10)], id="one grows"
        ),
        pytest.param(
            [2],
            [BOTH, ([10, 5], 11), BOTH, ([5], 12), BOTH],
            [rollback(1, 3, 5)],
            id="the window of a larger segment is older, for which a log does not reach",
        ),
        pytest.param([1], [NEW, OLD, BOTH, BOTH, OLD], None, id="logs too short for the only window, none shared"),
        pytest.param([1], [NO_LOG, OLD, NO_LOG], [rollback(0, 2, 5)], id="the whole model to what it shares"),
        pytest.param([1], [BOTH, NO_WINDOW, BOTH], None, id="a lost stage without a window"),
    ],
)
def test_who_rolls_back_to_where(
    lost: list[int], stages: list[Row | list[Row]], expected: list[Rollback] | None
) -> None:
    inventories = inventories_of(*stages)
    if expected is None:
        with pytest.raises(CheckpointLoadError):
            plan(lost, inventories)
    else:
        assert plan(lost, inventories) == RecoveryPlan(
            target_iteration=TARGET, num_stages=len(stages), rollbacks=tuple(expected), fetches=()
        )


@pytest.mark.parametrize(("lost", "expected"), [([], []), ([1], [rollback(0, 3, 10)]), ([0, 3], [rollback(0, 3, 10)])])
def test_without_boundary_logs_the_whole_model_rolls_back(lost: list[int], expected: list[Rollback]) -> None:
    found = plan(lost, inventories_of(BOTH, NO_LOG, NEW, BOTH), boundary_log=False)
    assert (found.target_iteration, list(found.rollbacks)) == (TARGET, expected)


@pytest.mark.parametrize("stage", [-1, 4])
@pytest.mark.parametrize("boundary_log", [True, False])
def test_a_stage_that_does_not_exist_is_our_own_bug(stage: int, boundary_log: bool) -> None:
    with pytest.raises(AssertionError):
        plan([1, stage], inventories_of(*[BOTH] * 4), boundary_log=boundary_log)


@pytest.mark.parametrize("past", [1, 2, 100])
def test_a_window_that_ends_at_the_target_needs_no_logs(past: int) -> None:
    """After the one slot of a window, or the base of a run, nothing is run again."""
    at_target, before = window(10, num_slots=1), window(5, num_slots=1)
    without = (10 + past, 10)
    inventories = [inventory(stage, stage, [at_target, before], logged=without) for stage in range(3)]
    assert plan([1], inventories, 10).rollbacks == (rollback(1, 1, 10, 1),)


@pytest.mark.parametrize(
    ("logged", "expected"),
    [
        pytest.param((11, 14), rollback(1, 1, 10), id="all of it"),
        pytest.param((11, 13), rollback(1, 2, 10), id="not the last"),
        pytest.param((12, 14), rollback(1, 2, 10), id="not the first"),
        pytest.param((14, 13), rollback(1, 2, 10), id="nothing"),
    ],
)
def test_a_log_has_to_reach_from_the_window_to_the_target(logged: tuple[int, int], expected: Rollback) -> None:
    inventories = [
        *(inventory(stage, stage, [window(10)]) for stage in range(2)),
        inventory(2, 2, [window(10)], logged=logged),
        inventory(3, 3, [window(10)]),
    ]
    assert plan([1], inventories).rollbacks == (expected,)


NEWER, OLDER = window(10), window(5)


@pytest.mark.parametrize(
    ("own", "target", "expected", "reached"),
    [
        pytest.param([[NEWER], [window(10, cut="b")]], 14, [rollback(1, 1, 10)], 14, id="each stage its cut"),
        pytest.param([[OLDER], [window(10, steps_to=13), OLDER]], 14, [rollback(1, 1, 5)], 14, id="too few steps"),
        pytest.param([[OLDER], [window(10, num_slots=4), OLDER]], 12, [rollback(1, 1, 5)], 12, id="ends too late"),
        pytest.param([[], [NEWER]], 12, [rollback(1, 1, 10)], 12, id="ends at the target"),
        pytest.param([[OLDER], [window(10, num_slots=4)]], 12, None, 0, id="only a window that ends too late"),
        pytest.param([[NEWER], [window(10, num_slots=4)]], 12, None, 0, id="lengths that differ, not to be shared"),
        pytest.param([[NEWER], [window(10, steps_to=13)]], 14, [rollback(0, 1, 10)], 13, id="all end where one can"),
        pytest.param([[NEWER], [window(10, steps_to=12)]], 14, [rollback(0, 1, 10)], 12, id="at the window's end"),
        pytest.param([[NEWER], [NEWER]], 11, [rollback(0, 1, 10)], 12, id="past the target, at the window's end"),
        pytest.param(
            [[NEWER, OLDER], [window(10, steps_to=13), window(5, steps_to=13)]],
            14,
            [rollback(0, 1, 10)],
            13,
            id="the newest of those that end early",
        ),
        pytest.param([[NEWER, OLDER], [NEWER, OLDER]], None, [rollback(0, 1, 10)], 12, id="nobody has state"),
        pytest.param([[NEWER, OLDER], [OLDER]], None, [rollback(0, 1, 5)], 7, id="nobody has state, nor the newest"),
        pytest.param([[NEWER], [OLDER]], None, None, 0, id="nobody has state, and nothing shared"),
    ],
)
def test_where_it_ends(
    own: list[list[WindowRef]], target: int | None, expected: list[Rollback] | None, reached: int
) -> None:
    inventories = [inventory(stage, stage, windows) for stage, windows in enumerate(own)]
    lost = [0, 1] if target is None else [1]
    if expected is None:
        with pytest.raises(CheckpointLoadError):
            plan(lost, inventories, target)
    else:
        found = plan(lost, inventories, target)
        assert (list(found.rollbacks), found.target_iteration) == (expected, reached)


def test_ranks_of_a_stage_cannot_mix_cuts() -> None:
    inventories = [inventory(0, 0), inventory(1, 1, [NEWER, OLDER]), inventory(2, 1, [window(10, cut="b"), OLDER])]
    assert plan([1], inventories).rollbacks == (rollback(1, 1, 5),)


@pytest.mark.parametrize(
    ("own", "held", "expected"),
    [
        pytest.param([1, 2], {}, [], id="each has its own"),
        pytest.param([2], {3: [1]}, [fetch(1, 3)], id="a copy in the other stage's memory"),
        pytest.param([2], {2: [1]}, [fetch(1, 2)], id="a copy in its own stage's memory"),
        pytest.param([1, 2], {3: [1, 2]}, [], id="copies that nobody needs"),
        pytest.param([], {0: [1, 2], 3: [1, 2]}, [fetch(1, 0), fetch(2, 3)], id="the load is shared"),
        pytest.param([], {3: [1], 0: [2]}, [fetch(1, 3), fetch(2, 0)], id="each from who has it"),
        pytest.param([], {2: [1], 1: [2]}, [fetch(1, 2), fetch(2, 1)], id="from each other"),
    ],
)
def test_who_fetches_from_whom(own: list[int], held: dict[int, list[int]], expected: list[Fetch]) -> None:
    """Stages 0, 1, 1, 2 of ranks 0 to 3; stage 1 is lost."""
    inventories = [
        inventory(
            rank,
            stage,
            [NEWER, OLDER] if rank in own else [OLDER],
            held={owner: [NEWER] for owner in held.get(rank, [])},
        )
        for rank, stage in enumerate([0, 1, 1, 2])
    ]
    found = plan([1], inventories)
    assert found.rollbacks == (rollback(1, 1, 10),)
    assert list(found.fetches) == expected


def test_an_own_window_with_too_few_steps_is_fetched() -> None:
    inventories = [inventory(0, 0, held={1: [NEWER]}), inventory(1, 1, [window(10, steps_to=13)])]
    assert plan([1], inventories).fetches == (fetch(1, 0),)
    assert plan([1], inventories, 13).fetches == ()


def test_an_own_window_of_another_cut_is_fetched() -> None:
    inventories = [
        inventory(0, 0, held={1: [NEWER]}),
        inventory(1, 1, [window(10, cut="b")]),
        inventory(2, 1, [NEWER]),
    ]
    assert plan([1], inventories).fetches == (fetch(1, 0),)


def test_sources_have_the_steps_to_the_target() -> None:
    inventories = [
        inventory(0, 0, held={2: [window(10, steps_to=13)]}),
        inventory(1, 0, held={2: [NEWER]}),
        inventory(2, 1),
    ]
    assert plan([1], inventories).fetches == (fetch(2, 1),)
    assert plan([1], inventories, 13).fetches == (fetch(2, 0),)


def test_healthy_stages_that_roll_back_fetch_too() -> None:
    inventories = [
        inventory(0, 0, held={1: [NEWER]}, logged=(6, 14)),
        inventory(1, 1, logged=(15, 14)),
        inventory(2, 2, [NEWER]),
    ]
    found = plan([2], inventories)
    assert (found.rollbacks, found.fetches) == ((rollback(1, 2, 10),), (fetch(1, 0),))


def test_an_error_says_what_there_was() -> None:
    inventories = [
        inventory(0, 0, [NEWER], held={1: [window(5, num_slots=2, steps_to=9, cut="b")]}, logged=(11, 14)),
        inventory(1, 1, logged=(15, 14)),
    ]
    with pytest.raises(CheckpointLoadError) as caught:
        plan([1, 0, 1], inventories)
    assert str(caught.value) == (
        "stages [0, 1] cannot be rebuilt at iteration 14: looked for a complete window from which logs lead "
        "there, or that all ranks have; got rank 0 of stage 0: windows 10 to 12 (steps to 14, cut a) in rank 0's "
        "memory, boundary log 11 to 14; rank 1 of stage 1: windows 5 to 6 (steps to 9, cut b) in rank 0's memory, "
        "boundary log none"
    )
    with pytest.raises(CheckpointLoadError, match=r"^stages \[0, 1\] cannot be rebuilt: looked for"):
        plan([0, 1], inventories, None)


@pytest.mark.parametrize(
    ("rollbacks", "fetches", "num_stages", "expected"),
    [
        pytest.param(
            [rollback(1, 2, 10)],
            [fetch(3, 1)],
            4,
            [
                "stages 1 to 2: replay iterations 11 to 14 from the window at 10",
                "stages 0, 3: wait and send logs",
                "rank 3: get the window at 10 from rank 1",
                "all stages: go on after iteration 14",
            ],
            id="jointly",
        ),
        pytest.param(
            [rollback(0, 0, 13), rollback(3, 3, 12)],
            [],
            6,
            [
                "stage 0: replay iteration 14 from the window at 13",
                "stage 3: replay iterations 13 to 14 from the window at 12",
                "stages 1, 2, 4: wait and send logs",
                "stage 5: wait",
                "all stages: go on after iteration 14",
            ],
            id="apart",
        ),
        pytest.param(
            [rollback(1, 1, 14, 1)],
            [],
            3,
            ["stage 1: load the window at 14", "stages 0, 2: wait", "all stages: go on after iteration 14"],
            id="nothing to replay",
        ),
        pytest.param(
            [rollback(0, 2, 10)],
            [],
            3,
            [
                "stages 0 to 2: replay iterations 11 to 14 from the window at 10",
                "all stages: go on after iteration 14",
            ],
            id="the whole model",
        ),
        pytest.param([], [], 3, ["all stages: go on after iteration 14"], id="nothing lost"),
    ],
)
def test_lines(rollbacks: list[Rollback], fetches: list[Fetch], num_stages: int, expected: list[str]) -> None:
    made = RecoveryPlan(
        target_iteration=TARGET, num_stages=num_stages, rollbacks=tuple(rollbacks), fetches=tuple(fetches)
    )
    assert made.lines() == expected


def test_every_rank_comes_to_the_same_plan() -> None:
    inventories = [
        inventory(
            rank, rank // 2, [NEWER] if rank == 2 else [], held={owner: [NEWER] for owner in range(6) if owner != rank}
        )
        for rank in range(6)
    ]
    once = plan([1, 2], inventories)
    for seed in range(20):
        shuffled = Random(seed).sample(inventories, len(inventories))
        assert plan([2, 1, 2], shuffled) == once
