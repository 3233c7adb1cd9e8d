"""Simulated runs log the events of real runs, and events add up to the simulation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from moe_ckpt.events import (
    CheckpointSaved,
    ExpertsChosen,
    GenerationEnded,
    IterationCommitted,
    LoggedEvent,
    Rejoined,
    RunFinished,
    SnapshotTaken,
    StageRecovered,
    StateResumed,
    TokensLost,
    WindowChosen,
    WorkerStarted,
    read_events,
    write_events,
)
from moe_ckpt.faults.schedule import Kill
from moe_ckpt.sim.cluster import simulate
from moe_ckpt.sim.emit import rank_events
from moe_ckpt.sim.policies import plan_saving
from moe_ckpt.sim.timeline import Outcome
from tests.sim.setups import ckpt, cluster, setup

SETUP = setup()
LOCAL = plan_saving(ckpt("ckpt=moevement", "ckpt.window=3"), SETUP)
DENSE = plan_saving(ckpt("ckpt=dense", "ckpt.every_iters=3"), SETUP)
KILLS = (Kill(rank=4, after_s=95.0), Kill(rank=0, after_s=255.0))


def told(outcome: Outcome, rank: int, saving: object = LOCAL) -> list[LoggedEvent]:
    return rank_events(SETUP, saving, outcome, rank)  # type: ignore[arg-type]


def counts(events: list[LoggedEvent]) -> Counter[type]:
    return Counter(type(logged.event) for logged in events)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return simulate(SETUP, LOCAL, KILLS, duration_s=500.0)


def test_every_rank_commits_every_iteration_once_and_in_order(outcome: Outcome) -> None:
    for rank in range(8):
        events = told(outcome, rank)
        commits = [
            logged.event.iteration
            for logged in events
            if isinstance(logged.event, IterationCommitted)
        ]
        assert commits == list(range(1, outcome.iterations + 1))
        assert [logged.t_s for logged in events] == sorted(
            logged.t_s for logged in events
        )
        assert {logged.global_rank for logged in events} == {rank}


def test_stalls_and_seconds_are_those_of_the_ledger(outcome: Outcome) -> None:
    commits = [
        logged.event
        for logged in told(outcome, 1)
        if isinstance(logged.event, IterationCommitted)
    ]
    ledger = outcome.ledger
    assert sum(event.stall_s for event in commits) == pytest.approx(ledger.stall_s)
    assert sum(event.seconds for event in commits) == pytest.approx(
        ledger.useful_s + ledger.stall_s
    )
    last = told(outcome, 1)[-1]
    assert isinstance(last.event, RunFinished)
    assert last.t_s == pytest.approx(ledger.wall_s)


def test_a_killed_rank_starts_again_and_only_its_stage_replays(
    outcome: Outcome,
) -> None:
    victim, peer, other = (counts(told(outcome, rank)) for rank in (4, 5, 2))
    assert [kinds[WorkerStarted] for kinds in (victim, peer, other)] == [2, 1, 1]
    assert [kinds[StageRecovered] for kinds in (victim, peer, other)] == [1, 1, 0]
    assert [kinds[Rejoined] for kinds in (victim, peer, other)] == [2, 2, 2]
    assert [kinds[GenerationEnded] for kinds in (victim, peer, other)] == [1, 2, 2]


def test_snapshots_are_logged_slot_by_slot_with_what_chose_them(
    outcome: Outcome,
) -> None:
    events = told(outcome, 1)
    taken = [
        logged.event for logged in events if isinstance(logged.event, SnapshotTaken)
    ]
    numbers = [(event.iteration, event.slot, event.num_slots) for event in taken[:5]]
    assert numbers == [(0, 0, 1), (1, 0, 3), (2, 1, 3), (3, 2, 3), (4, 0, 3)]
    assert taken[1].size_bytes < taken[0].size_bytes == taken[0].dense_bytes
    assert all(event.window_start == event.iteration - event.slot for event in taken)
    begun = [
        (logged.t_s, logged.event)
        for logged in events
        if isinstance(logged.event, WindowChosen)
    ]
    assert {event.num_slots for _, event in begun} == {3}
    commits = [
        (logged.t_s, logged.event)
        for logged in events
        if isinstance(logged.event, IterationCommitted)
    ]
    committed_s = {event.iteration: t_s for t_s, event in commits}
    assert [t_s for t_s, _ in begun[:4]] == [
        committed_s[event.iteration] for _, event in begun[:4]
    ]


def test_a_restart_is_told_as_one() -> None:
    outcome = simulate(SETUP, DENSE, KILLS[:1], duration_s=300.0)
    kinds = counts(told(outcome, 7, DENSE))
    assert (
        kinds[WorkerStarted],
        kinds[StateResumed],
        kinds[Rejoined],
        kinds[GenerationEnded],
    ) == (2, 1, 0, 0)
    saved = [
        logged.event
        for logged in told(outcome, 7, DENSE)
        if isinstance(logged.event, CheckpointSaved)
    ]
    assert [event.iteration for event in saved] == list(
        range(3, outcome.iterations + 1, 3)
    )


def test_a_lost_node_is_one_fault_of_its_class() -> None:
    kills = [
        Kill(rank=4, after_s=95.0, scope="node"),
        Kill(rank=1, after_s=255.0, scope="node"),
        Kill(rank=6, after_s=255.0, scope="node"),
    ]
    outcome = simulate(SETUP, LOCAL, kills, duration_s=500.0)
    for rank in range(8):
        found = [
            (logged.event.deaths, logged.event.classes)
            for logged in told(outcome, rank)
            if isinstance(logged.event, Rejoined)
        ]
        assert found == [
            (["node 2 is lost"], ["node"]),
            (["node 0 is lost", "node 3 is lost"], ["node", "node"]),
        ]


def test_nodes_of_a_cluster_without_spares_are_ranks_of_one_machine() -> None:
    of = setup(machines=cluster(spares=0, repair_s=0.0))
    kill = Kill(rank=4, after_s=95.0, scope="node")
    outcome = simulate(of, LOCAL, [kill], duration_s=200.0)
    (event,) = (
        logged.event
        for logged in rank_events(of, LOCAL, outcome, 0)
        if isinstance(logged.event, Rejoined)
    )
    assert (event.deaths, event.classes) == (
        ["rank 4 died", "rank 5 died"],
        ["signal", "signal"],
    )


def test_events_are_read_as_they_were_written(outcome: Outcome, tmp_path: Path) -> None:
    events, path = told(outcome, 4), tmp_path / "events" / "rank0004.jsonl"
    write_events(path, events)
    read = list(read_events(path))
    assert [type(logged.event) for logged in read] == [
        type(logged.event) for logged in events
    ]
    assert [logged.t_s for logged in read] == [
        round(logged.t_s, 6) for logged in events
    ]


def test_partial_checkpoints_tell_what_they_take_and_what_is_lost() -> None:
    saving = plan_saving(ckpt("ckpt=moc", "ckpt.k_snapshot=1"), SETUP)
    outcome = simulate(SETUP, saving, KILLS, duration_s=500.0)
    lost: list[TokensLost] = []
    for rank in range(8):
        events = [logged.event for logged in told(outcome, rank, saving)]
        chosen = [event for event in events if isinstance(event, ExpertsChosen)]
        lost = [event for event in events if isinstance(event, TokensLost)]
        taken = [event for event in events if isinstance(event, SnapshotTaken)]
        assert {event.iteration for event in taken} <= {
            event.iteration for event in chosen
        }
        assert [len(layer) for layer in chosen[0].memory] == [4, 4]
        assert [len(layer) for layer in chosen[1].memory] == [1, 1]
        assert [event.layers for event in lost] == [
            [rank // 2 * 2, rank // 2 * 2 + 1]
        ] * 2
        assert lost[-1].lost_by_layer == [
            sum(layer) for layer in lost[-1].lost_by_expert
        ]
    assert outcome.plt == pytest.approx(
        lost[-1].plt * lost[-1].iteration / outcome.iterations
    )
    assert outcome.mlt == pytest.approx(8 * outcome.plt)
