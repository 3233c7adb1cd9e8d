"""What faults cost a run, from its events: restarts and recoveries alike."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest

from launcher.cluster_profile import constants_of, measure
from launcher.config import compose_settings
from launcher.faults.log import InjectedFault
from launcher.simulator.comparison import predict_run
from launcher.simulator.config import compose_machine
from launcher.simulator.real_run import RealRun, events_of, facts_of, kills_of, recoveries_of, setup_of
from moe_ckpt.events import Event, IterationCommitted, LoggedEvent, Rejoined, WorkerStarted
from moe_ckpt.faults.schedule import Kill
from moe_ckpt.sim.cluster import simulate
from moe_ckpt.sim.emit import rank_events
from moe_ckpt.sim.hardware import ClusterConfig
from moe_ckpt.sim.policies import plan_saving
from tests.report_runs import committed, rejoined


def second(iteration: int) -> IterationCommitted:
    """An iteration of a second, without a stall."""
    return committed(iteration, seconds=1.0, stall_s=0.0)


def born(incarnation: int) -> WorkerStarted:
    return WorkerStarted(pid=1, host="here", incarnation=incarnation, device="cpu")


def back(detect_s: float, rebuild_s: float, **fetched: int) -> Rejoined:
    seconds = {"detect_s": detect_s, "rebuild_s": rebuild_s, "fetch_s": 0.25, "replay_s": 0.5}
    return rejoined(2, **({"fetched_bytes": 0} | seconds | fetched))


def logged(rank: int, *told: tuple[float, Event]) -> list[LoggedEvent]:
    return [LoggedEvent(t_s=t_s, global_rank=rank, event=event) for t_s, event in told]


def test_a_fault_costs_all_between_iterations_before_and_after_it() -> None:
    start = [(float(number), second(number)) for number in (1, 2, 3)]
    survivor = logged(0, (0, born(0)), *start, (6, back(1, 2)), (8, second(3)), (9, second(4)))
    dead_first = [(t_s + 0.1, event) for t_s, event in start]
    newborn = logged(1, (0, born(0)), *dead_first, (5, born(1)), (6, back(1.5, 2)), (8.1, second(3)), (9.1, second(4)))
    (found,) = recoveries_of([survivor, newborn], 1.0)
    assert (found.cost_s, found.again, found.after_s) == (5.0, 1, 3.0)
    assert found.rejoined == back(1.5, 2)
    assert recoveries_of([survivor], 1.0) == []


def test_a_restart_costs_without_a_recovery() -> None:
    told = [(0.0, born(0)), (1.0, second(1)), (2.0, second(2)), (20.0, born(1))]
    again = [(24.0, second(1)), (25.0, second(2)), (26.0, second(3))]
    (found,) = recoveries_of([logged(rank, *told, *again) for rank in (0, 1)], 1.0)
    assert (found.cost_s, found.again, found.rejoined) == (23.0, 2, None)


@pytest.mark.parametrize(
    ("told", "resume_s"),
    [
        (back(0.1, 0.2), "1.75"),  # 0.25 and 0.5, and two iterations take a second longer than two do
        (back(0.1, 0.2, fetched_bytes=1), None),
        (back(0.1, 0.2, executed_iters=1), None),
    ],
    ids=["went back", "fetched", "replayed"],
)
def test_to_resume_takes_the_extra_time_of_the_first_iterations(told: Rejoined, resume_s: str | None) -> None:
    before, after = [(float(number), second(number)) for number in (1, 2, 3)], [(8, second(3)), (9, second(4))]
    living = [logged(rank, (0, born(0)), *before, (6, told), *after) for rank in (0, 2, 3)]
    newborn = logged(1, (0, born(0)), *before, (5, born(1)), (6, told), *after)
    settings = compose_settings(["ckpt=gemini"])
    run = RealRun(settings=settings, world_size=4, kills=(), ranks=[living[0], newborn, *living[1:]])
    found = measure([run], compose_machine(["cluster=local"])[0])
    assert (found["detect_s"], found["rebuild_s"], found.get("resume_s")) == ("0.1", "0.2", resume_s)
    assert "restart_s" not in found


def injected(unix_s: float, rank: int, phase: str, iteration: int | None = 7) -> InjectedFault:
    where = {"pid": 1, "signal": "KILL", "scope": "process", "generation": 0, "ordered": False}
    return InjectedFault(unix_s=unix_s, rank=rank, phase=phase, iteration=iteration, **where)  # type: ignore[arg-type]


def test_faults_of_a_run_are_at_points_one_after_another() -> None:
    told = [(1.0, "join", None), (2.0, "backward", 7), (2.0, "step", 7), (3.0, "build", None), (4.0, "recovery", 7)]
    later = [(5.0, "between", 8), (6.0, "unknown", 9), (7.0, "reduce", 3)]
    kills = kills_of([injected(unix_s, rank, phase, at) for rank, (unix_s, phase, at) in enumerate([*told, *later])])
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


KILLS = (Kill(rank=2, iteration=13, phase="backward"), Kill(rank=0, iteration=19))
POLICIES = {
    "none": (),
    "dense": ("ckpt.every_iters=5",),
    "gemini": ("ckpt.every_iters=5",),
    "moevement": ("ckpt.window=3",),
    "moc": (),
    "moetion": (),
}


def run_of(policy: str, constants: Mapping[str, float], kills: tuple[Kill, ...] = KILLS) -> RealRun:
    """A run that a simulation made, on a machine with its own constants."""
    settings = compose_settings([f"ckpt={policy}", *POLICIES[policy], "train.global_batch_size=16"])
    machine = compose_machine(["cluster=local", *(f"cluster.{name}={value}" for name, value in constants.items())])[0]
    run = RealRun(settings=settings, world_size=4, kills=kills, ranks=())
    setup = setup_of(run, machine, None)
    saving = plan_saving(settings.ckpt, setup)
    outcome = simulate(setup, saving, kills, duration_s=1e9, last_iteration=30)
    ranks = [rank_events(setup, saving, outcome, rank) for rank in range(4)]
    return RealRun(settings=settings, world_size=4, kills=kills, ranks=ranks)


MACHINE = {
    "detect_s": 0.3,
    "rebuild_s": 0.7,
    "resume_s": 1.5,
    "restart_s": 9.0,
    "flops_per_s": 5e8,
    "take_s": 0.01,
    "disk_bytes_per_s": 4e6,
    "disk_read_bytes_per_s": 9e6,
}


# interference cannot be told from the seconds that any snapshot takes
SLOW_LINKS = {"copy_bytes_per_s": 1.5e6, "whole_copy_bytes_per_s": 1.5e6, "interference": 0.0}


def machine_of(links_are_slow: bool) -> dict[str, float]:
    return MACHINE | (SLOW_LINKS if links_are_slow else {})


@cache
def measured(*, links_are_slow: bool) -> ClusterConfig:
    kills, machine = (Kill(rank=1, iteration=8), Kill(rank=3, iteration=16)), machine_of(links_are_slow)
    return constants_of([run_of(name, machine, kills) for name in ("none", "dense", "gemini", "moevement")])


@pytest.mark.parametrize("links_are_slow", [False, True], ids=["fast links", "training waits for copies"])
@pytest.mark.parametrize("policy", POLICIES)
def test_constants_from_other_runs_predict_a_run_of_the_same_machine(policy: str, *, links_are_slow: bool) -> None:
    run = run_of(policy, machine_of(links_are_slow))
    truth, predicted = facts_of(run.ranks), predict_run(run, measured(links_are_slow=links_are_slow), None, 30)
    assert predicted.recovery_s == pytest.approx(truth.recovery_s, rel=0.05)
    assert predicted.ettr == pytest.approx(truth.ettr, abs=0.01)
    assert truth.num_recoveries == 2


def test_waits_for_copies_are_none_of_what_any_snapshot_takes() -> None:
    run = run_of("gemini", machine_of(links_are_slow=True))
    longest_s = max(event.stall_s for event in events_of(run.ranks, IterationCommitted))
    assert longest_s > 10 * MACHINE["take_s"], "training waits"
    assert constants_of([run]).take_s == pytest.approx(MACHINE["take_s"])
