"""Partial snapshots of moc and moetion: experts, destinations, refused settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest

from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.moc import PartialExperts
from moe_ckpt.policies.moetion import PopularExperts
from moe_ckpt.policies.partial import MoeStage
from moe_ckpt.policies.stage_profile import StageProfile
from moe_ckpt.types import (
    CORE,
    ExpertChoice,
    Measured,
    OperatorId,
    OperatorKind,
    OperatorTable,
)
from tests.policies.profiles import config


def moc(k_snapshot: int | str = 2, ep: int = 2, **changes: Any) -> PartialExperts:
    """Return a policy that takes two of four experts to memory, and one to disk."""
    return PartialExperts(
        config("moc", k_snapshot=k_snapshot, **changes), [stage()], 0, ep
    )


def moetion(
    experts: int | str = 2, remote_experts: int | str = 1, **changes: Any
) -> PopularExperts:
    """Return a policy that takes two of four experts to memory, and one to a peer."""
    settings = config(
        "moetion", experts=experts, remote_experts=remote_experts, **changes
    )
    return PopularExperts(settings, [stage()], 0, num_copies=1)


def stage(num_layers: int = 2) -> StageProfile:
    """Return a stage of two ranks.

    In each layer, the ranks share a block of 120 bytes, and each rank has two experts
    of 240 bytes.
    """
    operators: list[OperatorId] = []
    sizes: list[tuple[int, int]] = []
    for layer in range(num_layers):
        experts = [
            OperatorId(kind=OperatorKind.EXPERT, layer=layer, expert=expert)
            for expert in range(4)
        ]
        operators += [OperatorId(kind=OperatorKind.BLOCK, layer=layer), *experts]
        sizes += [(60, 60), (240, 0), (240, 0), (0, 240), (0, 240)]
    full_bytes = np.array(sizes, np.int64).reshape(-1, 2).T
    table = OperatorTable(
        operators=operators, full_bytes=full_bytes, compute_bytes=full_bytes // 6
    )
    return StageProfile(table=table, boundary_log_bytes=0, step_log_bytes=0)


def measuring(
    tokens: Sequence[float] = (0.0,) * 8, **changes: Any
) -> Callable[[], Measured]:
    values: dict[str, Any] = {
        "iteration_s": 1.0,
        "copy_bytes_per_s": math.inf,
        "popularity": np.array(tokens),
    }
    return lambda: Measured(**(values | changes))


def begun(policy: P) -> P:
    """Return the policy after its first snapshot, which takes everything."""
    policy.plan(0, measuring())
    return policy


def chosen(
    policy: PartialExperts | PopularExperts,
    iteration: int,
    measure: Callable[[], Measured],
) -> ExpertChoice:
    choice = policy.plan(iteration, measure).experts
    assert choice is not None
    return choice


P = TypeVar("P", PartialExperts, PopularExperts)
EVERYTHING = ((0, 1, 2, 3), (0, 1, 2, 3))


@pytest.mark.parametrize("make", [moc, moetion])
def test_the_first_snapshot_takes_everything_everywhere(
    make: Callable[[], PartialExperts | PopularExperts],
) -> None:
    plan = make().plan(0, measuring())
    assert plan.experts is not None
    assert plan.experts.memory == EVERYTHING
    assert plan.sparse is not None
    assert [unit.name for unit in plan.sparse.units] == [
        unit.name for unit in plan.sparse.checkpoint
    ]
    core = plan.sparse.units[0]
    assert (core.name, core.full) == (CORE, (0, 5)), "all that is no expert"
    assert all(unit.on_peers for unit in plan.sparse.units) is (make is moetion)
    assert all(unit.on_disk for unit in plan.sparse.units) is (make is moc)


def test_moc_says_what_each_rank_saves() -> None:
    note = moc().notes()[-1]
    policy = moc()
    plan = begun(policy).plan(1, measuring()).experts
    assert plan is not None
    saved = MoeStage(stage().table).snapshot_bytes(plan.memory)
    assert (
        note
        == f"a snapshot of this stage, bytes by rank: {', '.join(map(str, saved))};"
        f" most 600, least {min(saved)}"
    )


def test_experts_take_turns_and_all_get_to_storage() -> None:
    policy = begun(moc())
    turns = [chosen(policy, iteration, measuring()) for iteration in range(1, 5)]
    assert [turn.memory for turn in turns] == [((0, 2), (1, 3)), ((1, 3), (0, 2))] * 2
    for layer in range(2):
        assert {expert for turn in turns for expert in turn.on_disk[layer]} == {
            0,
            1,
            2,
            3,
        }
        assert all(set(turn.on_disk[layer]) < set(turn.memory[layer]) for turn in turns)


@pytest.mark.parametrize("slow_for", [1, 2, 3])
def test_all_get_to_storage_however_slow_it_is(slow_for: int) -> None:
    policy = begun(moc(k_persist=2))
    stored: list[set[int]] = [set(), set()]
    for iteration in range(1, 1 + 2 * (slow_for + 1)):
        plan = policy.plan(
            iteration, measuring(is_persisting=iteration % (slow_for + 1) != 0)
        )
        assert plan.experts is not None
        assert plan.to_disk is (iteration % (slow_for + 1) == 0)
        for layer in range(2):
            stored[layer] |= set(plan.experts.on_disk[layer])
    assert stored == [{0, 1, 2, 3}] * 2


def test_by_load_those_with_most_tokens_go_first_to_each_level() -> None:
    policy = begun(moc(selection="load"))
    tokens = (9.0, 1.0, 8.0, 2.0, 0.0, 7.0, 7.0, 7.0)
    first = chosen(policy, 1, measuring(tokens))
    assert (first.memory, first.on_disk) == (((0, 2), (1, 2)), ((0,), (2,))), (
        "of equals the other rank's"
    )
    second = chosen(policy, 2, measuring((0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)))
    assert second.memory == ((1, 3), (0, 3)), "the others have been saved since"
    third = chosen(policy, 3, measuring((0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0)))
    assert (third.memory, third.on_disk) == (((0, 2), (0, 2)), ((2,), (2,))), (
        "storage lacks these"
    )


@pytest.mark.parametrize(("rate", "k"), [(1e9, 4), (1.0, 1)])
def test_moc_takes_as_many_experts_as_the_next_iteration_hides(
    rate: float, k: int
) -> None:
    choice = chosen(begun(moc("auto", ep=1)), 1, measuring(copy_bytes_per_s=rate))
    assert [len(experts) for experts in choice.memory] == [k, k]


@pytest.mark.parametrize(
    ("is_dynamic", "facts", "plt", "iteration", "k"),
    [
        pytest.param(
            True,
            (1.0, 0.0),
            0.018,
            100,
            1,
            id="the limit of 1 is half of 3.75 %: 1 and 2 share it",
        ),
        pytest.param(True, (1.0, 0.0), 0.019, 100, 2, id="more than that"),
        pytest.param(
            True, (2.0, 1.9), 0.019, 200, 2, id="half of it was lost with another k"
        ),
        pytest.param(
            True, (2.0, 1.9), 0.029, 200, 4, id="two thirds were lost with this one"
        ),
        pytest.param(False, (1.0, 0.0), 0.5, 100, 1, id="fixed"),
    ],
)
def test_dynamic_k_doubles_where_faults_since_it_last_did_cost_too_much(
    is_dynamic: bool, facts: tuple[float, float], plt: float, iteration: int, k: int
) -> None:
    policy = moc(1, dynamic_k=is_dynamic)
    policy.went_back(facts, plt=plt, iteration=iteration)
    policy.plan(10, measuring())
    assert len(chosen(policy, 11, measuring()).memory[0]) == k


def test_popular_experts_go_first_and_each_level_has_its_own_count() -> None:
    policy = begun(moetion())
    first = chosen(policy, 1, measuring((9.0, 1.0, 8.0, 2.0, 5.0, 5.0, 5.0, 5.0)))
    assert (first.memory, first.on_peers) == (((0, 2), (0, 1)), ((0,), (0,)))
    second = chosen(policy, 2, measuring((0.0, 0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0)))
    assert second.memory == ((3,), (0, 2, 3)), "the second layer has more at risk"
    assert second.on_peers == ((), (0, 2)), "of those"
    third = chosen(policy, 3, measuring((0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)))
    assert third.memory == ((0, 1, 2, 3), ()), "nothing of the second layer is at risk"
    assert third.on_peers == ((2, 3), ()), (
        "9 and 2 tokens of these have not gone to peers"
    )


def test_peers_are_sent_gradients_of_experts_in_their_last_snapshot() -> None:
    policy = moetion(experts=4)
    assert chosen(policy, 0, measuring()).by_gradient == ((), ())
    tokens = (9.0, 1.0, 0.0, 0.0, 9.0, 8.0, 0.0, 0.0)
    assert chosen(policy, 1, measuring(tokens)).by_gradient == ((0,), (0,)), (
        "they have all of the first"
    )
    again = chosen(policy, 2, measuring(tokens))
    assert (again.on_peers, again.by_gradient) == (((0,), (1,)), ((0,), ()))
    policy.went_back((), plt=0.0, iteration=1)
    assert chosen(policy, 3, measuring(tokens)).by_gradient == ((), ())


@pytest.mark.parametrize("changes", [{"every_iters": 2}, {"send_gradients": False}])
def test_peers_are_sent_whole_experts(changes: dict[str, Any]) -> None:
    policy = begun(moetion(experts=4, remote_experts=4, **changes))
    choice = chosen(policy, 2, measuring())
    assert (choice.on_peers, choice.by_gradient) == (EVERYTHING, ((), ()))


def test_budgets_follow_what_links_carry() -> None:
    policy = begun(moetion(experts="auto", remote_experts="auto"))
    tokens = tuple(map(float, range(8)))
    # budgets of both ranks together: 1200 and 600 bytes, 240 of each for the core
    rates = {"host_bytes_per_s": 600.0, "peer_bytes_per_s": 300.0}
    choice = chosen(policy, 1, measuring(tokens, **rates))
    assert sum(map(len, choice.memory)) == 4
    assert sum(map(len, choice.on_peers)) == 1


def test_no_link_carries_more_than_its_budget() -> None:
    """A link carries 360 bytes: 120 of the core, and one expert of the rank.

    The popular experts of both layers are on the first rank.
    """
    policy = begun(moetion("auto"))
    popular = (9.0, 8.0, 1.0, 2.0, 9.0, 8.0, 1.0, 2.0)
    memory = chosen(policy, 1, measuring(popular, host_bytes_per_s=360.0)).memory
    assert memory == ((0,), (3,))
    assert MoeStage(stage().table).snapshot_bytes(memory).tolist() == [360, 360]


def test_a_budget_without_room_for_an_expert_is_refused_with_the_numbers() -> None:
    policy = begun(moetion("auto"))
    wanted = (
        r"ckpt.experts=auto: got a budget of 400 bytes an iteration, wanted at"
        r" least 480"
    )
    with pytest.raises(ConfigError, match=wanted):
        policy.plan(1, measuring(host_bytes_per_s=200.0))
    policy.plan(2, measuring(host_bytes_per_s=600.0))
    slow = chosen(policy, 3, measuring(host_bytes_per_s=200.0))
    assert sum(map(len, slow.memory)) == 1, "a slow moment does not end a run"


@pytest.mark.parametrize("partial", ["both", "weights", "moments"])
def test_bytes_are_those_of_the_papers_equations(partial: str) -> None:
    """MoC, equation (6), and MoEtion, equation (5).

    A snapshot has all state except experts, and K / N of the experts.
    """
    whole = MoeStage(stage().table, partial)
    thirds = {"both": 3, "weights": 1, "moments": 2}[partial]
    for k in range(1, 5):
        taken = whole.snapshot_bytes((tuple(range(k)),) * 2).sum()
        assert taken == 240 + 8 * 80 * (3 - thirds) + 8 * 80 * thirds * k // 4


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (moc, {"k_snapshot": 5}, "k_snapshot: got 5, wanted at most 4, the"),
        (
            moc,
            {"k_snapshot": 0},
            "k_snapshot: got 0, wanted auto or a number of experts of at least 1",
        ),
        (moc, {"k_persist": 3}, "k_persist: got 3, wanted at most ckpt.k_snapshot=2"),
        (moc, {"k_persist": 0}, "k_persist: got 0, wanted at least 1"),
        (
            moc,
            {"plt_limit": 0.0},
            "plt_limit: got 0.0, wanted more than 0 and less than 1",
        ),
        (
            moc,
            {"memory_budget_bytes": 100},
            "memory_budget_bytes: got 100, wanted at least 3240:",
        ),
        (moetion, {"experts": 9}, "experts: got 9, wanted at most 4"),
        (
            moetion,
            {"remote_experts": 3},
            "remote_experts: got 3, wanted at most ckpt.experts=2",
        ),
        (moetion, {"boost": 1.5}, "boost: got 1.5, wanted between 0 and 1"),
    ],
)
def test_bad_settings_are_refused_by_name(
    make: Callable[..., object], changes: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^ckpt.{message}"):
        make(**changes)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"ckpt.policy: got 'moetion', wanted a policy for dense models",
    ):
        PopularExperts(config("moetion"), [stage(num_layers=0)], 0)
