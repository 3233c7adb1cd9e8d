"""Drawn popularities have the skewness that was requested."""

from __future__ import annotations

import numpy as np
import pytest

from moe_ckpt.sim.skew import skewed_popularity


def skewness_of(popularity: np.ndarray) -> float:
    """Return the normalized Herfindahl-Hirschman index of shares.

    The index is (sum p^2 - 1 / E) / (1 - 1 / E).
    """
    even = 1 / len(popularity)
    return float(((popularity**2).sum() - even) / (1 - even))


def test_popularity_is_even_without_skew_and_the_same_for_a_seed() -> None:
    assert list(skewed_popularity(4, 0.0, seed=1)) == [0.25] * 4
    assert list(skewed_popularity(0, 0.5, seed=1)) == []
    first, again, other = (skewed_popularity(64, 0.5, seed=seed) for seed in (1, 1, 2))
    assert list(first) == list(again) != list(other)


@pytest.mark.parametrize("skewness", [0.25, 0.5, 0.75, 0.99])  # MoEvement, Appendix D
def test_popularity_is_on_average_as_uneven_as_asked_for(skewness: float) -> None:
    drawn = [skewed_popularity(64, skewness, seed=seed) for seed in range(400)]
    assert all(
        np.isclose(shares.sum(), 1.0) and (shares >= 0).all() for shares in drawn
    )
    assert np.mean([skewness_of(shares) for shares in drawn]) == pytest.approx(
        skewness, abs=0.04
    )
