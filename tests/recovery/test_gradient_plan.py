"""Plans of recoveries by logged gradients: who is rebuilt, from where, and how far."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import NothingLeftError
from moe_ckpt.recovery.gradient_plan import GradientPlan, plan_by_gradients
from moe_ckpt.recovery.inventory import Inventory, WindowRef
from moe_ckpt.recovery.plan import Fetch

TARGET = 14


def window(start: int, to: int, slots: int = 3, *branches: int) -> WindowRef:
    """Return a window that leads to an iteration, by steps of these branches, or of 1.

    The branches are those of the iterations from the window's last snapshot on.
    """
    steps = to - (start + slots - 1) + 1
    return WindowRef(
        start=start,
        num_slots=slots,
        replayable_to=to,
        assignment="a",
        branches=branches or (1,) * steps,
    )


def inventory(
    rank: int,
    *windows: WindowRef,
    held: Mapping[int, tuple[WindowRef, ...]] | None = None,
) -> Inventory:
    return Inventory(
        global_rank=rank,
        stage=rank // 2,
        windows=windows,
        held=held or {},
        logged_from=1,
        logged_to=0,
    )


def plan(
    lost: list[int], *ranks: Inventory, target: int | None = TARGET, branch: int = 1
) -> GradientPlan:
    return plan_by_gradients(
        lost,
        ranks,
        target_iteration=target,
        branch=None if target is None else branch,
    )


WHOLE = window(10, TARGET)


def test_only_lost_ranks_are_rebuilt() -> None:
    found = plan([1], *(inventory(rank, WHOLE) for rank in range(4)))
    assert found == GradientPlan(
        target_iteration=TARGET, branch=1, windows={1: range(10, 13)}, fetches=()
    )
    assert found.goes_back
    assert (found.window_of(1, 0), found.window_of(0, 0)) == (range(10, 13), None)


def test_nobody_is_rebuilt_where_nobody_is_lost() -> None:
    found = plan([], *(inventory(rank) for rank in range(2)))
    assert (found.windows, found.goes_back) == ({}, False)


def test_ranks_may_have_windows_of_their_own() -> None:
    """No rank's steps need another rank."""
    found = plan([0, 1], inventory(0, window(10, 14)), inventory(1, window(7, 14, 1)))
    assert found.windows == {0: range(10, 13), 1: range(7, 8)}


def test_a_lost_memory_is_fetched_from_the_holder_that_is_asked_least() -> None:
    held: Mapping[int, tuple[WindowRef, ...]] = dict.fromkeys((0, 1), (WHOLE,))
    found = plan(
        [0, 1],
        inventory(0),
        inventory(1),
        inventory(2, WHOLE, held=held),
        inventory(3, WHOLE, held=held),
    )
    assert found.fetches == (
        Fetch(global_rank=0, source_rank=2, window_start=10),
        Fetch(global_rank=1, source_rank=3, window_start=10),
    )


def test_a_window_in_own_memory_comes_before_a_newer_copy() -> None:
    copies = {0: (window(12, 14, 1),)}
    found = plan([0], inventory(0, WHOLE), inventory(1, held=copies))
    assert (found.windows, found.fetches) == ({0: range(10, 13)}, ())


def test_missing_gradients_take_all_ranks_to_the_newest_common_iteration() -> None:
    found = plan(
        [1],
        inventory(0, WHOLE),
        inventory(1),
        inventory(2, WHOLE, held={1: (window(10, 13),)}),
        inventory(3, window(10, 12)),
    )
    assert found.target_iteration == 12
    assert found.windows == dict.fromkeys(range(4), range(10, 13))


def test_without_state_all_ranks_load() -> None:
    found = plan([], inventory(0, WHOLE), inventory(1, window(10, 13)), target=None)
    assert (found.target_iteration, sorted(found.windows)) == (13, [0, 1])


