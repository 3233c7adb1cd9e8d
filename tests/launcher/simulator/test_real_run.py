"""The costs of faults in a run, from its events: of restarts and of recoveries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest

from launcher.cluster_profile import constants_of, measure
from launcher.config import compose_settings
from launcher.faults.log import InjectedFault
from launcher.simulator.comparison import predict_run
from launcher.simulator.config import compose_machine
from launcher.simulator.real_run import (
    RealRun,
    events_of,
    facts_of,
    kills_of,
    recoveries_of,
    setup_of,
    stalled_by_snapshots,
)
from moe_ckpt.events import (
    CheckpointSaved,
    Event,
    GenerationEnded,
    GradientsSent,
    IterationCommitted,
    LoggedEvent,
    Rejoined,
    SnapshotTaken,
    WorkerStarted,
)
from moe_ckpt.faults.schedule import Kill
from moe_ckpt.sim.cluster import simulate
from moe_ckpt.sim.costs import update_bytes
from moe_ckpt.sim.emit import rank_events
from moe_ckpt.sim.faults import LateKill
from moe_ckpt.sim.hardware import ClusterConfig
from moe_ckpt.sim.policies import plan_saving
from tests.report_runs import committed, rejoined


def second(iteration: int, *, stall_s: float = 0.0) -> IterationCommitted:
    """Return the commit of an iteration of 1 s, with a stall in addition."""
    return committed(iteration, seconds=1.0 + stall_s, stall_s=stall_s)


def born(incarnation: int) -> WorkerStarted:
    return WorkerStarted(pid=1, host="here", incarnation=incarnation, device="cpu")


def back(detect_s: float, rebuild_s: float, **fetched: int) -> Rejoined:
    seconds = {
        "detect_s": detect_s,
        "rebuild_s": rebuild_s,
        "fetch_s": 0.25,
        "replay_s": 0.5,
    }
    return rejoined(2, **({"fetched_bytes": 0} | seconds | fetched))


def logged(rank: int, *told: tuple[float, Event]) -> list[LoggedEvent]:
    return [LoggedEvent(t_s=t_s, global_rank=rank, event=event) for t_s, event in told]


def test_a_fault_costs_all_between_iterations_before_and_after_it() -> None:
    start = [(float(number), second(number)) for number in (1, 2, 3)]
    survivor = logged(
        0, (0, born(0)), *start, (6, back(1, 2)), (8, second(3)), (9, second(4))
    )
    dead_first = [(t_s + 0.1, event) for t_s, event in start]
    newborn = logged(
        1,
        (0, born(0)),
        *dead_first,
        (5, born(1)),
        (6, back(1.5, 2)),
        (8.1, second(3)),
        (9.1, second(4)),
    )
    (found,) = recoveries_of([survivor, newborn], 1.0)
    assert (found.cost_s, found.again, found.after_s) == (5.0, 1, 3.0)
    assert found.rejoined == back(1.5, 2)
    assert recoveries_of([survivor], 1.0) == []


def test_a_rank_that_steps_as_it_joins_may_be_ahead_of_one_that_replayed() -> None:
    start = [(0.0, born(0)), (1.0, second(1)), (2.0, second(2))]
    survivor = logged(0, *start, (5.0, back(1, 2)), (5.0, second(3)), (6.0, second(4)))
    newborn = logged(
        1, *start, (3.5, born(1)), (5.5, back(1, 2, executed_iters=2)), (6.0, second(4))
    )
    (found,) = recoveries_of([survivor, newborn], 1.0)
    assert (found.replayed, found.after_s) == (2, 0.0)


def test_a_restart_costs_without_a_recovery() -> None:
    told = [(0.0, born(0)), (1.0, second(1)), (2.0, second(2)), (20.0, born(1))]
    again = [(24.0, second(1)), (25.0, second(2)), (26.0, second(3))]
    (found,) = recoveries_of([logged(rank, *told, *again) for rank in (0, 1)], 1.0)
    assert (found.cost_s, found.again, found.rejoined) == (23.0, 2, None)


@pytest.mark.parametrize(
    ("fault", "found"),
    [("signal", ("0.5", "2", None)), ("node", (None, None, "2.1"))],
)
def test_a_lost_node_takes_longer_than_a_dead_worker(
    fault: str, found: tuple[str | None, ...]
) -> None:
    """On this machine a dead worker takes 0.4 s until all ranks have met again."""
    told = replace(back(0.5, 2.0), classes=[fault])
    start = [(0.0, born(0)), (1.0, second(1)), (2.0, second(2))]
    after = [(6.0, told), (7.0, second(3)), (8.0, second(4))]
    ranks = [
        logged(0, *start, *after),
        logged(1, *start, (5.0, born(1)), *after),
    ]
    run = RealRun(
        settings=compose_settings(["ckpt=gemini"]), world_size=2, kills=(), ranks=ranks
    )
    measured = measure([run], compose_machine(["cluster=local"])[0])
    names = ("detect_s", "rebuild_s", "spare_s")
    assert tuple(measured.get(name) for name in names) == found


@pytest.mark.parametrize(
    ("told", "stall_s", "resume_s"),
    [
        # fetch takes 0.25 s, replay 0.5 s, and two iterations take 1 s longer than
        # before
        (back(0.1, 0.2), 0.0, "1.75"),
        # half of that second is the stall of a snapshot, which sizes and rates
        # determine
        (back(0.1, 0.2), 0.5, "1.25"),
        (back(0.1, 0.2, fetched_bytes=1), 0.0, None),
        (back(0.1, 0.2, executed_iters=1), 0.0, None),
    ],
    ids=["went back", "went back and waited for a snapshot", "fetched", "replayed"],
)
def test_to_resume_takes_the_extra_time_of_the_first_iterations(
    told: Rejoined, stall_s: float, resume_s: str | None
) -> None:
    before = [(float(number), second(number)) for number in (1, 2, 3)]
    after = [(8, second(3, stall_s=stall_s)), (9, second(4))]
    living = [
        logged(rank, (0, born(0)), *before, (6, told), *after) for rank in (0, 2, 3)
    ]
    newborn = logged(1, (0, born(0)), *before, (5, born(1)), (6, told), *after)
    settings = compose_settings(["ckpt=gemini"])
    run = RealRun(
        settings=settings,
        world_size=4,
        kills=(),
        ranks=[living[0], newborn, *living[1:]],
    )
    found = measure(
        [run], compose_machine(["cluster=local", "cluster.rerun_ratio=1"])[0]
    )
    assert (found["detect_s"], found["rebuild_s"], found.get("resume_s")) == (
        "0.1",
        "0.2",
        resume_s,
    )
    assert "restart_s" not in found


def injected(
    unix_s: float, rank: int, phase: str, iteration: int | None = 7, **where: Any
) -> InjectedFault:
    given = {
        "pid": 1,
        "signal": "KILL",
        "scope": "process",
        "generation": 0,
        "ordered": False,
    } | where
    return InjectedFault(
        unix_s=unix_s, rank=rank, phase=phase, iteration=iteration, **given
    )


def test_faults_of_a_run_are_at_points_one_after_another() -> None:
    told = [
        (1.0, "join", None),
        (2.0, "backward", 7),
        (2.0, "step", 7),
        (3.0, "build", None),
        (4.0, "recovery", 7),
    ]
    later = [(5.0, "between", 8), (6.0, "unknown", 9), (7.0, "reduce", 3)]
    faults = [
        injected(unix_s, rank, phase, at)
        for rank, (unix_s, phase, at) in enumerate([*told, *later])
    ]
    kills = kills_of(faults, ranks=(), origin_unix_s=0.0)
    assert [(kill.rank, kill.phase, kill.iteration) for kill in kills] == [
        (0, "forward", 1),
        (1, "backward", 7),
        (2, "recovery", None),
        (3, "recovery", None),
        (4, "recovery", None),
        (5, "snapshot", 8),
        (6, "forward", 9),
        (7, "reduce", 3),
    ]


def test_a_fault_comes_as_long_after_its_iteration_began_as_in_the_run() -> None:
    joined = rejoined(1, generation=2)
    ranks = [
        logged(0, (1.0, second(1)), (10.0, joined), (11.0, second(2))),
        logged(1, (11.0, second(2))),
    ]
    faults = [
        injected(101.5, 0, "backward", 2),
        injected(109.0, 1, "recovery", 1),
        injected(110.25, 2, "recovery", 1, generation=2),
        injected(111.75, 3, "reduce", 3),
        injected(111.75, 4, "reduce", 3),
        injected(111.875, 5, "step", 3, ordered=True),
    ]
    own: dict[str, Any] = {"signal": "KILL", "scope": "process"}
    assert kills_of(faults, ranks, origin_unix_s=100.0) == (
        LateKill(rank=0, iteration=2, phase="backward", late_s=0.5, **own),
        LateKill(rank=1, phase="recovery", late_s=7.5, **own),
        LateKill(rank=2, phase="forward", late_s=0.25, **own),
        LateKill(rank=3, iteration=3, phase="reduce", late_s=0.75, **own),
        LateKill(rank=4, phase="recovery", late_s=0.0, **own),
        Kill(rank=5, iteration=3, phase="step", **own),
    )


def test_faults_outside_what_is_measured_are_left_out() -> None:
    """Iteration 1 ends at 1 s, and iteration 3 ends in generation 2."""
    told = [
        (1.0, second(1)),
        (2.5, rejoined(1, generation=2)),
        (3.5, second(2)),
        (4.5, second(3)),
    ]
    faults = [
        injected(100.5, 0, "forward", 1, generation=1),
        injected(102.0, 1, "forward", 2, generation=1),
        injected(104.25, 2, "reduce", 3, generation=2),
    ]
    kept = [
        kills_of(faults, [logged(0, *told)], 100.0, until) for until in (1, 2, 3, None)
    ]
    assert [[kill.rank for kill in kills] for kills in kept] == [[], [1], [1], [1, 2]]
    after = [
        injected(103.75, 3, "build", generation=0),
        injected(104.75, 3, "build", generation=0),
    ]
    assert [kill.rank for kill in kills_of(after, [logged(0, *told)], 100.0, 3)] == [
        3
    ], "a newborn has no generation"


def test_an_ordered_fault_counts_whenever_it_was_told() -> None:
    told = [
        (1.0, second(1)),
        (2.5, rejoined(1, generation=2)),
        (3.5, second(2)),
        (4.5, second(3)),
    ]
    order: dict[str, Any] = {"ordered": True, "generation": 0}
    faults = [
        injected(100.0, 0, "step", 2, **order),
        injected(100.0, 1, "forward", 3, **order),
        injected(103.0, 2, "recovery", None, **order),
    ]
    assert kills_of(faults, [logged(0, *told)], 100.0, until=3) == (
        Kill(rank=0, iteration=2, phase="step"),
        Kill(rank=1, iteration=3, phase="forward"),
        Kill(rank=2, phase="recovery"),
    )


def test_orders_come_in_the_order_of_their_points() -> None:
    """Workers get their orders at the start, in any order.

    A worker that starts anew gets its order again.
    """
    told = [
        (1.0, second(1)),
        (2.0, second(2)),
        (2.5, rejoined(1, generation=2)),
        (3.5, second(2)),
        (4.5, second(3)),
    ]
    ended = (2.25, GenerationEnded(generation=1, reason="", left_unix_s=0.0))
    order: dict[str, Any] = {"ordered": True, "generation": 0}
    faults = [
        injected(100.0, 0, "forward", 4, **order),
        injected(100.0, 1, "recovery", None, **order),
        injected(100.0, 2, "forward", 3, **order),
        injected(103.0, 3, "reduce", 3, **order),
        injected(100.0, 4, "forward", 1, **order),
    ]
    kills = kills_of(
        faults, [logged(0, (0.5, born(0)), *told[:2], ended, *told[2:])], 100.0
    )
    assert [kill.rank for kill in kills] == [4, 2, 1, 3, 0]


def test_a_job_that_restarts_has_all_faults_up_to_its_last_commit() -> None:
    told = [(float(number), second(number)) for number in (1, 2, 3)]
    faults = [
        injected(101.5, 0, "backward", 2, generation=1),
        injected(102.5, 0, "step", 3, generation=1),
    ]
    kills = kills_of(faults, [logged(0, *told)], 100.0, until=3)
    assert [kill.phase for kill in kills] == ["backward", "step"]


def test_two_faults_of_a_generation_are_one_recovery() -> None:
    told = [(1.0, second(1)), (2.5, rejoined(1, generation=2)), (3.5, second(2))]
    faults = [
        injected(101.5, 0, "backward", 2, generation=1),
        injected(101.75, 1, "backward", 2, generation=1),
        injected(103.0, 1, "backward", 2, generation=2),
    ]
    first, together, later = kills_of(faults, [logged(0, *told)], origin_unix_s=100.0)
    assert (first.phase, later.phase) == ("backward", "backward")
    assert together == LateKill(rank=1, phase="recovery", late_s=0.25)


@pytest.mark.parametrize(
    ("device", "step_log_bytes"), [("cpu", 35_336), ("NVIDIA H100", 15_176)]
)
def test_generators_of_a_cpu_are_larger(device: str, step_log_bytes: int) -> None:
    started = WorkerStarted(pid=1, host="here", incarnation=0, device=device)
    settings = compose_settings(["ckpt=gemini"])
    run = RealRun(
        settings=settings, world_size=4, kills=(), ranks=[logged(0, (0.0, started))]
    )
    profiles = setup_of(run, compose_machine(["cluster=local"])[0], None).job.profiles
    assert {profile.step_log_bytes for profile in profiles} == {step_log_bytes}


KILLS = (Kill(rank=2, iteration=13, phase="backward"), Kill(rank=0, iteration=19))
POLICIES = {
    "none": (),
    "dense": ("ckpt.every_iters=5",),
    "gemini": ("ckpt.every_iters=5",),
    "moevement": ("ckpt.window=3",),
    "moc": (),
    "moetion": (),
}
MACHINE = {
    "detect_s": 0.3,
    "rebuild_s": 0.7,
    "resume_s": 1.5,
    "rerun_ratio": 0.8,
    "restart_s": 9.0,
    "flops_per_s": 5e8,
    "take_s": 0.01,
    "disk_bytes_per_s": 4e6,
    "disk_read_bytes_per_s": 9e6,
}
SLOW = 1.5e6
CAPS = (f"ckpt.max_bytes_per_s.host={SLOW}",)


@dataclass(frozen=True, kw_only=True)
class Links:
    """Rates of the machine's copies, and bandwidth caps of policies that copy."""

    rates: Mapping[str, float] = field(default_factory=dict[str, float])
    caps: Sequence[str] = ()

    @property
    def machine(self) -> dict[str, float]:
        return MACHINE | dict(self.rates)


