"""Time from `kill -9` of a rank to the next new iteration, beside torchrun's restart.

    python benchmarks/recovery.py [--kills 10] [--mtbf-s 15]
        [OVERRIDES]    # model=tiny, 4 ranks, PP=2 EP=2

The job with ckpt=moevement recovers; torchrun restarts the job with ckpt=dense. Both
jobs train the same model on this machine, one after the other, and lose a random rank
again and again. Printed: the median of each phase, and the ratio of the jobs.
`--mtbf-s` sets `ckpt.mtbf_s` of the first job, from which `window=auto` chooses: about
the seconds between kills. Absolute times mean little on a laptop; ratios are
meaningful.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_ckpt.elastic.live_workers import read_live  # noqa: E402
from moe_ckpt.events import (  # noqa: E402
    Event,
    IterationCommitted,
    ModelBuilt,
    Rejoined,
    WorkerStarted,
    read_events,
)

RANKS = 4
WARM_ITERATIONS = 6
NEW_ITERATIONS_BETWEEN_KILLS = 4
PATIENCE_S = 300.0

console = Console(highlight=False)


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Phases of a recovery, each of the slowest rank."""

    detect_s: float
    """Time until the fault is detected, in seconds."""

    rebuild_s: float
    """Time from detection until all ranks are together again, in seconds."""

    build_s: float
    """Part of `rebuild_s` in which the replacement builds its model."""

    fetch_s: float
    """Time to fetch windows from other ranks' memories, in seconds."""

    replay_s: float
    """Time of loading and replay, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """The recovery from one kill."""

    phases: Phases | None
    """Phases of the recovery; None if the job was started again."""

    committed_s: float
    """Time from the kill to the next new iteration, in seconds."""

    iteration_s: float
    """Median time of the new iterations that follow, in seconds."""

    repeated_iters: int
    """Iterations that the killed rank ran again."""


class Job:
    """A running job and its events.

    Args:
        folder: The run folder; the log is beside the folder.
        arguments: Arguments of torchrun: options, the script and its settings.
    """

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.folder = folder
        self._log = folder.with_suffix(".log").open("w")
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        command = [
            torchrun,
            f"--nproc-per-node={RANKS}",
            *arguments,
            f"run.dir={folder}",
            "run.progress=none",
        ]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=self._log, stderr=subprocess.STDOUT
        )

    def events(self, rank: int) -> Iterator[tuple[float, Event]]:
        """Yield a rank's events, each with its time in Unix seconds."""
        origin = json.loads((self.folder / "run.json").read_text())[
            "clock_origin_unix_s"
        ]
        path = self.folder / "events" / f"rank{rank:04d}.jsonl"
        for logged in read_events(path) if path.exists() else ():
            yield origin + logged.t_s, logged.event

    def committed(self) -> list[tuple[float, int]]:
        """Return the first commit of each iteration on any rank, by iteration.

        Returns:
            Pairs of the time in Unix seconds and the iteration.
        """
        if not (self.folder / "run.json").exists():
            return []
        everywhere = [
            (event.iteration, when)
            for rank in range(RANKS)
            for when, event in self.events(rank)
            if isinstance(event, IterationCommitted)
        ]
        first = {}
        for iteration, when in sorted(everywhere):
            first.setdefault(iteration, when)
        return [(when, iteration) for iteration, when in sorted(first.items())]

    def wait_for(self, is_there: Callable[[], bool], what: str) -> None:
        """Wait for a state of the job's files. A failure ends this process.

        Args:
            is_there: Returns whether the state is reached.
            what: The name of the state, for the message.
        """
        until_s = time.monotonic() + PATIENCE_S
        while not is_there():
            if self._process.poll() is not None or time.monotonic() > until_s:
                sys.exit(
                    f"{self.folder.name}: no"
                    f" {what}\n{self.folder.with_suffix('.log').read_text()[-4000:]}"
                )
            time.sleep(0.05)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        self._log.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument(
        "--mtbf-s",
        type=float,
        help="the first job's ckpt.mtbf_s; default: the policy's",
    )
    parser.add_argument("--seed", type=int, default=0)
    options, overrides = parser.parse_known_args()
    common = [
        "train.iterations=100000",
        "train.eval_every_iters=0",
        "run.tensorboard=false",
        *overrides,
    ]
    told = [f"ckpt.mtbf_s={options.mtbf_s}"] if options.mtbf_s is not None else []
    with tempfile.TemporaryDirectory() as folder:
        moevement = ["launcher/train.py", "+ckpt=moevement", *told, *common]
        elastic = measure(
            Job(Path(folder) / "moevement", moevement), options.kills, options.seed
        )
        restarts = [
            f"--max-restarts={options.kills}",
            "launcher/train.py",
            "+ckpt=dense",
            "ckpt.every_iters=10",
            *common,
        ]
        restarted = measure(
            Job(Path(folder) / "dense", restarts),
            max(3, options.kills // 3),
            options.seed,
        )
    show(elastic, restarted)
    return 0


def measure(job: Job, kills: int, seed: int) -> list[Recovered]:
    """Kill a random rank again and again, and stop the job.

    Args:
        job: The running job.
        kills: The number of kills.
        seed: The seed of the choice of ranks.

    Returns:
        The recovery from each kill.
    """
    chosen = random.Random(seed)
    try:
        job.wait_for(
            lambda: len(job.committed()) >= WARM_ITERATIONS, "first iterations"
        )
        return [kill_once(job, chosen) for _ in range(kills)]
    finally:
        job.stop()


def kill_once(job: Job, chosen: random.Random) -> Recovered:
    before = job.committed()[-1][1]
    pid, rank = victim(job, chosen)
    killed_unix_s = time.time()
    subprocess.run(["kill", "-9", str(pid)], check=True)
    job.wait_for(
        lambda: len(job.committed()) > 0 and job.committed()[-1][1] > before + 1,
        "recovery",
    )
    committed = next(
        when
        for when, iteration in job.committed()
        if iteration > before and when > killed_unix_s
    )
    wanted = before + 1 + NEW_ITERATIONS_BETWEEN_KILLS
    job.wait_for(lambda: job.committed()[-1][1] >= wanted, "new iterations")
    times = [
        when for when, iteration in job.committed() if before < iteration <= wanted
    ]
    again = [event for when, event in job.events(rank) if when > killed_unix_s]
    repeated = sum(
        isinstance(event, IterationCommitted) and event.iteration <= before
        for event in again
    )
    executed = sum(
        event.executed_iters for event in again if isinstance(event, Rejoined)
    )
    return Recovered(
        phases=phases_of(job, killed_unix_s, again),
        committed_s=committed - killed_unix_s,
        iteration_s=statistics.median(end - start for start, end in pairwise(times)),
        repeated_iters=repeated + executed,
    )


def victim(job: Job, chosen: random.Random) -> tuple[int, int]:
    """Return the pid of a random rank's process, and the rank."""
    rank = chosen.randrange(RANKS)
    live = {worker.global_rank: worker.pid for worker in read_live(job.folder)}
    started = [
        event.pid for _, event in job.events(rank) if isinstance(event, WorkerStarted)
    ]
    return live.get(rank, started[-1]), rank


def phases_of(
    job: Job, killed_unix_s: float, replacement: Sequence[Event]
) -> Phases | None:
    """Return the phases of a recovery; None if the job was started again.

    Args:
        job: The job.
        killed_unix_s: Time of the kill, in Unix seconds.
        replacement: Events of the killed rank since the kill.
    """
    rejoined = [
        event
        for rank in range(RANKS)
        for when, event in job.events(rank)
        if isinstance(event, Rejoined) and when > killed_unix_s
    ]
    if not rejoined:
        return None
    return Phases(
        detect_s=max(event.detect_s for event in rejoined),
        rebuild_s=max(event.rebuild_s for event in rejoined),
        build_s=next(
            event.seconds for event in replacement if isinstance(event, ModelBuilt)
        ),
        fetch_s=max(event.fetch_s for event in rejoined),
        replay_s=max(event.replay_s for event in rejoined),
    )


def show(elastic: Sequence[Recovered], restarted: Sequence[Recovered]) -> None:
    table = Table(
        "median (least to most)",
        f"moevement, {len(elastic)} kills",
        f"dense, {len(restarted)} restarts",
    )
    phases = [recovered.phases for recovered in elastic if recovered.phases is not None]
    parts = {
        "detection, s": [each.detect_s for each in phases],
        "until all ranks are together again, s": [each.rebuild_s for each in phases],
        "of these, building the model": [each.build_s for each in phases],
        "windows out of other ranks' memories, s": [each.fetch_s for each in phases],
        "loading and replay, s": [each.replay_s for each in phases],
    }
    for name, seconds in parts.items():
        table.add_row(name, summary(seconds), "-")
    both = elastic, restarted
    committed = [[recovered.committed_s for recovered in found] for found in both]
    table.add_row("kill to the next new iteration, s", *map(summary, committed))
    table.add_row(
        "an iteration, s",
        *(summary([each.iteration_s for each in found]) for found in both),
    )
    again = [[float(recovered.repeated_iters) for recovered in found] for found in both]
    table.add_row("iterations run again, on the killed rank", *map(summary, again))
    console.print(table)
    iteration_s = statistics.median(each.iteration_s for each in elastic)
    beside_detection_s = statistics.median(committed[0]) - statistics.median(
        parts["detection, s"]
    )
    console.print(
        "kill to the next new iteration beside detection:"
        f" {beside_detection_s / iteration_s:.2f} iterations"
    )
    ratio = statistics.median(committed[1]) / statistics.median(committed[0])
    console.print(f"torchrun's restart takes {ratio:.1f} times as long")


def summary(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
