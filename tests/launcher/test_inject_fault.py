"""Faults injected into a running job: by command, by plan, by function.

The jobs are of real processes (tests/harness/jobs/walking_job.py).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from launcher.faults.carry_out import carry_out
from launcher.faults.log import read_faults
from launcher.inject_fault import main
from launcher.proc import stands_still
from moe_ckpt.elastic.live_workers import read_live, read_written
from moe_ckpt.elastic.status_page import Phase
from moe_ckpt.faults.schedule import Kill, has_come, poisson_kills
from tests.harness.jobs.walking_job import (
    RECOVERS_AT,
    Died,
    Job,
    make_run,
    parked_job,
    rewrite_live,
    running_job,
)
from tests.scenarios import ROOT
from tests.waits import WAIT_S


@pytest.fixture(scope="module")
def parked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Two parked ranks on two nodes.

    Each test leaves the job as found, though with other workers.
    """
    with parked_job(tmp_path_factory.mktemp("parked"), 2) as (job, _):
        yield job


def pids_of(job: Job) -> list[int]:
    return [worker.pid for worker in read_live(job.run)]


def inject(job: Job, *arguments: str) -> int:
    return main(["--run", str(job.run), *arguments])


def kill_at_once(job: Job, rank: int) -> None:
    """Kill a rank with the command, and wait for the death."""
    assert inject(job, "--rank", str(rank)) == 0
    job.wait_for_death(rank)


def wait_for_successor(job: Job, rank: int) -> Died:
    """Wait until a worker has died and its successor is parked; return the death."""
    died = job.wait_for_death(rank)
    job.wait_to_park(rank)
    return died


def points_of_death(job: Job, rank: int) -> list[tuple[int, str]]:
    return [(death.iteration, death.phase) for death in job.deaths(rank)]


def test_without_arguments_a_random_worker_of_the_newest_run_is_killed(
    tmp_path: Path,
    parked: Job,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pids, before, other = (
        pids_of(parked),
        read_faults(parked.run),
        [len(parked.deaths(rank)) for rank in (0, 1)],
    )
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "latest").symlink_to(parked.run)
    monkeypatch.chdir(tmp_path)
    before_s = time.time()
    assert main([]) == 0
    where = r"generation \d+, iteration 3, backward"
    match = re.fullmatch(
        rf"killed rank (\d) \(pid (\d+)\) of {parked.run} in {where}\n",
        capsys.readouterr().out,
    )
    assert match
    rank, pid = int(match[1]), int(match[2])
    death = wait_for_successor(parked, rank)
    assert (death.pid, death.signal, pid) == (pids[rank], "SIGKILL", pids[rank])
    assert len(parked.deaths(1 - rank)) == other[1 - rank]
    (fault,) = read_faults(parked.run)[len(before) :]
    assert before_s <= fault.unix_s <= time.time()
    assert asdict(fault) == {
        "unix_s": fault.unix_s,
        "rank": rank,
        "pid": pid,
        "signal": "KILL",
        "scope": "process",
        "generation": 1 + other[rank],
        "iteration": 3,
        "phase": "backward",
        "ordered": False,
    }


def test_a_stopped_rank_hangs_at_once_or_at_its_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with parked_job(tmp_path, 2) as (job, pids):
        assert inject(job, "--rank", "0", "--signal", "STOP") == 0
        said = capsys.readouterr().out
        assert (
            said
            == f"stopped rank 0 (pid {pids[0]}) of {job.run} in generation 1, iteration"
            " 3, backward\n"
        )
        assert (
            inject(
                job,
                "--rank",
                "1",
                "--at-iteration",
                "5",
                "--phase",
                "step",
                "--signal",
                "STOP",
            )
            == 0
        )
        while not all(map(stands_still, pids)):
            os.sched_yield()
        assert (job.page(1).iteration, job.page(1).phase.name) == (5, "STEP")
        assert len(read_live(job.run)) == 2


def host_memory(job: Job, rank: int) -> list[str]:
    """Return the parts of host memory that the first incarnation has left."""
    return sorted(
        part
        for part in ("own", "held")
        if (job.memory(rank) / part / "incarnation0").exists()
    )