# runs do not separate interference from the seconds that every snapshot takes
LINKS = {
    "fast links": Links(),
    "training waits for copies": Links(
        rates={
            "copy_bytes_per_s": SLOW,
            "whole_copy_bytes_per_s": SLOW,
            "interference": 0.0,
        }
    ),
    "copies have a cap, recoveries none": Links(rates={"interference": 0.0}, caps=CAPS),
}


def run_of(policy: str, links: Links, kills: tuple[Kill, ...] = KILLS) -> RealRun:
    """Return a run that a simulation made, on a machine with its own constants."""
    caps = () if policy in ("none", "dense") else links.caps
    settings = compose_settings(
        [f"ckpt={policy}", *POLICIES[policy], *caps, "train.global_batch_size=16"]
    )
    constants = (f"cluster.{name}={value}" for name, value in links.machine.items())
    machine = compose_machine(["cluster=local", *constants])[0]
    run = RealRun(settings=settings, world_size=4, kills=kills, ranks=())
    setup = setup_of(run, machine, None)
    saving = plan_saving(settings.ckpt, setup)
    outcome = simulate(setup, saving, kills, duration_s=1e9, last_iteration=30)
    ranks = [rank_events(setup, saving, outcome, rank) for rank in range(4)]
    return RealRun(settings=settings, world_size=4, kills=kills, ranks=ranks)


