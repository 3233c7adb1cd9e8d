"""Effective training time under faults: the planned runs, and measurements of a run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.under_faults import (
    PLAIN,
    Cell,
    PlainTraining,
    Study,
    arguments_of,
    carry_out,
    interval,
    losses_of,
    measure,
    plain_training,
    plan_cells,
    slowdowns,
    table,
)
from launcher.compare import plan_variants
from launcher.config import compose_settings
from launcher.simulator.comparison import predict_events
from launcher.simulator.config import compose_machine
from launcher.simulator.real_run import RealRun, first_commits, setup_of
from moe_ckpt.events import Event, LoggedEvent, SnapshotTaken, WorkerStarted
from moe_ckpt.faults.schedule import Kill
from moe_ckpt.sim.pace import EVEN, Pace
from tests.report_runs import committed

POLICIES = ["moevement", "gemini:ckpt.every_iters=5", "none"]


def words(cell: Cell, cap_bytes_per_s: float | None = 28e6) -> list[str]:
    """Return the words for `launcher.compare` of a run of 60 s."""
    return arguments_of(
        cell, cap_bytes_per_s=cap_bytes_per_s, seconds=60.0, common=["model=small"]
    )


def test_each_round_runs_plain_training_and_begins_with_another_policy() -> None:
    rounds = [(PLAIN, "a", "b"), ("a", "b", PLAIN), ("b", PLAIN, "a")]
    cells = plan_cells(["a", "b"], {20.0: 2, 60.0: 3})
    assert [(cell.policy, cell.mtbf_s, cell.number) for cell in cells] == [
        (policy, mtbf_s, number)
        for mtbf_s, number in [(20.0, 0), (60.0, 0), (20.0, 1), (60.0, 1), (60.0, 2)]
        for policy in rounds[number]
    ]


def test_all_policies_of_a_round_get_the_same_faults() -> None:
    schedules = set()
    for policy in POLICIES:
        settings = compose_settings(
            [
                w
                for w in words(Cell(policy=policy, mtbf_s=20.0, number=3))
                if "fault" in w
            ]
        )
        schedules.add(settings.fault.kills(4))
    [kills] = schedules
    assert all(one.after_s < other.after_s for one, other in pairwise(kills))
    assert kills[-1].after_s > 60.0


@pytest.mark.parametrize("policy", [*POLICIES, PLAIN, "checkfreq", "moc", "moetion"])
@pytest.mark.parametrize("cap_bytes_per_s", [None, 28e6])
def test_every_run_is_one_that_the_launcher_accepts(
    policy: str, cap_bytes_per_s: float | None
) -> None:
    [variant] = plan_variants(
        words(Cell(policy=policy, mtbf_s=20.0, number=0), cap_bytes_per_s), 4
    )
    is_capped = "ckpt.max_bytes_per_s.host=28000000" in variant.overrides
    assert is_capped == (cap_bytes_per_s is not None and policy not in ("none", PLAIN))


@pytest.mark.parametrize("policy", ["moevement", PLAIN])
def test_a_job_that_loses_hosts_injects_no_fault_by_itself(policy: str) -> None:
    cell = Cell(policy=policy, mtbf_s=20.0, number=3)
    arguments = arguments_of(
        cell, cap_bytes_per_s=28e6, seconds=60.0, common=["model=tiny"], spare_nodes=3
    )
    [variant] = plan_variants(arguments, 4)
    settings = compose_settings(variant.overrides)
    assert not settings.fault.kills(4)
    assert settings.runtime.spare_nodes == (0 if policy == PLAIN else 3)


def test_all_hosts_but_that_of_the_store_may_be_lost() -> None:
    cells = [Cell(policy="a", mtbf_s=20.0, number=number) for number in range(20)]
    losses = [losses_of(cell, 6) for cell in cells]
    assert {loss.ranks for each in losses for loss in each} == {(1,), (2,), (3,)}
    assert {(len(each), each[0].scope) for each in losses} == {(6, "node")}
    assert losses_of(cells[0], 6) == losses[0]


def test_policies_are_compared_round_by_round() -> None:
    run = run_of([(0.0, iteration(1)), (2.0, iteration(2)), (4.0, iteration(3))])
    slow, fast = measure(run, 8.0), measure(run, 4.0)
    slower = measure(
        run_of([(0.0, iteration(1)), (4.0, iteration(2)), (8.0, iteration(3))]), 8.0
    )
    cells = [
        Cell(policy=policy, mtbf_s=20.0, number=number)
        for number in range(2)
        for policy in ("a", "b", PLAIN)
    ]
    study = Study(
        runs={},
        measured=dict(zip(cells, [slow, fast, fast, fast, fast, slower], strict=True)),
    )
    assert study.differences("b", "a", 20.0) == [0.5, 0.0]
    assert study.ettrs("b", 20.0) == [1.0, 2.0], (
        "plain training of the second round took twice as long"
    )
    assert study.plain_s == 3.0
    assert study.slowdown("b", 20.0) == (4.0 + 4.0) / (4.0 + 8.0)


FIXED = {"gemini": ("ckpt.every_iters=5",), "moevement": ("ckpt.window=3",)}
SPARES = {"process": 0, "node": 5}
MACHINE = (
    *("detect_s=0.3", "rebuild_s=0.7", "take_s=0.01", "interference=0.0"),
    "spare_s=2.0",
)


def simulated(policy: str, kills: tuple[Kill, ...], scope: str = "process") -> RealRun:
    """Return a run that a simulation made.

    The first 12 iterations take half as long as the others.
    """
    machine = compose_machine(
        ["cluster=local", *(f"cluster.{constant}" for constant in MACHINE)]
    )[0]
    spares = f"runtime.spare_nodes={SPARES[scope]}"
    settings = compose_settings([f"ckpt={policy}", spares, *FIXED.get(policy, ())])
    run = RealRun(settings=settings, world_size=4, kills=kills, ranks=())
    return replace(
        run,
        ranks=predict_events(run, setup_of(run, machine, 1.0, Pace([0.5] * 12)), 40),
    )


@pytest.mark.parametrize(
    ("policy", "scope"),
    [("gemini", "process"), ("moevement", "process"), ("moevement", "node")],
)
def test_runs_at_another_mtbf_predict_a_run(policy: str, scope: str) -> None:
    often, seldom = ((8, 15, 22, 29, 36), (11, 25))
    cells = {
        Cell(policy=policy, mtbf_s=mtbf_s, number=0): simulated(
            policy, tuple(Kill(rank=1, iteration=n, scope=scope) for n in at), scope
        )
        for mtbf_s, at in ((20.0, often), (60.0, seldom))
    }
    plain = {
        Cell(policy=PLAIN, mtbf_s=mtbf_s, number=0): simulated("none", ())
        for mtbf_s in (20.0, 60.0)
    }
    measured = {
        cell: measure(
            run, max(each.t_s for each in run.ranks[0]) - first_commits(run.ranks)[1]
        )
        for cell, run in (cells | plain).items()
    }
    study = Study(runs=cells | plain, measured=measured)
    for mtbf_s, at in ((20.0, often), (60.0, seldom)):
        [predicted], [ettr], faults_s = (
            study.predictions(policy, mtbf_s),
            study.ettrs(policy, mtbf_s),
            study.faults_s(policy, mtbf_s),
        )
        assert predicted.ettr == pytest.approx(ettr, abs=0.01)
        assert predicted.fault_s == pytest.approx(faults_s, rel=0.05)
        assert len(faults_s) == len(at)
        [header, _, row] = [
            line.split(" | ") for line in table(study, [policy], [mtbf_s])
        ]
        assert row[header.index("predicted") + 1] == interval([predicted.ettr - ettr])


def run_of(*ranks: list[tuple[float, Event]]) -> RealRun:
    """Return a run with the given events of each rank."""
    logged = [
        [LoggedEvent(t_s=t_s, global_rank=rank, event=event) for t_s, event in told]
        for rank, told in enumerate(ranks)
    ]
    return RealRun(
        settings=compose_settings(["ckpt=none"]),
        world_size=len(ranks),
        kills=(),
        ranks=logged,
    )


def iteration(number: int) -> Event:
    return committed(number, seconds=1.0, stall_s=0.0)


def worker(incarnation: int) -> Event:
    return WorkerStarted(pid=1, host="here", incarnation=incarnation, device="cpu")


def test_only_new_iterations_within_the_time_count() -> None:
    """Iteration 1 ends at 10 s, and a restart makes iterations 2 and 3 run again.

    Iterations 2 to 5 are new in the 10 s after iteration 1.
    """
    before: list[tuple[float, Event]] = [
        (0.0, worker(0)),
        *((9.0 + n, iteration(n)) for n in (1, 2, 3)),
    ]
    after: list[tuple[float, Event]] = [
        (13.0, worker(1)),
        *((15.0 + n, iteration(n)) for n in (2, 3, 4, 5, 6)),
    ]
    run = run_of([*before, *after], [*before, *after])
    outcome = measure(run, 10.0)
    assert outcome.ended_s == (1.0, 2.0, 9.0, 10.0)
    assert (outcome.last, outcome.tail_s, measure(run, 10.75).tail_s) == (5, 0.0, 0.75)


def test_a_run_is_held_against_the_very_iterations_of_plain_training() -> None:
    """Plain training takes 2, 1, 1 and 4 s for the iterations 2 to 5.

    An iteration that plain training lacks counts as the mean, 2 s.
    """
    plain = plain_training(
        measure(
            run_of(
                [
                    (float(t_s), iteration(n + 1))
                    for n, t_s in enumerate((0, 2, 3, 4, 8))
                ]
            ),
            8.0,
        )
    )
    assert (plain.between(1, 4), plain.between(3, 7)) == (4.0, 9.0)
    before: list[tuple[float, Event]] = [
        (0.0, worker(0)),
        *((9.0 + n, iteration(n)) for n in (1, 2, 3)),
    ]
    after: list[tuple[float, Event]] = [
        (13.0, worker(1)),
        (19.0, iteration(4)),
        (22.0, iteration(5)),
    ]
    run = run_of([*before, *after])
    outcome = measure(run, 20.0)
    assert [measure(run, seconds).ettr(plain) for seconds in (10.0, 20.0)] == [
        4.0 / 10.0,
        8.0 / 20.0,
    ]
    assert outcome.quiet_s() == {2: 1.0, 3: 1.0, 5: 3.0}, (
        "without iteration 4, after the fault"
    )
    assert plain.fault_s(outcome.recoveries) == [7.0 - 1.0]


def test_hooks_slow_every_iteration_and_copies_those_that_they_are_in() -> None:
    """Plain iterations take 1 s, iterations of the run 1.1 s, or 1.6 s during a copy.

    A stall takes 0.5 s more.
    """
    stalled = committed(2, seconds=2.0, stall_s=0.5)
    told = [(0.0, worker(0)), (1.0, iteration(1)), (3.1, stalled), (4.2, iteration(3))]
    # iteration 4 runs again after a fault
    told += [(5.0, worker(1)), (9.0, iteration(4)), (10.1, iteration(5))]
    taken = SnapshotTaken(
        iteration=1,
        window_start=1,
        slot=0,
        num_slots=1,
        size_bytes=8,
        dense_bytes=8,
        copy_s=2.0,
        bubble_bytes=0,
    )

    def slower(told: list[tuple[float, Event]], plain_s: float) -> tuple[float, float]:
        run = run_of(told)
        return slowdowns(
            [(run, measure(run, 20.0), PlainTraining(iteration_s=plain_s, pace=EVEN))]
        )

    assert slower([*told, (11.0, taken)], 1.0) == (
        pytest.approx(0.1),
        pytest.approx(0.5 / 1.6),
    )
    assert slower(told, 1.0) == (pytest.approx((0.6 + 0.1 + 0.1) / 3), 0.0)
    faster_with_copies = [
        (0.0, iteration(1)),
        (1.0, iteration(2)),
        (4.0, iteration(3)),
        (5.0, taken),
    ]
    assert slower(faster_with_copies, 2.0) == (0.0, 0.0)


def test_an_interval_is_students() -> None:
    assert interval([0.5]) == "0.500 (one run)"
    assert interval([0.4, 0.6]) == "0.500 (-0.771 to 1.771)"


def test_a_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    cell = Cell(policy="moevement", mtbf_s=20.0, number=0)
    (tmp_path / cell.name).mkdir()
    (tmp_path / f"{cell.name}.json").write_text("{}")
    with pytest.raises(SystemExit, match="wanted an empty folder"):
        carry_out(cell, tmp_path, words(cell), 60.0)