def test_a_lost_node_takes_the_host_memory_of_its_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with parked_job(tmp_path, 4, ranks_per_node=2) as (job, pids):
        assert inject(job, "--rank", "3", "--scope", "node") == 0
        assert [wait_for_successor(job, rank).signal for rank in (2, 3)] == [
            "SIGKILL",
            "SIGKILL",
        ]
        assert [host_memory(job, rank) for rank in range(4)] == [
            ["held", "own"],
            ["held", "own"],
            [],
            [],
        ]
        assert (job.memory(3) / "own" / "incarnation1").exists()
        assert [[death.pid for death in job.deaths(rank)] for rank in range(4)] == [
            [],
            [],
            pids[2:3],
            pids[3:],
        ]
        struck = [
            (fault.rank, fault.pid, fault.scope) for fault in read_faults(job.run)
        ]
        assert struck == [(2, pids[2], "node"), (3, pids[3], "node")]
        assert "lost the host memory of ranks 2, 3\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "iteration", "phase"),
    [
        (["--at-iteration", "4", "--phase", "forward"], 4, "forward"),
        (["--at-iteration", "5", "--phase", "backward"], 5, "backward"),
        (["--at-iteration", "6", "--phase", "reduce"], 6, "reduce"),
        (["--at-iteration", "7", "--phase", "step"], 7, "step"),
        (["--at-iteration", "4", "--phase", "snapshot"], 4, "snapshot"),
        (["--at-iteration", "12"], 12, "forward"),
        (["--phase", "step"], 3, "step"),
        (["--phase", "backward"], 4, "backward"),
        (["--phase", "recovery"], RECOVERS_AT - 1, "recovery"),
    ],
)
def test_an_order_is_carried_out_at_exactly_its_point(
    parked: Job,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    iteration: int,
    phase: str,
) -> None:
    pid, others, deaths = (
        pids_of(parked)[1],
        len(parked.deaths(0)),
        len(parked.deaths(1)),
    )
    before_s = time.time()
    assert inject(parked, "--rank", "1", *arguments) == 0
    death = wait_for_successor(parked, 1)
    assert (death.pid, death.signal, death.iteration, death.phase) == (
        pid,
        "SIGKILL",
        iteration,
        phase,
    )
    assert len(parked.deaths(0)) == others
    fault = read_faults(parked.run)[-1]
    assert (fault.pid, fault.ordered, fault.generation, fault.phase) == (
        pid,
        True,
        1 + deaths,
        phase,
    )
    assert fault.iteration == (iteration if "--at-iteration" in arguments else None)
    assert before_s <= fault.unix_s <= time.time()
    ordered, done = capsys.readouterr().out.splitlines()
    assert ordered.startswith(f"ordered from pid {pid}: SIGKILL to rank 1 ")
    assert done == ordered.replace("ordered from", "carried out by")


def test_an_order_that_the_run_does_not_live_to_see_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with parked_job(tmp_path, 1, last_iteration=9) as (job, _):
        assert inject(job, "--at-iteration", "10") == 1
        said = capsys.readouterr().out.splitlines()
        assert (
            said[1]
            == "the run ended before: SIGKILL to rank 0 in iteration 10, forward"
        )
        job.wait_for_end()
        assert job.deaths(0) == []


def test_an_order_is_given_again_when_its_worker_dies_of_something_else(
    tmp_path: Path,
) -> None:
    said: SimpleQueue[str] = SimpleQueue()
    with parked_job(tmp_path, 1) as (job, [pid]), ThreadPoolExecutor(1) as beside:
        kills = [Kill(rank=0, iteration=1_000_000)]
        over = beside.submit(
            carry_out, kills, job.run, ranks_per_node=1, say=said.put, patience_s=0.2
        )
        assert said.get(timeout=WAIT_S).startswith(f"ordered from pid {pid}: ")
        assert job.page(0).has_order
        os.kill(pid, signal.SIGKILL)
        job.wait_for_death(0)
        successor = job.wait_to_park(0)
        assert said.get(timeout=WAIT_S).startswith(f"ordered from pid {successor}: ")
        job.kill_supervisor(0)
        assert not over.result(WAIT_S)
        assert [(fault.pid, fault.ordered) for fault in read_faults(job.run)] == [
            (pid, True),
            (successor, True),
        ]


def test_an_order_is_given_again_when_the_plan_has_killed_its_worker(
    tmp_path: Path,
) -> None:
    with running_job(tmp_path, 1, park=(1, "forward")) as job:
        assert carry_out(
            [Kill(rank=0, iteration=30), Kill(rank=0, after_s=0.0)],
            job.run,
            ranks_per_node=1,
        )
        job.wait_for_death(0, times=2)
        first, second = points_of_death(job, 0)
        assert first[0] < 30
        assert second == (30, "forward")
        assert [fault.ordered for fault in read_faults(job.run)] == [True, False, True]