def test_states_of_other_branches_are_no_states_of_the_target() -> None:
    """The copies of rank 1 are of before a rollback; iteration 13 was trained again."""
    held = {1: (window(10, 14),)}
    newer = window(10, 14, 3, 1, 2, 2)
    found = plan([1], inventory(0, newer, held=held), inventory(1), branch=2)
    assert (found.target_iteration, found.branch) == (12, 1)
    assert found.windows == {0: range(10, 13), 1: range(10, 13)}


def test_the_newest_branch_comes_before_a_later_iteration() -> None:
    """Copies may still be there of a branch from which the run has gone back."""
    older, newer = window(10, 16), window(8, 13, 3, 1, 1, 1, 2)
    ranks = [
        inventory(0, newer, held={1: (older,)}),
        inventory(1, newer, held={0: (older,)}),
    ]
    found = plan([], *ranks, target=None)
    assert (found.target_iteration, found.branch) == (13, 2)


def test_no_common_iteration_is_an_error_that_lists_the_sources() -> None:
    wanted = (
        r"^ranks cannot be rebuilt: looked for an iteration at or before 14 to which"
        r" windows and logged gradients of all ranks lead; got rank 0: 10 to 12 \(.*\)"
        r" in rank 0's memory; rank 1: no window$"
    )
    with pytest.raises(NothingLeftError, match=wanted):
        plan([1], inventory(0, WHOLE), inventory(1))


def test_the_lines_tell_what_happens() -> None:
    held = {1: (WHOLE,)}
    found = plan([1], inventory(0, WHOLE, held=held), inventory(1))
    assert found.lines() == [
        "rank 1: take steps 11 to 14 by logged gradients from the window at 10",
        "rank 1: get the window at 10 from rank 0",
        "all stages: go on after iteration 14",
    ]
    loaded = plan([0], inventory(0, window(14, 14, 1)))
    assert loaded.lines()[0] == "rank 0: load the window at 14"


_WINDOWS = st.lists(
    st.tuples(st.integers(0, 8), st.integers(1, 3), st.integers(0, 6)),
    unique_by=lambda drawn: drawn[0],
    max_size=3,
).map(
    lambda drawn: tuple(
        window(start, start + slots - 1 + more, slots) for start, slots, more in drawn
    )
)


@given(
    own=st.lists(_WINDOWS, min_size=3, max_size=3),
    copies=st.lists(_WINDOWS, min_size=3, max_size=3),
    lost=st.sets(st.integers(0, 2)),
    target=st.none() | st.integers(0, 16),
)
def test_any_plan_leads_as_far_as_possible_and_rebuilds_as_few_as_possible(
    own: list[tuple[WindowRef, ...]],
    copies: list[tuple[WindowRef, ...]],
    lost: set[int],
    target: int | None,
) -> None:
    """Rank r holds the copies for rank r + 1."""
    ranks = [
        inventory(rank, *own[rank], held={(rank + 1) % 3: copies[rank]})
        for rank in range(3)
    ]
    reach = [
        {
            iteration
            for ref in (*own[rank], *copies[rank - 1])
            for iteration in range(ref.end, ref.replayable_to + 1)
        }
        for rank in range(3)
    ]
    keeps_live = target is not None and all(target in reach[rank] for rank in lost)
    common = set.intersection(*reach)
    usable = {i for i in common if target is None or i <= target}
    if not keeps_live and not usable:
        with pytest.raises(NothingLeftError):
            plan(sorted(lost), *ranks, target=target)
        return
    found = plan(sorted(lost), *ranks, target=target)
    goal = target if keeps_live else max(usable)
    assert found.target_iteration == goal
    assert set(found.windows) == (lost if keeps_live else {0, 1, 2})
    fetched = {fetch.global_rank: fetch for fetch in found.fetches}
    for rank, span in found.windows.items():
        source = copies[rank - 1] if rank in fetched else own[rank]
        assert any(
            ref.span == span and ref.end <= found.target_iteration <= ref.replayable_to
            for ref in source
        )
    permuted = itertools.permutations(ranks)
    assert all(plan(sorted(lost), *each, target=target) == found for each in permuted)
