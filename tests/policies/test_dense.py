"""Properties of the iterations after which the dense policies save."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.dense import make_policy
from moe_ckpt.types import SnapshotPlan
from tests.policies.profiles import config, unasked

COUNTS = st.integers(1, 1000)


@given(every_iters=COUNTS, last_iteration=COUNTS)
def test_dense_saves_at_the_interval_and_at_the_end(
    every_iters: int, last_iteration: int
) -> None:
    policy = make_policy(
        config("dense", every_iters=every_iters), last_iteration=last_iteration
    )
    saved = [
        iteration
        for iteration in range(1, last_iteration + 1)
        if policy.plan(iteration, unasked).durable
    ]
    assert saved == [*range(every_iters, last_iteration, every_iters), last_iteration]


@given(iteration=COUNTS, last_iteration=COUNTS)
def test_none_never_saves(iteration: int, last_iteration: int) -> None:
    policy = make_policy(config("none"), last_iteration=last_iteration)
    assert policy.plan(iteration, unasked) == SnapshotPlan(durable=False)
    assert policy.plan(last_iteration, unasked) == SnapshotPlan(durable=False)


@pytest.mark.parametrize("setting", ["every_iters", "keep"])
def test_a_count_below_one_is_refused(setting: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^ckpt.{setting}: got 0, wanted at least 1$"
    ):
        config("dense", **{setting: 0})
