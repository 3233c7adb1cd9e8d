"""`ckpt=flowcheck`: plans of everything, and the memory that servers need."""

from __future__ import annotations

import pytest

from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.flowcheck import ServerSnapshots
from tests.policies.profiles import config, equal, unasked


def policy(num_copies: int = 1, **settings: object) -> ServerSnapshots:
    return ServerSnapshots(config("flowcheck", **settings), [equal(3)], 0, num_copies)


def test_everything_is_saved_in_every_iteration_and_durably_when_due() -> None:
    flowcheck = policy(durable_every_iters=3)
    plans = [flowcheck.plan(iteration, unasked) for iteration in range(7)]
    slots = [plan.sparse for plan in plans if plan.sparse]
    assert [slot.window_start for slot in slots] == list(range(7))
    assert {(slot.full, slot.compute) for slot in slots} == {((0, 1, 2), ())}
    assert [iteration for iteration, plan in enumerate(plans) if plan.durable] == [3, 6]


def test_memory_is_that_of_the_states_between_the_slowest_and_the_newest() -> None:
    size = int(equal(3).table.full_bytes.sum(axis=1).max())
    needed = policy(num_copies=1, max_lag_iters=2).forecast()
    assert needed.copies_bytes == 2 * 5 * size, (
        "on two servers: lag, the one all have, the newest, the one being made"
    )
    assert needed.snapshots_bytes == 2 * size + size, (
        "two whole snapshots, and three iterations' gradients"
    )
    assert policy(num_copies=0, max_lag_iters=0).forecast().copies_bytes == 3 * size


def test_a_budget_that_is_too_small_is_named() -> None:
    total = policy().forecast().total_bytes
    policy(memory_budget_bytes=total)
    with pytest.raises(
        ConfigError,
        match=f"ckpt.memory_budget_bytes: got {total - 1}, wanted at least {total}",
    ):
        policy(memory_budget_bytes=total - 1)
