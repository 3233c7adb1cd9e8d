"""Whole snapshots in host memory: the first one, interval, changes and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.full_snapshots import WholeSnapshots
from moe_ckpt.policies.stage_profile import StageProfile
from moe_ckpt.types import Measured, SlotPlan, SnapshotPlan, UnitPlan
from tests.policies.profiles import (
    NOTHING,
    config,
    equal,
    nothing_yet,
    profile,
    unasked,
)


def gemini(every_iters: int | str = "auto", **changes: Any) -> WholeSnapshots:
    """Return a policy for three operators of 12 bytes each."""
    return WholeSnapshots(
        config("gemini", every_iters=every_iters, **changes), [equal(3)], 0
    )


def checkfreq(**changes: Any) -> WholeSnapshots:
    return WholeSnapshots(config("checkfreq", **changes), [equal(3)], 0)


def measuring(
    *,
    cost_s: float | None = 0.0,
    copy_bytes_per_s: float = math.inf,
    since_quiet: int = 0,
    **others: Any,
) -> Callable[[], Measured]:
    """Return a function that gives the measurements; iterations take two seconds."""
    measured = Measured(
        iteration_s=2.0,
        copy_bytes_per_s=copy_bytes_per_s,
        popularity=np.zeros(0),
        snapshot_cost_s=cost_s,
        iters_since_quiet=since_quiet,
        **others,
    )
    return lambda: measured


def everything_at(iteration: int) -> SlotPlan:
    return SlotPlan(window_start=iteration, units=(UnitPlan(full=(0, 1, 2)),))


def taken(
    policy: WholeSnapshots, iterations: range, measure: Callable[[], Measured]
) -> list[int]:
    """Return the iterations whose state a snapshot takes.

    Asserts that each snapshot takes everything.
    """
    plans = {
        iteration: policy.plan(iteration, measure).sparse for iteration in iterations
    }
    snapshots = {iteration: plan for iteration, plan in plans.items() if plan}
    assert snapshots == {iteration: everything_at(iteration) for iteration in snapshots}
    return list(snapshots)


def chosen(
    policy: WholeSnapshots, iteration: int, cost_s: float | None, **others: Any
) -> tuple[int, int]:
    """Return the interval that a plan chooses, and the best interval.

    Asserts that the plan also takes a snapshot of everything.
    """
    plan = policy.plan(iteration, measuring(cost_s=cost_s, **others))
    assert plan.sparse == everything_at(iteration)
    assert plan.interval is not None
    return plan.interval.every_iters, plan.interval.best


@pytest.mark.parametrize("start", [0, 40])
@pytest.mark.parametrize("every_iters", [1, 4])
def test_a_given_interval_is_kept_without_measurements(
    start: int, every_iters: int
) -> None:
    policy = gemini(every_iters=every_iters)
    iterations = range(start, start + 13)
    assert taken(policy, iterations, unasked) == list(iterations[::every_iters])


def test_the_interval_is_chosen_once_iterations_have_been_measured() -> None:
    policy = gemini(mtbf_s=100.0)
    assert policy.plan(0, nothing_yet) == SnapshotPlan(sparse=everything_at(0))
    assert taken(policy, range(1, 5), unasked) == []
    assert chosen(policy, 5, cost_s=2.0) == (10, 10), "sqrt(2 * 2.0 * 100.0) seconds"
    assert taken(policy, range(6, 36), measuring(cost_s=2.0)) == [15, 25, 35]


def test_until_its_cost_is_known_there_is_a_snapshot_every_few_iterations() -> None:
    policy = gemini(profile_iters=3)
    assert taken(policy, range(10), measuring(cost_s=None)) == [0, 3, 6, 9]


def test_until_its_cost_is_known_a_snapshot_costs_the_wait_for_its_copy() -> None:
    """The update waits for 2.5 s of a copy of 4.5 s; the first measured cost is 3 s."""
    policy = gemini(mtbf_s=81.0, profile_iters=5)
    predicted = {"host_bytes_per_s": 8.0, "overlap_s": 2.0}
    assert policy.plan(0, nothing_yet).interval is None
    assert chosen(policy, 5, None, **predicted) == (10, 10), (
        "sqrt(2 * 2.5 * 81.0) seconds"
    )
    assert chosen(policy, 15, None, **(predicted | {"overlap_s": 1.5})) == (10, 11), (
        "a little more is no reason"
    )
    assert chosen(policy, 25, 3.0) == (11, 11), "but a first measurement is"
    assert chosen(policy, 36, 2.5) == (11, 10)


@pytest.mark.parametrize(
    "rate",
    [pytest.param(20.0, id="short waits"), pytest.param(math.inf, id="no waits")],
)
def test_until_its_cost_is_known_snapshots_are_not_closer_than_told(
    rate: float,
) -> None:
    policy = gemini(mtbf_s=1.0, profile_iters=3)
    assert taken(
        policy, range(10), measuring(cost_s=None, host_bytes_per_s=rate, overlap_s=1.7)
    ) == [0, 3, 6, 9]


def test_a_copy_that_is_waited_for_no_longer_has_no_predicted_cost() -> None:
    policy = gemini(mtbf_s=81.0, profile_iters=3)
    assert chosen(policy, 0, None, host_bytes_per_s=8.0, overlap_s=2.0) == (10, 10)
    assert policy.plan(10, measuring(cost_s=None)).interval is None
    assert taken(policy, range(11, 17), measuring(cost_s=None)) == [13, 16]


def test_an_iteration_is_left_alone_where_none_has_been_for_long() -> None:
    policy = gemini()
    assert taken(policy, range(4), measuring(since_quiet=63)) == [0, 1, 2, 3]
    assert taken(policy, range(4, 6), measuring(since_quiet=64)) == [4]
    assert taken(policy, range(6, 9), measuring()) == [6, 7, 8]
    fixed = gemini(every_iters=1)
    assert taken(fixed, range(4), measuring(since_quiet=64)) == [0, 1, 2, 3]


def test_what_was_measured_before_a_fault_still_counts() -> None:
    policy = gemini(mtbf_s=100.0)
    assert taken(policy, range(7, 20), measuring(cost_s=2.0)) == [7, 17]


@pytest.mark.parametrize(
    "stages",
    [[equal(3)], [equal(3), profile([[1, 1, 1], [2, 2, 2]])]],
    ids=["one", "two"],
)
def test_a_snapshot_comes_when_the_slowest_stage_has_copied_the_last(
    stages: list[StageProfile],
) -> None:
    rate = 3 * len(stages) * 12 / 7.0  # a copy of everything takes 7 s
    policy = WholeSnapshots(config("gemini"), stages, 0)
    assert taken(policy, range(12), measuring(copy_bytes_per_s=rate)) == [0, 4, 8]


def test_the_interval_changes_when_the_best_one_is_far_off() -> None:
    policy = gemini(mtbf_s=100.0, interval_drift=0.25)
    assert taken(policy, range(11), measuring(cost_s=2.0)) == [0, 10]
    assert chosen(policy, 20, cost_s=2.5) == (10, 11)
    assert chosen(policy, 30, cost_s=8.0) == (20, 20)
    assert taken(policy, range(31, 51), measuring(cost_s=8.0)) == [50]


def test_whole_checkpoints_on_disk_come_beside_snapshots() -> None:
    policy = gemini(every_iters=4, durable_every_iters=6)
    plans = [policy.plan(iteration, unasked) for iteration in range(13)]
    assert [iteration for iteration, plan in enumerate(plans) if plan.durable] == [
        6,
        12,
    ]
    assert plans[5] == NOTHING


def test_memory_is_two_snapshots_and_as_much_for_each_rank_that_is_kept() -> None:
    stages = [equal(3), profile([[1, 1, 1], [2, 2, 2]])]
    alone, keeping = (
        WholeSnapshots(config("gemini"), stages, 0, num_copies=copies)
        for copies in (0, 1)
    )
    assert (alone.own_forecast().total_bytes, alone.forecast().total_bytes) == (
        2 * 36,
        2 * 72,
    )
    assert keeping.own_forecast().total_bytes == 2 * 36 + 2 * 72


def test_a_budget_that_is_too_small_is_refused_with_the_numbers() -> None:
    gemini(memory_budget_bytes=72)
    with pytest.raises(
        ConfigError,
        match=r"ckpt.memory_budget_bytes: got 71, wanted at least 72:\n +snapshots",
    ):
        gemini(memory_budget_bytes=71)


def test_under_a_cap_the_interval_is_the_shortest_that_keeps_to_it() -> None:
    policy = checkfreq(overhead=0.05)
    assert taken(policy, range(35), measuring(cost_s=1.0)) == [0, 10, 20, 30], (
        "1 s in 10 iterations of 2 s are 5 %"
    )
    assert (
        "everything at the interval that keeps to ckpt.overhead=0.05:"
        in policy.notes()[0]
    )


@pytest.mark.parametrize(
    ("make", "changes", "to_disk"),
    [
        pytest.param(checkfreq, {}, [0, 3, 6, 9, 12, 15, 18], id="all under a cap"),
        pytest.param(
            gemini, {"disk_every_iters": 5}, [0, 6, 12, 18], id="as often as told"
        ),
        pytest.param(gemini, {}, [], id="never"),
    ],
)
def test_snapshots_go_to_disk(
    make: Callable[..., WholeSnapshots], changes: dict[str, int], to_disk: list[int]
) -> None:
    policy = make(every_iters=3, **changes)
    assert [i for i in range(20) if policy.plan(i, unasked).to_disk] == to_disk
