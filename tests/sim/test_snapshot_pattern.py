"""What a policy does is counted as if it were asked for every iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.policies.full_snapshots import WholeSnapshots
from moe_ckpt.policies.moevement import SparseWindows
from moe_ckpt.sim.snapshot_pattern import NOTHING, PlannedSnapshot, SnapshotPattern, probe_policy
from moe_ckpt.types import Measured, SlotPlan
from tests.sim.setups import ckpt, job

POLICIES = [
    ("ckpt=moevement",),
    ("ckpt=moevement", "ckpt.window=3"),
    ("ckpt=moevement", "ckpt.window=3", "ckpt.disk_every_iters=7"),
    ("ckpt=moevement", "ckpt.paper_exact=true"),
    ("ckpt=gemini",),
    ("ckpt=gemini", "ckpt.every_iters=6", "ckpt.disk_every_iters=10"),
    ("ckpt=checkfreq",),
    ("ckpt=checkfreq", "ckpt.every_iters=1"),
]


def make(overrides: Sequence[str]) -> SparseWindows | WholeSnapshots:
    config = ckpt(*overrides)
    kind = SparseWindows if config.policy == "moevement" else WholeSnapshots
    return kind(config, job(pp=1).profiles, 0)  # type: ignore[arg-type]


def answers(*, measured_before: bool) -> list[Measured]:
    popularity = np.ones(32)
    costs: dict[str, Any] = {"snapshot_cost_s": 0.7, "empty_snapshot_s": 0.1, "dense_snapshot_s": 0.7}
    known = Measured(iteration_s=2.0, copy_bytes_per_s=1e5, popularity=popularity, **costs)
    nothing = Measured(iteration_s=0.0, copy_bytes_per_s=np.inf, popularity=popularity)
    return [known if measured_before else nothing, known]


def describe(plan: SlotPlan) -> tuple[int, float]:
    return 100 * len(plan.full) + len(plan.compute), 0.125 * len(plan.full)


def probed(overrides: Sequence[str], *, measured_before: bool) -> SnapshotPattern:
    first, then = answers(measured_before=measured_before)
    replies = iter([first])
    config = ckpt(*overrides)
    settled = config.policy != "moevement" and config.every_iters != "auto"  # type: ignore[union-attr]
    return probe_policy(
        make(overrides),
        lambda: next(replies, then),
        describe,
        disk_every=config.disk_every_iters > 0,  # type: ignore[union-attr]
        is_settled=settled,
    )


@pytest.mark.parametrize("measured_before", [False, True])
@pytest.mark.parametrize("overrides", POLICIES, ids=" ".join)
def test_a_rhythm_is_what_the_policy_says_by_iteration(overrides: Sequence[str], measured_before: bool) -> None:
    pattern = probed(overrides, measured_before=measured_before)
    first, then = answers(measured_before=measured_before)
    replies, policy = iter([first]), make(overrides)
    plans = [policy.plan(iteration, lambda: next(replies, then)) for iteration in range(120)]
    asked = [
        (iteration, plan.sparse.slot, plan.sparse.num_slots, *describe(plan.sparse), plan.to_disk)
        for iteration, plan in enumerate(plans)
        if plan.sparse
    ]
    told = [
        (snapshot.offset, snapshot.slot, snapshot.num_slots, snapshot.size_bytes, snapshot.stall_s, snapshot.to_disk)
        for snapshot in pattern.snapshots(0, 119)
    ]
    assert told == asked
    for iterations in range(120):
        expected = sum(stall for offset, _, _, _, stall, _ in asked if offset < iterations)
        assert pattern.stalls_s(iterations) == pytest.approx(expected)


@pytest.mark.parametrize("overrides", POLICIES, ids=" ".join)
def test_no_state_is_taken_twice_but_for_disks(overrides: Sequence[str]) -> None:
    pattern = probed(overrides, measured_before=True)
    first, *others = pattern.snapshots(0, 119)
    assert list(pattern.after_window(0, 1).snapshots(0, 119)) == ([first, *others] if first.to_disk else others)
    assert pattern.after_window(1, 1) is pattern.after_window(0, 2) is pattern, "windows lead to this state, none is it"


@st.composite
def patterns(draw: st.DrawFn) -> SnapshotPattern:
    """A window of any length at first, then a period of windows."""

    def windows(offset: int, lengths: list[int]) -> list[PlannedSnapshot]:
        snapshots = []
        for length in lengths:
            snapshots += [
                PlannedSnapshot(
                    offset=offset + slot, slot=slot, num_slots=length, size_bytes=1, stall_s=draw(STALLS), to_disk=False
                )
                for slot in range(length)
            ]
            offset += length
        return snapshots

    lead = windows(0, draw(st.lists(st.integers(1, 3), max_size=2)))
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    pause = draw(st.integers(0, 3))
    return SnapshotPattern(
        tuple(lead), tuple(windows(len(lead) + pause, lengths)), sum(lengths) + draw(st.integers(0, 4))
    )


STALLS = st.integers(0, 8).map(float)


@given(pattern=patterns(), iterations=st.integers(0, 60))
def test_stalls_are_summed_and_takes_found_however_far(pattern: SnapshotPattern, iterations: int) -> None:
    snapshots = list(pattern.snapshots(0, 100))
    assert [snapshot.offset for snapshot in snapshots] == sorted({snapshot.offset for snapshot in snapshots})
    assert pattern.stalls_s(iterations) == sum(
        snapshot.stall_s for snapshot in snapshots if snapshot.offset < iterations
    )
    assert list(pattern.snapshots(7, iterations)) == [
        snapshot for snapshot in snapshots if 7 <= snapshot.offset <= iterations
    ]


@given(pattern=patterns(), last=st.integers(-1, 60))
def test_windows_are_told_from_the_newest_to_the_first(pattern: SnapshotPattern, last: int) -> None:
    begins = [snapshot for snapshot in pattern.snapshots(0, 60) if snapshot.slot == 0]
    expected = [(snapshot.offset, snapshot.offset + snapshot.num_slots - 1) for snapshot in begins]
    spans = [(span.first.offset, span.last.offset) for span in pattern.spans_back(last)]
    assert spans == [span for span in reversed(expected) if span[1] <= last]


def test_nothing_is_never_saved() -> None:
    assert NOTHING.stalls_s(1000) == 0.0
    assert list(NOTHING.snapshots(0, 1000)) == []
    assert list(NOTHING.spans_back(1000)) == []