@cache
def measured(links: str) -> ClusterConfig:
    kills = (Kill(rank=1, iteration=8), Kill(rank=3, iteration=16))
    return constants_of(
        [
            run_of(name, LINKS[links], kills)
            for name in ("none", "dense", "gemini", "moevement")
        ]
    )


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("policy", POLICIES)
def test_constants_from_other_runs_predict_a_run_of_the_same_machine(
    policy: str, links: str
) -> None:
    run = run_of(policy, LINKS[links])
    truth, predicted = facts_of(run.ranks), predict_run(run, measured(links), None, 30)
    assert predicted.recovery_s == pytest.approx(truth.recovery_s, rel=0.05)
    assert predicted.ettr == pytest.approx(truth.ettr, abs=0.01)
    assert truth.num_recoveries == 2


@pytest.mark.parametrize(
    ("policy", "ratio"),
    [
        ("gemini", MACHINE["rerun_ratio"]),
        ("moevement", MACHINE["rerun_ratio"]),
        ("dense", 0.5),
    ],
)
def test_how_long_iterations_take_that_run_again_is_measured(
    policy: str, ratio: float
) -> None:
    """Either all ranks ran the iterations again, or a stage replayed them.

    New processes are no faster than in the first run.
    """
    others = replace(
        compose_machine(["cluster=local"])[0],
        rerun_ratio=0.5,
        resume_s=MACHINE["resume_s"],
    )
    found = constants_of([run_of(policy, LINKS["fast links"])], others)
    assert found.rerun_ratio == pytest.approx(ratio, rel=0.01)


