"""Simulated ranks measure their iterations, windows and replays."""

from __future__ import annotations

import pytest

from moe_ckpt.sim.measuring import (
    SETTLED,
    GenerationStart,
    MeasuredSoFar,
    MeasurementHistory,
)
from moe_ckpt.sim.pace import EVEN, Pace
from moe_ckpt.types import ENOUGH_WINDOWS, RECENT_ITERS, WARM_UP_ITERS


def test_an_iteration_is_the_median_of_recent_ones() -> None:
    begin = GenerationStart(
        recent=(9.0, 9.0), coming=(5.0, 1.0, 2.0, 4.0), warm_up_iters=2
    )
    lengths = [
        so_far.length for offset in range(6) if (so_far := begin.measured(offset, 0))
    ]
    assert lengths == [9.0, 9.0, 9.0, 9.0, 6.5, 4.0], (
        "iterations 1 and 2 do not count, and 1 follows 4"
    )
    expected = MeasuredSoFar(
        length=1.0, num_costs=0, replay_length=None, kept_since=None
    )
    assert begin.measured(4 + RECENT_ITERS, 0) == expected
    assert GenerationStart(warm_up_iters=2).measured(2, 0) is None


@pytest.mark.parametrize(
    ("age_iters", "num_costs"),
    [(None, [1, 1, 1, 2, ENOUGH_WINDOWS]), (4, [1, 1, 2, 3, ENOUGH_WINDOWS])],
)
def test_costs_are_those_of_windows_that_others_follow(
    age_iters: int | None, num_costs: list[int]
) -> None:
    """A base, the first snapshot of ranks that keep no window, does not count."""
    begin = GenerationStart(
        recent=(1.0,), num_costs=1, kept_age_iters=age_iters, kept_slots=3
    )
    all_so_far = [begin.measured(9, num_begun) for num_begun in (0, 1, 2, 3, 99)]
    assert [so_far.num_costs for so_far in all_so_far if so_far] == num_costs
    assert {so_far.kept_since for so_far in all_so_far if so_far} == {
        None if age_iters is None else -4
    }


@pytest.mark.parametrize(
    ("begin", "since"),
    [
        (SETTLED, 0),
        (GenerationStart(coming=(1.0, 0.5)), 2 + RECENT_ITERS),
        (GenerationStart(recent=(1.0, 0.5)), RECENT_ITERS),
    ],
)
def test_all_is_even_once_different_iterations_are_forgotten(
    begin: GenerationStart, since: int
) -> None:
    assert [begin.is_even(offset) for offset in (since - 1, since)] == [
        since == 0,
        True,
    ]


def test_a_history_has_the_last_iterations_and_the_median_of_replays() -> None:
    lengths = [0.3, 0.7, 1.1, 1.9, 0.2, 1.3]
    history, pace = MeasurementHistory(), Pace(lengths)
    history.trained(pace, 0, 1, 1, takes_base=True)
    history.trained(pace, 0, 4, 2, takes_base=False)
    history.trained(pace, 4, 4, 1, takes_base=False)
    for done, reached in [(0, 1), (1, 3), (2, 2), (3, 4)]:
        history.replayed(pace, done, reached)
    start = history.start(pace, 4, 2, 3)
    assert (start.recent, start.coming, start.warm_up_iters) == (
        tuple(lengths[1:4]),
        tuple(lengths[4:]),
        0,
    )
    assert (
        start.num_costs,
        start.replay_length,
        start.kept_age_iters,
        start.kept_slots,
    ) == (1, 0.9, 2, 3)


def test_a_history_of_an_even_pace_is_short() -> None:
    history = MeasurementHistory()
    history.trained(EVEN, 0, WARM_UP_ITERS, 2, takes_base=True)
    assert history.start(EVEN, WARM_UP_ITERS, None, 0) == GenerationStart()
    history.trained(EVEN, WARM_UP_ITERS, 10**9, 3, takes_base=False)
    assert history.start(EVEN, 10**9, None, 0) == GenerationStart(
        recent=(1.0,), num_costs=2
    )
