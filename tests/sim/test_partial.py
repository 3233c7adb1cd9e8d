"""Partial snapshots: how old experts are, when they grow, and popularity as uneven as is asked for."""

from __future__ import annotations

import numpy as np
import pytest

from moe_ckpt.errors import ConfigError
from moe_ckpt.sim.partial import PartialConfig, mean_age_iters
from moe_ckpt.sim.skew import skewed_popularity, skewness_of
from tests.sim.setups import job, shape


def config(experts: int, policy: str = "moc", limit: float | None = 0.03) -> PartialConfig:
    return PartialConfig(policy=policy, experts=experts, lost_tokens_limit=limit)


@pytest.mark.parametrize(("experts", "age"), [(1, 1.5), (2, 0.5), (4, 0.0)])
def test_in_turn_an_expert_is_half_a_round_old(experts: int, age: float) -> None:
    assert mean_age_iters(config(experts), job()) == age


def test_saving_the_popular_ones_loses_less_than_saving_in_turn() -> None:
    of = job(shape=shape(popularity=(0.7, 0.1, 0.1, 0.1)))
    assert mean_age_iters(config(2, "moetion"), of) < mean_age_iters(config(2, "moc"), of)


def test_snapshots_double_until_they_have_all_experts() -> None:
    sizes, one = [], config(1)
    while one is not None:
        sizes.append((one.experts, round(one.limit_now(8), 4)))
        one = one.grown(8)
    assert sizes == [(1, 0.01), (2, 0.02), (4, 0.03), (8, 0.03)]
    assert config(1, limit=None).grown(8) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"policy": "gemini"}, "partial.policy: got 'gemini', wanted one of moc, moetion"),
        ({"lost_tokens_limit": 0.0}, "partial.lost_tokens_limit: got 0.0"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PartialConfig(**{"policy": "moc", "experts": 1, "lost_tokens_limit": None, **changes})  # type: ignore[arg-type]
    assert str(caught.value).startswith(says)


def test_popularity_is_even_without_skew_and_the_same_for_a_seed() -> None:
    assert list(skewed_popularity(4, 0.0, seed=1)) == [0.25] * 4
    assert list(skewed_popularity(0, 0.5, seed=1)) == []
    first, again, other = (skewed_popularity(64, 0.5, seed=seed) for seed in (1, 1, 2))
    assert list(first) == list(again) != list(other)


@pytest.mark.parametrize("skewness", [0.25, 0.5, 0.75, 0.99])  # MoEvement, Appendix D
def test_popularity_is_on_average_as_uneven_as_asked_for(skewness: float) -> None:
    drawn = [skewed_popularity(64, skewness, seed=seed) for seed in range(400)]
    assert all(np.isclose(shares.sum(), 1.0) and (shares >= 0).all() for shares in drawn)
    assert np.mean([skewness_of(shares) for shares in drawn]) == pytest.approx(skewness, abs=0.04)


def test_skewness_is_the_normalized_herfindahl_index() -> None:
    assert skewness_of(np.array([0.25] * 4)) == 0.0
    assert skewness_of(np.array([1.0, 0.0, 0.0, 0.0])) == 1.0
