"""Effective training time under faults: which runs are made, and what is measured of one."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.under_faults import (
    PLAIN,
    Cell,
    Study,
    arguments_of,
    carry_out,
    faults_until,
    interference,
    interval,
    mean_fault_s,
    measure,
    plan_cells,
)
from launcher.compare import plan_variants
from launcher.config import compose_settings
from launcher.simulator.real_run import RealRun, facts_of
from moe_ckpt.events import Event, LoggedEvent, SnapshotTaken, WorkerStarted
from moe_ckpt.faults.schedule import Kill
from tests.benchmarks.faults import injected
from tests.report_runs import committed, rejoined

POLICIES = ["moevement", "gemini:ckpt.every_iters=5", "none"]


def words(cell: Cell, cap_bytes_per_s: float | None = 28e6) -> list[str]:
    return arguments_of(cell, cap_bytes_per_s=cap_bytes_per_s, seconds=60.0, common=["model=small"])


def test_each_round_runs_plain_training_and_begins_with_another_policy() -> None:
    cells = list(plan_cells(["a", "b"], [20.0, 60.0], 2))
    assert [(cell.policy, cell.mtbf_s, cell.number) for cell in cells] == [
        *[(PLAIN, math.inf, 0), ("a", 20.0, 0), ("b", 20.0, 0), ("a", 60.0, 0), ("b", 60.0, 0)],
        *[(PLAIN, math.inf, 1), ("b", 20.0, 1), ("a", 20.0, 1), ("b", 60.0, 1), ("a", 60.0, 1)],
    ]


def test_all_policies_of_a_round_get_the_same_faults() -> None:
    schedules = set()
    for policy in POLICIES:
        settings = compose_settings([w for w in words(Cell(policy=policy, mtbf_s=20.0, number=3)) if "fault" in w])
        schedules.add(settings.fault.kills(4))
    [kills] = schedules
    assert all(one.after_s < other.after_s for one, other in pairwise(kills))
    assert kills[-1].after_s > 60.0


@pytest.mark.parametrize("policy", [*POLICIES, PLAIN, "checkfreq", "moc", "moetion"])
@pytest.mark.parametrize("cap_bytes_per_s", [None, 28e6])
def test_every_run_is_one_that_the_launcher_accepts(policy: str, cap_bytes_per_s: float | None) -> None:
    [variant] = plan_variants(words(Cell(policy=policy, mtbf_s=20.0, number=0), cap_bytes_per_s), 4)
    is_capped = "ckpt.max_bytes_per_s.host=28000000" in variant.overrides
    assert is_capped == (cap_bytes_per_s is not None and policy not in ("none", PLAIN))


def test_policies_are_compared_round_by_round() -> None:
    run = run_of([(0.0, iteration(1)), (2.0, iteration(2)), (4.0, iteration(3))])
    slow, fast = measure(run, 8.0), measure(run, 4.0)
    cells = [Cell(policy=policy, mtbf_s=20.0, number=number) for number in range(2) for policy in ("a", "b")]
    measured = dict(zip(cells, [slow, fast, fast, fast], strict=True))
    plain = {Cell(policy=PLAIN, mtbf_s=math.inf, number=number): each for number, each in enumerate((fast, slow))}
    study = Study(runs={}, measured=measured | plain)
    assert study.differences("b", "a", 20.0) == [0.5, 0.0]
    assert study.ettrs("b", 20.0) == [1.0, 2.0], "plain training of the second round took twice as long"


def test_a_prediction_has_the_faults_before_its_last_iteration() -> None:
    back = rejoined(1, generation=2)
    run = run_of([(0.0, iteration(1)), (1.0, back), (2.0, iteration(2)), (3.0, iteration(3))])
    run = replace(run, kills=tuple(Kill(rank=rank, iteration=rank + 1) for rank in range(3)))
    faults = [injected(rank, rank + 1, generation=generation) for rank, generation in enumerate((1, 2, 3))]
    kept = [[kill.rank for kill in faults_until(number, run, faults).kills] for number in (1, 2, 3)]
    assert kept == [[], [0], [0]], "the second one ends the generation of the last iteration"


def test_each_fault_counts_once_in_whatever_run_it_came() -> None:
    facts = facts_of([[LoggedEvent(t_s=1.0, global_rank=0, event=iteration(1))]])
    costs = [(2, 3.0), (0, 0.0), (1, 9.0)]
    runs = [replace(facts, num_recoveries=number, recovery_s=cost_s) for number, cost_s in costs]
    assert mean_fault_s(runs) == 5.0
    assert mean_fault_s(runs[1:2]) is None


def run_of(*ranks: list[tuple[float, Event]]) -> RealRun:
    logged = [
        [LoggedEvent(t_s=t_s, global_rank=rank, event=event) for t_s, event in told] for rank, told in enumerate(ranks)
    ]
    return RealRun(settings=compose_settings(["ckpt=none"]), world_size=len(ranks), kills=(), ranks=logged)


def iteration(number: int) -> Event:
    return committed(number, seconds=1.0, stall_s=0.0)


def worker(incarnation: int) -> Event:
    return WorkerStarted(pid=1, host="here", incarnation=incarnation, device="cpu")


def test_only_new_iterations_within_the_time_count() -> None:
    """Iteration 1 ends at 10 s; a restart takes 2 and 3 back; 60 % of the 10 s after that are the iterations 2 to 4."""
    before: list[tuple[float, Event]] = [(0.0, worker(0)), *((9.0 + n, iteration(n)) for n in (1, 2, 3))]
    after: list[tuple[float, Event]] = [(13.0, worker(1)), *((15.0 + n, iteration(n)) for n in (2, 3, 4, 5, 6))]
    run = run_of([*before, *after], [*before, *after])
    outcome = measure(run, 10.0)
    assert (outcome.iterations, outcome.iteration_s) == (4, 1.0)
    assert outcome.fault_s == (6.0,)
    assert outcome.ettr(plain_s=1.5) == pytest.approx(0.6)
    assert (outcome.tail_s, measure(run, 10.75).tail_s) == (0.0, 0.75)


def test_copies_slow_iterations_by_their_excess_over_plain_ones() -> None:
    """Iterations 2 and 3 take 1.5 s without stalls where plain ones take 1.2 s, and 2 s of copies go on meanwhile."""
    slow = [committed(number, seconds=seconds, stall_s=0.5) for number, seconds in [(1, 9.0), (2, 2.0), (3, 2.0)]]
    taken = SnapshotTaken(
        iteration=1, window_start=1, slot=0, num_slots=1, size_bytes=8, dense_bytes=8, copy_s=2.0, bubble_bytes=0
    )
    run = run_of([(float(t_s), event) for t_s, event in enumerate([*slow, taken])])
    assert interference([run], plain_s=1.2) == pytest.approx(0.3)
    assert interference([run], plain_s=2.0) == 0.0
    assert interference([run_of([(0.0, iteration(2))])], plain_s=1.0) == 0.0, "nothing was copied"


def test_an_interval_is_students() -> None:
    assert interval([0.5]) == "0.500 (one run)"
    assert interval([0.4, 0.6]) == "0.500 (-0.771 to 1.771)"


def test_a_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    cell = Cell(policy="moevement", mtbf_s=20.0, number=0)
    (tmp_path / cell.name).mkdir()
    (tmp_path / f"{cell.name}.json").write_text("{}")
    with pytest.raises(SystemExit, match="wanted an empty folder"):
        carry_out(cell, tmp_path, words(cell), 60.0)
