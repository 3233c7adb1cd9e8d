"""Plans in words, refused inputs, replays that were cut off, and failed fetches.

test_plan_random.py tests which stages roll back, and to which windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.recovery.inventory import Inventory, ReplayedState, WindowRef
from moe_ckpt.recovery.plan import (
    Fetch,
    RecoveryPlan,
    Rollback,
    after_fetches,
    plan_recovery,
)

TARGET = 14


def window(
    start: int,
    *,
    num_slots: int = 3,
    replayable_to: int = TARGET,
    assignment: str = "a",
) -> WindowRef:
    return WindowRef(
        start=start,
        num_slots=num_slots,
        replayable_to=replayable_to,
        assignment=assignment,
    )


NEW = window(10)
Held = Mapping[int, Sequence[WindowRef]]


def inventory(
    rank: int,
    windows: Sequence[WindowRef] = (),
    held: Held | None = None,
    logged: tuple[int, int] = (6, TARGET),
) -> Inventory:
    """Return the inventory of a rank that is the only rank of its stage."""
    copies = {owner: tuple(of_owner) for owner, of_owner in (held or {}).items()}
    first, last = logged
    own = tuple(windows)
    return Inventory(
        global_rank=rank,
        stage=rank,
        windows=own,
        held=copies,
        logged_from=first,
        logged_to=last,
    )


def rollback(
    first_stage: int, last_stage: int, window_start: int, num_slots: int = 3
) -> Rollback:
    span = range(window_start, window_start + num_slots)
    return Rollback(stages=range(first_stage, last_stage + 1), span=span)


@pytest.mark.parametrize("stage", [-1, 4])
@pytest.mark.parametrize("boundary_log", [True, False])
def test_a_stage_that_does_not_exist_is_our_own_bug(
    stage: int, boundary_log: bool
) -> None:
    inventories = [inventory(rank, [NEW]) for rank in range(4)]
    with pytest.raises(AssertionError):
        plan_recovery(
            [1, stage], inventories, target_iteration=TARGET, boundary_log=boundary_log
        )


def test_a_window_with_fewer_steps_than_slots_is_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        window(10, replayable_to=11)


@pytest.mark.parametrize(
    ("windows", "held"),
    [
        ([NEW, window(10, assignment="b")], {}),
        ([], {1: [NEW, window(10, num_slots=2)]}),
        ([], {0: [NEW]}),
    ],
    ids=["two own windows of a start", "two copies of a start", "a copy of its own"],
)
def test_a_memory_that_cannot_be_is_our_own_bug(
    windows: list[WindowRef], held: Held
) -> None:
    with pytest.raises(AssertionError):
        inventory(0, windows, held)


def test_an_error_lists_all_windows_and_logs() -> None:
    old = window(5, num_slots=2, replayable_to=9, assignment="b")
    inventories = [
        inventory(0, [NEW], {1: [old]}, logged=(11, 14)),
        inventory(1, logged=(15, 14)),
    ]
    with pytest.raises(CheckpointLoadError) as caught:
        plan_recovery(
            [1, 0, 1], inventories, target_iteration=TARGET, boundary_log=True
        )
    assert (
        str(caught.value)
        == "stages [0, 1] cannot be rebuilt at iteration 14: looked for a complete"
        " window from which logs lead there, or that all ranks have; got rank 0 of"
        " stage 0: windows 10 to 12 (steps to 14, assignment a) in rank 0's memory,"
        " boundary log 11 to 14; rank 1 of stage 1: windows 5 to 6 (steps to 9,"
        " assignment b) in rank 0's memory, boundary log none"
    )
    with pytest.raises(
        CheckpointLoadError, match=r"^stages \[0, 1\] cannot be rebuilt: looked for"
    ):
        plan_recovery([0, 1], inventories, target_iteration=None, boundary_log=True)


JOINTLY = [
    "stages 1 to 2: replay iterations 11 to 14 from the window at 10",
    "stages 0, 3: wait and send logs",
]
APART = [
    "stage 0: replay iteration 14 from the window at 13",
    "stage 3: replay iterations 13 to 14 from the window at 12",
    "stages 1, 2, 4: wait and send logs",
    "stage 5: wait",
]
FETCH = Fetch(global_rank=3, source_rank=1, window_start=10)


@pytest.mark.parametrize(
    ("rollbacks", "fetches", "num_stages", "expected"),
    [
        (
            [rollback(1, 2, 10)],
            [FETCH],
            4,
            [*JOINTLY, "rank 3: get the window at 10 from rank 1"],
        ),
        ([rollback(0, 0, 13), rollback(3, 3, 12)], [], 6, APART),
        (
            [rollback(1, 1, 14, 1)],
            [],
            3,
            ["stage 1: load the window at 14", "stages 0, 2: wait"],
        ),
        ([], [], 3, []),
    ],
    ids=["jointly", "apart", "no replay", "nothing lost"],
)
def test_lines_of_a_plan(
    rollbacks: list[Rollback],
    fetches: list[Fetch],
    num_stages: int,
    expected: list[str],
) -> None:
    made = RecoveryPlan(
        target_iteration=TARGET,
        num_stages=num_stages,
        rollbacks=tuple(rollbacks),
        fetches=tuple(fetches),
    )
    assert made.lines() == [*expected, "all stages: go on after iteration 14"]


def cut_off(
    rank: Inventory, of: WindowRef, iteration: int | None, stage: int = 0
) -> Inventory:
    """Return a rank whose replay of a window was cut off.

    Args:
        rank: The rank.
        of: The window.
        iteration: The iteration of the cut. None: the cut came in an update.
        stage: The new stage of the rank.
    """
    replayed = (
        None
        if iteration is None
        else ReplayedState(span=of.span, assignment=of.assignment, iteration=iteration)
    )
    return replace(rank, stage=stage, replayed=replayed)


def plan(lost: Sequence[int], inventories: Sequence[Inventory]) -> RecoveryPlan:
    return plan_recovery(lost, inventories, target_iteration=TARGET, boundary_log=True)


@pytest.mark.parametrize(
    ("replayed_to", "resumed_at", "words"),
    [
        (
            (12, 12),
            12,
            (
                "replay iterations 13 to 14, after the replay of the window at 10 that"
                " was cut off at 12"
            ),
        ),
        (
            (14, 14),
            14,
            (
                "nothing is left to replay, after the replay of the window at 10 that"
                " was cut off at 14"
            ),
        ),
        ((12, 11), None, "replay iterations 11 to 14 from the window at 10"),
        ((12, None), None, "replay iterations 11 to 14 from the window at 10"),
        ((15, 15), None, "replay iterations 11 to 14 from the window at 10"),
    ],
    ids=[
        "both at 12",
        "both at the target",
        "one earlier",
        "one in its update",
        "beyond the target",
    ],
)
def test_a_replay_that_was_cut_off_goes_on_where_all_its_ranks_are(
    replayed_to: tuple[int | None, ...], resumed_at: int | None, words: str
) -> None:
    lost = [
        cut_off(inventory(rank, [NEW]), NEW, iteration)
        for rank, iteration in enumerate(replayed_to)
    ]
    planned = plan([0], [*lost, replace(inventory(2, [NEW]), stage=1)])
    assert planned.rollbacks == (replace(rollback(0, 0, 10), resumed_at=resumed_at),)
    assert planned.lines()[0] == f"stage 0: {words}"


def test_a_cut_off_replay_of_another_window_or_segment_starts_over() -> None:
    another = cut_off(inventory(0, [NEW]), window(10, assignment="b"), 12)
    older = cut_off(inventory(0, [NEW, window(5)]), window(5), 12)
    for first in (another, older):
        assert plan([0], [first, inventory(1, [NEW])]).rollbacks == (
            rollback(0, 0, 10),
        )
    joint = [cut_off(inventory(0, [NEW]), NEW, 12), inventory(1, [NEW]), inventory(2)]
    assert plan([0, 1], joint).rollbacks == (rollback(0, 1, 10),)


def test_a_rank_that_fetched_has_no_window_of_its_own_any_more() -> None:
    """Rank 1 got window 10 from rank 0, and rank 2 did not.

    Both ranks go back to window 5, which rank 1's own memory had.
    """
    old = window(5)
    inventories = [
        inventory(0, [NEW, old], {1: [NEW], 2: [NEW]}),
        inventory(1, [old]),
        inventory(2),
        inventory(3, [NEW, old], {1: [old], 2: [old]}),
    ]
    first = plan_recovery(
        [1, 2], inventories, target_iteration=TARGET, boundary_log=True
    )
    assert [(fetch.global_rank, fetch.source_rank) for fetch in first.fetches] == [
        (1, 0),
        (2, 0),
    ]
    left = after_fetches(inventories, first.fetches, failed={2})
    again = plan_recovery([1, 2], left, target_iteration=TARGET, boundary_log=True)
    assert [rollback.window_start for rollback in again.rollbacks] == [5]
    assert [(fetch.global_rank, fetch.source_rank) for fetch in again.fetches] == [
        (1, 3),
        (2, 3),
    ]
    assert left[0].held == {1: (NEW,)}  # the copy that rank 1 fetched is still there


@pytest.mark.parametrize(("emptied", "start"), [((), 5), ((1,), None)])
def test_a_rank_whose_fetch_failed_has_its_own_windows_still(
    emptied: tuple[int, ...], start: int | None
) -> None:
    """Rank 1's window 5 leads to an earlier iteration, to which all ranks go back.

    Nothing is left if rank 1 dropped window 5 to make room.
    """
    old = window(5, replayable_to=9)
    inventories = [inventory(0, [NEW, old], {1: [NEW]}), inventory(1, [old])]
    first = plan_recovery([1], inventories, target_iteration=TARGET, boundary_log=True)
    assert [(fetch.global_rank, fetch.source_rank) for fetch in first.fetches] == [
        (1, 0)
    ]
    left = after_fetches(inventories, first.fetches, failed={1}, emptied=emptied)
    if start is None:
        with pytest.raises(CheckpointLoadError):
            plan_recovery([1], left, target_iteration=TARGET, boundary_log=True)
        return
    again = plan_recovery([1], left, target_iteration=TARGET, boundary_log=True)
    assert [rollback.window_start for rollback in again.rollbacks] == [start]
    assert again.fetches == ()
