"""Plans of a simulation are the plans that the real run would make.

The simulation lists equal ranks once, which does not change the plan.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import NothingLeftError
from moe_ckpt.recovery.inventory import Inventory, WindowRef
from moe_ckpt.recovery.plan import RecoveryPlan, plan_recovery
from moe_ckpt.replication.placement import copy_holders
from moe_ckpt.sim.generation import Kept
from moe_ckpt.sim.policies import plan_saving
from moe_ckpt.sim.recovering import Losses, estimate, plan_after, replay_s, replayed_by
from moe_ckpt.sim.saving import Saving, Setup
from tests.sim.setups import ckpt, cluster, job, setup

NOBODY: frozenset[int] = frozenset()
KEPT = (Kept(start=6, end=8),)
REACHED = 10
# 16 ranks, 2 on each node, 2 nodes for each stage
SETUP = setup(of=job(pp=4, dp=4, ep=2), machines=cluster(nodes=8))


def saving(*overrides: str) -> Saving:
    return plan_saving(ckpt("ckpt=moevement", "ckpt.window=3", *overrides), SETUP)


LOCAL = saving("ckpt.replicas=1")
NO_LOGS = saving("ckpt.replicas=1", "ckpt.boundary_log=false")
GEMINI = plan_saving(
    ckpt("ckpt=gemini", "ckpt.every_iters=5", "ckpt.replicas=1"), SETUP
)


def losses(
    *ranks: int, bare: bool = False, unreplicated: frozenset[int] = NOBODY
) -> Losses:
    dead = frozenset(ranks)
    return Losses(
        dead=dead,
        bare=dead if bare else NOBODY,
        unreplicated=unreplicated | (dead if bare else NOBODY),
        rolling={},
    )


def of_all_ranks(lost: Losses, window: Kept) -> list[Inventory]:
    """Return the inventory that each of the 16 ranks would send in a real run."""
    ref = WindowRef(
        start=window.start,
        num_slots=window.num_slots,
        replayable_to=REACHED,
        assignment="",
    )
    held: dict[int, dict[int, tuple[WindowRef, ...]]] = {}
    for owner in lost.bare:
        for holder in copy_holders(owner, world_size=16, ranks_per_node=2, replicas=1):
            if holder not in lost.unreplicated:
                held.setdefault(holder, {})[owner] = (ref,)
    return [
        Inventory(
            global_rank=rank,
            stage=rank // 4,
            windows=() if rank in lost.bare else (ref,),
            held=held.get(rank, {}),
            logged_from=window.start + 1,
            logged_to=window.start if rank in lost.dead else REACHED,
        )
        for rank in range(16)
    ]


def planned(of: Setup, how: Saving, lost: Losses) -> RecoveryPlan | None:
    try:
        return plan_after(of, how, KEPT, lost, REACHED)
    except NothingLeftError:
        return None


def planned_by_all(lost: Losses, *, boundary_log: bool) -> RecoveryPlan | None:
    everybody_is_gone = len(lost.dead) == 16
    try:
        return plan_recovery(
            {rank // 4 for rank in lost.dead},
            of_all_ranks(lost, KEPT[0]),
            target_iteration=None if everybody_is_gone else REACHED,
            boundary_log=boundary_log,
        )
    except NothingLeftError:
        return None


@given(ranks=st.sets(st.integers(0, 15), min_size=1), logs=st.booleans())
def test_lost_processes_are_planned_for_as_by_all_ranks(
    ranks: set[int], logs: bool
) -> None:
    lost = losses(*ranks)
    assert planned(SETUP, LOCAL if logs else NO_LOGS, lost) == planned_by_all(
        lost, boundary_log=logs
    )


@given(
    nodes=st.sets(st.integers(0, 7), min_size=1, max_size=5),
    before=st.sets(st.integers(0, 7), max_size=2),
    logs=st.booleans(),
)
def test_lost_nodes_are_planned_for_as_by_all_ranks(
    nodes: set[int], before: set[int], logs: bool
) -> None:
    ranks = [2 * node + local_index for node in nodes for local_index in (0, 1)]
    unreplicated = frozenset(
        2 * node + local_index for node in before for local_index in (0, 1)
    )
    lost = losses(*ranks, bare=True, unreplicated=unreplicated)
    assert planned(SETUP, LOCAL if logs else NO_LOGS, lost) == planned_by_all(
        lost, boundary_log=logs
    )


def test_a_stage_on_its_way_back_is_lost_with_what_is_lost_then() -> None:
    lost = replace(losses(5), rolling={2: None})
    plan = plan_after(SETUP, LOCAL, KEPT, lost, REACHED)
    assert [rollback.stages for rollback in plan.rollbacks] == [range(1, 3)]


def test_a_cut_off_replay_goes_on_from_its_last_whole_iteration() -> None:
    (whole,) = plan_after(SETUP, LOCAL, KEPT, losses(1), REACHED).rollbacks
    window = Kept(start=whole.span[0], end=whole.span[-1])
    left_s = [
        replay_s(SETUP, LOCAL, range(1), window, REACHED, done) for done in range(5)
    ]
    (all_s,) = estimate(
        SETUP, LOCAL, plan_after(SETUP, LOCAL, KEPT, losses(1), REACHED)
    ).replay_s
    for done in range(5):
        replayed = replayed_by(
            SETUP, LOCAL, whole, REACHED, all_s - left_s[done] + 1e-6
        )
        assert (replayed.iteration if replayed else window.start) == window.start + done
        plan = plan_after(
            SETUP, LOCAL, KEPT, replace(losses(13), rolling={0: replayed}), REACHED
        )
        assert [rollback.resumed_at for rollback in plan.rollbacks] == [
            window.start + done if done else None,
            None,
        ]
        expected_s = left_s[done] if done else all_s
        assert estimate(SETUP, LOCAL, plan).replay_s[0] == pytest.approx(expected_s)


def test_everybody_goes_back_to_a_whole_snapshot() -> None:
    plan = plan_after(SETUP, GEMINI, (Kept(start=5, end=5),), losses(0), REACHED)
    assert (plan.target_iteration, plan.rollbacks[0].stages) == (5, range(4))


def test_a_replay_takes_its_iterations_and_its_frozen_operators_less() -> None:
    plan = plan_after(SETUP, LOCAL, KEPT, losses(5), REACHED)
    costs, active = SETUP.costs, LOCAL.active(3)
    loaded_s = LOCAL.whole_bytes / LOCAL.reload_bytes_per_s
    shares = (active[0], active[1], 1.0, 1.0)  # iterations 7 to 10 after slots 0, 1, 2
    expected = loaded_s + sum(costs.replay_s(range(1, 2), share) for share in shares)
    found = estimate(SETUP, LOCAL, plan)
    assert found.replay_s == pytest.approx((expected,))
    assert found.fetch_s == 0.0
    assert [
        plan.target_iteration - rollback.starts_from for rollback in plan.rollbacks
    ] == [4]


def test_a_window_of_fewer_slots_is_active_sooner() -> None:
    costs, active = SETUP.costs, LOCAL.active(2)
    assert LOCAL.active(3)[0] < active[0] < active[1] == LOCAL.active(1)[0] == 1.0
    shares = (active[0], 1.0, 1.0)
    expected = sum(costs.replay_s(range(1, 2), share) for share in shares)
    assert replay_s(
        SETUP, LOCAL, range(1, 2), Kept(start=6, end=7), 9
    ) == pytest.approx(expected)


def test_lost_memory_is_fetched_from_who_holds_it() -> None:
    slow = setup(of=SETUP.job, machines=cluster(nodes=8, network_bytes_per_s=2000.0))
    how = plan_saving(ckpt("ckpt=moevement", "ckpt.window=3", "ckpt.replicas=1"), slow)
    plan = plan_after(slow, how, KEPT, losses(4, 5, bare=True), REACHED)
    assert [(fetch.global_rank, fetch.source_rank) for fetch in plan.fetches] == [
        (4, 6),
        (5, 7),
    ]
    window_bytes = sum(snapshot.size_bytes for snapshot in how.settled.repeat[:3])
    assert estimate(slow, how, plan).fetch_s == pytest.approx(window_bytes / 1000.0)


def test_without_a_copy_anywhere_nothing_is_left() -> None:
    alone = plan_saving(
        ckpt("ckpt=moevement", "ckpt.window=3", "ckpt.replicas=0"), SETUP
    )
    with pytest.raises(NothingLeftError):
        plan_after(SETUP, alone, KEPT, losses(4, 5, bare=True), REACHED)
