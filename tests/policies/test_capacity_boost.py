"""Capacity after a recovery: tables, and limits that hold for every batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.policies.capacity_boost import boosted_capacity, made_up, share_of

IntArray = npt.NDArray[np.int64]


@pytest.mark.parametrize(
    ("demand", "deficit", "factor", "expected"),
    [
        pytest.param(
            [150, 85, 150],
            [20, 0, 40],
            0.1,
            [105, 100, 110],
            id="the largest deficit first",
        ),
        pytest.param(
            [150, 85, 150],
            [40, 0, 40],
            0.1,
            [110, 100, 105],
            id="of equals the lowest expert",
        ),
        pytest.param(
            [150, 0], [99, 0], 0.29, [129, 100], id="29 percent of 100 are 29"
        ),
    ],
)
def test_largest_deficits_come_first(
    demand: list[int], deficit: list[int], factor: float, expected: list[int]
) -> None:
    got = boosted_capacity(
        np.array(demand), np.array(deficit), capacity=100, factor=factor
    )
    assert got.dtype == np.int64
    assert got.tolist() == expected


@st.composite
def batches(draw: st.DrawFn) -> tuple[IntArray, IntArray, int, float]:
    """Draw demand and deficit of up to 8 experts, a capacity, and a boost factor.

    The factor is a multiple of one percent.
    """
    num_experts = draw(st.integers(1, 8))
    counts = st.lists(st.integers(0, 300), min_size=num_experts, max_size=num_experts)
    deficits = st.lists(
        st.one_of(st.just(0), st.integers(0, 60)),
        min_size=num_experts,
        max_size=num_experts,
    )
    factor = draw(st.integers(0, 100)) / 100
    return (
        np.array(draw(counts)),
        np.array(draw(deficits)),
        draw(st.integers(0, 200)),
        factor,
    )


@given(batch=batches())
def test_a_boost_costs_nobody_anything(
    batch: tuple[IntArray, IntArray, int, float],
) -> None:
    demand, deficit, capacity, factor = batch
    got = boosted_capacity(demand, deficit, capacity=capacity, factor=factor)
    extra = got - capacity
    assert np.all(got[deficit == 0] == capacity)
    assert np.all((extra >= 0) & (extra <= deficit))
    assert np.all(extra * 100 <= round(factor * 100) * capacity)
    assert np.minimum(demand, got).sum() <= capacity * len(demand)
    assert np.all(np.minimum(demand, got) == np.minimum(demand, capacity) + extra), (
        "a boost that is not used"
    )


@given(batch=batches())
def test_nothing_is_unused_that_a_recovering_expert_could_take(
    batch: tuple[IntArray, IntArray, int, float],
) -> None:
    demand, deficit, capacity, factor = batch
    got = boosted_capacity(demand, deficit, capacity=capacity, factor=factor)
    num_unused = capacity * len(demand) - int(np.minimum(demand, got).sum())
    most = capacity + round(factor * 100) * capacity // 100
    short = (got < demand) & (got < most) & (got - capacity < deficit)
    assert num_unused == 0 or not short.any()


def test_no_more_is_made_up_than_was_lost() -> None:
    assert made_up(np.array([40, 3, 0]), np.array([5, 5, 5])).tolist() == [35, 0, 0]


@given(
    deficit=st.lists(st.integers(0, 10**12), min_size=1, max_size=4),
    num_shares=st.integers(1, 50),
)
def test_shares_are_the_deficit_and_equal_but_for_one_token(
    deficit: list[int], num_shares: int
) -> None:
    shares = np.stack(
        [
            share_of(np.array(deficit), index=index, num_shares=num_shares)
            for index in range(num_shares)
        ]
    )
    assert shares.dtype == np.int64
    assert shares.sum(axis=0).tolist() == deficit
    assert np.all(np.diff(shares, axis=0) <= 0)
    assert np.all(shares[0] - shares[-1] <= 1)