def test_orders_to_one_rank_are_for_one_worker_after_the_other(tmp_path: Path) -> None:
    with running_job(tmp_path, 2) as job:
        points = [(0, 4, "step"), (1, 5, "forward"), (0, 6, "backward")]
        kills = [
            Kill(rank=rank, iteration=iteration, phase=phase)
            for rank, iteration, phase in points
        ]
        assert carry_out(kills, job.run, ranks_per_node=1)
        job.wait_for_death(0, times=2)
        job.wait_for_death(1)
        assert points_of_death(job, 0) == [(4, "step"), (6, "backward")]
        assert points_of_death(job, 1) == [(5, "forward")]


def test_an_order_waits_for_one_that_stands_already(tmp_path: Path) -> None:
    with parked_job(tmp_path, 1) as (job, _):
        job.page(0).order(signal.SIGTERM, Phase.STEP, iteration=12)
        assert carry_out([Kill(rank=0, iteration=9)], job.run, ranks_per_node=1)
        job.wait_for_death(0, times=2)
        assert [(death.signal, death.iteration) for death in job.deaths(0)] == [
            ("SIGTERM", 12),
            ("SIGKILL", 9),
        ]


@pytest.mark.parametrize(
    "kill",
    [
        Kill(rank=1, iteration=20, phase="step", scope="node"),
        Kill(rank=0, iteration=9, scope="node"),
    ],
    ids=["rank 1", "rank 0"],
)
def test_a_node_at_a_point_is_lost_as_soon_as_the_point_has_come(
    tmp_path: Path, kill: Kill
) -> None:
    with parked_job(tmp_path, 3, ranks_per_node=2) as (job, _):
        job.let_go()
        assert carry_out([kill], job.run, ranks_per_node=2)
        for rank in (0, 1):
            job.wait_for_death(rank)
            assert host_memory(job, rank) == []
        (death,) = job.deaths(kill.rank or 0)
        passed = (death.iteration, death.phase) == (kill.iteration, "between")
        assert has_come(kill, death.iteration, death.phase) or passed
        assert death.iteration < 1000
        assert job.deaths(2) == []
        assert [fault.ordered for fault in read_faults(job.run)] == [False, False]


@pytest.mark.parametrize("arguments", [[], ["--rank", "0"]])
def test_a_worker_that_is_being_replaced_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with parked_job(tmp_path, 1, hold=True) as (job, [pid]):
        kill_at_once(job, 0)
        replacing = threading.Timer(0.3, job.release, (0,))  # by then the command waits
        replacing.start()
        assert inject(job, *arguments) == 0
        replacing.join()
        first, second = capsys.readouterr().out.splitlines()
        assert first.startswith(
            f"killed rank 0 (pid {pid}) of {job.run} in generation 1, "
        )
        assert re.match(r"killed rank 0 \(pid \d+\) of .* in generation 2, ", second)
        job.wait_for_death(0)
        assert [death.signal for death in job.deaths(0)] == ["SIGKILL", "SIGKILL"]


def test_a_strike_waits_for_all_its_workers(tmp_path: Path) -> None:
    with parked_job(tmp_path, 2, hold=True) as (job, _):
        kill_at_once(job, 0)
        calls = count()

        def clock() -> float:
            if next(calls) == 9:  # by then the injector has looked more than once
                job.release(0)
            return time.monotonic()

        kills = [Kill(rank=rank, after_s=0.0) for rank in (0, 1)]
        assert carry_out(kills, job.run, ranks_per_node=1, clock=clock)
        _, *burst = read_faults(job.run)
        assert [fault.rank for fault in burst] == [0, 1]
        assert burst[0].unix_s == burst[1].unix_s


def test_a_worker_without_a_successor_is_left_alone_in_time(tmp_path: Path) -> None:
    said: list[str] = []
    with parked_job(tmp_path, 2, hold=True) as (job, _):
        kill_at_once(job, 0)
        kills = [Kill(rank=0, after_s=0.0), Kill(rank=1, after_s=0.0)]
        assert not carry_out(
            kills, job.run, ranks_per_node=1, say=said.append, patience_s=0.2
        )
        assert said[0] == "rank 0: no new worker within 0.2 s, left alone"
        assert said[1].startswith("killed rank 1 ")


