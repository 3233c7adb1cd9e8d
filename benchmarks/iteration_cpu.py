"""CPU time of an iteration by process and thread, beside a job without hooks.

    python benchmarks/iteration_cpu.py [--policy CKPT[,SETTING=VALUE...]] [OVERRIDES]

Unless overridden: model=small, 4 ranks, `moevement,ckpt.window=4`. Jobs take turns, all
but one stopped (benchmarks/turns.py). The job `supervised` has the supervisors, daemons
and process groups of the first policy, and no hook of the training loop
(benchmarks/without_hooks.py). In each block the benchmark reads the kernel's counters
of all threads (/proc/PID/task/TID/schedstat) twice. Iterations between both readings
are counted by their commits, with fractions. Each kind of thread has a row: CPU
milliseconds per rank and iteration, means over rounds with 95 % intervals, and the
milliseconds that a policy adds.

CPU time is meaningful on a busy machine, too: waits for a core do not count. The names
of threads come from benchmarks/thread_names.py, whose own thread is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.overhead import half_interval  # noqa: E402
from benchmarks.runs import RANKS, current_commit, default_model, hardware  # noqa: E402
from benchmarks.thread_names import LOOKER  # noqa: E402
from benchmarks.turns import (  # noqa: E402
    SUPERVISED,
    TRAIN,
    WITHOUT_HOOKS,
    Job,
    ended_at_exit,
    in_turn,
    warm_up,
)
from moe_ckpt.elastic.live_workers import read_live  # noqa: E402
from moe_ckpt.linux import children_of, descendants_of  # noqa: E402

ALL = "all"
_NAMES = "benchmarks/thread_names.py"
_POLICY = "moevement,ckpt.window=4"
_LEAST_MS = 0.05  # a kind of thread below this time is in `all` only
_POLL_S = 0.05

Thread = tuple[int, int]
"""The pid of a process and the number of a thread in it."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The CPU time of all threads of a job at one moment."""

    unix_s: float
    """Time of the reading, in seconds since the epoch."""

    cpu_ns: Mapping[Thread, int]
    """CPU time of each thread since its start, in nanoseconds."""

    kinds: Mapping[Thread, str]
    """Kind of each thread, by process and name."""


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A mean over rounds with its 95 % interval."""

    mean: float
    """Mean, in milliseconds."""

    half: float
    """Half of the interval, in milliseconds; infinite after one round."""

    def __str__(self) -> str:
        return f"{self.mean:.2f} +-{self.half:.2f}"


def kind_of(process: str, name: str, *, is_main: bool) -> str:
    """Return the kind of a thread: the process, and the thread's name without numbers.

    Args:
        process: `worker`, `daemon` or `supervisor`.
        name: The thread's name in /proc.
        is_main: Whether the process began with this thread.
    """
    if is_main:
        return (
            f"{process}, {'training thread' if process == 'worker' else 'main thread'}"
        )
    return f"{process}, {re.sub(r'[-_ ]*[0-9]+$', '', name)}"


def read_threads(processes: Mapping[int, str]) -> Reading:
    """Read the counters of all threads of some processes.

    Args:
        processes: `worker`, `daemon` or `supervisor`, by pid.
    """
    cpu_ns: dict[Thread, int] = {}
    kinds: dict[Thread, str] = {}
    for pid, process in processes.items():
        for folder in _threads_of(pid):
            with contextlib.suppress(OSError):  # the thread has ended
                name = (folder / "comm").read_text().strip()
                thread = pid, int(folder.name)
                if name == LOOKER:
                    continue
                cpu_ns[thread] = int((folder / "schedstat").read_text().split()[0])
                kinds[thread] = kind_of(process, name, is_main=pid == thread[1])
    return Reading(unix_s=time.time(), cpu_ns=cpu_ns, kinds=kinds)


def ms_by_kind(
    before: Reading, after: Reading, commits_unix_s: Sequence[float], num_ranks: int
) -> dict[str, float]:
    """Return CPU milliseconds per rank and iteration, by kind of thread and for `all`.

    Args:
        before: The first reading.
        after: The second reading. A thread that began between both readings counts from
            its start; a thread that ended does not count.
        commits_unix_s: Times of commits, from before the first reading to after the
            second one, in seconds since the epoch.
        num_ranks: The ranks of the job.

    Raises:
        ValueError: The readings do not lie between commits.
    """
    moments = before.unix_s, after.unix_s
    if not commits_unix_s[0] <= moments[0] < moments[1] <= commits_unix_s[-1]:
        wanted = f"wanted within {commits_unix_s[0]} to {commits_unix_s[-1]}"
        raise ValueError(f"readings: got {moments[0]} and {moments[1]}, {wanted}")
    begin, end = np.interp(moments, commits_unix_s, np.arange(len(commits_unix_s)))
    found: dict[str, float] = defaultdict(float)
    for thread, cpu_ns in after.cpu_ns.items():
        since_ns = cpu_ns - before.cpu_ns.get(thread, 0)
        ms = since_ns / 1e6 / (end - begin) / num_ranks
        found[after.kinds[thread]] += ms
        found[ALL] += ms
    return dict(found)


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of one value per round, with its interval."""
    return Mean(mean=statistics.fmean(values), half=half_interval(values))


