"""The price of checkpoint policies beside training: jobs that take turns on one machine.

    python scripts/gpu/price.py --out DIR --policy moevement,ckpt.window=4 --policy gemini [OVERRIDES]
    python scripts/gpu/price.py --out DIR --ranks 2 --policy moevement,parallel.ranks_per_node=1

A job without checkpoints and a job for each policy train at the same time, and all but one
are stopped (SIGSTOP), block by block in turn: all jobs meet the same clocks, heat and
neighbours. The time of an iteration is that from one commit to the next, where both lie
in a block. A line of JSON for each policy: the geometric mean of its iterations beside
those without checkpoints, over rounds of blocks, with its 95 % interval; stalls; bytes.
`--policy none` is the control, whose interval must include 1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.overhead import QUIET, Ratio, ratio  # noqa: E402
from launcher.overrides import last_values  # noqa: E402
from moe_ckpt.events import IterationCommitted, LoggedEvent, SnapshotTaken, WindowReplicated, read_events  # noqa: E402
from moe_ckpt.linux import descendants_of  # noqa: E402
from moe_ckpt.run_folder import read_run_folder  # noqa: E402

_FIRST_COMMITS = 3
_FEWEST_COMMITS = 3  # between them lie two whole iterations
_POLL_S = 0.2
_END_S = 3.0  # less than `timeout -k 5` leaves
_NO_END = 1_000_000
# a stopped job sends no heartbeat and commits nothing, and neither is a fault
_PATIENT = {"heartbeat_s": 600, "progress_s": 1200, "operation_s": 2400, "join_s": 3600, "stop_save_s": 0}

Kind = TypeVar("Kind", bound=object)


@dataclass(frozen=True, kw_only=True)
class Block:
    """The seconds, since the epoch, for which one job trained alone in a round."""

    round_number: int
    from_unix_s: float
    to_unix_s: float


@dataclass(frozen=True, kw_only=True)
class Price:
    """The price of a policy beside the same training without checkpoints."""

    policy: str
    """`ckpt` and its settings, as given."""
    rounds: int
    """Rounds in which both jobs finished at least two iterations."""
    ratio: float
    """Time of an iteration beside that without checkpoints, geometric mean of the rounds."""
    low: float
    """Lower end of the ratio's 95 % interval."""
    high: float
    """Upper end of the ratio's 95 % interval."""
    ms_without: float
    """Milliseconds of an iteration without checkpoints, median of the rounds."""
    stall: float
    """Share of the last 40 iterations for which checkpoints stopped training."""
    first_iterations_s: tuple[float, ...]
    """Seconds of the first iterations, which make buffers; all jobs train at once there."""
    first_stalls_s: tuple[float, ...]
    """Seconds for which checkpoints stopped training in these iterations."""
    snapshot_gb: float
    """Gigabytes (1e9) of a snapshot of rank 0, median."""
    copy_gb_per_s: float
    """Gigabytes a second of copies to host memory, median."""
    to_peers_gb: float
    """Gigabytes of rank 0's windows that peers have confirmed, in the whole run."""


class Job:
    """A job of torchrun that can be stopped for a while."""

    def __init__(self, name: str, folder: Path, num_ranks: int, settings: Sequence[str], *, on_gpu: bool) -> None:
        self.name = name
        self.folder = folder
        self.log = folder.with_suffix(".log")
        self.blocks: list[Block] = []
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
            *(f"--nproc-per-node={num_ranks}", "launcher/train.py", f"run.dir={folder}"),
            *last_values([f"train.iterations={_NO_END}", *QUIET, *settings]),
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
        return len(_of(self.events(), IterationCommitted))

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def train_alone(self, round_number: int, block_s: float, until_s: float) -> None:
        """Train for a block, in which some iterations are committed; the job is stopped before and afterwards.

        Args:
            round_number: Number of the round.
            block_s: Seconds of the block, or more where iterations take longer.
            until_s: Monotonic time at which the block ends in any case.
        """
        wanted = self.num_commits() + _FEWEST_COMMITS
        from_unix_s = time.time()
        self.go_on()
        time.sleep(block_s)
        while self.num_commits() < wanted and not self.has_ended and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        self.blocks.append(Block(round_number=round_number, from_unix_s=from_unix_s, to_unix_s=time.time()))
        self.stop()

    def iteration_s(self) -> dict[int, float]:
        """Return the mean time of an iteration by round, as `iteration_s_of` does."""
        origin = read_run_folder(self.folder).clock_origin_unix_s
        commits = [each.t_s + origin for each in self.events() if isinstance(each.event, IterationCommitted)]
        return iteration_s_of(commits, self.blocks)

    def kill(self) -> list[int]:
        """Kill the agent, with which all processes of the job end; return their pids."""
        self.go_on()
        pids = descendants_of(self._agent.pid)
        self._agent.kill()
        self._agent.wait()
        return pids

    def _signal(self, number: int) -> None:
        # not to the agent, which hosts the store: a silent store is a fault
        for pid in descendants_of(self._agent.pid):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def iteration_s_of(commits_unix_s: Sequence[float], blocks: Sequence[Block]) -> dict[int, float]:
    """Return the mean seconds of an iteration by round.

    Args:
        commits_unix_s: Seconds since the epoch at which iterations were committed, in order.
        blocks: When the job was not stopped.

    Returns:
        Means over iterations that lie wholly in a block, of rounds with at least two.
    """
    found: dict[int, float] = {}
    for block in blocks:
        inside = [at for at in commits_unix_s if block.from_unix_s <= at <= block.to_unix_s]
        seconds = [after - before for before, after in itertools.pairwise(inside)]
        if len(seconds) >= 2:
            found[block.round_number] = statistics.fmean(seconds)
    return found