def test_the_first_iteration_after_a_fault_is_no_usual_rerun() -> None:
    """Iterations 3 and 4 take 1 s each at first, and then 3 s and 0.5 s."""
    told = [
        (0.0, born(0)),
        *((float(number), second(number)) for number in (1, 2, 3, 4)),
        (6.0, back(0.1, 0.2)),
    ]
    again = [
        (9.0, committed(3, seconds=3.0, stall_s=0.0)),
        (9.5, committed(4, seconds=0.5, stall_s=0.0)),
        (10.5, second(5)),
    ]
    run = RealRun(
        settings=compose_settings(["ckpt=gemini"]),
        world_size=1,
        kills=(),
        ranks=[logged(0, *told, *again)],
    )
    assert constants_of([run]).rerun_ratio == 0.5


def test_a_cap_is_none_of_the_machines_rates() -> None:
    capped = LINKS["copies have a cap, recoveries none"]
    rates = [
        constants_of([run_of("gemini", links)]).copy_bytes_per_s
        for links in (capped, LINKS["fast links"])
    ]
    assert (
        rates
        == [pytest.approx(compose_machine(["cluster=local"])[0].copy_bytes_per_s)] * 2
    )


def test_waits_for_copies_are_none_of_what_any_snapshot_takes() -> None:
    """The update and the stall of a snapshot follow a copy for which training waits."""
    run = run_of("gemini", LINKS["training waits for copies"])
    longest_s = max(event.stall_s for event in events_of(run.ranks, IterationCommitted))
    assert longest_s > 10 * MACHINE["take_s"], "training waits"

    def follows_s(machine: ClusterConfig) -> float:
        return machine.take_s + setup_of(run, machine, None).costs.update_s

    local = compose_machine(["cluster=local"])[0]
    given = replace(local, take_s=MACHINE["take_s"], flops_per_s=MACHINE["flops_per_s"])
    assert follows_s(constants_of([run])) == pytest.approx(follows_s(given), rel=0.01)


