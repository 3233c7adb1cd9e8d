"""Measure the price of checkpoint policies, with jobs that take turns on one machine.

On GPUs, or with `--cpu` on a machine without a GPU.

    python scripts/gpu/price.py --out DIR --policy moevement,ckpt.window=4
        --policy gemini [OVERRIDES]
    python scripts/gpu/price.py --out DIR --ranks 2
        --policy moevement,parallel.ranks_per_node=1

There is a job without checkpoints and a job for each policy. The jobs train in blocks
of time, in turn, while all other jobs are stopped (SIGSTOP). So all jobs meet the same
clocks, heat and neighbours. The time of an iteration is the time between two commits
that lie in one block. The output has a line of JSON for each policy: the ratio of its
iteration times to those without checkpoints, as geometric mean over rounds of blocks
with a 95 % interval; stalls; bytes.

`--policy none` is the control, whose interval must include 1. `--beside supervised`
compares with a job that has the supervisors, daemons and process groups of the first
policy, but no hooks (benchmarks/without_hooks.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.overhead import Ratio, ratio  # noqa: E402
from benchmarks.turns import (  # noqa: E402
    SUPERVISED,
    TRAIN,
    WITHOUT_HOOKS,
    Job,
    ended_at_exit,
    measure,
    of_kind,
)
from moe_ckpt.events import IterationCommitted, SnapshotTaken, WindowReplicated  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Price:
    """The price of a policy beside the same training without checkpoints."""

    policy: str
    """`ckpt` and its settings, as on the command line."""

    rounds: int
    """Number of rounds in which both jobs finished at least two iterations."""

    ratio: float
    """Time of an iteration relative to that without checkpoints.

    Geometric mean of the rounds.
    """

    low: float
    """Lower end of the ratio's 95 % interval."""

    high: float
    """Upper end of the ratio's 95 % interval."""

    ms_without: float
    """Milliseconds of an iteration without checkpoints, median of the rounds."""

    stall: float
    """Share of the time of the last 40 iterations that were stalls by checkpoints."""

    first_iterations_s: tuple[float, ...]
    """Time of each of the first iterations, which allocate buffers.

    In these iterations all jobs train at once.
    """

    first_stalls_s: tuple[float, ...]
    """Time of stalls by checkpoints in each of these iterations."""

    snapshot_gb: float
    """Size of a snapshot of rank 0 in gigabytes (1e9 bytes), median."""

    copy_gb_per_s: float
    """Rate of copies to host memory in gigabytes per second, median."""

    to_peers_gb: float
    """Windows of rank 0 that peers confirmed in the whole run, in gigabytes."""


def price_of(job: Job, beside: Job) -> Price:
    """Return the price of a job's policy.

    Args:
        job: The job with the policy.
        beside: The job to compare with.

    Raises:
        ValueError: Fewer than two rounds can be compared.
    """
    seconds, seconds_without = job.iteration_s(), beside.iteration_s()
    rounds = sorted(seconds.keys() & seconds_without.keys())
    if len(rounds) < 2:
        raise ValueError(
            f"{job.name}: got {len(rounds)} rounds with two iterations of both jobs,"
            " wanted 2 or more"
        )
    found: Ratio = ratio(
        [seconds[number] for number in rounds],
        [seconds_without[number] for number in rounds],
    )
    events = job.events()
    commits, snapshots = (
        of_kind(events, IterationCommitted),
        of_kind(events, SnapshotTaken),
    )
    last, first = commits[-40:], commits[:6]
    snapshot_bytes = [taken.size_bytes for taken in snapshots] or [0]
    bytes_per_s = [
        taken.size_bytes / taken.copy_s for taken in snapshots if taken.copy_s > 0
    ] or [0.0]
    to_peers_bytes = sum(each.size_bytes for each in of_kind(events, WindowReplicated))
    return Price(
        policy=job.name,
        rounds=len(rounds),
        ratio=round(found.mean, 4),
        low=round(found.low, 4),
        high=round(found.high, 4),
        ms_without=round(1e3 * statistics.median(seconds_without.values()), 1),
        stall=round(
            sum(each.stall_s for each in last) / sum(each.seconds for each in last), 4
        ),
        first_iterations_s=tuple(round(each.seconds, 2) for each in first),
        first_stalls_s=tuple(round(each.stall_s, 2) for each in first),
        snapshot_gb=round(statistics.median(snapshot_bytes) / 1e9, 4),
        copy_gb_per_s=round(statistics.median(bytes_per_s) / 1e9, 1),
        to_peers_gb=round(to_peers_bytes / 1e9, 4),
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the jobs")
    parser.add_argument(
        "--policy", action="append", required=True, metavar="CKPT[,SETTING=VALUE...]"
    )
    parser.add_argument(
        "--beside",
        choices=["none", SUPERVISED],
        default="none",
        help="the job to compare with",
    )
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each job")
    parser.add_argument("--cpu", action="store_true", help="without a GPU")
    parser.add_argument("--rounds", type=int, default=9, help="blocks of each job")
    parser.add_argument("--block-s", type=float, default=5.0, help="seconds of a block")
    parser.add_argument(
        "--warm-s",
        type=float,
        default=25.0,
        help="seconds after the first iterations, before blocks",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=240.0,
        help="seconds after which no round begins",
    )
    options, overrides = parser.parse_known_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    jobs: list[Job] = []

    def start(name: str, given: str, script: Sequence[str] = TRAIN) -> None:
        policy, *settings = given.split(",")
        folder = options.out.resolve() / f"{len(jobs)}-{name.partition(',')[0]}"
        words = [f"+ckpt={policy}", *overrides, *settings]
        jobs.append(
            Job(
                name,
                folder,
                options.ranks,
                words,
                on_gpu=not options.cpu,
                script=script,
            )
        )

    with ended_at_exit(jobs):
        if options.beside == SUPERVISED:
            start(SUPERVISED, options.policy[0], WITHOUT_HOOKS)
        else:
            start("none", "none")
        for given in options.policy:
            start(given, given)
        limits: dict[str, Any] = {
            "block_s": options.block_s,
            "warm_s": options.warm_s,
            "limit_s": options.limit_s,
        }
        measure(jobs, num_rounds=options.rounds, **limits)
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
