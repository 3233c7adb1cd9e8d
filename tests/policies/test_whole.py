"""Whole snapshots in host memory: the first, the interval between them, when it changes, and what memory allows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moe_ckpt.config import CheckfreqConfig, GeminiConfig
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.whole import WholeSnapshots
from moe_ckpt.types import Measured, SlotPlan, SnapshotPlan
from tests.policies.profiles import NOTHING, equal, nothing_yet, profile, unasked


def config(**changes: Any) -> GeminiConfig:
    """conf/ckpt/gemini.yaml with changes."""
    defaults: dict[str, Any] = {
        "policy": "gemini",
        "every_iters": "auto",
        "mtbf_s": 3600.0,
        "profile_iters": 5,
        "interval_drift": 0.25,
        "memory_budget_bytes": None,
        "replicas": "auto",
        "network_interface": None,
        "disk_every_iters": 0,
        "disk_path": None,
        "disk_budget_bytes": None,
        "durable_every_iters": 0,
        "keep": 2,
        "async_save": True,
        "strict": False,
    }
    return GeminiConfig(**(defaults | changes))


def checkfreq(**changes: Any) -> CheckfreqConfig:
    """conf/ckpt/checkfreq.yaml with changes."""
    defaults: dict[str, Any] = {
        "policy": "checkfreq",
        "every_iters": "auto",
        "overhead": 0.03,
        "profile_iters": 5,
        "interval_drift": 0.25,
        "memory_budget_bytes": None,
        "disk_path": None,
        "disk_budget_bytes": None,
        "durable_every_iters": 0,
        "keep": 2,
        "async_save": True,
        "strict": False,
    }
    return CheckfreqConfig(**(defaults | changes))


def measuring(
    *, cost_s: float | None = 0.0, copy_bytes_per_s: float = math.inf, since_quiet: int = 0
) -> Callable[[], Measured]:
    """Iterations of two seconds."""
    measured = Measured(
        iteration_s=2.0,
        copy_bytes_per_s=copy_bytes_per_s,
        popularity=np.zeros(0),
        snapshot_cost_s=cost_s,
        iters_since_quiet=since_quiet,
    )
    return lambda: measured


def everything_at(iteration: int) -> SlotPlan:
    return SlotPlan(window_start=iteration, slot=0, num_slots=1, full=(0, 1, 2), compute=())


def taken(policy: WholeSnapshots, iterations: range, measure: Callable[[], Measured]) -> list[int]:
    """Return the iterations that a snapshot is taken of; each is of everything."""
    plans = {iteration: policy.plan(iteration, measure).sparse for iteration in iterations}
    snapshots = {iteration: plan for iteration, plan in plans.items() if plan}
    assert snapshots == {iteration: everything_at(iteration) for iteration in snapshots}
    return list(snapshots)


@pytest.mark.parametrize("start", [0, 40])
@pytest.mark.parametrize("every_iters", [1, 4])
def test_a_given_interval_is_kept_and_nobody_measures(start: int, every_iters: int) -> None:
    policy = WholeSnapshots(config(every_iters=every_iters), [equal(3)], 0)
    iterations = range(start, start + 13)
    assert taken(policy, iterations, unasked) == list(iterations[::every_iters])


def test_the_interval_is_chosen_once_iterations_have_been_measured() -> None:
    policy = WholeSnapshots(config(mtbf_s=100.0), [equal(3)], 0)
    assert policy.plan(0, nothing_yet) == SnapshotPlan(sparse=everything_at(0))
    assert taken(policy, range(1, 5), unasked) == []
    plan = policy.plan(5, measuring(cost_s=2.0))
    assert plan.sparse == everything_at(5)
    assert plan.interval is not None
    assert (plan.interval.every_iters, plan.interval.best) == (10, 10), "sqrt(2 * 2.0 * 100.0) seconds"
    assert taken(policy, range(6, 36), measuring(cost_s=2.0)) == [15, 25, 35]


def test_until_its_cost_is_known_there_is_a_snapshot_every_few_iterations() -> None:
    policy = WholeSnapshots(config(profile_iters=3), [equal(3)], 0)
    assert taken(policy, range(10), measuring(cost_s=None)) == [0, 3, 6, 9]


def test_an_iteration_is_left_alone_where_none_has_been_for_long() -> None:
    policy = WholeSnapshots(config(), [equal(3)], 0)
    assert taken(policy, range(4), measuring(since_quiet=63)) == [0, 1, 2, 3]
    assert taken(policy, range(4, 6), measuring(since_quiet=64)) == [4]
    assert taken(policy, range(6, 9), measuring()) == [6, 7, 8]
    fixed = WholeSnapshots(config(every_iters=1), [equal(3)], 0)
    assert taken(fixed, range(4), measuring(since_quiet=64)) == [0, 1, 2, 3]


def test_what_was_measured_before_a_fault_still_counts() -> None:
    policy = WholeSnapshots(config(mtbf_s=100.0), [equal(3)], 0)
    assert taken(policy, range(7, 20), measuring(cost_s=2.0)) == [7, 17]


def test_a_snapshot_waits_for_none_that_is_still_being_copied() -> None:
    rate = 3 * 12 / 7.0  # seven seconds for everything
    policy = WholeSnapshots(config(), [equal(3)], 0)
    assert taken(policy, range(12), measuring(copy_bytes_per_s=rate)) == [0, 4, 8]


def test_the_slowest_stage_counts() -> None:
    rate = 6 * 12 / 7.0
    stages = [equal(3), profile([[1, 1, 1], [2, 2, 2]])]
    assert taken(WholeSnapshots(config(), stages, 0), range(12), measuring(copy_bytes_per_s=rate)) == [0, 4, 8]


def test_the_interval_changes_when_the_best_one_is_far_off() -> None:
    policy = WholeSnapshots(config(mtbf_s=100.0, interval_drift=0.25), [equal(3)], 0)
    assert taken(policy, range(11), measuring(cost_s=2.0)) == [0, 10]
    near = policy.plan(20, measuring(cost_s=2.5)).interval
    assert near is not None
    assert (near.every_iters, near.best) == (10, 11)
    far = policy.plan(30, measuring(cost_s=8.0)).interval
    assert far is not None
    assert (far.every_iters, far.best) == (20, 20)
    assert taken(policy, range(31, 51), measuring(cost_s=8.0)) == [50]


def test_whole_checkpoints_on_disk_come_beside_snapshots() -> None:
    policy = WholeSnapshots(config(every_iters=4, durable_every_iters=6), [equal(3)], 0)
    plans = [policy.plan(iteration, unasked) for iteration in range(13)]
    assert [iteration for iteration, plan in enumerate(plans) if plan.durable] == [6, 12]
    assert plans[5] == NOTHING


def test_memory_is_two_snapshots_and_as_much_for_each_rank_that_is_kept() -> None:
    sizes = [equal(3), profile([[1, 1, 1], [2, 2, 2]])]
    alone, keeping = WholeSnapshots(config(), sizes, 0), WholeSnapshots(config(), sizes, 0, num_copies=1)
    assert alone.own_forecast().total_bytes == 2 * 36
    assert alone.forecast().total_bytes == 2 * 72
    assert keeping.own_forecast().total_bytes == 2 * 36 + 2 * 72


def test_a_budget_that_is_too_small_is_refused_with_the_numbers() -> None:
    WholeSnapshots(config(memory_budget_bytes=72), [equal(3)], 0)
    with pytest.raises(ConfigError, match=r"ckpt.memory_budget_bytes: got 71, wanted at least 72:\n +snapshots"):
        WholeSnapshots(config(memory_budget_bytes=71), [equal(3)], 0)


def test_under_a_cap_the_interval_is_the_shortest_that_keeps_to_it() -> None:
    policy = WholeSnapshots(checkfreq(overhead=0.05), [equal(3)], 0)
    assert taken(policy, range(35), measuring(cost_s=1.0)) == [0, 10, 20, 30], "1 s in 10 iterations of 2 s are 5 %"
    assert "everything at the interval that keeps to ckpt.overhead=0.05:" in policy.notes()[0]


def test_all_snapshots_under_a_cap_go_to_disk_and_others_as_often_as_told() -> None:
    capped = WholeSnapshots(checkfreq(every_iters=3), [equal(3)], 0)
    assert [i for i in range(10) if capped.plan(i, unasked).to_disk] == [0, 3, 6, 9]
    rarely = WholeSnapshots(config(every_iters=3, disk_every_iters=5), [equal(3)], 0)
    assert [i for i in range(20) if rarely.plan(i, unasked).to_disk] == [0, 6, 12, 18]
    never = WholeSnapshots(config(every_iters=3), [equal(3)], 0)
    assert not any(never.plan(i, unasked).to_disk for i in range(10))