def test_what_follows_the_copy_that_an_update_waits_for_is_its_time() -> None:
    """Iterations take 1 s, or 2.5 s with a copy of 2.25 s.

    A copy of 3 s began before a fault.
    """
    before = [
        (1, second(1)),
        (2, second(2)),
        (2, snapshot(2, copy_s=2.25)),
        (4.5, second(3, stall_s=1.5)),
    ]
    after = [
        (9, back(0.1, 0.2)),
        (10, second(3)),
        (10, snapshot(3, copy_s=3.0)),
        (11, second(4)),
    ]
    settings = compose_settings(["ckpt=gemini", "model=tiny"])
    run = RealRun(
        settings=settings, world_size=1, kills=(), ranks=[logged(0, *before, *after)]
    )
    local = compose_machine(["cluster=local"])[0]
    moved_bytes = update_bytes(setup_of(run, local, None).job)
    assert constants_of([run]).gpu_bytes_per_s == pytest.approx(
        moved_bytes / 0.25, rel=0.01
    )


def test_the_wait_for_all_of_a_first_snapshot_is_no_price_of_any() -> None:
    """Snapshots are taken after 0, 2 and 4 iterations.

    Training stands still for 5 s, 0.5 s and an unknown time.
    """
    taken = [snapshot(number) for number in (0, 2, 4)]
    stalls_s = enumerate((5.0, 0.0, 0.5, 0.0), start=1)
    trained = [second(number, stall_s=stall_s) for number, stall_s in stalls_s]
    ranks = [
        logged(
            0, *((float(t_s), event) for t_s, event in enumerate([*trained, *taken]))
        )
    ]
    run = RealRun(
        settings=compose_settings(["ckpt=gemini"]), world_size=1, kills=(), ranks=ranks
    )
    assert constants_of([run]).take_s == 0.5


