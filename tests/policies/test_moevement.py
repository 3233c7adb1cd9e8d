"""Windows of sparse snapshots: base, slots, changes of length and order, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.config import MoevementConfig
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.moevement import SparseWindows
from moe_ckpt.policies.stage_profile import StageProfile
from moe_ckpt.policies.window_schedule import fixed_order
from moe_ckpt.policies.window_sizes import WindowSizes
from moe_ckpt.types import Measured, SlotPlan, SnapshotPlan, UnitPlan, WindowChoice
from tests.policies.profiles import (
    NOTHING,
    config,
    equal,
    nothing_yet,
    profile,
    unasked,
)


def moevement(**changes: Any) -> MoevementConfig:
    return config("moevement", **changes)


def begun(*stages: StageProfile, own_stage: int = 0, **changes: Any) -> SparseWindows:
    """Return a policy that has taken a base at iteration 0 and measured nothing yet."""
    policy = SparseWindows(moevement(**changes), stages, own_stage)
    policy.plan(0, nothing_yet)
    return policy


class Measurements:
    """Gives one measurement after another, the last one forever, and counts requests.

    Args:
        *budgets_bytes: Bytes that can be copied in an iteration of 2 s, by request.
        popularity: Popularity of experts, by request.
        costs_s: Seconds that an empty and a dense snapshot add. None: not measured.
        **facts: Other measurements.
    """

    def __init__(
        self,
        *budgets_bytes: float,
        popularity: Sequence[Sequence[float]] = ((),),
        costs_s: tuple[float, float] | None = None,
        **facts: Any,
    ) -> None:
        self.asked = 0
        self._budgets_bytes = budgets_bytes
        self._popularity = popularity
        if costs_s:
            facts |= {"empty_snapshot_s": costs_s[0], "dense_snapshot_s": costs_s[1]}
        self._facts = facts

    def __call__(self) -> Measured:
        budget_bytes = self._budgets_bytes[
            min(self.asked, len(self._budgets_bytes) - 1)
        ]
        popularity = self._popularity[min(self.asked, len(self._popularity) - 1)]
        self.asked += 1
        rate = budget_bytes / 2
        facts: dict[str, Any] = {
            "host_bytes_per_s": rate,
            "peer_bytes_per_s": rate,
        } | self._facts
        return Measured(
            iteration_s=2.0,
            copy_bytes_per_s=rate,
            popularity=np.array(popularity, np.float64),
            **facts,
        )


def slots_of(plans: Sequence[SnapshotPlan]) -> list[SlotPlan]:
    slots = [plan.sparse for plan in plans if plan.sparse]
    assert len(slots) == len(plans)
    return slots


def next_window(
    policy: SparseWindows, iteration: int, measure: Measurements
) -> tuple[WindowChoice, list[SlotPlan]]:
    """Return the choice and the slots of the window that begins at an iteration.

    Asserts that the policy measures nothing once the window has begun, and takes
    nothing in the pause after the window.
    """
    first = policy.plan(iteration, measure)
    assert first.window is not None
    end = iteration + first.window.num_slots
    later = [policy.plan(number, unasked) for number in range(iteration + 1, end)]
    assert all(plan.window is None and not plan.durable for plan in later)
    paused = [
        policy.plan(end + number, unasked) for number in range(first.window.pause_iters)
    ]
    assert paused == [NOTHING] * len(paused)
    return first.window, slots_of([first, *later])


def first_windows(
    policy: SparseWindows, count: int, measure: Callable[[], Measurements]
) -> list[tuple[int, int, float | None]]:
    """Return slots, pause and snapshot share of each of the first windows.

    The first window begins after a base and the profiled iterations.
    """
    begin, found = 6, []
    for _ in range(count):
        choice, _ = next_window(policy, begin, measure())
        begin += choice.period_iters
        found.append((choice.num_slots, choice.pause_iters, choice.snapshot_share))
    return found


def assert_is_window(
    slots: Sequence[SlotPlan], start: int, num_slots: int, num_operators: int
) -> None:
    """Assert that slots are those of a window.

    A window takes every operator whole once, and takes the operator's compute weights
    in all earlier slots.
    """
    numbers = [(slot.window_start, slot.slot, slot.num_slots) for slot in slots]
    assert numbers == [(start, number, num_slots) for number in range(num_slots)]
    assert sorted(operator for slot in slots for operator in slot.full) == list(
        range(num_operators)
    )
    for number, slot in enumerate(slots):
        assert list(slot.compute) == sorted(
            operator for later in slots[number + 1 :] for operator in later.full
        )


def slot_of_each(slots: Sequence[SlotPlan]) -> dict[int, int]:
    return {operator: slot.slot for slot in slots for operator in slot.full}


@st.composite
def stages(draw: st.DrawFn) -> list[StageProfile]:
    """Draw one to four stages of one to three ranks.

    An operator may have bytes on any number of these ranks.
    """
    found = []
    for _ in range(draw(st.integers(1, 4))):
        num_ranks, num_operators = draw(st.integers(1, 3)), draw(st.integers(1, 9))
        row = st.lists(
            st.integers(0, 20), min_size=num_operators, max_size=num_operators
        )
        parameters = draw(st.lists(row, min_size=num_ranks, max_size=num_ranks))
        logs = {
            "boundary_log_bytes": draw(st.integers(0, 500)),
            "step_log_bytes": draw(st.integers(0, 50)),
        }
        found.append(
            profile(parameters, num_experts=draw(st.integers(0, num_operators)), **logs)
        )
    return found


def popularity_for(stage: StageProfile, seed: int) -> list[float]:
    num_experts = len(fixed_order(stage.table.operators).experts)
    return (
        np.random.default_rng(seed)
        .integers(0, 5, num_experts)
        .astype(np.float64)
        .tolist()
    )


@pytest.mark.parametrize("window", ["auto", 1, 3])
@pytest.mark.parametrize("iteration", [0, 40])
def test_the_first_plan_takes_everything(window: int | str, iteration: int) -> None:
    policy = SparseWindows(moevement(window=window), [equal(6)], 0)
    everything = SlotPlan(
        window_start=iteration, units=(UnitPlan(full=(0, 1, 2, 3, 4, 5)),)
    )
    assert policy.plan(iteration, nothing_yet) == SnapshotPlan(sparse=everything)


TRIAL = WindowChoice(
    num_slots=3, iteration_s=2.0, copy_bytes_per_s=20.5, reordered=True, pause_iters=2
)


@pytest.mark.parametrize("profile_iters", [2, 5])
def test_auto_takes_nothing_while_iterations_are_profiled(profile_iters: int) -> None:
    policy = SparseWindows(moevement(profile_iters=profile_iters), [equal(6)], 0)
    policy.plan(40, nothing_yet)
    profiled = [policy.plan(41 + i, unasked) for i in range(profile_iters)]
    assert profiled == [NOTHING] * profile_iters
    choice, slots = next_window(policy, 41 + profile_iters, Measurements(41))
    assert choice == TRIAL
    assert_is_window(slots, 41 + profile_iters, 3, 6)


def test_auto_does_not_profile_again_after_a_fault() -> None:
    policy = SparseWindows(moevement(), [equal(6)], 0)
    # peers receive all 72 bytes in an iteration of 2 s
    meter = Measurements(41, peer_bytes_per_s=36.0)
    base = policy.plan(40, meter).sparse
    assert base
    assert base.pause_iters == 0
    first = policy.plan(41, unasked)
    assert first.window == TRIAL


@pytest.mark.parametrize(
    ("settings", "peer_bytes_per_s", "pause_iters"),
    [
        pytest.param({}, 35.9, 2, id="a little longer than an iteration"),
        pytest.param({}, 9.0, 4, id="four iterations"),
        pytest.param(
            {"memory_budget_bytes": 163}, 9.0, 1, id="as memory for logs allows"
        ),
        pytest.param({"paper_exact": True}, 9.0, 0, id="as printed"),
    ],
)
def test_after_a_fault_peers_get_the_base_before_a_window_begins(
    settings: dict[str, Any], peer_bytes_per_s: float, pause_iters: int
) -> None:
    """Without this pause the next update would wait until peers have the base."""
    policy = SparseWindows(
        moevement(**settings), [equal(6, boundary_log_bytes=2, step_log_bytes=1)], 0
    )
    measure = Measurements(41, peer_bytes_per_s=peer_bytes_per_s)
    base = policy.plan(40, measure).sparse
    assert base
    assert base.pause_iters == pause_iters
    assert [policy.plan(41 + i, unasked) for i in range(pause_iters)] == [
        NOTHING
    ] * pause_iters
    assert policy.plan(41 + pause_iters, measure).window is not None


@pytest.mark.parametrize(
    ("kept_since", "begin", "num_slots"),
    [
        pytest.param(38, 43, 3, id="a period after the kept one"),
        pytest.param(35, 40, 3, id="now, as a period has passed"),
        pytest.param(33, 40, 3, id="all slots in two periods"),
        pytest.param(32, 40, 2, id="with fewer slots in two periods"),
        pytest.param(31, 40, 1, id="whole in the last iteration of two periods"),
        pytest.param(10, 40, 1, id="whole, after many periods"),
    ],
)
def test_after_a_fault_windows_go_on_from_the_one_that_is_kept(
    kept_since: int, begin: int, num_slots: int
) -> None:
    """A period has 5 iterations: a trial of three slots, and a pause of two."""
    policy, measure = (
        SparseWindows(moevement(), [equal(6)], 0),
        Measurements(41, kept_since=kept_since),
    )
    first = policy.plan(40, measure)
    assert first.window == replace(TRIAL, num_slots=num_slots)
    rest = [
        policy.plan(iteration, unasked)
        for iteration in range(41, begin + num_slots + TRIAL.pause_iters)
    ]
    plans = [first, *rest]
    assert [plan.sparse for plan in plans[: begin - 40]] == [None] * (begin - 40)
    end = begin - 40 + num_slots
    assert_is_window(slots_of(plans[begin - 40 : end]), begin, num_slots, 6)
    assert plans[end:] == [NOTHING] * TRIAL.pause_iters
    choice, slots = next_window(policy, begin + num_slots + TRIAL.pause_iters, measure)
    assert_is_window(slots, begin + num_slots + TRIAL.pause_iters, choice.num_slots, 6)
    assert measure.asked == 2


def test_peers_get_a_shorter_window_before_the_next_begins() -> None:
    """At 9 bytes/s, the 80 bytes of two slots reach peers in five iterations.

    The 72 bytes of a whole snapshot reach peers in four iterations.
    """
    pauses = []
    for kept_since in (32, 31):
        policy = SparseWindows(moevement(), [equal(6)], 0)
        choice = policy.plan(
            40, Measurements(41, peer_bytes_per_s=9.0, kept_since=kept_since)
        ).window
        assert choice
        pauses.append((choice.num_slots, choice.pause_iters))
    assert pauses == [(2, 4), (1, 4)]


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        pytest.param({"paper_exact": True}, {"kept_since": 38}, id="as printed"),
        pytest.param({}, {"kept_since": None}, id="a rank keeps none"),
        pytest.param(
            {}, {"kept_since": 38, "iteration_s": 0.0}, id="nothing is measured"
        ),
        pytest.param({"window": 3}, {"kept_since": 38}, id="a given window"),
    ],
)
def test_a_generation_without_a_rhythm_begins_with_everything(
    settings: dict[str, Any], facts: dict[str, Any]
) -> None:
    policy = SparseWindows(moevement(**settings), [equal(6)], 0)
    plan = policy.plan(40, lambda: replace(Measurements(41)(), **facts))
    assert plan.sparse
    assert (plan.sparse.full, plan.window) == ((0, 1, 2, 3, 4, 5), None)


@given(
    stages=stages(),
    budgets_bytes=st.lists(st.floats(1, 5000), min_size=1, max_size=5),
    costs_s=st.none() | st.tuples(st.floats(0, 1), st.floats(1, 3)),
)
def test_auto_windows_line_up_over_stages(
    stages: list[StageProfile],
    budgets_bytes: list[float],
    costs_s: tuple[float, float] | None,
) -> None:
    policies = [
        SparseWindows(moevement(profile_iters=2), stages, own)
        for own in range(len(stages))
    ]
    assert {policy.plan(0, nothing_yet) is NOTHING for policy in policies} == {False}
    begin = 3
    for number, budget_bytes in enumerate(budgets_bytes):
        found = set()
        for policy, stage in zip(policies, stages, strict=True):
            measure = Measurements(
                budget_bytes,
                popularity=[popularity_for(stage, number)],
                costs_s=costs_s,
            )
            choice, slots = next_window(policy, begin, measure)
            assert measure.asked == 1
            assert_is_window(slots, begin, choice.num_slots, len(stage.table.operators))
            found.add(replace(choice, reordered=True))
        assert len(found) == 1
        begin += found.pop().period_iters


def test_an_iteration_that_does_not_follow_begins_a_window() -> None:
    policy = begun(equal(6), window=3)
    measure = Measurements(1.0)
    slots = slots_of(
        [policy.plan(iteration, measure) for iteration in (1, 3, 4, 5, 6, 20)]
    )
    numbers = [(slot.window_start, slot.slot) for slot in slots]
    assert numbers == [(1, 0), (3, 0), (3, 1), (3, 2), (6, 0), (20, 0)]
    assert_is_window(slots[1:4], 3, 3, 6)
    assert measure.asked == 4


def test_an_iteration_that_was_planned_already_changes_nothing() -> None:
    policy = SparseWindows(moevement(window=3), [equal(6)], 0)
    policy.plan(10, nothing_yet)
    measure = Measurements(1.0)
    first = slots_of([policy.plan(iteration, measure) for iteration in (11, 12)])
    assert [policy.plan(iteration, unasked) for iteration in (12, 11, 10, 3)] == [
        NOTHING
    ] * 4
    assert_is_window([*first, *slots_of([policy.plan(13, unasked)])], 11, 3, 6)


def test_windows_are_tried_until_it_is_known_what_they_cost() -> None:
    """Trials have the fewest slots that fit, then four times as many slots.

    The two lengths separate the cost of a byte from the cost of a snapshot.
    """
    found = first_windows(begun(equal(6)), 3, lambda: Measurements(80))
    assert found == [(1, 2, None), (4, 2, None), (1, 2, None)]


def test_no_longer_window_is_tried_where_faults_are_frequent() -> None:
    """With windows of four slots, a fault makes a stage replay 6 iterations of 2 s.

    The replay takes 3 % of 400 s, and 4 % of 300 s.
    """
    for mtbf_s, num_slots in ((400.0, 4), (300.0, 1)):
        policy, measure = begun(equal(6), mtbf_s=mtbf_s), Measurements(80)
        first, _ = next_window(policy, 6, measure)
        second, _ = next_window(policy, 6 + first.period_iters, measure)
        assert (first.num_slots, second.num_slots) == (1, num_slots)


@pytest.mark.parametrize(
    ("boundary_log", "replayed_s", "share"),
    [
        pytest.param(True, None, 0.5, id="by itself, as expected"),
        pytest.param(True, 0.6, 0.3, id="by itself, as measured"),
        pytest.param(False, None, 1.0, id="with all others"),
    ],
)
def test_a_replay_takes_what_is_expected_until_it_is_measured(
    boundary_log: bool, replayed_s: float | None, share: float
) -> None:
    policy = SparseWindows(
        moevement(boundary_log=boundary_log, mtbf_s=400.0),
        [equal(6)],
        0,
        alone_share=0.5,
    )
    policy.plan(0, nothing_yet)
    choice = cheapest(policy, 6, costs_s=(0.01, 0.01), replayed_iteration_s=replayed_s)
    replayed_iters = 1.5 * choice.num_slots + choice.pause_iters / 2
    assert choice.replay_share == pytest.approx(replayed_iters * share * 2.0 / 400.0)


@pytest.mark.parametrize(
    ("mtbf_s", "wanted"),
    [
        pytest.param(
            3600.0,
            [(1, 14), (4, 55), (1, 14)],
            id="the shortest pauses with which trials take 3 %",
        ),
        pytest.param(
            20.0, [(1, 2), (1, 2), (1, 2)], id="no longer than the best pause"
        ),
    ],
)
def test_trials_are_spread(mtbf_s: float, wanted: list[tuple[int, int]]) -> None:
    """Each snapshot adds 0.88 s to iterations of 2 s, and costs are not settled."""
    measure = lambda: Measurements(1e9, costs_s=(0.88, 0.88), costs_are_settled=False)  # noqa: E731
    found = first_windows(begun(equal(6), mtbf_s=mtbf_s), 3, measure)
    assert found == [(*window, None) for window in wanted]


@pytest.mark.parametrize(
    ("host_bytes_per_s", "wanted"),
    [
        pytest.param(
            8.0, [(1, 7), (1, 7)], id="the update waits for 7 s of a copy of 9 s"
        ),
        pytest.param(40.0, [(1, 2), (1, 2)], id="the update waits for nothing"),
    ],
)
def test_first_trials_are_spread_by_waits_alone(
    host_bytes_per_s: float, wanted: list[tuple[int, int]]
) -> None:
    measure = lambda: Measurements(1e9, host_bytes_per_s=host_bytes_per_s)  # noqa: E731
    found = first_windows(begun(equal(6), mtbf_s=20.0), 2, measure)
    assert found == [(*window, None) for window in wanted]


def cheapest(
    policy: SparseWindows, begin: int, *, costs_s: tuple[float, float], **facts: Any
) -> WindowChoice:
    choice, _ = next_window(policy, begin, Measurements(1e9, costs_s=costs_s, **facts))
    return choice


@pytest.mark.parametrize(
    ("settings", "facts", "pause_iters", "snapshot_share"),
    [
        pytest.param(
            {},
            {"costs_s": (0.0, 0.0)},
            0,
            0.0,
            id="windows that cost nothing follow each other",
        ),
        pytest.param(
            {},
            {},
            39,
            0.9 / 80,
            id="sqrt(2 * 0.9 * 3600) / 2 balances snapshots and replays",
        ),
        pytest.param(
            {},
            {"replayed_iteration_s": 0.5},
            79,
            0.9 / 160,
            id="fast replays make longer pauses",
        ),
        pytest.param(
            {"mtbf_s": 20.0, "overhead": 0.99},
            {},
            2,
            0.15,
            id="frequent faults make short pauses",
        ),
        pytest.param(
            {"mtbf_s": 20.0, "overhead": 0.031},
            {},
            14,
            0.03,
            id="under a cap on overhead longer ones",
        ),
        pytest.param(
            {"pause_iters": 7}, {}, 7, 0.9 / 16, id="a pause that is given is kept"
        ),
    ],
)
def test_a_pause_loses_the_least_time(
    settings: dict[str, Any],
    facts: dict[str, Any],
    pause_iters: int,
    snapshot_share: float,
) -> None:
    """A snapshot adds 0.9 s, an iteration takes 2 s, and a fault comes every hour.

    Some cases give other values.
    """
    choice = cheapest(begun(equal(6), **settings), 6, **{"costs_s": (0.9, 0.9)} | facts)
    assert (choice.num_slots, choice.pause_iters) == (1, pause_iters)
    assert choice.snapshot_share == pytest.approx(snapshot_share)
    replay_s, mtbf_s = (
        facts.get("replayed_iteration_s", 2.0),
        settings.get("mtbf_s", 3600.0),
    )
    assert choice.replay_share == pytest.approx(
        (1.5 + pause_iters / 2) * replay_s / mtbf_s
    )


def test_copies_that_take_longer_than_an_iteration_make_slots() -> None:
    """In an iteration of 2 s, 33 of the 72 bytes of the whole state can be copied.

    Three slots of 32, 28 and 24 bytes fit; fewer slots do not fit.
    """
    measure = Measurements(
        33.0, costs_s=(0.0, 0.0), host_bytes_per_s=16.5, peer_bytes_per_s=1e9
    )
    choice, _ = next_window(begun(equal(6), mtbf_s=20.0), 6, measure)
    assert (choice.num_slots, choice.pause_iters, choice.snapshot_share) == (3, 0, 0.0)


def test_slots_fit_into_the_time_before_the_update() -> None:
    """The update takes none, or half a second, of an iteration of 2 s.

    At 20 bytes/s, the first of three slots, with 32 bytes, needs 1.6 s.
    """
    rates: dict[str, Any] = {"host_bytes_per_s": 20.0, "peer_bytes_per_s": 20.0}
    early, late = (
        next_window(
            begun(equal(6)), 6, Measurements(40.0, overlap_s=overlap_s, **rates)
        )[0]
        for overlap_s in (2.0, 1.5)
    )
    assert (early.num_slots, late.num_slots) == (3, 4)


@pytest.mark.parametrize(("drift", "is_kept"), [(0.5, True), (0.01, False)])
def test_the_window_changes_when_another_loses_clearly_less(
    drift: float, is_kept: bool
) -> None:
    policy = begun(equal(6), window_drift=drift)
    first = cheapest(policy, 6, costs_s=(0.9, 0.9))
    second = cheapest(policy, 6 + first.period_iters, costs_s=(1.8, 1.8))
    assert (first.pause_iters, second.pause_iters) == (39, 39 if is_kept else 56)
    assert second.snapshot_share == pytest.approx(1.8 / (2 * second.period_iters))


def test_a_pause_is_no_longer_than_memory_for_logs() -> None:
    """Logs of 3 bytes per iteration may take as many bytes as the state, 72.

    Logs of two windows of 11 iterations, and of one more iteration, fit.
    """
    stage = equal(6, boundary_log_bytes=2, step_log_bytes=1)
    assert cheapest(begun(stage), 6, costs_s=(0.9, 0.9)).pause_iters == 10
    budget = SparseWindows(moevement(), [stage], 0).forecast(1, 20).total_bytes
    for allowed, pause_iters in ((budget, 20), (budget - 1, 19)):
        choice = cheapest(
            begun(stage, memory_budget_bytes=allowed), 6, costs_s=(0.9, 0.9)
        )
        assert (choice.num_slots, choice.pause_iters) == (1, pause_iters)


def test_a_pause_is_kept_beside_a_fixed_window() -> None:
    fixed = begun(equal(6), window=2, pause_iters=3)
    assert [
        next_window(fixed, begin, Measurements(1.0))[0].pause_iters for begin in (1, 6)
    ] == [3, 3]


def test_iterations_without_copies_are_measured_again_now_and_then() -> None:
    policy = begun(equal(6))
    assert (
        cheapest(policy, 6, costs_s=(0.0, 0.0), iters_since_quiet=15).pause_iters == 0
    )
    assert (
        cheapest(policy, 7, costs_s=(0.0, 0.0), iters_since_quiet=16).pause_iters == 1
    )
    assert cheapest(policy, 9, costs_s=(0.0, 0.0)).pause_iters == 0


@pytest.mark.parametrize(("drift", "num_slots"), [(0.3, 2), (0.4, 3)])
def test_the_papers_window_changes_by_more_than_the_drift(
    drift: float, num_slots: int
) -> None:
    policy = begun(equal(6), window_drift=drift, paper_exact=True)
    first, _ = next_window(policy, 6, Measurements(33))
    second, _ = next_window(policy, 9, Measurements(43))
    assert (first.num_slots, second.num_slots, second.pause_iters) == (3, num_slots, 0)


@pytest.mark.parametrize(
    ("change", "share", "now", "reordered"),
    [
        pytest.param(0.10, 0.25, [100] * 6 + [80, 120], True, id="2 of 8 changed"),
        pytest.param(0.10, 0.26, [100] * 6 + [80, 120], False, id="2 of 8 are too few"),
        pytest.param(
            0.25, 0.25, [100] * 6 + [80, 120], False, id="by less than is allowed"
        ),
    ],
)
def test_experts_are_reordered_if_enough_changed(
    change: float, share: float, now: list[int], reordered: bool
) -> None:
    policy = begun(
        profile([[1] * 8], num_experts=8),
        window=8,
        reorder_change=change,
        reorder_share=share,
    )
    measure = Measurements(1.0, popularity=[[100] * 8, now])
    first, slots = next_window(policy, 1, measure)
    second, later = next_window(policy, 9, measure)
    assert (first.reordered, second.reordered) == (True, reordered)
    wanted = (
        sorted(range(8), key=lambda expert: now[expert])
        if reordered
        else list(range(8))
    )
    assert [slot.full for slot in slots] == [(expert,) for expert in range(8)]
    assert [slot.full for slot in later] == [(expert,) for expert in wanted]


def test_changes_count_from_the_last_order_not_from_the_last_window() -> None:
    policy = begun(profile([[1] * 8], num_experts=8), window=8)
    creeping = [[100 + by, 100 - by] + [100] * 6 for by in (0, 8, 16, 16, 24)]
    measure = Measurements(1.0, popularity=creeping)
    reordered = [
        next_window(policy, begin, measure)[0].reordered for begin in (1, 9, 17, 25, 33)
    ]
    assert reordered == [True, False, True, False, False]


def test_an_order_is_kept_over_a_change_of_the_window() -> None:
    policy = begun(profile([[1] * 6], num_experts=6))
    measure = Measurements(42, 83, popularity=[[6, 5, 4, 3, 2, 1], [6, 5, 4, 3, 2, 1]])
    first, slots = next_window(policy, 6, measure)
    second, later = next_window(policy, 6 + first.period_iters, measure)
    assert [(choice.num_slots, choice.reordered) for choice in (first, second)] == [
        (2, True),
        (4, False),
    ]
    assert [slot.full for slot in slots] == [(3, 4, 5), (0, 1, 2)]
    assert [slot.full for slot in later] == [(5,), (3, 4), (2,), (0, 1)]


def test_the_forecast_is_that_of_the_rank_with_the_most() -> None:
    """A parameter takes 12 bytes in one slot, and 2 bytes in each slot before.

    Ranks keep two windows beside the window in flight.
    """
    logs = profile([[100] * 12, [90] * 12], boundary_log_bytes=7000, step_log_bytes=7)
    config, stages = (
        moevement(keep_windows=2),
        [profile([[1] * 6, [500] * 6]), logs, equal(3)],
    )
    policy, sizes = (
        SparseWindows(config, stages, 2, num_copies=1),
        WindowSizes(config, stages, 1),
    )
    dense, sparse = policy.forecast(1), policy.forecast(12)
    assert (dense.snapshots_bytes, dense.boundary_log_bytes) == (3 * 12 * 6 * 500, 0)
    assert (dense.copies_bytes, dense.double_buffered_dense_bytes) == (
        3 * 12 * 6 * 500,
        2 * 12 * 6 * 500,
    )
    assert sparse == sizes.forecast_of(1, 12)
    assert sparse.snapshots_bytes == 3 * (12 + 11) * 12 * 100
    assert (sparse.boundary_log_bytes, sparse.step_log_bytes) == (37 * 7000, 37 * 7)
    assert policy.own_forecast() == sizes.forecast_of(2, 12)


@given(
    stages=stages(),
    budget_bytes=st.integers(1, 20_000),
    speeds=st.lists(st.floats(1, 500), max_size=4),
)
def test_auto_stays_in_budget_and_uses_it(
    stages: list[StageProfile], budget_bytes: int, speeds: list[float]
) -> None:
    unlimited = SparseWindows(moevement(), stages, 0)
    allowed = [
        w
        for w in range(1, unlimited.max_slots + 1)
        if unlimited.forecast(w).total_bytes <= budget_bytes
    ]
    settings = moevement(
        memory_budget_bytes=budget_bytes, profile_iters=2, window_drift=0.0
    )
    if not allowed:
        with pytest.raises(
            ConfigError,
            match=rf"^ckpt\.memory_budget_bytes: got {budget_bytes}, wanted ",
        ):
            SparseWindows(settings, stages, 0)
        return
    policy = SparseWindows(settings, stages, 0)
    assert policy.max_slots == max(allowed)
    policy.plan(0, nothing_yet)
    begin = 3
    for speed in speeds:
        measure = Measurements(
            speed, popularity=[popularity_for(stages[0], 0)], costs_s=(0.9, 0.9)
        )
        choice, slots = next_window(policy, begin, measure)
        assert (
            policy.forecast(choice.num_slots, choice.pause_iters).total_bytes
            <= budget_bytes
        )
        assert_is_window(slots, begin, choice.num_slots, len(stages[0].table.operators))
        begin += choice.period_iters


@pytest.mark.parametrize(
    ("has_budget", "in_slots"),
    [(False, {1: 0, 2: 0, 0: 1}), (True, {0: 0, 1: 1, 2: 1})],
)
def test_an_order_that_exceeds_the_forecast_is_not_taken(
    has_budget: bool, in_slots: dict[int, int]
) -> None:
    """The largest expert is the most popular, and would stay frozen longest.

    The window would then contain the compute weights of that expert once more.
    """
    stages = [profile([[3, 1, 1]], num_experts=3)]
    budget = SparseWindows(moevement(window=2), stages, 0).forecast(2).total_bytes
    policy = begun(
        *stages, window=2, memory_budget_bytes=budget if has_budget else None
    )
    choice, slots = next_window(
        policy, 1, Measurements(1.0, popularity=[(9.0, 1.0, 1.0)])
    )
    assert choice.reordered is not has_budget
    assert slot_of_each(slots) == in_slots


MIB = 1 << 20


def test_a_budget_that_no_window_fits_in_is_refused_with_the_numbers() -> None:
    """The stage has 6 operators of 1 Mi parameters.

    Ranks need memory for 2 windows of 72 MiB and for logs of 3 iterations.
    """
    stage = profile([[MIB] * 6], boundary_log_bytes=2 * MIB, step_log_bytes=MIB // 2)
    fits = int(151.5 * MIB)
    with pytest.raises(ConfigError) as caught:
        SparseWindows(moevement(memory_budget_bytes=fits - 1), [stage, equal(3)], 1)
    first, *lines = str(caught.value).splitlines()
    assert (
        first
        == f"ckpt.memory_budget_bytes: got {fits - 1}, wanted with a window of 1 at"
        f" least {fits}:"
    )
    # windows, boundary logs, step logs, copies, total, two dense checkpoints
    sizes = ("144.0", "6.0", "1.5", "0.0", "151.5", "144.0")
    assert [line.split()[-2:] for line in lines] == [[size, "MiB"] for size in sizes]


def test_a_fixed_window_that_does_not_fit_is_refused() -> None:
    budget = SparseWindows(moevement(), [equal(6)], 0).forecast(3).total_bytes
    too_much = (
        rf"^ckpt\.memory_budget_bytes: got {budget}, wanted with a window of 4 at least"
        r" \d+:"
    )
    too_long = (
        r"^ckpt\.window: got 7, wanted at most 6, the operators of the largest stage$"
    )
    stages = [equal(2), equal(6), equal(3)]
    for window, memory_bytes, reason in ((4, budget, too_much), (7, None, too_long)):
        with pytest.raises(ConfigError, match=reason):
            SparseWindows(
                moevement(window=window, memory_budget_bytes=memory_bytes), stages, 1
            )
    assert (
        SparseWindows(
            moevement(window=3, memory_budget_bytes=budget), stages[1:2], 0
        ).max_slots
        == 3
    )
    assert SparseWindows(moevement(window=6), stages, 0).max_slots == 6


def test_paper_exact_cuts_by_count_and_takes_all_operators_for_equal() -> None:
    # whole state 144 bytes, compute weights 24 bytes: on average 24 and 4 per operator
    stage = profile([[1, 1, 1, 1, 1, 7]])
    # the budget is 2 * 24 + 4 * 4
    _, slots = next_window(begun(stage, paper_exact=True), 6, Measurements(64))
    assert [(len(slot.full), slot.num_slots) for slot in slots] == [(2, 3)] * 3