def lines(found: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    """Return the measurements as a table.

    Args:
        found: CPU milliseconds by kind of thread, for each round of each job;
            `supervised` is the first job.
    """
    jobs = list(found)
    policies = jobs[1:]
    head = [*jobs, *(f"{name} less {SUPERVISED}" for name in policies)]
    rows = [f"| CPU ms a rank and iteration | {' | '.join(head)} |"]
    rows.append("| --- |" + " --- |" * len(head))
    for kind in _kinds(found):
        values = {name: [each.get(kind, 0.0) for each in found[name]] for name in jobs}
        cells = [mean_of(values[name]) for name in jobs]
        if max(cell.mean for cell in cells) < _LEAST_MS:
            continue
        for name in policies:
            pairs = zip(values[name], values[SUPERVISED], strict=True)
            cells.append(mean_of([one - other for one, other in pairs]))
        rows.append(f"| {kind} | {' | '.join(map(str, cells))} |")
    return rows


def _kinds(found: Mapping[str, Sequence[Mapping[str, float]]]) -> Sequence[str]:
    """Return the kinds of threads of all jobs, most CPU time first."""
    most: dict[str, float] = defaultdict(float)
    for rounds in found.values():
        for kinds in rounds:
            for kind, ms in kinds.items():
                most[kind] = max(most[kind], ms)
    return sorted(most, key=lambda kind: -most[kind])


def _threads_of(pid: int) -> Iterable[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:  # the process has ended
        return []


def _processes_of(job: Job) -> dict[int, str]:
    """Return the kind of each process of a job, by pid.

    torchrun is left out, because torchrun has no part in an iteration.
    """
    supervisors = set(children_of(job.agent_pid))
    workers = {worker.pid for worker in read_live(job.folder)}
    found = {}
    for pid in descendants_of(job.agent_pid):
        beside = "supervisor" if pid in supervisors else "daemon"
        found[pid] = "worker" if pid in workers else beside
    return found


def _measure_block(job: Job, num_iterations: int) -> dict[str, float]:
    """Let a stopped job train for so many iterations, and stop the job again.

    Returns:
        CPU milliseconds per rank and iteration, by kind of thread.
    """
    job.go_on()
    _wait_for_commits(job, 1)  # of the iteration in which the job was stopped
    before = read_threads(_processes_of(job))
    _wait_for_commits(job, num_iterations)
    after = read_threads(_processes_of(job))
    _wait_for_commits(job, 1)
    job.stop()
    return ms_by_kind(before, after, job.commits_unix_s(), RANKS)


def _wait_for_commits(job: Job, count: int) -> None:
    wanted = job.num_commits() + count
    while job.num_commits() < wanted:
        if job.has_ended:
            raise RuntimeError(
                f"{job.name}: got an end, wanted iterations: {job.last_words()}"
            )
        time.sleep(_POLL_S)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", action="append", metavar="CKPT[,SETTING=VALUE...]")
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each job")
    parser.add_argument(
        "--iterations", type=int, default=12, help="iterations of a block"
    )
    parser.add_argument(
        "--warm-s", type=float, default=20.0, help="before the first block"
    )
    parser.add_argument("--limit-s", type=float, default=300.0, help="for the start")
    options, overrides = parser.parse_known_args()
    policies = options.policy or [_POLICY]
    common = [*default_model(overrides), *overrides]
    jobs: list[Job] = []
    with tempfile.TemporaryDirectory() as folder, ended_at_exit(jobs):

        def start(name: str, script: str, policy: str) -> None:
            ckpt, *settings = policy.split(",")
            given = [f"+ckpt={ckpt}", *settings, *common]
            run, program = Path(folder) / str(len(jobs)), (_NAMES, script)
            jobs.append(Job(name, run, RANKS, given, on_gpu=False, script=program))

        start(SUPERVISED, WITHOUT_HOOKS[0], policies[0])
        for policy in policies:
            start(policy, TRAIN[0], policy)
        warm_up(jobs, warm_s=options.warm_s, limit_s=options.limit_s)
        found: dict[str, list[dict[str, float]]] = {job.name: [] for job in jobs}
        for number in range(options.rounds):
            for job in in_turn(jobs, number):
                found[job.name].append(_measure_block(job, options.iterations))
                ms = found[job.name][-1][ALL]
                print(
                    f"round {number + 1}, {job.name}: {ms:.1f} ms",
                    file=sys.stderr,
                    flush=True,
                )
    print("\n".join(lines(found)))
    print(f"\n{options.rounds} rounds. {hardware()}; commit {current_commit()}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
