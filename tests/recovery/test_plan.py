"""Which stages roll back together: a table and a property."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.recovery.plan import Segment, plan_segments


@pytest.mark.parametrize(
    ("lost_stages", "num_stages", "boundary_log", "expected"),
    [
        pytest.param([], 4, True, [], id="nothing lost"),
        pytest.param([], 4, False, [], id="nothing lost, no log"),
        pytest.param([2], 4, True, [(2, 2)], id="one stage"),
        pytest.param([0], 4, True, [(0, 0)], id="the first stage"),
        pytest.param([3], 4, True, [(3, 3)], id="the last stage"),
        pytest.param([2, 1], 4, True, [(1, 2)], id="neighbours recover together"),
        pytest.param([5, 1, 2], 8, True, [(1, 2), (5, 5)], id="others on their own"),
        pytest.param([2, 2], 4, True, [(2, 2)], id="a stage that is named twice"),
        pytest.param([0, 1, 2, 3], 4, True, [(0, 3)], id="all stages"),
        pytest.param([2], 4, False, [(0, 3)], id="no log"),
        pytest.param([0], 1, True, [(0, 0)], id="a pipeline of one"),
    ],
)
def test_segments(lost_stages: list[int], num_stages: int, boundary_log: bool, expected: list[tuple[int, int]]) -> None:
    segments = plan_segments(lost_stages, num_stages, boundary_log=boundary_log)
    assert [(segment.first_stage, segment.last_stage) for segment in segments] == expected


@given(lost=st.sets(st.integers(0, 11)))
def test_segments_are_the_lost_stages_and_healthy_ones_lie_between(lost: set[int]) -> None:
    segments = plan_segments(lost, 12, boundary_log=True)
    covered = [stage for segment in segments for stage in range(segment.first_stage, segment.last_stage + 1)]
    assert covered == sorted(lost)
    for before, after in pairwise(segments):
        assert after.first_stage >= before.last_stage + 2


@given(lost=st.sets(st.integers(0, 11), min_size=1), further=st.integers(0, 11))
def test_a_further_loss_leaves_segments_that_it_does_not_touch(lost: set[int], further: int) -> None:
    def untouched(segment: Segment) -> bool:
        return not segment.first_stage - 1 <= further <= segment.last_stage + 1

    before, after = (plan_segments(stages, 12, boundary_log=True) for stages in (lost, lost | {further}))
    assert {segment for segment in before if untouched(segment)} <= set(after)
    assert len(set(after) - set(before)) <= 1


@pytest.mark.parametrize("stage", [-1, 4])
@pytest.mark.parametrize("boundary_log", [True, False])
def test_a_stage_that_does_not_exist_is_our_own_bug(stage: int, boundary_log: bool) -> None:
    with pytest.raises(AssertionError):
        plan_segments([1, stage], 4, boundary_log=boundary_log)
