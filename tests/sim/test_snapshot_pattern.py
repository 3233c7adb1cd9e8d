"""A pattern has the snapshots of a policy that is asked at every iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.policies.full_snapshots import WholeSnapshots
from moe_ckpt.policies.moevement import SparseWindows
from moe_ckpt.sim.measuring import SETTLED, GenerationStart, MeasuredSoFar
from moe_ckpt.sim.snapshot_pattern import (
    NOTHING,
    PlannedSnapshot,
    SnapshotPattern,
    probe_policy,
)
from moe_ckpt.types import ENOUGH_WINDOWS, Measured, SlotPlan
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


UNEVEN = tuple(0.25 * (1 + number % 7) for number in range(40))
BEGINNINGS = {
    "the start": GenerationStart(warm_up_iters=2),
    "all is measured": SETTLED,
    "uneven iterations": GenerationStart(warm_up_iters=2, coming=UNEVEN),
    "uneven ones before": GenerationStart(
        recent=UNEVEN[:9],
        num_costs=3,
        replay_length=0.5,
        kept_age_iters=4,
        kept_slots=3,
    ),
    "its state is kept": replace(SETTLED, kept_age_iters=0, kept_slots=1),
}


def measured(so_far: MeasuredSoFar | None) -> Measured:
    popularity = np.ones(32)
    if so_far is None:
        return Measured(iteration_s=0.0, copy_bytes_per_s=np.inf, popularity=popularity)
    costs: dict[str, Any] = {}
    if so_far.num_costs:
        costs = {
            "snapshot_cost_s": 0.7,
            "empty_snapshot_s": 0.1,
            "dense_snapshot_s": 0.7,
        }
    return Measured(
        iteration_s=2.0 * so_far.length,
        copy_bytes_per_s=1e5,
        popularity=popularity,
        costs_are_settled=so_far.num_costs == ENOUGH_WINDOWS,
        replayed_iteration_s=so_far.replay_length,
        kept_since=so_far.kept_since,
        **costs,
    )


def describe(plan: SlotPlan, length: float) -> tuple[int, float]:
    return 100 * len(plan.full) + len(plan.compute), length * 0.125 * len(plan.full)


def probed(overrides: Sequence[str], begin: GenerationStart) -> SnapshotPattern:
    config = ckpt(*overrides)
    return probe_policy(
        make(overrides),
        begin,
        measured,
        describe,
        disk_every=config.disk.every_iters > 0,  # type: ignore[union-attr]
        is_fixed=config.policy != "moevement" and config.every_iters != "auto",  # type: ignore[union-attr]
    )


@pytest.mark.parametrize("begin", BEGINNINGS.values(), ids=BEGINNINGS)
@pytest.mark.parametrize("overrides", POLICIES, ids=" ".join)
def test_a_rhythm_is_what_the_policy_says_by_iteration(
    overrides: Sequence[str], begin: GenerationStart
) -> None:
    pattern, policy, num_begun = probed(overrides, begin), make(overrides), 0
    asked = []
    for iteration in range(160):
        plan = policy.plan(
            iteration,
            lambda: measured(begin.measured(iteration, num_begun)),  # noqa: B023
        )
        if plan.sparse and (iteration > 0 or plan.to_disk or not begin.is_kept):
            num_begun += plan.sparse.slot == 0
            size_bytes, stall_s = describe(plan.sparse, begin.length(iteration))
            asked.append(
                (
                    iteration,
                    plan.sparse.slot,
                    plan.sparse.num_slots,
                    size_bytes,
                    stall_s,
                    plan.to_disk,
                )
            )
    told = [
        (
            snapshot.offset,
            snapshot.slot,
            snapshot.num_slots,
            snapshot.size_bytes,
            snapshot.stall_s,
            snapshot.to_disk,
        )
        for snapshot in pattern.snapshots(0, 159)
    ]
    assert told == asked
    for iterations in range(160):
        expected = sum(
            stall for offset, _, _, _, stall, _ in asked if offset < iterations
        )
        assert pattern.stalls_s(iterations) == pytest.approx(expected)


@pytest.mark.parametrize("overrides", POLICIES, ids=" ".join)
def test_no_state_is_taken_twice_but_for_disks(overrides: Sequence[str]) -> None:
    starts = [
        replace(SETTLED, kept_age_iters=age, kept_slots=num)
        for age, num in ((None, 0), (0, 1), (0, 2), (1, 1))
    ]
    takes = [list(probed(overrides, start).snapshots(0, 119)) for start in starts]
    offsets = [[snapshot.offset for snapshot in of_start] for of_start in takes]
    assert offsets[0][0] == 0
    assert (offsets[1][0] == 0) == takes[0][0].to_disk
    if overrides != ("ckpt=moevement",):  # windows continue after the kept window
        assert offsets[1] == (offsets[0] if takes[0][0].to_disk else offsets[0][1:])
        assert offsets[2] == offsets[3] == offsets[0], (
            "windows lead to this state, none is it"
        )


@st.composite
def patterns(draw: st.DrawFn) -> SnapshotPattern:
    """Draw up to two windows at the start, then a period of one to three windows."""

    def windows(offset: int, lengths: list[int]) -> list[PlannedSnapshot]:
        snapshots = []
        for length in lengths:
            snapshots += [
                PlannedSnapshot(
                    offset=offset + slot,
                    slot=slot,
                    num_slots=length,
                    size_bytes=1,
                    stall_s=draw(STALLS),
                    to_disk=False,
                )
                for slot in range(length)
            ]
            offset += length
        return snapshots

    lead = windows(0, draw(st.lists(st.integers(1, 3), max_size=2)))
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    pause = draw(st.integers(0, 3))
    return SnapshotPattern(
        tuple(lead),
        tuple(windows(len(lead) + pause, lengths)),
        sum(lengths) + draw(st.integers(0, 4)),
    )


STALLS = st.integers(0, 8).map(float)


@given(pattern=patterns(), iterations=st.integers(0, 60))
def test_stalls_are_summed_and_takes_found_however_far(
    pattern: SnapshotPattern, iterations: int
) -> None:
    snapshots = list(pattern.snapshots(0, 100))
    assert pattern.num_begun(iterations) == sum(
        each.slot == 0 and each.offset <= iterations for each in snapshots
    )
    assert [snapshot.offset for snapshot in snapshots] == sorted(
        {snapshot.offset for snapshot in snapshots}
    )
    assert pattern.stalls_s(iterations) == sum(
        snapshot.stall_s for snapshot in snapshots if snapshot.offset < iterations
    )
    assert list(pattern.snapshots(7, iterations)) == [
        snapshot for snapshot in snapshots if 7 <= snapshot.offset <= iterations
    ]


@given(pattern=patterns(), last=st.integers(-1, 60))
def test_windows_are_told_from_the_newest_to_the_first(
    pattern: SnapshotPattern, last: int
) -> None:
    begins = [snapshot for snapshot in pattern.snapshots(0, 60) if snapshot.slot == 0]
    expected = [
        (snapshot.offset, snapshot.offset + snapshot.num_slots - 1)
        for snapshot in begins
    ]
    spans = [(span.first.offset, span.last.offset) for span in pattern.spans_back(last)]
    assert spans == [span for span in reversed(expected) if span[1] <= last]


def test_nothing_is_never_saved() -> None:
    assert NOTHING.stalls_s(1000) == 0.0
    assert list(NOTHING.snapshots(0, 1000)) == []
    assert list(NOTHING.spans_back(1000)) == []
