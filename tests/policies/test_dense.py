"""When the dense policies save: tables and properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.config import DenseConfig, NoneConfig
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.dense import EveryInterval, make_policy
from moe_ckpt.types import Measured, SnapshotPlan

COUNTS = st.integers(1, 1000)


def unasked() -> Measured:
    raise AssertionError("a dense policy needs no measurements")


def dense(every_iters: int, keep: int = 2) -> DenseConfig:
    return DenseConfig(policy="dense", every_iters=every_iters, keep=keep, async_save=False, strict=False)


@pytest.mark.parametrize(
    ("every_iters", "last_iteration", "saved"),
    [
        (1, 4, [1, 2, 3, 4]),
        (3, 9, [3, 6, 9]),
        (3, 10, [3, 6, 9, 10]),
        (5, 4, [4]),
        (4, 4, [4]),
        (50, 1, [1]),
    ],
)
def test_dense_saves_at_the_interval_and_at_the_end(every_iters: int, last_iteration: int, saved: list[int]) -> None:
    policy = make_policy(dense(every_iters), last_iteration=last_iteration)
    assert [iteration for iteration in range(1, last_iteration + 1) if policy.plan(iteration, unasked).durable] == saved


@given(every_iters=COUNTS, last_iteration=COUNTS)
def test_dense_never_loses_more_than_an_interval(every_iters: int, last_iteration: int) -> None:
    policy = make_policy(dense(every_iters), last_iteration=last_iteration)
    saved = [iteration for iteration in range(1, last_iteration + 1) if policy.plan(iteration, unasked).durable]
    assert saved[-1] == last_iteration
    assert saved[:-1] == list(range(every_iters, last_iteration, every_iters))
    assert max(after - before for before, after in zip([0, *saved], saved, strict=False)) <= every_iters


@given(iteration=COUNTS, last_iteration=COUNTS)
def test_none_never_saves(iteration: int, last_iteration: int) -> None:
    policy = make_policy(NoneConfig(policy="none"), last_iteration=last_iteration)
    assert policy.plan(iteration, unasked) == SnapshotPlan(durable=False)
    assert policy.plan(last_iteration, unasked) == SnapshotPlan(durable=False)


def test_a_configuration_becomes_its_policy() -> None:
    assert make_policy(dense(7), last_iteration=9) == EveryInterval(every_iters=7, last_iteration=9)


@pytest.mark.parametrize(("every_iters", "keep", "setting"), [(0, 2, "ckpt.every_iters"), (1, 0, "ckpt.keep")])
def test_a_count_below_one_is_refused(every_iters: int, keep: int, setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{setting}: got 0, wanted at least 1$"):
        dense(every_iters, keep)
