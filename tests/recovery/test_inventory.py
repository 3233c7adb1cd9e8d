"""What a stage has in common: tables. Properties are those of the plans that are made from it."""

from __future__ import annotations

import pytest

from moe_ckpt.recovery.inventory import Inventory, WindowRef, combine_stages, find_memories

NEW = WindowRef(start=10, num_slots=3, steps_to=14, cut="a")
SHORT = WindowRef(start=10, num_slots=3, steps_to=13, cut="a")
OTHER_CUT = WindowRef(start=10, num_slots=3, steps_to=15, cut="b")
OTHER_LENGTH = WindowRef(start=10, num_slots=2, steps_to=14, cut="a")
OLD = WindowRef(start=5, num_slots=3, steps_to=14, cut="a")


def inventory(
    global_rank: int,
    *windows: WindowRef,
    held: dict[int, tuple[WindowRef, ...]] | None = None,
    logged: tuple[int, int] = (6, 14),
) -> Inventory:
    return Inventory(
        global_rank=global_rank,
        stage=0,
        windows=windows,
        held=held or {},
        logged_from=logged[0],
        logged_to=logged[1],
    )


@pytest.mark.parametrize(
    ("inventories", "expected"),
    [
        pytest.param([inventory(0, NEW, OLD)], [NEW, OLD], id="all of one rank"),
        pytest.param([inventory(0, NEW, OLD), inventory(1, NEW)], [NEW], id="what both have"),
        pytest.param([inventory(0, NEW), inventory(1, OLD)], [], id="nothing that both have"),
        pytest.param([inventory(0, NEW), inventory(1, SHORT)], [SHORT], id="the steps that both have"),
        pytest.param([inventory(0, NEW), inventory(1, OTHER_CUT)], [], id="another cut is another window"),
        pytest.param([inventory(0, NEW), inventory(1, OTHER_LENGTH)], [], id="so is another length"),
        pytest.param([inventory(0, held={1: (NEW,)}), inventory(1, held={0: (NEW,)})], [NEW], id="copies count"),
        pytest.param([inventory(0, SHORT), inventory(1, NEW, held={0: (NEW,)})], [NEW], id="a copy with more steps"),
        pytest.param([inventory(0, NEW), inventory(1, NEW, held={0: (SHORT,)})], [NEW], id="a copy with fewer"),
        pytest.param([inventory(0, NEW, held={1: (NEW,)}), inventory(1, held={0: (NEW,)})], [NEW], id="both"),
        pytest.param(
            [inventory(0, NEW, held={1: (OTHER_CUT,)}), inventory(1, NEW, held={0: (OTHER_CUT,)})],
            [OTHER_CUT],
            id="of two cuts the one that leads further",
        ),
    ],
)
def test_windows_of_a_stage(inventories: list[Inventory], expected: list[WindowRef]) -> None:
    (stage,) = combine_stages(inventories, find_memories(inventories))
    assert stage.windows == {window.states: window for window in expected}


@pytest.mark.parametrize(
    ("logs", "first", "last", "expected"),
    [
        pytest.param([(6, 14), (6, 14)], 6, 14, True, id="all of it"),
        pytest.param([(6, 14), (6, 14)], 5, 14, False, id="begins too late"),
        pytest.param([(6, 14), (6, 14)], 6, 15, False, id="ends too early"),
        pytest.param([(6, 12), (9, 14)], 9, 12, True, id="what both have"),
        pytest.param([(6, 12), (9, 14)], 8, 12, False, id="begins too late for one"),
        pytest.param([(6, 12), (9, 14)], 9, 13, False, id="ends too early for one"),
        pytest.param([(6, 14), (8, 7)], 7, 8, False, id="an empty log amid"),
        pytest.param([(6, 14), (8, 7)], 8, 7, True, id="nothing is wanted"),
        pytest.param([(6, 8), (12, 14)], 9, 11, False, id="logs that do not meet"),
    ],
)
def test_logs_of_a_stage(logs: list[tuple[int, int]], first: int, last: int, expected: bool) -> None:
    inventories = [inventory(rank, logged=logged) for rank, logged in enumerate(logs)]
    (stage,) = combine_stages(inventories, find_memories(inventories))
    assert stage.has_logged(first, last) == expected


def test_copies_of_all_memories_are_found() -> None:
    inventories = [inventory(0, NEW), inventory(1, held={0: (NEW, OLD), 2: ()}), inventory(2, held={0: (SHORT,)})]
    memories = find_memories(inventories)
    assert memories == {0: {0: (NEW,), 1: (NEW, OLD), 2: (SHORT,)}, 1: {1: ()}, 2: {1: (), 2: ()}}


def test_steps_that_end_before_the_window_does_are_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        WindowRef(start=10, num_slots=3, steps_to=11, cut="a")


def test_a_memory_that_keeps_two_windows_of_a_start_is_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        inventory(0, NEW, OTHER_CUT)
    with pytest.raises(AssertionError):
        inventory(0, held={1: (NEW, OTHER_LENGTH)})
    with pytest.raises(AssertionError):
        inventory(0, held={0: (NEW,)})
