"""Simulated runs under faults: short runs by hand, and properties of all runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.faults.schedule import Kill, poisson_kills
from moe_ckpt.sim.cluster import simulate
from moe_ckpt.sim.faults import LateKill
from moe_ckpt.sim.measuring import GenerationStart
from moe_ckpt.sim.pace import Pace
from moe_ckpt.sim.policies import plan_saving
from moe_ckpt.sim.saving import Saving, Setup
from moe_ckpt.sim.snapshot_pattern import SnapshotPattern
from moe_ckpt.sim.timeline import Outcome, Recovered, Trained
from moe_ckpt.types import WARM_UP_ITERS
from tests.properties import examples
from tests.sim.setups import ckpt, cluster, job, setup

SETUP = setup()  # 8 ranks, 2 on a node; each stage has a node; iterations of 10 s
NONE = plan_saving(ckpt("ckpt=none"), SETUP)
GEMINI = plan_saving(
    ckpt("ckpt=gemini", "ckpt.every_iters=4", "ckpt.replicas=1"), SETUP
)
LOCAL = plan_saving(ckpt("ckpt=moevement", "ckpt.window=3", "ckpt.replicas=1"), SETUP)
ALL = [
    ("ckpt=none",),
    ("ckpt=dense", "ckpt.every_iters=7"),
    ("ckpt=dense", "ckpt.every_iters=7", "ckpt.async_save=true"),
    ("ckpt=checkfreq",),
    ("ckpt=gemini", "ckpt.every_iters=4", "ckpt.disk_every_iters=20"),
    ("ckpt=moevement",),
    ("ckpt=moc", "ckpt.k_snapshot=1"),
    ("ckpt=moc", "ckpt.durable_every_iters=10", "ckpt.disk_every_iters=0"),
    ("ckpt=moetion", "ckpt.experts=2", "ckpt.replicas=1"),
    ("ckpt=flowcheck", "ckpt.replicas=1"),
    ("ckpt=moevement", "ckpt.window=3", "ckpt.durable_every_iters=10"),
    ("ckpt=moevement", "ckpt.window=3", "ckpt.boundary_log=false"),
]


def at(
    after_s: float, rank: int = 0, scope: str = "process", signal: str = "KILL"
) -> Kill:
    return Kill(rank=rank, after_s=after_s, scope=scope, signal=signal)


def run(
    saving: Saving,
    kills: Sequence[Kill] = (),
    *,
    of: Setup = SETUP,
    duration_s: float = 400.0,
) -> Outcome:
    return simulate(of, saving, kills, duration_s=duration_s)


def recoveries(outcome: Outcome) -> list[Recovered]:
    return [stretch for stretch in outcome.timeline if isinstance(stretch, Recovered)]


def windows_of(recovered: Recovered) -> list[tuple[range, int, int]]:
    """Return the stages, the window start and the number of slots of each rollback."""
    assert recovered.plan is not None
    return [
        (each.stages, each.window_start, len(each.span))
        for each in recovered.plan.rollbacks
    ]


def replayed_iters(recovered: Recovered) -> int:
    """Return the most iterations that a stage runs again."""
    assert recovered.plan is not None
    return max(
        (recovered.iteration - each.starts_from for each in recovered.plan.rollbacks),
        default=0,
    )


def case(
    name: str,
    saving: Saving,
    kills: Sequence[Kill],
    *windows: tuple[range, int, int],
    **facts: object,
) -> Any:
    return pytest.param(saving, kills, windows, facts, id=name)


LOST_AT_ONCE = [at(95.0, rank=2), at(95.0, rank=4), at(95.0, rank=0)]
LOST_NODE = [at(95.0, rank=4, scope="node")]
LOST_IN_RECOVERY = [at(95.0, rank=4), Kill(rank=0, phase="recovery")]
AUTO = plan_saving(ckpt("ckpt=moevement", "ckpt.replicas=1"), SETUP)
THIRD = (range(2, 3), 7, 3)
(ALONE,) = recoveries(run(LOCAL, [at(95.0, rank=4)]))
WHILE_IT_REPLAYS = [
    at(95.0, rank=4),
    at(ALONE.since_s + ALONE.detect_s + ALONE.rebuild_s + 1.0, rank=2),
]
LATE = LateKill(rank=2, phase="recovery", late_s=ALONE.detect_s + ALONE.rebuild_s + 1.0)
AGAIN: dict[str, object] = {"faults": [(4,), (2,)], "detect_s": 2.0, "rebuild_s": 4.0}


@pytest.mark.parametrize(
    ("saving", "kills", "windows", "facts"),
    [
        case(
            "back to a whole snapshot",
            GEMINI,
            [at(95.0)],
            (range(4), 8, 1),
            lost_iters=1,
            source="host memory",
        ),
        case(
            "a stage replays alone",
            LOCAL,
            [at(95.0, rank=4)],
            THIRD,
            iteration=9,
            lost_iters=0,
            replayed_iters=2,
        ),
        case(
            "only the base while iterations are profiled",
            AUTO,
            [at(45.0)],
            (range(1), 0, 1),
            replayed_iters=4,
        ),
        case(
            "at once: one fault, neighbours together",
            LOCAL,
            LOST_AT_ONCE,
            (range(3), 7, 3),
            faults=[(2, 4, 0)],
        ),
        case(
            "before all met again",
            LOCAL,
            [at(95.0, rank=4), at(97.0, rank=2)],
            (range(1, 3), 7, 3),
            rebuild_s=3.0,
        ),
        case(
            "while a stage replays: all plan again",
            LOCAL,
            WHILE_IT_REPLAYS,
            (range(1, 3), 7, 3),
            **AGAIN,
        ),
        case(
            "the same, by a kill in a recovery",
            LOCAL,
            [at(95.0, rank=4), LATE],
            (range(1, 3), 7, 3),
            **AGAIN,
        ),
        case(
            "hung, found late",
            LOCAL,
            [at(95.0, signal="STOP")],
            (range(1), 7, 3),
            detect_s=9.0,
            rebuild_s=2.0,
        ),
        case(
            "copies of another node",
            LOCAL,
            LOST_NODE,
            THIRD,
            iteration=9,
            fetches=[(4, 6), (5, 7)],
        ),
        case(
            "in a recovery",
            LOCAL,
            LOST_IN_RECOVERY,
            (range(1), 7, 3),
            THIRD,
            faults=[(4,), (0,)],
        ),
    ],
)
def test_a_recovery_is_that_of_the_plan(
    saving: Saving,
    kills: Sequence[Kill],
    windows: tuple[tuple[range, int, int], ...],
    facts: dict[str, object],
) -> None:
    (recovered,) = recoveries(run(saving, kills))
    assert recovered.plan is not None
    assert windows_of(recovered) == list(windows)
    fetches = [
        (fetch.global_rank, fetch.source_rank) for fetch in recovered.plan.fetches
    ]
    found = {"faults": [fault.ranks for fault in recovered.faults], "fetches": fetches}
    found["replayed_iters"] = replayed_iters(recovered)
    assert {
        name: found.get(name, getattr(recovered, name, None)) for name in facts
    } == facts


@given(duration_s=st.floats(1.0, 1e6), iteration_s=st.floats(1e-3, 1e3))
def test_without_faults_and_checkpoints_all_time_is_of_use(
    duration_s: float, iteration_s: float
) -> None:
    of = setup(iteration_s=iteration_s)
    outcome = run(plan_saving(ckpt("ckpt=none"), of), of=of, duration_s=duration_s)
    assert outcome.ledger.ettr == 1.0
    assert outcome.ledger.wall_s == outcome.iterations * iteration_s >= duration_s
    assert (outcome.iterations - 1) * iteration_s < duration_s


def test_without_checkpoints_everything_is_trained_again() -> None:
    outcome = run(NONE, [at(95.0)])
    ledger = outcome.ledger
    assert (ledger.again_s, ledger.recovery_s, ledger.stall_s) == (
        95.0,
        1.0 + 50.0,
        0.0,
    )
    assert outcome.iterations == 26  # (400 - 146) / 10, rounded up
    assert ledger.wall_s == pytest.approx(146.0 + 260.0)
    ended = simulate(SETUP, NONE, [], duration_s=1e9, last_iteration=7)
    assert (ended.iterations, ended.ledger.wall_s) == (7, 70.0)


def test_a_restart_goes_on_from_what_was_written_by_then() -> None:
    whole_bytes = setup().total_full_bytes
    of = setup(
        machines=cluster(
            disk_bytes_per_s=whole_bytes / 4.0, disk_read_bytes_per_s=whole_bytes / 2.0
        )
    )
    dense = plan_saving(ckpt("ckpt=dense", "ckpt.every_iters=3"), of)
    # the checkpoint of iteration 3 is written from 30 s to 34 s
    before, after = (run(dense, [at(at_s)], of=of) for at_s in (33.5, 34.5))
    assert [
        recovered.iteration
        for outcome in (before, after)
        for recovered in recoveries(outcome)
    ] == [0, 3]
    (recovered,) = recoveries(after)
    assert (recovered.rebuild_s, recovered.fetch_s, recovered.source) == (
        50.0,
        2.0,
        "disk",
    )


def test_a_snapshot_that_is_not_copied_yet_is_none() -> None:
    copying_s = GEMINI.whole_bytes / GEMINI.kept_bytes_per_s
    assert 0 < copying_s < 5.0
    before, after = (
        recoveries(run(GEMINI, [at(80.0 + share * copying_s)]))[0]
        for share in (0.9, 1.1)
    )
    assert (before.iteration, before.lost_iters) == (4, 4)
    assert (after.iteration, after.lost_iters) == (8, 0)


@pytest.mark.parametrize(
    ("kill", "into_s"),
    [
        pytest.param(Kill(rank=0, iteration=5), 0.0, id="where the iteration begins"),
        pytest.param(
            Kill(rank=0, iteration=5, phase="reduce"),
            10.0,
            id="gradients wait for no copy",
        ),
        pytest.param(
            Kill(rank=0, iteration=5, phase="step"), 15.0, id="the update does"
        ),
        pytest.param(LateKill(rank=0, iteration=5, late_s=4.0), 4.0, id="late"),
        pytest.param(
            LateKill(rank=0, iteration=5, phase="reduce", late_s=4.0),
            10.0,
            id="not before its phase",
        ),
        pytest.param(
            LateKill(rank=0, iteration=5, phase="reduce", late_s=12.0),
            12.0,
            id="while the update waits",
        ),
        pytest.param(
            LateKill(rank=0, iteration=5, phase="reduce", late_s=99.0),
            15.0,
            id="not after its phase",
        ),
        pytest.param(
            LateKill(rank=0, iteration=6, phase="reduce", late_s=14.0),
            14.0,
            id="in the wait nearest to it",
        ),
        pytest.param(LateKill(rank=0, iteration=6, late_s=9.0), 24.0, id="in no wait"),
        pytest.param(
            LateKill(rank=0, iteration=6, late_s=12.0),
            25.0,
            id="in no wait, but in a slow iteration",
        ),
    ],
)
def test_a_kill_comes_before_or_after_the_wait_for_a_copy(
    kill: Kill, into_s: float
) -> None:
    """Iteration 5 begins after 45 s and ends after 60 s.

    Every fourth iteration, from the first on, takes 5 s longer.
    """
    copy_s = 15.0 - setup().costs.update_s
    of = setup(machines=cluster(whole_copy_bytes_per_s=GEMINI.whole_bytes / copy_s))
    saving = plan_saving(ckpt("ckpt=gemini", "ckpt.every_iters=4"), of)
    (recovered,) = recoveries(run(saving, [kill], of=of))
    assert recovered.since_s == pytest.approx(45.0 + into_s, abs=2 * of.costs.update_s)


def starts(
    of: Setup, kills: Sequence[Kill], saving: Saving = LOCAL
) -> list[GenerationStart]:
    """Return the start of each generation."""
    told: list[GenerationStart] = []

    def pattern(begin: GenerationStart) -> SnapshotPattern:
        told.append(begin)
        return saving.pattern(begin)

    run(replace(saving, pattern=pattern), kills, of=of)
    return told


@pytest.mark.parametrize(
    ("iteration", "num_measured"), [(WARM_UP_ITERS, 0), (WARM_UP_ITERS + 1, 1)]
)
def test_nothing_is_measured_in_the_first_iterations(
    iteration: int, num_measured: int
) -> None:
    saving = plan_saving(ckpt("ckpt=gemini"), SETUP)
    first, second = starts(SETUP, [Kill(rank=0, iteration=iteration + 1)], saving)
    assert (first, second.recent) == (
        GenerationStart(warm_up_iters=WARM_UP_ITERS),
        (1.0,) * num_measured,
    )
    assert second.is_kept
    assert next(saving.pattern(second).snapshots(0, 40)).offset > 0, (
        "none of the state to which all ranks went back"
    )


def test_the_last_iterations_are_measured_and_those_that_run_again() -> None:
    """Windows begin after 1, 4, 7 and 10 iterations.

    After the recoveries at iterations 12 and 13, ranks take a base.
    """
    lengths = tuple(0.5 + number / 70 for number in range(40))
    kills = [
        Kill(rank=0, iteration=13, phase="forward"),
        Kill(rank=0, iteration=14, phase="forward"),
    ]
    _, second, third = starts(replace(SETUP, pace=Pace(lengths)), kills)
    assert (second.recent, third.recent) == (
        lengths[WARM_UP_ITERS:12],
        lengths[WARM_UP_ITERS:13],
    )
    assert (second.coming, second.warm_up_iters, second.num_costs) == (
        lengths[12:],
        0,
        3,
    )
    assert third.num_costs == 4, (
        "of the base: a window is kept, so training did not wait for it"
    )
    assert second.replay_length == pytest.approx(statistics.fmean(lengths[7:12]))
    assert third.replay_length is not None
    assert third.replay_length > statistics.fmean(lengths[7:12])


@pytest.mark.parametrize(
    ("dead", "replay_length"),
    [((4,), 1.0), ((4, 6), None)],
    ids=["alone", "with a neighbour"],
)
def test_only_the_replay_of_a_stage_by_itself_is_measured(
    dead: tuple[int, ...], replay_length: float | None
) -> None:
    *_, last = starts(SETUP, [at(95.0, rank=rank) for rank in dead])
    assert last.replay_length == replay_length


def test_the_first_snapshot_after_a_rollback_has_a_cost_like_others() -> None:
    """Before the fault, snapshots begin after 0, 4, 8 and 12 iterations.

    After the fault in iteration 14, snapshots begin after 16, 20 and 24 iterations.
    """
    kills = [Kill(rank=0, iteration=14), Kill(rank=0, iteration=26)]
    assert [start.num_costs for start in starts(SETUP, kills, GEMINI)] == [0, 2, 4]


@pytest.mark.parametrize(
    ("scope", "num_ranks", "recent"),
    [("process", 8, ()), ("process", 7, (1.0,)), ("node", 4, ())],
)
def test_measurements_are_lost_with_the_last_process(
    scope: str, num_ranks: int, recent: tuple[float, ...]
) -> None:
    """Without copies on other nodes, a lost node makes the job begin anew.

    All processes are then new.
    """
    saving = plan_saving(
        ckpt("ckpt=gemini", "ckpt.every_iters=4", "ckpt.replicas=0"), SETUP
    )
    _, second = starts(
        SETUP, [at(95.0, rank=rank, scope=scope) for rank in range(num_ranks)], saving
    )
    assert (second.recent, second.warm_up_iters) == (
        recent,
        0 if recent else WARM_UP_ITERS,
    )


def test_at_an_even_pace_one_iteration_stands_for_all_that_were_measured() -> None:
    """The rule also holds once iterations of other lengths are forgotten."""
    kills = [Kill(rank=0, iteration=number, phase="forward") for number in (20, 36)]
    for of in (SETUP, replace(SETUP, pace=Pace([0.7, 1.1, 0.3] * 4))):
        last = starts(of, kills)[-1]
        assert (last.recent, last.coming) == ((1.0,), ())


def test_all_go_on_from_the_snapshot_to_which_they_went_back() -> None:
    """The second snapshot is copied from 45 s on, and is kept after 60 s.

    A snapshot every fourth iteration adds 5 s.
    """
    of = setup(machines=cluster(whole_copy_bytes_per_s=GEMINI.whole_bytes / 15.0))
    saving = plan_saving(ckpt("ckpt=gemini", "ckpt.every_iters=4"), of)
    end = run(saving, [at(75.0)], of=of)
    (recovered,) = recoveries(end)
    last = end.timeline[-1]
    assert isinstance(last, Trained)
    assert recovered.iteration == last.generation.start == 4
    offsets = [snapshot.offset for snapshot in last.generation.pattern.snapshots(0, 9)]
    assert offsets == [4, 8], "none at the state of iteration 4"


SLOW_RATE = GEMINI.whole_bytes / 12.0
SLOW_PEERS = setup(
    machines=cluster(
        whole_copy_bytes_per_s=SLOW_RATE, network_bytes_per_s=2 * SLOW_RATE
    )
)


def slow_peers(*overrides: str) -> Saving:
    """Return a policy whose snapshots, after 4 and 8 iterations, reach peers late.

    A snapshot is in host memory at the end of the next iteration, and at peers 12 s
    later.
    """
    return plan_saving(
        ckpt("ckpt=gemini", "ckpt.every_iters=4", *overrides), SLOW_PEERS
    )


@pytest.mark.parametrize(
    ("replicas", "iteration", "is_kept"),
    [(1, 6, False), (1, 7, True), (1, 8, True), (0, 6, True)],
)
def test_all_take_a_snapshot_again_that_peers_do_not_hold(
    replicas: int, iteration: int, is_kept: bool
) -> None:
    """The fault comes 12 s, 22 s or 32 s after the state of iteration 4.

    Ranks meet 3 s after the fault.
    """
    saving = slow_peers(f"ckpt.replicas={replicas}")
    _, again = starts(
        SLOW_PEERS, [Kill(rank=0, iteration=iteration, phase="forward")], saving
    )
    assert (again.is_kept, again.kept_age_iters) == (is_kept, 0 if is_kept else 4)


def test_a_window_is_kept_until_peers_hold_the_next_one() -> None:
    kills = [Kill(rank=0, iteration=number, phase="backward") for number in (6, 5)]
    outcome = simulate(
        SLOW_PEERS,
        slow_peers("ckpt.replicas=1"),
        kills,
        duration_s=1e9,
        last_iteration=9,
        in_order=True,
    )
    assert [each.iteration for each in recoveries(outcome)] == [4, 0]
    taken = next(
        each.generation for each in outcome.timeline[2:] if isinstance(each, Trained)
    )
    assert taken.iteration_s(1) == pytest.approx(12.0)


@pytest.mark.parametrize(("iteration", "back_to"), [(6, 0), (8, 4)])
def test_a_lost_node_has_the_windows_that_peers_hold(
    iteration: int, back_to: int
) -> None:
    kill = Kill(rank=0, iteration=iteration, phase="forward", scope="node")
    (recovered,) = recoveries(run(slow_peers("ckpt.replicas=1"), [kill], of=SLOW_PEERS))
    assert recovered.iteration == back_to


def test_a_wait_far_away_is_none_of_a_slow_iteration() -> None:
    of = setup(machines=cluster(whole_copy_bytes_per_s=GEMINI.whole_bytes / 15.0))
    saving = plan_saving(ckpt("ckpt=gemini", "ckpt.every_iters=40"), of)
    (recovered,) = recoveries(
        run(saving, [LateKill(rank=0, iteration=20, late_s=14.0)], of=of)
    )
    assert recovered.lost_iters == 19


@pytest.mark.parametrize("iteration", range(1, 12))
@pytest.mark.parametrize("late_s", [None, 99.0])
def test_a_kill_in_the_update_finds_all_ranks_prepared(
    iteration: int, late_s: float | None
) -> None:
    of = setup(machines=cluster(gpu_bytes_per_s=1e9))
    saving = plan_saving(ckpt("ckpt=moevement", "ckpt.window=3"), of)
    point: dict[str, Any] = {"rank": 0, "iteration": iteration, "phase": "step"}
    kill = Kill(**point) if late_s is None else LateKill(**point, late_s=late_s)
    (recovered,) = recoveries(run(saving, [kill], of=of))
    assert recovered.iteration == iteration


def test_whoever_lives_takes_the_step_that_all_were_ready_for() -> None:
    slow_update = setup(machines=cluster(gpu_bytes_per_s=1e7))
    saving = plan_saving(ckpt("ckpt=moevement", "ckpt.window=3"), slow_update)
    update_s = slow_update.costs.update_s
    assert 1.0 < update_s < 9.0, "copies are complete before it"
    early, late = (
        recoveries(run(saving, [at(at_s)], of=slow_update))[0]
        for at_s in (99.9 - update_s, 100.1 - update_s)
    )
    assert (early.iteration, late.iteration) == (9, 10)
    assert late.since_s == pytest.approx(100.0)


def test_after_a_recovery_windows_begin_with_a_new_base() -> None:
    soon_s = ALONE.since_s + ALONE.seconds + 25.0  # two iterations later
    first, second = recoveries(run(LOCAL, [at(95.0, rank=4), at(soon_s, rank=0)]))
    assert (first.iteration, second.iteration) == (9, 11)
    assert [window[1:] for window in windows_of(second)] == [(9, 1)]


def test_the_store_serves_ranks_that_enter_a_generation_one_by_one() -> None:
    of = replace(SETUP, cluster=replace(SETUP.cluster, store_operation_s=0.01))
    (recovered,) = recoveries(run(LOCAL, [at(95.0, rank=4)], of=of))
    # operations of each of the eight ranks: 10 to enter the generation, and for each of
    # two groups 10 to form the group and 10 to use the group first
    assert recovered.rebuild_s == pytest.approx(2.0 + 50 * 8 * 0.01)


def test_stages_that_were_on_their_way_back_have_no_state() -> None:
    no_logs = plan_saving(
        ckpt("ckpt=moevement", "ckpt.window=3", "ckpt.boundary_log=false"), SETUP
    )
    alone = recoveries(run(no_logs, [at(85.0)]))[0]
    replaying_s = alone.since_s + alone.detect_s + alone.rebuild_s + 1.0
    (recovered,) = recoveries(run(no_logs, [at(85.0), at(replaying_s)]))
    # no rank is at iteration 8 any more, and the window leads to iteration 6
    assert (alone.iteration, recovered.iteration) == (8, 6)


def test_nodes_that_keep_each_others_copies_take_everything_with_them() -> None:
    outcome = run(
        LOCAL, [at(95.0, rank=4, scope="node"), at(95.0, rank=6, scope="node")]
    )
    (recovered,) = recoveries(outcome)
    assert (recovered.iteration, recovered.source) == (0, "the beginning")
    assert outcome.ledger.again_s == pytest.approx(95.0)
    others = run(
        LOCAL, [at(95.0, rank=2, scope="node"), at(95.0, rank=4, scope="node")]
    )
    assert recoveries(others)[0].iteration == 9


def test_copies_are_back_once_the_next_base_is_kept() -> None:
    kills = [at(95.0, rank=4, scope="node")]
    back_s = (
        recoveries(run(LOCAL, kills))[0].since_s
        + recoveries(run(LOCAL, kills))[0].seconds
    )
    copying_s = LOCAL.whole_bytes / LOCAL.kept_bytes_per_s
    soon, later = (
        run(LOCAL, [*kills, at(back_s + share * copying_s, rank=6, scope="node")])
        for share in (0.9, 1.1)
    )
    assert [recovered.source for recovered in recoveries(soon)] == [
        "host memory",
        "the beginning",
    ]
    assert [recovered.source for recovered in recoveries(later)] == [
        "host memory",
        "host memory",
    ]


def test_where_memory_is_lost_a_disk_is_next() -> None:
    of = setup(machines=cluster(disk_bytes_per_s=1e9))
    saving = plan_saving(
        ckpt(
            "ckpt=moevement",
            "ckpt.window=3",
            "ckpt.replicas=0",
            "ckpt.durable_every_iters=4",
        ),
        of,
    )
    (recovered,) = recoveries(run(saving, [at(95.0, scope="node")], of=of))
    assert (recovered.iteration, recovered.source, recovered.lost_iters) == (
        8,
        "disk",
        1,
    )


def test_memory_counts_until_its_snapshot_is_on_disk() -> None:
    whole_bytes = SETUP.total_full_bytes
    slow = setup(machines=cluster(disk_bytes_per_s=whole_bytes / 25.0))
    saving = plan_saving(ckpt("ckpt=checkfreq", "ckpt.every_iters=3"), slow)
    scopes = ("process", "node")
    early, late = (
        [
            recoveries(run(saving, [at(at_s, scope=scope)], of=slow))[0]
            for scope in scopes
        ]
        for at_s in (114.0, 116.0)
    )
    assert [(each.iteration, each.source) for each in early] == [
        (9, "host memory"),
        (6, "disk"),
    ]
    assert [(each.iteration, each.source) for each in late] == [
        (9, "host memory"),
        (9, "disk"),
    ]


@pytest.mark.parametrize(
    ("saving", "meets_s", "replaying"),
    [(LOCAL, 2.0, [2]), (GEMINI, 2.0, [0, 1, 2, 3]), (NONE, 50.0, [])],
    ids=["moevement", "gemini", "none"],
)
def test_a_lost_node_costs_a_spare_beside_a_dead_worker_and_no_restart(
    saving: Saving, meets_s: float, replaying: list[int]
) -> None:
    """Only `none`, without supervisors, restarts all processes."""
    of = setup(machines=cluster(spare_s=5.0))
    (dead,) = recoveries(run(saving, [at(95.0, rank=4)], of=of))
    (lost,) = recoveries(run(saving, [at(95.0, rank=4, scope="node")], of=of))
    assert (dead.detect_s, dead.rebuild_s) == (1.0, pytest.approx(meets_s))
    assert (lost.detect_s, lost.rebuild_s) == (1.0, pytest.approx(meets_s + 5.0))
    rollbacks = lost.plan.rollbacks if lost.plan else ()
    assert [stage for each in rollbacks for stage in each.stages] == replaying


def test_without_a_spare_node_all_wait_for_a_repair() -> None:
    few = setup(machines=cluster(spares=1, repair_s=100.0, spare_s=5.0))
    saving = plan_saving(
        ckpt("ckpt=moevement", "ckpt.window=3", "ckpt.replicas=1"), few
    )
    kills = [at(95.0, rank=4, scope="node"), at(155.0, rank=2, scope="node")]
    first, second = recoveries(run(saving, kills, of=few))
    assert first.rebuild_s == pytest.approx(2.0 + 5.0)
    assert second.since_s == 155.0
    assert second.rebuild_s == pytest.approx(2.0 + 5.0 + (95.0 + 1.0 + 100.0 - 156.0))


def test_kills_at_points_come_when_training_gets_there() -> None:
    kills = [Kill(rank=4, iteration=7, phase="backward"), Kill(rank=0, iteration=20)]
    first, second = recoveries(run(LOCAL, kills))
    assert 60.0 < first.since_s < 70.0
    assert (first.iteration, second.iteration) == (6, 19)


def test_kills_in_order_meet_iterations_that_are_run_again() -> None:
    kills = [Kill(rank=4, iteration=12), Kill(rank=0, iteration=10)]
    outcomes = [
        simulate(SETUP, GEMINI, kills, duration_s=400.0, in_order=in_order)
        for in_order in (False, True)
    ]
    assert [
        [each.lost_iters for each in recoveries(outcome)] for outcome in outcomes
    ] == [[1, 3], [3, 1]]


def test_a_worker_that_dies_as_its_recovery_begins_has_not_replayed() -> None:
    (recovered,) = recoveries(run(LOCAL, LOST_IN_RECOVERY))
    (together,) = recoveries(run(LOCAL, [at(95.0, rank=4), at(95.0, rank=0)]))
    assert recovered.replay_s == pytest.approx(together.replay_s)
    assert recovered.rebuild_s == 2 * together.rebuild_s


def test_a_kill_in_a_recovery_comes_within_it() -> None:
    (at_once,), (late,) = (
        recoveries(
            run(
                LOCAL,
                [at(95.0, rank=4), LateKill(rank=4, phase="recovery", late_s=late_s)],
            )
        )
        for late_s in (0.0, 1e9)
    )
    assert at_once.seconds == pytest.approx(ALONE.seconds), (
        "found and replaced together with the one before"
    )
    assert late.seconds == pytest.approx(2 * ALONE.seconds)


@pytest.mark.parametrize("phase", ["forward", "backward", "reduce", "step"])
def test_a_phase_of_a_short_iteration_is_within_it(phase: str) -> None:
    """Iteration 5 takes 2 s, as does each of the four iterations before."""
    of = replace(SETUP, pace=Pace([0.2] * 8))
    (recovered,) = recoveries(
        run(NONE, [Kill(rank=0, iteration=5, phase=phase)], of=of)
    )
    assert (recovered.iteration, recovered.lost_iters) == (0, 4)
    assert 8.0 <= recovered.since_s < 10.0


def test_iterations_take_their_own_time_also_when_they_run_again() -> None:
    """Each of the first eight iterations takes 5 s, and all others take 10 s.

    The stage's replay runs one iteration of each length.
    """
    of = replace(SETUP, pace=Pace([0.5] * 8))
    assert run(NONE, of=of, duration_s=50.0).iterations == 9
    (recovered,) = recoveries(run(LOCAL, [at(55.0, rank=4)], of=of, duration_s=100.0))
    assert windows_of(recovered) == [THIRD]
    assert recovered.replay_s == pytest.approx(0.75 * ALONE.replay_s, rel=0.05)
    rolled_back = run(GEMINI, [Kill(rank=0, iteration=8)], of=of, duration_s=100.0)
    (recovered,) = recoveries(rolled_back)
    assert rolled_back.ledger.again_s == pytest.approx(5.0 * recovered.lost_iters)
    assert rolled_back.ledger.useful_s == 40.0 + 10.0 * (rolled_back.iterations - 8)


def test_iterations_that_run_again_are_faster_in_processes_that_live_on() -> None:
    """Faults come after 12 iterations, and after two iterations have run again.

    An iteration that runs again takes 8 s instead of 10 s.
    """
    of = setup(machines=cluster(rerun_ratio=0.8, restart_s=3.0))
    kills = [
        Kill(rank=0, iteration=13, phase="forward"),
        Kill(rank=0, iteration=11, phase="forward"),
    ]

    def in_order(saving: Saving) -> Outcome:
        return simulate(
            of, saving, kills, duration_s=1e9, last_iteration=14, in_order=True
        )

    living = in_order(plan_saving(ckpt("ckpt=gemini", "ckpt.every_iters=4"), of))
    first, second = recoveries(living)
    assert (first.lost_iters, second.lost_iters) == (4, 2)
    assert (living.ledger.useful_s, living.ledger.again_s) == (
        140.0,
        pytest.approx(2 * 8.0 + 4 * 8.0),
    )
    assert second.since_s == pytest.approx(first.since_s + first.seconds + 2 * 8.0)
    later = [kills[0], Kill(rank=0, iteration=15, phase="forward")]
    _, second, third = starts(
        of, later, plan_saving(ckpt("ckpt=gemini", "ckpt.every_iters=4"), of)
    )
    assert (second.coming, set(second.recent)) == ((0.8,) * 4, {1.0})
    assert third.recent[-6:] == (0.8,) * 4 + (1.0,) * 2
    anew = in_order(plan_saving(ckpt("ckpt=dense", "ckpt.every_iters=5"), of))
    assert [each.lost_iters for each in recoveries(anew)] == [2, 0]
    assert anew.ledger.again_s == pytest.approx(2 * 10.0)


def test_ranks_that_replay_do_not_take_the_time_to_resume_as_well() -> None:
    """`rerun_ratio` already contains the start of a replay.

    Ranks that go back without a replay need `resume_s`, 5 s here, until training is as
    fast as before.
    """
    of = setup(machines=cluster(resume_s=5.0))
    seconds = [
        recoveries(run(saving, [at(75.0)], of=each))[0].replay_s
        for saving in (LOCAL, GEMINI)
        for each in (SETUP, of)
    ]
    assert seconds[1] == seconds[0] > 5.0
    assert seconds[3] == pytest.approx(seconds[2] + 5.0)


def test_partial_snapshots_lose_tokens_and_grow_when_they_lose_too_many() -> None:
    fixed = plan_saving(
        ckpt("ckpt=moc", "ckpt.k_snapshot=1", "ckpt.dynamic_k=false"), SETUP
    )
    grows = plan_saving(
        ckpt("ckpt=moc", "ckpt.k_snapshot=1", "ckpt.plt_limit=0.02"), SETUP
    )
    kills = [at(100.0 * number) for number in range(1, 20)]
    losing, saved = (run(saving, kills, duration_s=2000.0) for saving in (fixed, grows))
    assert losing.plt == pytest.approx(
        sum(lost_iters(each) for each in recoveries(losing)) / losing.iterations
    )
    assert 0 < saved.plt < losing.plt
    assert lost_iters(recoveries(saved)[-1]) == 0 < lost_iters(recoveries(losing)[-1])
    assert run(LOCAL, kills).plt == 0.0


def lost_iters(recovered: Recovered) -> float:
    assert recovered.lost is not None
    tokens = 16 * 8 * 2  # of a layer in an iteration: sequences, length, top-k
    return float(
        np.mean([of_stage.sum(axis=1) / tokens for of_stage in recovered.lost.by_stage])
    )


def test_a_lost_node_takes_a_partial_checkpoint_back_to_what_is_on_disk() -> None:
    slow = setup(machines=cluster(disk_bytes_per_s=1e4))
    saving = plan_saving(ckpt("ckpt=moc", "ckpt.k_snapshot=2"), slow)
    process, node = (
        recoveries(run(saving, [at(395.0, scope=scope)], of=slow))[0]
        for scope in ("process", "node")
    )
    assert process.lost_iters <= 1 < node.lost_iters
    assert node.fetch_s > process.fetch_s == 0.0


def poisson(
    mtbf_s: float, seed: int, scope: str = "process", count: int = 100
) -> tuple[Kill, ...]:
    return poisson_kills(
        mtbf_s=mtbf_s, count=count, seed=seed, world_size=8, scope=scope
    )


@examples(40)
@given(
    overrides=st.sampled_from(ALL),
    mtbf_s=st.floats(20.0, 5000.0),
    scope=st.sampled_from(["process", "node"]),
    seed=st.integers(0, 1000),
    rerun_ratio=st.sampled_from([1.0, 0.7, 1.3]),
)
def test_time_adds_up_and_seeds_repeat_runs(
    overrides: tuple[str, ...], mtbf_s: float, scope: str, seed: int, rerun_ratio: float
) -> None:
    of = setup(machines=cluster(rerun_ratio=rerun_ratio))
    saving, kills = plan_saving(ckpt(*overrides), of), poisson(mtbf_s, seed, scope)
    outcome, again = (run(saving, kills, of=of, duration_s=3000.0) for _ in range(2))
    ledger = outcome.ledger
    assert 0.0 <= ledger.ettr <= 1.0
    assert (
        min(ledger.useful_s, ledger.stall_s, ledger.again_s, ledger.recovery_s) >= 0.0
    )
    assert ledger.wall_s >= 3000.0
    last = outcome.timeline[-1]
    if isinstance(last, Trained):
        assert last.generation.since_s + last.generation.elapsed_s(
            last.iterations
        ) == pytest.approx(ledger.wall_s)
    assert (again.ledger, again.iterations, again.num_faults) == (
        ledger,
        outcome.iterations,
        outcome.num_faults,
    )
    for recovered in recoveries(outcome):
        assert all(
            fault.after_s <= recovered.since_s + recovered.seconds + 1e-9
            for fault in recovered.faults
        )
    stretches = [
        stretch for stretch in outcome.timeline if isinstance(stretch, Recovered)
    ]
    assert outcome.num_faults == sum(len(stretch.faults) for stretch in stretches)


@examples(12)
@given(overrides=st.sampled_from(ALL), mtbf_s=st.floats(150.0, 600.0))
def test_the_more_often_something_fails_the_less_time_is_of_use(
    overrides: tuple[str, ...], mtbf_s: float
) -> None:
    saving = plan_saving(ckpt(*overrides), SETUP)

    def mean_ettr(factor: float) -> float:
        runs = (
            run(saving, poisson(factor * mtbf_s, seed), duration_s=4000.0)
            for seed in range(8)
        )
        return statistics.fmean(outcome.ledger.ettr for outcome in runs)

    often, sometimes, seldom = mean_ettr(1.0), mean_ettr(8.0), mean_ettr(64.0)
    assert often < sometimes <= seldom


@given(
    pp=st.sampled_from([1, 2, 4]),
    window=st.integers(1, 4),
    at_s=st.floats(0.0, 300.0),
    rank=st.integers(0, 7),
)
@examples(100)
def test_a_local_recovery_never_loses_a_committed_iteration(
    pp: int, window: int, at_s: float, rank: int
) -> None:
    of = setup(of=job(pp=pp, dp=8 // pp, ep=2))
    saving = plan_saving(
        ckpt("ckpt=moevement", f"ckpt.window={window}", "ckpt.replicas=1"), of
    )
    (recovered,) = recoveries(run(saving, [at(at_s, rank=rank)], of=of))
    assert recovered.lost_iters == 0
    assert replayed_iters(recovered) <= 2 * window + 1
