"""What a stage has in common: tables. Properties are those of the plans that are made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from moe_ckpt.recovery.inventory import WindowRef, combine_stages, find_memories
from tests.recovery.inventories import inventory, window

NEW, SHORT, OLD = window(10), window(10, steps_to=13), window(5)
OTHER_CUT, OTHER_LENGTH = window(10, steps_to=15, cut="b"), window(10, num_slots=2)

Memory = tuple[Sequence[WindowRef], Sequence[WindowRef]]
"""A rank's own windows, and its copies of the other rank's."""


@pytest.mark.parametrize(
    ("memories", "expected"),
    [
        pytest.param([([NEW, OLD], [])], [NEW, OLD], id="all of one rank"),
        pytest.param([([NEW, OLD], []), ([NEW], [])], [NEW], id="in both memories"),
        pytest.param([([NEW], []), ([OLD], [])], [], id="nothing in both"),
        pytest.param([([NEW], []), ([SHORT], [])], [SHORT], id="the steps in both"),
        pytest.param([([NEW], []), ([OTHER_CUT], [])], [], id="another cut is another window"),
        pytest.param([([NEW], []), ([OTHER_LENGTH], [])], [], id="so is another length"),
        pytest.param([([], [NEW]), ([], [NEW])], [NEW], id="copies count"),
        pytest.param([([SHORT], []), ([NEW], [NEW])], [NEW], id="a copy with more steps"),
        pytest.param([([NEW], []), ([NEW], [SHORT])], [NEW], id="a copy with fewer"),
        pytest.param(
            [([NEW], [OTHER_CUT]), ([NEW], [OTHER_CUT])], [OTHER_CUT], id="of two cuts the one that leads further"
        ),
    ],
)
def test_windows_of_a_stage(memories: list[Memory], expected: list[WindowRef]) -> None:
    inventories = [
        inventory(rank, windows=own, held={1 - rank: copies} if copies else None)
        for rank, (own, copies) in enumerate(memories)
    ]
    (stage,) = combine_stages(inventories, find_memories(inventories))
    assert stage.windows == {window.states: window for window in expected}


@pytest.mark.parametrize(
    ("logs", "first", "last", "expected"),
    [
        pytest.param([(6, 14), (6, 14)], 6, 14, True, id="all of it"),
        pytest.param([(6, 12), (9, 14)], 9, 12, True, id="the part of both"),
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
    inventories = [
        inventory(0, windows=[NEW]),
        inventory(1, held={0: (NEW, OLD), 2: ()}),
        inventory(2, held={0: (SHORT,)}),
    ]
    memories = find_memories(inventories)
    assert memories == {0: {0: (NEW,), 1: (NEW, OLD), 2: (SHORT,)}, 1: {1: ()}, 2: {1: (), 2: ()}}


def test_a_window_with_fewer_steps_than_slots_is_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        window(10, steps_to=11)


@pytest.mark.parametrize(
    ("windows", "held"),
    [([NEW, OTHER_CUT], {}), ([], {1: [NEW, OTHER_LENGTH]}), ([], {0: [NEW]})],
    ids=["two own windows of a start", "two copies of a start", "a copy of its own"],
)
def test_a_memory_that_cannot_be_is_our_own_bug(
    windows: list[WindowRef], held: Mapping[int, Sequence[WindowRef]]
) -> None:
    with pytest.raises(AssertionError):
        inventory(0, windows=windows, held=held)
