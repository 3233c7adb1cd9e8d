"""Plans in examples, their words, and what is refused. Jobs of all kinds, against every choice: test_plan_random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.recovery.inventory import Inventory, WindowRef
from moe_ckpt.recovery.plan import Fetch, RecoveryPlan, Rollback, Segment, plan_recovery, plan_segments
from tests.recovery.inventories import TARGET, inventory, replayed, window

Row = tuple[Sequence[int], int]
"""What a rank has: the starts of its windows, of 3 slots and with steps to 14, and where its log to 14 begins."""


@given(lost=st.sets(st.integers(0, 11)))
def test_segments_are_the_lost_stages_and_healthy_ones_lie_between(lost: set[int]) -> None:
    segments = plan_segments(lost)
    assert [stage for segment in segments for stage in segment.stages] == sorted(lost)
    for before, after in pairwise(segments):
        assert after.first_stage >= before.last_stage + 2


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
        pytest.param([], [NO_WINDOW] * 2, [], id="nothing is lost, and nothing there"),
        pytest.param([5, 2, 1, 2], [BOTH] * 8, [rollback(1, 2, 10), rollback(5, 5, 10)], id="neighbours jointly"),
        pytest.param([0, 2], [BOTH] * 4, [rollback(0, 0, 10), rollback(2, 2, 10)], id="one between serves both"),
        pytest.param([0], [NO_LOG], [rollback(0, 0, 10)], id="a pipeline of one needs no log"),
        pytest.param([1], [BOTH, BOTH, NO_LOG, BOTH], [rollback(1, 2, 10)], id="no log behind: that stage, too"),
        pytest.param([1], [BOTH, BOTH, LATE, BOTH], [rollback(1, 2, 10)], id="a log one iteration short"),
        pytest.param([1], [[BOTH, NO_LOG], BOTH, BOTH], [rollback(0, 1, 10)], id="one rank of a neighbour has no log"),
        pytest.param([1, 3], [BOTH, BOTH, LATE, BOTH, BOTH], [rollback(1, 3, 10)], id="segments that grow together"),
        pytest.param(
            [2],
            [BOTH, ([10, 5], 11), BOTH, ([5], 12), BOTH],
            [rollback(1, 3, 5)],
            id="the window of a larger segment is older, for which a log does not reach",
        ),
        pytest.param([1], [NO_LOG, OLD, NO_LOG], [rollback(0, 2, 5)], id="the whole model to the window of all"),
        pytest.param([1], [NEW, OLD, BOTH], None, id="logs too short for the only window, none shared"),
    ],
)
def test_stages_roll_back(lost: list[int], stages: list[Row | list[Row]], expected: list[Rollback] | None) -> None:
    inventories = inventories_of(*stages)
    if expected is None:
        with pytest.raises(CheckpointLoadError):
            plan(lost, inventories)
    else:
        assert plan(lost, inventories) == RecoveryPlan(
            target_iteration=TARGET, num_stages=len(stages), rollbacks=tuple(expected), fetches=()
        )


@pytest.mark.parametrize(("lost", "expected"), [([], []), ([1], [rollback(0, 3, 10)])])
def test_without_boundary_logs_the_whole_model_rolls_back(lost: list[int], expected: list[Rollback]) -> None:
    found = plan(lost, inventories_of(BOTH, NO_LOG, NEW, BOTH), boundary_log=False)
    assert (found.target_iteration, list(found.rollbacks)) == (TARGET, expected)


@pytest.mark.parametrize("stage", [-1, 4])
@pytest.mark.parametrize("boundary_log", [True, False])
def test_a_stage_that_does_not_exist_is_our_own_bug(stage: int, boundary_log: bool) -> None:
    with pytest.raises(AssertionError):
        plan([1, stage], inventories_of(*[BOTH] * 4), boundary_log=boundary_log)


def test_a_window_that_ends_at_the_target_needs_no_logs() -> None:
    """After the one slot of a window, or the base of a run, nothing is run again."""
    windows = [window(10, num_slots=1), window(5, num_slots=1)]
    inventories = [inventory(stage, stage, windows, logged=(110, 10)) for stage in range(3)]
    assert plan([1], inventories, 10).rollbacks == (rollback(1, 1, 10, 1),)


NEWER, OLDER = window(10), window(5)


@pytest.mark.parametrize(
    ("own", "target", "expected", "reached"),
    [
        pytest.param([[OLDER], [window(10, steps_to=13), OLDER]], 14, rollback(1, 1, 5), 14, id="too few steps"),
        pytest.param([[NEWER], [window(10, steps_to=13)]], 14, rollback(0, 1, 10), 13, id="with the steps of all"),
        pytest.param([[NEWER], [NEWER]], 11, rollback(0, 1, 10), 12, id="past the target, at the window's end"),
        pytest.param([[NEWER, OLDER], [OLDER]], None, rollback(0, 1, 5), 7, id="no rank has state"),
    ],
)
def test_where_a_plan_ends(own: list[list[WindowRef]], target: int | None, expected: Rollback, reached: int) -> None:
    inventories = [inventory(stage, stage, windows) for stage, windows in enumerate(own)]
    found = plan([0, 1] if target is None else [1], inventories, target)
    assert (found.rollbacks, found.target_iteration) == ((expected,), reached)


FEW_STEPS = window(10, steps_to=13)


@pytest.mark.parametrize(
    ("own", "held", "expected"),
    [
        pytest.param({}, {0: {1: NEWER, 2: NEWER}, 3: {1: NEWER, 2: NEWER}}, [fetch(1, 0), fetch(2, 3)], id="evenly"),
        pytest.param({}, {2: {1: NEWER}, 1: {2: NEWER}}, [fetch(1, 2), fetch(2, 1)], id="from each other"),
        pytest.param({1: FEW_STEPS, 2: NEWER}, {0: {1: NEWER}}, [fetch(1, 0)], id="its own has too few steps"),
        pytest.param({2: NEWER}, {0: {1: FEW_STEPS}, 3: {1: NEWER}}, [fetch(1, 3)], id="a copy has too few steps"),
    ],
)
def test_ranks_fetch_windows(
    own: Mapping[int, WindowRef], held: Mapping[int, Mapping[int, WindowRef]], expected: list[Fetch]
) -> None:
    """Stages 0, 1, 1, 2 of ranks 0 to 3; stage 1 is lost."""
    inventories = [
        inventory(
            rank,
            stage,
            [own[rank]] if rank in own else [OLDER],
            held={owner: [copy] for owner, copy in held.get(rank, {}).items()},
        )
        for rank, stage in enumerate([0, 1, 1, 2])
    ]
    found = plan([1], inventories)
    assert (found.rollbacks, list(found.fetches)) == ((rollback(1, 1, 10),), expected)


def test_an_error_lists_all_windows_and_logs() -> None:
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
            ],
            id="apart",
        ),
        pytest.param(
            [rollback(1, 1, 14, 1)], [], 3, ["stage 1: load the window at 14", "stages 0, 2: wait"], id="no replay"
        ),
        pytest.param([], [], 3, [], id="nothing lost"),
    ],
)
def test_lines_of_a_plan(rollbacks: list[Rollback], fetches: list[Fetch], num_stages: int, expected: list[str]) -> None:
    made = RecoveryPlan(
        target_iteration=TARGET, num_stages=num_stages, rollbacks=tuple(rollbacks), fetches=tuple(fetches)
    )
    assert made.lines() == [*expected, "all stages: go on after iteration 14"]


@pytest.mark.parametrize(
    ("replayed_to", "resumed_at", "words"),
    [
        ((12, 12), 12, "replay iterations 13 to 14, after the replay of the window at 10 that was cut off at 12"),
        ((14, 14), 14, "nothing is left to replay, after the replay of the window at 10 that was cut off at 14"),
        ((12, 11), None, "replay iterations 11 to 14 from the window at 10"),
        ((12, None), None, "replay iterations 11 to 14 from the window at 10"),
        ((15, 15), None, "replay iterations 11 to 14 from the window at 10"),
    ],
    ids=["both at 12", "both at the target", "one earlier", "one in its update", "beyond the target"],
)
def test_a_replay_that_was_cut_off_goes_on_where_all_its_ranks_are(
    replayed_to: tuple[int | None, ...], resumed_at: int | None, words: str
) -> None:
    lost = [inventory(rank, 0, [window(10)], replayed_to=to) for rank, to in enumerate(replayed_to)]
    planned = plan([0], [*lost, inventory(2, 1, [window(10)])])
    assert planned.rollbacks == (replace(rollback(0, 0, 10), resumed_at=resumed_at),)
    assert planned.lines()[0] == f"stage 0: {words}"


def test_a_cut_off_replay_of_another_window_or_segment_starts_over() -> None:
    other_cut = replace(inventory(0, 0, [window(10)]), replayed=replayed(window(10, cut="b"), 12))
    older = replace(inventory(0, 0, [window(10), window(5)]), replayed=replayed(window(5), 12))
    for first in (other_cut, older):
        assert plan([0], [first, inventory(1, 1, [window(10)])]).rollbacks == (rollback(0, 0, 10),)
    joint = [inventory(0, 0, [window(10)], replayed_to=12), inventory(1, 1, [window(10)]), inventory(2, 2)]
    assert plan([0, 1], joint).rollbacks == (rollback(0, 1, 10),)
