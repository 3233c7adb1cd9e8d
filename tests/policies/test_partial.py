"""Which experts a partial snapshot takes, where they go, and what is refused: moc and moetion."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from moe_ckpt.config import MocConfig, MoetionConfig
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.moc import PartialExperts
from moe_ckpt.policies.moetion import PopularExperts
from moe_ckpt.policies.partial import MoeStage
from moe_ckpt.policies.profile import StageProfile
from moe_ckpt.types import CORE, ExpertChoice, Measured, OperatorId, OperatorKind, OperatorTable, PartialPlan

SHARED: dict[str, Any] = {
    "every_iters": 1,
    "memory_budget_bytes": None,
    "disk_path": None,
    "disk_budget_bytes": None,
    "durable_every_iters": 0,
    "keep": 2,
    "async_save": True,
    "strict": False,
}


def moc(**changes: Any) -> MocConfig:
    """conf/ckpt/moc.yaml with changes, and two experts to memory, one of them to disk."""
    own = {"policy": "moc", "k_snapshot": 2, "k_persist": 1, "selection": "sequential", "partial": "both"}
    limits = {"dynamic_k": True, "plt_limit": 0.0375, "disk_every_iters": 1}
    return MocConfig(**(SHARED | own | limits | changes))


def moetion(**changes: Any) -> MoetionConfig:
    """conf/ckpt/moetion.yaml with changes."""
    own = {
        "policy": "moetion",
        "experts": 2,
        "remote_experts": 1,
        "boost": 0.1,
        "send_gradients": True,
        "bubble_copies": True,
    }
    where = {"replicas": "auto", "network_interface": None, "disk_every_iters": 0}
    return MoetionConfig(**(SHARED | own | where | changes))


def stage(num_layers: int = 2, num_experts: int = 4, ranks: int = 2) -> StageProfile:
    """Blocks of 120 bytes shared by all ranks, experts of 240 bytes, each layer's in blocks on the ranks."""
    operators: list[OperatorId] = []
    sizes: list[list[int]] = []
    for layer in range(num_layers):
        operators.append(OperatorId(kind=OperatorKind.BLOCK, layer=layer))
        sizes.append([120 // ranks] * ranks)
        for expert in range(num_experts):
            operators.append(OperatorId(kind=OperatorKind.EXPERT, layer=layer, expert=expert))
            owner = expert * ranks // num_experts
            sizes.append([240 if rank == owner else 0 for rank in range(ranks)])
    full_bytes = np.array(sizes, np.int64).T
    table = OperatorTable(operators=operators, full_bytes=full_bytes, compute_bytes=full_bytes // 6)
    return StageProfile(table=table, boundary_log_bytes=0, step_log_bytes=0)


def measuring(tokens: Sequence[float] = (0.0,) * 8, **changes: Any) -> Callable[[], Measured]:
    values: dict[str, Any] = {"iteration_s": 1.0, "copy_bytes_per_s": math.inf, "popularity": np.array(tokens)}
    return lambda: Measured(**(values | changes))


def chosen(policy: PartialExperts | PopularExperts, iteration: int, measure: Callable[[], Measured]) -> ExpertChoice:
    choice = policy.plan(iteration, measure).experts
    assert choice is not None
    return choice


EVERYTHING = ((0, 1, 2, 3), (0, 1, 2, 3))


@pytest.mark.parametrize("policy", [PartialExperts(moc(), [stage()], 0, 2), PopularExperts(moetion(), [stage()], 0, 1)])
def test_the_first_snapshot_takes_everything_everywhere(policy: PartialExperts | PopularExperts) -> None:
    plan = policy.plan(0, measuring())
    assert plan.experts is not None
    assert plan.experts.memory == EVERYTHING
    assert isinstance(plan.sparse, PartialPlan)
    assert [unit.name for unit in plan.sparse.units] == [unit.name for unit in plan.sparse.checkpoint]
    assert plan.sparse.units[0].name == CORE
    assert plan.sparse.units[0].full == (0, 5), "all that is no expert"
    assert all(unit.on_peers for unit in plan.sparse.units) is isinstance(policy, PopularExperts)
    assert all(unit.on_disk for unit in plan.sparse.units) is isinstance(policy, PartialExperts)


def test_moc_says_what_the_rank_that_saves_most_saves() -> None:
    note = PartialExperts(moc(), [stage()], 0, ep=2).notes()[-1]
    assert "saves most: 600 bytes" in note, "its part of two blocks, and an expert of each layer"
    assert note.endswith("first 720, equal 600, adaptive 600")


def test_experts_take_turns_and_all_get_to_storage() -> None:
    policy = PartialExperts(moc(), [stage()], 0, 2)
    policy.plan(0, measuring())
    turns = [chosen(policy, iteration, measuring()) for iteration in range(1, 5)]
    assert [turn.memory for turn in turns] == [((0, 2), (1, 3)), ((1, 3), (0, 2))] * 2
    for layer in range(2):
        assert {expert for turn in turns for expert in turn.on_disk[layer]} == {0, 1, 2, 3}
        assert all(set(turn.on_disk[layer]) < set(turn.memory[layer]) for turn in turns)


@pytest.mark.parametrize("slow_for", [1, 2, 3])
def test_all_get_to_storage_however_slow_it_is(slow_for: int) -> None:
    policy = PartialExperts(moc(k_persist=2), [stage()], 0, 2)
    policy.plan(0, measuring())
    stored: list[set[int]] = [set(), set()]
    for iteration in range(1, 1 + 2 * (slow_for + 1)):
        plan = policy.plan(iteration, measuring(is_persisting=iteration % (slow_for + 1) != 0))
        assert plan.experts is not None
        assert plan.to_disk is (iteration % (slow_for + 1) == 0)
        for layer in range(2):
            stored[layer] |= set(plan.experts.on_disk[layer])
    assert stored == [{0, 1, 2, 3}] * 2


def test_by_load_those_with_most_tokens_go_first_to_each_place() -> None:
    policy = PartialExperts(moc(selection="load"), [stage()], 0, 2)
    policy.plan(0, measuring())
    tokens = (9.0, 1.0, 8.0, 2.0, 0.0, 7.0, 7.0, 7.0)
    first = chosen(policy, 1, measuring(tokens))
    assert (first.memory, first.on_disk) == (((0, 2), (1, 2)), ((0,), (2,))), "of equals the other rank's"
    second = chosen(policy, 2, measuring((0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)))
    assert second.memory == ((1, 3), (0, 3)), "the others have been saved since"
    third = chosen(policy, 3, measuring((0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0)))
    assert (third.memory, third.on_disk) == (((0, 2), (0, 2)), ((2,), (2,))), "storage lacks these"


def test_moc_takes_as_many_experts_as_the_next_iteration_hides() -> None:
    policy = PartialExperts(moc(k_snapshot="auto", k_persist=1), [stage()], 0, 1)
    policy.plan(0, measuring())
    for rate, k in ((1e9, 4), (1.0, 1)):
        assert [len(experts) for experts in chosen(policy, 1, measuring(copy_bytes_per_s=rate)).memory] == [k, k]
        policy = PartialExperts(moc(k_snapshot="auto", k_persist=1), [stage()], 0, 1)
        policy.plan(0, measuring())


def test_dynamic_k_doubles_where_faults_since_it_last_did_cost_too_much() -> None:
    policy = PartialExperts(moc(k_snapshot=1), [stage()], 0, 2)
    policy.went_back((1.0, 0.0), plt=0.018, iteration=100)
    assert len(chosen_after(policy)[0]) == 1, "the limit of 1 is half of 3.75 %: 1 and 2 share it"
    policy = PartialExperts(moc(k_snapshot=1), [stage()], 0, 2)
    policy.went_back((1.0, 0.0), plt=0.019, iteration=100)
    assert len(chosen_after(policy)[0]) == 2
    again = PartialExperts(moc(k_snapshot=1), [stage()], 0, 2)
    again.went_back((2.0, 1.9), plt=0.019, iteration=200)
    assert len(chosen_after(again)[0]) == 2, "half of it was lost with another k"
    again = PartialExperts(moc(k_snapshot=1), [stage()], 0, 2)
    again.went_back((2.0, 1.9), plt=0.029, iteration=200)
    assert len(chosen_after(again)[0]) == 4
    fixed = PartialExperts(moc(k_snapshot=1, dynamic_k=False), [stage()], 0, 2)
    fixed.went_back((1.0, 0.0), plt=0.5, iteration=100)
    assert len(chosen_after(fixed)[0]) == 1


def chosen_after(policy: PartialExperts) -> tuple[tuple[int, ...], ...]:
    policy.plan(10, measuring())
    return chosen(policy, 11, measuring()).memory


def test_popular_experts_go_first_and_each_place_has_its_own_count() -> None:
    policy = PopularExperts(moetion(), [stage()], 0, num_copies=1)
    policy.plan(0, measuring())
    first = chosen(policy, 1, measuring((9.0, 1.0, 8.0, 2.0, 5.0, 5.0, 5.0, 5.0)))
    assert (first.memory, first.on_peers) == (((0, 2), (0, 1)), ((0,), (0,)))
    second = chosen(policy, 2, measuring((0.0, 0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0)))
    assert second.memory == ((3,), (0, 2, 3)), "the second layer has more at risk"
    assert second.on_peers == ((), (0, 2)), "of those"
    third = chosen(policy, 3, measuring((0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)))
    assert third.memory == ((0, 1, 2, 3), ()), "nothing of the second layer is at risk"
    assert third.on_peers == ((2, 3), ()), "9 and 2 tokens of these have not gone to peers"


def test_peers_are_sent_gradients_of_experts_in_their_last_snapshot() -> None:
    policy = PopularExperts(moetion(experts=4), [stage()], 0, num_copies=1)
    assert chosen(policy, 0, measuring()).by_gradient == ((), ())
    tokens = (9.0, 1.0, 0.0, 0.0, 9.0, 8.0, 0.0, 0.0)
    assert chosen(policy, 1, measuring(tokens)).by_gradient == ((0,), (0,)), "they have all of the first"
    again = chosen(policy, 2, measuring(tokens))
    assert (again.on_peers, again.by_gradient) == (((0,), (1,)), ((0,), ()))
    policy.went_back((), plt=0.0, iteration=1)
    assert chosen(policy, 3, measuring(tokens)).by_gradient == ((), ())


@pytest.mark.parametrize("changes", [{"every_iters": 2}, {"send_gradients": False}])
def test_peers_are_sent_whole_experts(changes: dict[str, Any]) -> None:
    policy = PopularExperts(moetion(experts=4, remote_experts=4, **changes), [stage()], 0, num_copies=1)
    policy.plan(0, measuring())
    choice = chosen(policy, 2, measuring())
    assert (choice.on_peers, choice.by_gradient) == (EVERYTHING, ((), ()))


def test_layers_with_more_at_risk_get_more_experts() -> None:
    policy = PopularExperts(moetion(experts=2, remote_experts=1), [stage()], 0)
    policy.plan(0, measuring())
    memory = chosen(policy, 1, measuring((30.0, 20.0, 10.0, 15.0, 10.0, 5.0, 5.0, 5.0))).memory
    assert [len(experts) for experts in memory] == [3, 1], "75 to 25 of four"


def test_budgets_follow_what_links_carry() -> None:
    policy = PopularExperts(moetion(experts="auto", remote_experts="auto"), [stage()], 0, num_copies=1)
    policy.plan(0, measuring())
    tokens = tuple(map(float, range(8)))
    rates = {"host_bytes_per_s": 600.0, "peer_bytes_per_s": 300.0}  # 1200 and 600 on both ranks, 240 for the core
    choice = chosen(policy, 1, measuring(tokens, **rates))
    assert sum(map(len, choice.memory)) == 4
    assert sum(map(len, choice.on_peers)) == 1


def test_a_budget_without_room_for_an_expert_is_refused_with_the_numbers() -> None:
    policy = PopularExperts(moetion(experts="auto"), [stage()], 0)
    policy.plan(0, measuring())
    with pytest.raises(
        ConfigError, match=r"ckpt.experts=auto: got a budget of 400 bytes an iteration, wanted at least 480"
    ):
        policy.plan(1, measuring(host_bytes_per_s=200.0))
    policy.plan(2, measuring(host_bytes_per_s=600.0))
    slow = chosen(policy, 3, measuring(host_bytes_per_s=200.0))
    assert sum(map(len, slow.memory)) == 1, "a slow moment does not end a run"


@pytest.mark.parametrize("partial", ["both", "weights", "moments"])
def test_bytes_are_those_of_the_papers_equations(partial: str) -> None:
    """MoC, equation (6), and MoEtion, equation (5): all of what is no expert, K / N of the experts."""
    whole = MoeStage(stage().table, partial)
    thirds = {"both": 3, "weights": 1, "moments": 2}[partial]
    for k in range(1, 5):
        taken = whole.snapshot_bytes((tuple(range(k)),) * 2).sum()
        assert taken == 240 + 8 * 80 * (3 - thirds) + 8 * 80 * thirds * k // 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PartialExperts(moc(k_snapshot=5), [stage()], 0, 2), r"ckpt.k_snapshot: got 5, wanted at most 4, the"),
        (lambda: moc(k_snapshot=0), r"ckpt.k_snapshot: got 0, wanted auto or a number of experts of at least 1"),
        (lambda: moc(k_persist=3), r"ckpt.k_persist: got 3, wanted at most ckpt.k_snapshot=2"),
        (lambda: moc(k_persist=0), r"ckpt.k_persist: got 0, wanted at least 1"),
        (lambda: moc(plt_limit=0.0), r"ckpt.plt_limit: got 0.0, wanted more than 0 and less than 1"),
        (lambda: PopularExperts(moetion(experts=9), [stage()], 0), r"ckpt.experts: got 9, wanted at most 4"),
        (lambda: moetion(remote_experts=3), r"ckpt.remote_experts: got 3, wanted at most ckpt.experts=2"),
        (lambda: moetion(boost=1.5), r"ckpt.boost: got 1.5, wanted between 0 and 1"),
        (
            lambda: PartialExperts(moc(memory_budget_bytes=100), [stage()], 0, 2),
            r"ckpt.memory_budget_bytes: got 100, wanted at least 3240:",
        ),
        (
            lambda: PopularExperts(moetion(), [stage(num_layers=0)], 0),
            r"ckpt.policy: got 'moetion', wanted a policy for dense models",
        ),
    ],
)
def test_bad_settings_are_refused_with_the_numbers(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
