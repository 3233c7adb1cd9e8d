"""Sums merged while frames come are the sums merged at the end, and no others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.flowcheck.mirror.watcher import Watcher
from tests.flowcheck.captured import (
    BUCKETS,
    ITERATIONS,
    OPERATIONS,
    frames,
    reduced,
    wanted,
)


def follow(
    seen: Sequence[bytes], captures: int, merge_at: float, seed: int = 0
) -> tuple[Watcher, list[bool]]:
    """Return a watcher of these frames, and whether each iteration is complete.

    After every 16 frames the helper asks for iteration 0, and drops iteration 0 once
    complete; only then does the watcher merge iteration 1. The list begins with
    iteration 1.

    Args:
        seen: The frames.
        captures: The number of watched ranks.
        merge_at: The share of the frames after which the watcher merges.
        seed: The seed that chooses these frames.
    """
    generator, watcher = random.Random(seed), Watcher(captures)
    for number, frame in enumerate(seen):
        watcher.see(frame)
        if number % 16 == 0 and watcher.sums(wanted(0)) is not None:
            watcher.drop(wanted(0))
        if generator.random() < merge_at:
            watcher.merge()
    watcher.flush()
    found = [watcher.sums(wanted(iteration)) for iteration in range(1, ITERATIONS)]
    for iteration, sums in enumerate(found, 1):
        assert sums is None or [bytes(each) for each in sums] == reduced(iteration)
    return watcher, [sums is not None for sums in found]


@pytest.mark.parametrize("captures", [2, 3])
def test_all_sums_are_together_before_they_are_asked_for(captures: int) -> None:
    watcher = Watcher(captures)
    for frame in frames():
        watcher.see(frame)
        if watcher.sums(wanted(0)) is not None:
            watcher.drop(wanted(0))
            assert watcher.merged_bytes == 0
        watcher.merge()
    assert watcher.merged_bytes == sum(BUCKETS)
    sums = watcher.sums(wanted(1))
    assert sums is not None
    assert [bytes(each) for each in sums] == reduced(1)
    watcher.drop(wanted(1))
    assert watcher.merged_bytes == 0


@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.003, 0.02]),
    captures=st.sampled_from([2, 3]),
)
def test_merging_finds_the_same_iterations(
    seed: int, loss: float, captures: int
) -> None:
    generator = random.Random(seed)
    seen = [frame for frame in frames() if generator.random() >= loss]
    whole = [follow(seen, captures, merge_at, seed)[1] for merge_at in (0.0, 0.2, 1.0)]
    assert whole[0] == whole[1] == whole[2]
    assert loss or all(whole[0])


def test_merged_sums_of_other_numbers_are_not_taken() -> None:
    watcher, _ = follow(frames(), 3, 1.0)
    one_late = replace(wanted(1), first=wanted(1).first + 1, end=wanted(1).end + 1)
    assert watcher.sums(one_late) is None, "its first bucket is missing"
    assert (
        watcher.sums(replace(wanted(1), first=1, end=1 + 2 * OPERATIONS)) is not None
    ), "0 was dropped"
    assert watcher.sums(replace(wanted(1), buckets=BUCKETS[::-1])) is None