def measure(jobs: Sequence[Job], *, num_rounds: int, block_s: float, warm_s: float, limit_s: float) -> None:
    """Let jobs train together until all are warm, then one after another in blocks.

    Raises:
        RuntimeError: A job has ended, or has not begun to train within the limit.
    """
    begun_s = time.monotonic()
    while min(job.num_commits() for job in jobs) < _FIRST_COMMITS:
        ended = [job for job in jobs if job.has_ended]
        if ended:
            raise RuntimeError(f"{ended[0].name}: got an end, wanted iterations: {ended[0].last_words()}")
        if time.monotonic() - begun_s > limit_s:
            counts = {job.name: job.num_commits() for job in jobs}
            raise RuntimeError(f"iterations after {limit_s:g} s: got {counts}, wanted {_FIRST_COMMITS} of each job")
        time.sleep(_POLL_S)
    time.sleep(warm_s)
    for job in jobs:
        job.stop()
    for number in range(num_rounds):
        if time.monotonic() - begun_s + len(jobs) * block_s > limit_s:
            break
        shift = number % len(jobs)
        for job in (*jobs[shift:], *jobs[:shift]):
            job.train_alone(number, block_s, begun_s + limit_s)


def end(jobs: Sequence[Job]) -> None:
    """Kill jobs, and wait until their processes have given memory back, for some seconds at most."""
    pids = [pid for job in jobs for pid in job.kill()]
    end_s = time.monotonic() + _END_S
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            select.select([fd], [], [], max(0.0, end_s - time.monotonic()))
            os.close(fd)


def price_of(job: Job, beside: Job) -> Price:
    """Return the price of a job's policy. Raises ValueError if too few rounds can be compared."""
    seconds, seconds_without = job.iteration_s(), beside.iteration_s()
    rounds = sorted(seconds.keys() & seconds_without.keys())
    if len(rounds) < 2:
        raise ValueError(f"{job.name}: got {len(rounds)} rounds with two iterations of both jobs, wanted 2 or more")
    found: Ratio = ratio([seconds[number] for number in rounds], [seconds_without[number] for number in rounds])
    events = job.events()
    commits, snapshots = _of(events, IterationCommitted), _of(events, SnapshotTaken)
    last, first = commits[-40:], commits[:6]
    snapshot_bytes = [taken.size_bytes for taken in snapshots] or [0]
    bytes_per_s = [taken.size_bytes / taken.copy_s for taken in snapshots if taken.copy_s > 0] or [0.0]
    to_peers_bytes = sum(each.size_bytes for each in _of(events, WindowReplicated))
    return Price(
        policy=job.name,
        rounds=len(rounds),
        ratio=round(found.mean, 4),
        low=round(found.low, 4),
        high=round(found.high, 4),
        ms_without=round(1e3 * statistics.median(seconds_without.values()), 1),
        stall=round(sum(each.stall_s for each in last) / sum(each.seconds for each in last), 4),
        first_iterations_s=tuple(round(each.seconds, 2) for each in first),
        first_stalls_s=tuple(round(each.stall_s, 2) for each in first),
        snapshot_gb=round(statistics.median(snapshot_bytes) / 1e9, 4),
        copy_gb_per_s=round(statistics.median(bytes_per_s) / 1e9, 1),
        to_peers_gb=round(to_peers_bytes / 1e9, 4),
    )


def _of(events: Sequence[LoggedEvent], kind: type[Kind]) -> list[Kind]:
    return [each.event for each in events if isinstance(each.event, kind)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the jobs")
    parser.add_argument("--policy", action="append", required=True, metavar="CKPT[,SETTING=VALUE...]")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each job")
    parser.add_argument("--cpu", action="store_true", help="without a GPU")
    parser.add_argument("--rounds", type=int, default=9, help="blocks of each job")
    parser.add_argument("--block-s", type=float, default=5.0, help="seconds of a block")
    parser.add_argument("--warm-s", type=float, default=25.0, help="seconds after the first iterations, before blocks")
    parser.add_argument("--limit-s", type=float, default=240.0, help="seconds after which no round begins")
    options, overrides = parser.parse_known_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    patient = [f"runtime.{name}={value}" for name, value in _PATIENT.items()]
    jobs: list[Job] = []

    def start(name: str, policy: str, *settings: str) -> None:
        folder = options.out.resolve() / f"{len(jobs)}-{policy}"
        given = [f"+ckpt={policy}", *patient, *overrides, *settings]
        jobs.append(Job(name, folder, options.ranks, given, on_gpu=not options.cpu))

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit("SIGTERM: jobs end, too")

    signal.signal(signal.SIGTERM, leave)
    try:
        start("none", "none")
        for given in options.policy:
            policy, *settings = given.split(",")
            start(given, policy, *settings)
        limits: dict[str, Any] = {"block_s": options.block_s, "warm_s": options.warm_s, "limit_s": options.limit_s}
        measure(jobs, num_rounds=options.rounds, **limits)
    finally:
        end(jobs)
    status = 0
    for job in jobs[1:]:
        try:
            print(json.dumps(asdict(price_of(job, jobs[0]))), flush=True)
        except ValueError as error:
            print(f"error: {error}", flush=True)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
