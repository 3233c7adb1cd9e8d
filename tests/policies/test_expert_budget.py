"""Budgets: tables, and the division among layers against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.expert_budget import affordable_experts, allocate, budget_bytes

IntArray = npt.NDArray[np.int64]


def test_a_budget_is_what_a_link_carries_in_an_iteration() -> None:
    assert budget_bytes(25e9, 0.5) == 12_500_000_000
    assert budget_bytes(3.0, 0.5) == 1


@pytest.mark.parametrize(
    ("budget", "expert_bytes", "other_bytes", "expected"),
    [
        pytest.param(100, 30, 35, 2, id="beside the rest"),
        pytest.param(100, 30, 0, 3, id="as printed"),
        pytest.param(95, 30, 35, 2, id="exactly"),
        pytest.param(94, 30, 35, 1, id="a byte too few for two"),
        pytest.param(65, 30, 35, 1, id="exactly one"),
    ],
)
def test_experts_that_fit(
    budget: int, expert_bytes: int, other_bytes: int, expected: int
) -> None:
    assert (
        affordable_experts(
            budget, expert_bytes=expert_bytes, other_bytes=other_bytes, setting="x"
        )
        == expected
    )


def test_a_budget_without_room_for_an_expert_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        affordable_experts(
            64, expert_bytes=30, other_bytes=35, setting="ckpt.remote_bytes_per_s"
        )
    assert str(error.value) == (
        "ckpt.remote_bytes_per_s: got a budget of 64 bytes an iteration, "
        "wanted at least 65: 35 for what is no expert, 30 for one expert"
    )


@pytest.mark.parametrize(
    ("risks", "num_experts", "num_total", "expected"),
    [
        pytest.param(
            [90, 5, 5], 4, 8, [4, 2, 2], id="beyond a full layer the others share"
        ),
        pytest.param([90, 8, 1, 1], 4, 9, [4, 4, 1, 0], id="and beyond the next"),
        pytest.param(
            [60, 0, 0], 4, 7, [4, 2, 1], id="layers without risk share what is left"
        ),
        pytest.param([0, 0, 0], 4, 7, [3, 2, 2], id="nothing was counted yet"),
        pytest.param([10**15, 1], 64, 127, [64, 63], id="many tokens"),
    ],
)
def test_full_layers_share_with_others(
    risks: list[int], num_experts: int, num_total: int, expected: list[int]
) -> None:
    popularity = np.array(
        [[risk] + [0] * (num_experts - 1) for risk in risks], np.int64
    )
    assert allocate(popularity, num_total).tolist() == expected


@st.composite
def popularities(draw: st.DrawFn) -> IntArray:
    """Draw tokens of up to 6 layers of up to 6 experts; some layers have no tokens."""
    num_layers, num_experts = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    row = st.lists(
        st.one_of(st.just(0), st.integers(0, 10**6)),
        min_size=num_experts,
        max_size=num_experts,
    )
    zeros = st.just([0] * num_experts)
    return np.array(
        draw(st.lists(st.one_of(zeros, row), min_size=num_layers, max_size=num_layers)),
        np.int64,
    )


@given(popularity=popularities(), num_total=st.integers(0, 40))
def test_all_that_fit_are_shared_out_and_riskier_layers_get_no_fewer(
    popularity: IntArray, num_total: int
) -> None:
    share = allocate(popularity, num_total)
    assert share.dtype == np.int64
    assert share.sum() == min(num_total, popularity.size)
    assert np.all((share >= 0) & (share <= popularity.shape[1]))
    by_risk = sorted(
        range(len(share)), key=lambda layer: (-int(popularity[layer].sum()), layer)
    )
    assert share[by_risk].tolist() == sorted(share.tolist(), reverse=True)


@given(popularity=popularities(), num_total=st.integers(0, 40))
def test_where_no_layer_is_full_it_is_the_formula_rounded_up_or_down(
    popularity: IntArray, num_total: int
) -> None:
    """Algorithm 1: floor(R[i] / sum R * S_total), adjusted to a sum of S_total."""
    risk = popularity.sum(axis=1).tolist()
    if not sum(risk):
        return
    quotas = [Fraction(value * num_total, sum(risk)) for value in risk]
    if any(quota >= popularity.shape[1] for quota in quotas):
        return
    share = allocate(popularity, num_total).tolist()
    assert all(
        math.floor(quota) <= own <= math.ceil(quota)
        for quota, own in zip(quotas, share, strict=True)
    )
    remainders = [quota - math.floor(quota) for quota in quotas]
    raised = [
        rest
        for rest, own, quota in zip(remainders, share, quotas, strict=True)
        if own > math.floor(quota)
    ]
    others = [
        rest
        for rest, own, quota in zip(remainders, share, quotas, strict=True)
        if own == math.floor(quota)
    ]
    assert not raised or not others or min(raised) >= max(others)
