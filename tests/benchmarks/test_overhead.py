"""Ratios of interleaved runs and their intervals."""

from __future__ import annotations

import math

import pytest

from benchmarks.overhead import ratio


def test_a_ratio_is_the_geometric_mean_of_rounds() -> None:
    found = ratio([2.0, 8.0], [1.0, 1.0])
    assert found.mean == pytest.approx(4.0)
    # one degree of freedom: log 2 and log 8 deviate by log 2 / sqrt(2) * sqrt(2)
    half = 12.706 * math.log(2.0)
    assert (found.low, found.high) == (
        pytest.approx(4.0 * math.exp(-half)),
        pytest.approx(4.0 * math.exp(half)),
    )


def test_rounds_that_agree_have_no_interval_and_one_round_has_no_end() -> None:
    same = ratio([1.5, 3.0, 6.0], [1.0, 2.0, 4.0])
    assert (same.mean, same.low, same.high) == pytest.approx((1.5, 1.5, 1.5))
    assert ratio([1.5], [1.0]).half_width == math.inf
