"""Partial snapshots of a simulated run: choices, age of experts, tokens lost to faults.

The choices are those of the real policies.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from moe_ckpt.config import MocConfig
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.moc import PartialExperts
from moe_ckpt.sim.generation import Kept
from moe_ckpt.sim.partial import Account, Epoch, Lost, Partial, Tokens
from moe_ckpt.sim.policies import plan_saving
from moe_ckpt.sim.recovering import Losses, RollbackPath
from moe_ckpt.sim.saving import Saving, Setup
from moe_ckpt.sim.snapshot_pattern import Where
from moe_ckpt.sim.units import go_back
from moe_ckpt.types import Measured
from tests.sim.setups import EXPERTS, ckpt, cluster, job, setup, shape

# 4 stages of 2 ranks, each stage on a node of its own; each stage has 2 layers of 4
# experts, and each rank has two experts of a layer
SETUP = setup()
MOC = ("ckpt=moc", "ckpt.k_snapshot=2")
MOETION = ("ckpt=moetion", "ckpt.experts=2", "ckpt.remote_experts=1")


def lost_memory(*ranks: int) -> Losses:
    gone = frozenset(ranks)
    return Losses(dead=gone, bare=gone, unreplicated=gone, rolling={})


def told(*overrides: str, of: Setup = SETUP) -> tuple[Saving, Partial, Epoch]:
    saving = plan_saving(ckpt(*overrides), of)
    assert saving.partial is not None
    return saving, saving.partial, saving.partial.first_epoch()


def kept(epoch: Epoch, iteration: int) -> Kept:
    return Kept(start=iteration, end=iteration, is_whole=False, epoch=epoch)


def lost_by(found: RollbackPath | None) -> Lost:
    assert found is not None
    assert found.lost is not None
    return found.lost


@pytest.mark.parametrize("iteration", [0, 1, 7, 30, 200])
def test_choices_are_those_of_the_real_policy(iteration: int) -> None:
    _, _, epoch = told(*MOC)
    config = ckpt(*MOC)
    assert isinstance(config, MocConfig)
    policy = PartialExperts(config, SETUP.job.profiles, 1, SETUP.job.layout.ep)
    measured = Measured(
        iteration_s=10.0, copy_bytes_per_s=1e6, popularity=np.ones(2 * EXPERTS)
    )
    chosen = [
        policy.plan(number, lambda: measured).experts for number in range(iteration + 1)
    ][-1]
    (snapshot,) = epoch.pattern.snapshots(iteration, iteration)
    assert snapshot.experts is not None
    assert chosen is not None
    assert (snapshot.experts.choice.memory, snapshot.to_disk) == (chosen.memory, True)


def test_in_turn_experts_are_up_to_a_round_old() -> None:
    _, _, epoch = told(*MOC)
    for iteration in (3, 50, 10_001):
        ages = iteration - epoch.versions(iteration, Where.MEMORY)
        assert sorted(ages[0].tolist()) == [0, 0, 1, 1]
    assert (epoch.versions(0, Where.DISK) == 0).all()


def test_a_slow_disk_gets_fewer_snapshots() -> None:
    slow = setup(machines=cluster(disk_bytes_per_s=4e4))
    _, _, epoch = told(*MOC, of=slow)
    written = [snapshot.offset for snapshot in epoch.pattern.repeat if snapshot.to_disk]
    gaps = {late - soon for soon, late in pairwise(written)}
    assert min(gaps) > 1
    assert len(epoch.pattern.repeat) == epoch.pattern.period


def test_who_keeps_memory_loses_what_was_not_in_the_newest_snapshot() -> None:
    saving, partial, epoch = told(*MOC)
    found = go_back(SETUP, saving, [kept(epoch, 11)], kept(epoch, 8), lost_memory())
    assert found is not None
    assert found.iteration == 11
    tokens = partial.tokens.by_expert[0]  # all experts are equally popular
    assert [of_stage.sum(axis=1).tolist() for of_stage in lost_by(found).by_stage] == [
        [2 * tokens] * 2
    ] * 4
    assert lost_by(found).plt == pytest.approx(2 * tokens / (11 * EXPERTS * tokens))
    assert lost_by(found).mlt == pytest.approx(8 * lost_by(found).plt)


def test_only_the_experts_of_a_lost_node_are_as_old_as_on_disk() -> None:
    saving, _, epoch = told(*MOC)
    found = go_back(SETUP, saving, [kept(epoch, 11)], kept(epoch, 8), lost_memory(2))
    assert found is not None
    assert found.iteration == 8
    by_stage = [of_stage.sum(axis=0) for of_stage in lost_by(found).by_stage]
    assert all(
        (of_stage == by_stage[0]).all() for of_stage in (by_stage[2], by_stage[3])
    )
    # rank 2 has the first two experts of stage 1
    assert (by_stage[1][:2] > by_stage[0][:2]).all()
    assert (by_stage[1][2:] == by_stage[0][2:]).all()
    assert found.fetch_s > 0


def test_peers_bring_back_the_newest_snapshot_where_one_of_them_is_left() -> None:
    saving, _, epoch = told(*MOETION, "ckpt.replicas=1")
    one = go_back(SETUP, saving, [kept(epoch, 11)], None, lost_memory(2))
    assert one is not None
    assert one.iteration == 11
    assert lost_by(one).by_stage[1].sum() > lost_by(one).by_stage[0].sum()
    assert go_back(SETUP, saving, [kept(epoch, 11)], None, lost_memory(0, 2)) is None


def test_the_newest_of_several_checkpoints_is_taken_that_all_can_have() -> None:
    saving, partial, first = told(*MOC)
    later = partial.next_epoch(first, first.account, 20)
    found = go_back(SETUP, saving, [kept(later, 25)], kept(first, 18), lost_memory(2))
    assert found is not None
    assert found.iteration == 18
    assert go_back(SETUP, saving, [], None, lost_memory()) is None


def test_snapshots_grow_by_the_policys_own_rule() -> None:
    _, partial, epoch = told("ckpt=moc", "ckpt.k_snapshot=1", "ckpt.plt_limit=0.02")
    facts, tokens = epoch.account.facts, 1000 * partial.tokens.an_iteration * 2
    assert facts[0] == 1.0
    # two doublings share plt_limit=0.02: each may cost 0.01
    little, much = (
        Account(lost=np.full(8, share * tokens).astype(np.int64), facts=facts)
        for share in (0.009, 0.011)
    )
    assert partial.next_epoch(epoch, little, 1000).account.facts[0] == 1.0
    grown = partial.next_epoch(epoch, much, 1000)
    assert grown.account.facts == (2.0, pytest.approx(11.0, rel=1e-3))
    assert grown.pattern.repeat[0].size_bytes > epoch.pattern.repeat[0].size_bytes
    assert (grown.start, grown.number, grown.account.lost.tolist()) == (
        1000,
        1,
        much.lost.tolist(),
    )


def test_popular_experts_lose_less_than_in_turn() -> None:
    uneven = setup(of=job(shape=shape(popularity=(0.7, 0.1, 0.1, 0.1))))
    lost = {}
    for name, overrides in (("moc", MOC), ("moetion", MOETION)):
        saving, _, epoch = told(*overrides, of=uneven)
        found = [
            go_back(uneven, saving, [kept(epoch, at)], None, lost_memory())
            for at in range(40, 60)
        ]
        lost[name] = sum(lost_by(each).plt for each in found if each)
    assert 0 < lost["moetion"] < lost["moc"]


def test_tokens_are_those_of_the_batch_by_popularity() -> None:
    tokens = Tokens(job(shape=shape(popularity=(0.7, 0.1, 0.1, 0.1))))
    assert tokens.an_iteration == 16 * 8
    assert tokens.by_expert.tolist() == [179, 26, 26, 26]
    assert tokens.layers_of_stage == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_more_experts_than_there_are_cannot_be_saved() -> None:
    with pytest.raises(
        ConfigError,
        match=r"ckpt\.k_snapshot: got 5, wanted at most 4, the experts of a layer",
    ):
        plan_saving(ckpt("ckpt=moc", "ckpt.k_snapshot=5"), SETUP)