def test_a_random_victim_is_one_that_lives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with parked_job(tmp_path, 2, hold=True) as (job, _):
        kill_at_once(job, 0)
        for seed in range(8):
            assert inject(job, "--dry-run", "--seed", str(seed)) == 0
        assert set(re.findall(r"rank \d at once", capsys.readouterr().out)) == {
            "rank 1 at once"
        }


def test_kills_come_as_planned_from_mtbf(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with parked_job(tmp_path, 2, park=(1, "forward")) as (job, _):
        before_s = time.time()
        assert inject(job, "--mtbf", "0.05s", "--count", "4", "--seed", "5") == 0
        assert capsys.readouterr().out.startswith("4 faults, seed 5\nkilled rank ")
        planned = poisson_kills(mtbf_s=0.05, count=4, seed=5, world_size=2)
        faults = read_faults(job.run)
        assert Counter(fault.rank for fault in faults) == Counter(
            kill.rank for kill in planned
        )
        assert len({fault.pid for fault in faults}) == 4
        assert faults[-1].unix_s - before_s >= (planned[-1].after_s or 0.0)


def test_kills_come_as_planned_from_a_trace_in_bursts(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n6000,remove,a\n12000,remove,b\n12000,remove,c\n")
    with parked_job(tmp_path, 2) as (job, _):
        before_s = time.time()
        assert (
            inject(
                job,
                "--trace",
                str(trace),
                "--speedup",
                "60",
                "--seed",
                "1",
                "--signal",
                "TERM",
            )
            == 0
        )
        first, *burst = read_faults(job.run)
        assert [fault.signal for fault in (first, *burst)] == ["TERM"] * 3
        assert sorted(fault.rank for fault in burst) == [0, 1]
        assert burst[0].unix_s == burst[1].unix_s
        assert first.unix_s - before_s >= 0.1
        assert burst[0].unix_s - before_s >= 0.2


def test_no_incarnation_is_killed_twice(tmp_path: Path) -> None:
    with parked_job(tmp_path, 1) as (job, _):
        kills = [
            Kill(rank=0, after_s=0.0, signal=name) for name in ("SEGV", "TERM", "KILL")
        ]
        assert carry_out(kills, job.run, ranks_per_node=1)
        job.wait_for_death(0, times=3)
        assert [death.signal for death in job.deaths(0)] == [
            "SIGSEGV",
            "SIGTERM",
            "SIGKILL",
        ]
        while job.wait_to_park(0) in {death.pid for death in job.deaths(0)}:
            pass  # the next victim lives once it has parked
        kills = [Kill(rank=0, after_s=0.0, signal=name) for name in ("STOP", "SEGV")]
        assert not carry_out(kills, job.run, ranks_per_node=1, patience_s=0.2)
        assert [fault.signal for fault in read_faults(job.run)][3:] == ["STOP"]


def test_time_counts_by_the_clock_given_from_when_the_run_begins(
    tmp_path: Path,
) -> None:
    now_s, asked = [0.0], threading.Event()

    def clock() -> float:
        asked.set()
        return now_s[0]

    with ThreadPoolExecutor(1) as beside:
        kills = [Kill(rank=0, after_s=500.0), Kill(rank=1, after_s=0.0)]
        over = beside.submit(
            carry_out,
            kills,
            tmp_path / "run",
            ranks_per_node=1,
            patience_s=1e9,
            clock=clock,
        )
        assert asked.wait(WAIT_S)
        now_s[0] = 1000.0
        with running_job(tmp_path, 2) as job:
            job.wait_for_death(1)
            job.wait_to_park(1)
            assert job.deaths(0) == []
            now_s[0] = 1500.0
            job.wait_for_death(0)
            assert over.result(WAIT_S)


def test_a_plan_waits_for_its_run_to_begin_and_ends_with_it(tmp_path: Path) -> None:
    said: list[str] = []
    kills = [Kill(rank=0, after_s=1e9), Kill(rank=0, iteration=4, phase="step")]
    with ThreadPoolExecutor(1) as beside:
        over = beside.submit(
            carry_out, kills, tmp_path / "run", ranks_per_node=1, say=said.append
        )
        with running_job(tmp_path, 1, last_iteration=6) as job:
            job.wait_for_death(0)
            job.wait_to_park(0)
            job.let_go()
            job.wait_for_end()
            assert not over.result(WAIT_S)
    assert said[-1] == "the run ended before: SIGKILL to rank 0 after 1000000000.0 s"


def test_a_run_that_does_not_begin_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    run = make_run(tmp_path / "run", 1)
    assert not carry_out(
        [Kill(rank=0, after_s=0.0)],
        run,
        ranks_per_node=1,
        say=said.append,
        patience_s=0.05,
    )
    assert said == [f"no worker of {run} came to live within 0.05 s"]


def test_a_run_whose_processes_have_died_counts_as_ended_after_a_while(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    with parked_job(tmp_path, 1) as (job, _):

        def hear(message: str) -> None:
            said.append(message)
            if message.startswith("killed"):
                job.kill_supervisor(0)

        kills = [Kill(rank=0, after_s=0.0), Kill(rank=0, after_s=1000.0)]
        assert not carry_out(kills, job.run, ranks_per_node=1, say=hear, patience_s=0.2)
    assert said[1:] == ["the run ended before: SIGKILL to rank 0 after 1000.0 s"]


@pytest.mark.parametrize(
    "kills",
    [
        [Kill(rank=0, after_s=0.0)],
        [Kill(rank=0, iteration=9)],
        [Kill(rank=0, iteration=9, scope="node")],
    ],
    ids=["at once", "ordered", "node"],
)
def test_ranks_of_another_machine_are_left_to_it(
    tmp_path: Path, kills: Sequence[Kill]
) -> None:
    said: list[str] = []
    with parked_job(tmp_path, 2) as (job, _):
        rewrite_live(job.run, 0, host="far-away", boot="of far-away")
        assert not carry_out(
            [*kills, Kill(rank=1, after_s=0.0)],
            job.run,
            ranks_per_node=1,
            say=said.append,
        )
        assert "rank 0 runs on far-away: left to processes there" in said
        job.wait_for_death(1)
        assert job.deaths(0) == []
        assert not job.page(0).has_order


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(
        "1000,add,a\n" + "".join(f"{10000 + at},remove,n{at}\n" for at in range(9))
    )
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "plan"),
    [
        ([], r"SIGKILL to rank \d at once"),
        (["--rank", "1", "--signal", "STOP"], r"SIGSTOP to rank 1 at once"),
        (["--rank", "1", "--scope", "node"], r"SIGKILL to the node of rank 1 at once"),
        (
            ["--rank", "0", "--at-iteration", "9"],
            r"SIGKILL to rank 0 in iteration 9, forward",
        ),
        (
            ["--mtbf", "1m", "--count", "2"],
            r"(SIGKILL to rank \d after \d+\.\d s\n?){2}",
        ),
        (
            ["--trace", "TRACE", "--speedup", "2"],
            r"(SIGKILL to rank \d after 4.5 s\n?){9}",
        ),
    ],
)
def test_a_dry_run_prints_the_plan_of_its_seed_and_touches_nothing(
    parked: Job,
    capsys: pytest.CaptureFixture[str],
    trace: str,
    arguments: list[str],
    plan: str,
) -> None:
    arguments = [argument.replace("TRACE", trace) for argument in arguments]
    before, alive = contents(parked.run), read_live(parked.run)

    def plan_of(seed: int) -> str:
        assert inject(parked, "--seed", str(seed), "--dry-run", *arguments) == 0
        first, _, rest = capsys.readouterr().out.partition("\n")
        assert first == f"plan for {parked.run}, seed {seed}:"
        assert re.fullmatch(plan, rest.strip())
        return rest

    assert plan_of(3) == plan_of(3)
    assert (len({plan_of(seed) for seed in range(10)}) > 1) is (
        "--rank" not in arguments
    )
    assert (contents(parked.run), read_live(parked.run), len(alive)) == (
        before,
        alive,
        2,
    )
    assert not any(parked.page(rank).has_order for rank in (0, 1))


@pytest.mark.parametrize("change", [{}, {"host": "far-away"}])
def test_a_run_without_live_workers_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    with parked_job(tmp_path, 2) as (job, _):
        pass
    assert len(read_written(job.run)) == 2
    for rank in (0, 1):  # stale: this process has the pid of the workers now
        rewrite_live(job.run, rank, pid=os.getpid(), **change)
    assert inject(job) == 1
    said = capsys.readouterr().err
    assert (
        said == f"error: no live worker in {job.run}: the run has ended, or is on other"
        " machines\n"
    )
    assert read_faults(job.run) == []


def test_no_run_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([]) == 1
    assert (
        capsys.readouterr().err
        == f"error: no run in {tmp_path}/outputs/latest: start one, or name another's"
        " folder with --run\n"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--rank", "x"],
            "argument --rank: got 'x', wanted a whole number of at least 0",
        ),
        (
            ["--rank", "-1"],
            "argument --rank: got '-1', wanted a whole number of at least 0",
        ),
        (
            ["--rank", "2"],
            "--rank: got 2, wanted between 0 and 1, the ranks of the run",
        ),
        (["--signal", "HUP"], "argument --signal: invalid choice: 'HUP'"),
        (["--scope", "rack"], "argument --scope: invalid choice: 'rack'"),
        (
            ["--scope", "node", "--signal", "STOP"],
            "--signal: got 'STOP', wanted KILL where scope=node: it is gone",
        ),
        (
            ["--at-iteration", "0"],
            "argument --at-iteration: got '0', wanted a whole number of at least 1",
        ),
        (
            ["--at-iteration", "2"],
            "--at-iteration: got 2, wanted at least 3, where rank ",
        ),
        (["--phase", "between"], "argument --phase: invalid choice: 'between'"),
        (
            ["--mtbf", "30"],
            (
                "argument --mtbf: got '30', wanted a number above 0 with its unit: 30s,"
                " 5m, 1h"
            ),
        ),
        (["--mtbf", "0s"], "argument --mtbf: got '0s', wanted a number above 0"),
        (
            ["--mtbf", "1s", "--trace", "x"],
            "argument --trace: not allowed with argument --mtbf",
        ),
        (
            ["--mtbf", "1s", "--rank", "0"],
            "--rank: got 0, wanted nothing beside --mtbf or --trace, which choose",
        ),
        (
            ["--mtbf", "1s", "--at-iteration", "9"],
            "--at-iteration: got 9, wanted nothing beside",
        ),
        (
            ["--trace", "x", "--phase", "step"],
            "--phase: got 'step', wanted nothing beside",
        ),
        (["--count", "3"], "--count: got 3, wanted --mtbf beside it"),
        (
            ["--mtbf", "1s", "--count", "0"],
            "argument --count: got '0', wanted a whole number of at least 1",
        ),
        (
            ["--mtbf", "1s", "--speedup", "2"],
            "--speedup: got 2.0, wanted --trace beside it",
        ),
        (
            ["--trace", "x", "--speedup", "0"],
            "argument --speedup: got '0', wanted a number above 0",
        ),
        (
            ["--trace", "x", "--speedup", "y"],
            "argument --speedup: got 'y', wanted a number above 0",
        ),
        (
            ["--trace", "/nonexistent"],
            "--trace: got '/nonexistent', wanted a file with a trace (",
        ),
        (["--trace", "/dev/null"], "trace: got '', wanted a line for each event"),
        (
            ["--seed", "x"],
            "argument --seed: got 'x', wanted a whole number of at least 0",
        ),
        (["--nonesuch"], "unrecognized arguments: --nonesuch"),
    ],
)
def test_wrong_use_is_one_line(
    parked: Job, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    before = read_faults(parked.run)
    assert status_of(parked, arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {says}")
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert read_faults(parked.run) == before
    assert len(read_live(parked.run)) == 2


def status_of(job: Job, arguments: list[str]) -> object:
    try:
        return inject(job, *arguments)
    except SystemExit as end:  # argparse exits
        return end.code


def test_an_interruption_is_one_line(tmp_path: Path) -> None:
    with parked_job(tmp_path, 1) as (job, _):
        command = [
            sys.executable,
            "-m",
            "launcher.inject_fault",
            "--run",
            str(job.run),
            "--at-iteration",
            "1000000",
        ]
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ordered ")
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=WAIT_S)
    said = (
        "error: interrupted: what was ordered stays ordered, the rest is left undone\n"
    )
    assert (process.returncode, err) == (130, said)


def test_help_names_all_that_can_be_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    options = (
        "--rank --signal --scope --at-iteration --phase --mtbf --count --trace"
        " --speedup --seed --run --dry-run"
    )
    assert [
        word
        for word in (*options.split(), "examples:", "exit status")
        if word not in shown
    ] == []


def test_the_script_kills_from_anywhere(tmp_path: Path, parked: Job) -> None:
    pids = pids_of(parked)
    command = [ROOT / "scripts" / "inject_fault.sh", "--run", parked.run, "--rank", "0"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_S,
    )
    assert done.stdout.startswith(
        f"killed rank 0 (pid {pids[0]}) of {parked.run} in generation "
    )
    assert done.stderr == ""
    wait_for_successor(parked, 0)
