"""Jobs that take turns on one machine, block by block.

In each block all jobs but one are stopped (SIGSTOP), so all jobs meet the same clocks,
heat and neighbours. Must not: compute prices.

    jobs     none       |####....####....|
             moevement  |....####....####|    a block: some iterations of one job
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.overhead import QUIET
from launcher.overrides import last_values
from moe_ckpt.events import IterationCommitted, LoggedEvent, read_events
from moe_ckpt.linux import descendants_of
from moe_ckpt.run_folder import read_run_folder

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ("launcher/train.py",)
WITHOUT_HOOKS = ("benchmarks/without_hooks.py",)
SUPERVISED = "supervised"  # the name of a job without hooks
_FIRST_COMMITS = 3
_FEWEST_COMMITS = 3  # two whole iterations lie between three commits
_POLL_S = 0.2
_END_S = 3.0  # less than the time that `timeout -k 5` leaves
_NO_END = 1_000_000
# a stopped job sends no heartbeat and commits nothing, which must not be a fault
_PATIENT = {
    "heartbeat_s": 600,
    "progress_s": 1200,
    "operation_s": 2400,
    "join_s": 3600,
    "stop_save_s": 0,
}

Kind = TypeVar("Kind", bound=object)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A time in which one job trained alone."""

    round_number: int
    """Number of the round."""

    from_unix_s: float
    """Begin of the block, in seconds since the epoch."""

    to_unix_s: float
    """End of the block, in seconds since the epoch."""


class Job:
    """A job of torchrun that can be stopped for a while.

    Args:
        name: The name for messages and tables.
        folder: The run folder; the log is beside the folder.
        num_ranks: The ranks, all on this machine.
        settings: Settings of the launcher.
        on_gpu: Whether the job may see a GPU.
        script: The program of each rank, and arguments before the settings.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        num_ranks: int,
        settings: Sequence[str],
        *,
        on_gpu: bool,
        script: Sequence[str] = TRAIN,
    ) -> None:
        self.name = name
        self.folder = folder
        self.log = folder.with_suffix(".log")
        self.blocks: list[Block] = []
        patient = [f"runtime.{setting}={value}" for setting, value in _PATIENT.items()]
        command = [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--local-addr=127.0.0.1",
            ),
            *(f"--nproc-per-node={num_ranks}", *script, f"run.dir={folder}"),
            *last_values([f"train.iterations={_NO_END}", *QUIET, *patient, *settings]),
        ]
        hidden = {} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
        with self.log.open("w") as said:
            self._agent = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **hidden},
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    @property
    def agent_pid(self) -> int:
        """Pid of torchrun's process."""
        return self._agent.pid

    @property
    def has_ended(self) -> bool:
        return self._agent.poll() is not None

    def events(self) -> list[LoggedEvent]:
        path = self.folder / "events" / "rank0000.jsonl"
        return list(read_events(path)) if path.exists() else []

    def last_words(self) -> str:
        """Return the first error that the job has printed, or its last line."""
        lines = self.log.read_text().splitlines() or ["nothing was printed"]
        return next((line for line in lines if line.startswith("error:")), lines[-1])

    def num_commits(self) -> int:
        return len(of_kind(self.events(), IterationCommitted))

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def train_alone(self, round_number: int, block_s: float, until_s: float) -> None:
        """Let the stopped job train for a block, and stop the job again.

        A block has at least `_FEWEST_COMMITS` commits, unless the time is over.

        Args:
            round_number: The number of the round.
            block_s: The seconds of the block; longer if the iterations take longer.
            until_s: The monotonic time at which the block ends in any case.
        """
        wanted = self.num_commits() + _FEWEST_COMMITS
        from_unix_s = time.time()
        self.go_on()
        time.sleep(block_s)
        while (
            self.num_commits() < wanted
            and not self.has_ended
            and time.monotonic() < until_s
        ):
            time.sleep(_POLL_S)
        self.blocks.append(
            Block(
                round_number=round_number,
                from_unix_s=from_unix_s,
                to_unix_s=time.time(),
            )
        )
        self.stop()

    def iteration_s(self) -> dict[int, float]:
        """Return the mean seconds of an iteration by round, from all blocks."""
        return iteration_s_of(self.commits_unix_s(), self.blocks)

    def commits_unix_s(self) -> list[float]:
        """Return the times of rank 0's commits, in seconds since the epoch."""
        origin = read_run_folder(self.folder).clock_origin_unix_s
        return [
            each.t_s + origin
            for each in self.events()
            if isinstance(each.event, IterationCommitted)
        ]

    def kill(self) -> list[int]:
        """Kill the agent, with which all processes of the job end.

        Returns:
            The pids of these processes.
        """
        self.go_on()
        pids = descendants_of(self._agent.pid)
        self._agent.kill()
        self._agent.wait()
        return pids

    def _signal(self, number: int) -> None:
        # the agent goes on: the agent hosts the store, and a silent store is a fault
        for pid in descendants_of(self._agent.pid):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def iteration_s_of(
    commits_unix_s: Sequence[float], blocks: Sequence[Block]
) -> dict[int, float]:
    """Return the mean seconds of an iteration by round.

    Args:
        commits_unix_s: Times of commits in order, in seconds since the epoch.
        blocks: The times in which the job was not stopped.

    Returns:
        Means over iterations that lie wholly in a block, for rounds with at least two.
    """
    found: dict[int, float] = {}
    for block in blocks:
        inside = [
            at for at in commits_unix_s if block.from_unix_s <= at <= block.to_unix_s
        ]
        seconds = [after - before for before, after in itertools.pairwise(inside)]
        if len(seconds) >= 2:
            found[block.round_number] = statistics.fmean(seconds)
    return found