@pytest.mark.parametrize(
    ("stalls_s", "take_s"),
    [
        pytest.param((0.5, 0.125) * 3, 0.375, id="logs take 0.125 s"),
        pytest.param((0.5, 0.375) * 3, 0.625, id="its end stops training, too"),
        pytest.param((0.875, *[0.125] * 5), 0.25, id="few are long"),
    ],
)
def test_a_snapshot_takes_what_exceeds_logs(
    stalls_s: Sequence[float], take_s: float
) -> None:
    """A snapshot is taken every two iterations.

    Logs take 0.125 s of every iteration, also of later ones without a snapshot.
    """
    trained = [
        second(number, stall_s=stall_s)
        for number, stall_s in enumerate(stalls_s, start=2)
    ]
    trained += [second(number, stall_s=0.125) for number in range(8, 18)]
    told = [*trained, *(snapshot(number) for number in (1, 3, 5, 7))]
    rank = stalled_by_snapshots(
        logged(0, *((float(t_s), event) for t_s, event in enumerate(told)))
    )
    run = RealRun(
        settings=compose_settings(["ckpt=gemini"]), world_size=1, kills=(), ranks=[rank]
    )
    assert constants_of([run]).take_s == take_s


def test_stalls_of_every_iteration_are_those_of_gradients_sent_in_each() -> None:
    sent = GradientsSent(iteration=2, size_bytes=8, tap_s=0.5, lag_iters=0)
    trained = [
        second(number, stall_s=stall_s)
        for number, stall_s in ((2, 0.5), (3, 0.125), (4, 0.125))
    ]

    def stalls_s(*told: Event) -> list[float]:
        rank = stalled_by_snapshots(
            logged(0, *((float(t_s), event) for t_s, event in enumerate(told)))
        )
        return [event.stall_s for event in events_of([rank], IterationCommitted)]

    assert stalls_s(*trained, sent) == [0.375, 0.0, 0.0]
    assert stalls_s(trained[0], sent) == [0.5]


@pytest.mark.parametrize(
    ("seconds", "bytes_per_s"), [((2.0, 2.0), 32.0), ((1.0, 7.0), 16.0)]
)
def test_a_disk_is_as_fast_as_in_all_saves_together(
    seconds: Sequence[float], bytes_per_s: float
) -> None:
    saves = [
        CheckpointSaved(
            iteration=number, directory="", size_bytes=64, seconds=each, stall_s=each
        )
        for number, each in enumerate(seconds, start=1)
    ]
    told = [(float(number), second(number)) for number in (1, 2, 3)] + [
        (4.0, save) for save in saves
    ]
    run = RealRun(
        settings=compose_settings(["ckpt=dense"]),
        world_size=1,
        kills=(),
        ranks=[logged(0, *told)],
    )
    assert constants_of([run]).disk_bytes_per_s == bytes_per_s


def snapshot(iteration: int, *, copy_s: float = 0.25) -> SnapshotTaken:
    where = {
        "iteration": iteration,
        "window_start": iteration,
        "slot": 0,
        "num_slots": 1,
    }
    return SnapshotTaken(
        **where, size_bytes=8, dense_bytes=8, copy_s=copy_s, bubble_bytes=0
    )