def measure(
    jobs: Sequence[Job],
    *,
    num_rounds: int,
    block_s: float,
    warm_s: float,
    limit_s: float,
) -> None:
    """Let jobs train together until all are warm, then one after another in blocks.

    Args:
        jobs: The running jobs.
        num_rounds: The most rounds; a round that would exceed the limit does not begin.
        block_s: The seconds of a block.
        warm_s: The seconds from the first iterations to the first block.
        limit_s: The limit for everything, in seconds.

    Raises:
        RuntimeError: A job has ended, or has not begun to train within the limit.
    """
    begun_s = time.monotonic()
    warm_up(jobs, warm_s=warm_s, limit_s=limit_s)
    for number in range(num_rounds):
        if time.monotonic() - begun_s + len(jobs) * block_s > limit_s:
            break
        for job in in_turn(jobs, number):
            job.train_alone(number, block_s, begun_s + limit_s)


def warm_up(jobs: Sequence[Job], *, warm_s: float, limit_s: float) -> None:
    """Let jobs train together for a while after their first iterations, and stop them.

    Args:
        jobs: The running jobs.
        warm_s: The seconds to train after the first iterations.
        limit_s: The limit for the first iterations, in seconds.

    Raises:
        RuntimeError: A job has ended, or has not begun to train within the limit.
    """
    begun_s = time.monotonic()
    while min(job.num_commits() for job in jobs) < _FIRST_COMMITS:
        ended = [job for job in jobs if job.has_ended]
        if ended:
            raise RuntimeError(
                f"{ended[0].name}: got an end, wanted iterations:"
                f" {ended[0].last_words()}"
            )
        if time.monotonic() - begun_s > limit_s:
            counts = {job.name: job.num_commits() for job in jobs}
            raise RuntimeError(
                f"iterations after {limit_s:g} s: got {counts}, wanted {_FIRST_COMMITS}"
                " of each job"
            )
        time.sleep(_POLL_S)
    time.sleep(warm_s)
    for job in jobs:
        job.stop()


def in_turn(jobs: Sequence[Job], round_number: int) -> Sequence[Job]:
    """Return the jobs in the order of a round.

    Each round begins with another job than the round before.
    """
    shift = round_number % len(jobs)
    return (*jobs[shift:], *jobs[:shift])


@contextlib.contextmanager
def ended_at_exit(jobs: Sequence[Job]) -> Iterator[None]:
    """End jobs after the block of `with`, and at SIGTERM.

    Args:
        jobs: The jobs; jobs that are added in the block end, too.
    """

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit("SIGTERM: jobs end, too")

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        end(jobs)


def end(jobs: Sequence[Job]) -> None:
    """Kill jobs, and wait until their processes have given memory back.

    Waits for `_END_S` at most.
    """
    pids = [pid for job in jobs for pid in job.kill()]
    end_s = time.monotonic() + _END_S
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            select.select([fd], [], [], max(0.0, end_s - time.monotonic()))
            os.close(fd)


def of_kind(events: Sequence[LoggedEvent], kind: type[Kind]) -> list[Kind]:
    """Return the events of a kind."""
    return [each.event for each in events if isinstance(each.event, kind)]
