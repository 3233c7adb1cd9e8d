"""The price of a checkpoint policy without faults, by whole runs in interleaved order.

    python benchmarks/overhead.py [--rounds 8] [--iterations 52] [--skip 12]
        [--within 0.02] [--json FILE] [--variant NAME=OVERRIDE,...] [OVERRIDES]

Unless overridden: model=small, 4 ranks. Each round runs every variant once, from start
to end. The order is turned by one from round to round, so that no variant always
follows the same other variant. Variants: `plain` (ckpt=none, no supervisor),
`supervised` (supervisors and replica daemons, hooks that do nothing) and the given
variants; without a given variant, `policy` (+ckpt=moevement).

The time of an iteration is the time from one commit to the next on rank 0. All work of
checkpointing is in this time, wherever the work is done. Each variant has a row: the
geometric mean over rounds of the mean iteration time beside `plain` and beside
`supervised`, with 95 % intervals (Student's t of the logarithms); the stall; bytes.
Rounds end early once all intervals are within `--within`. Absolute times mean nothing
on a laptop.

`supervised` is the baseline for the price of a policy. `plain` hides a part of the
price: with gloo each of torch's groups has connections and threads of its own, while
handles of the same ranks share an inner group (`ElasticGroups(shares=True)`). Sharing
saves some 20 ms of CPU per rank and iteration on two cores. Plain jobs have no handles,
so nothing in a plain job could share. With groups of handles, `plain` would be
`supervised` without its supervisors.

Where a difference of 1 % matters, let jobs take turns; here with a slot and its copies
in each iteration:

    python scripts/gpu/price.py --cpu --out DIR --beside supervised --ranks 4 \\
        --rounds 30 model=tiny \\
        --policy moevement,ckpt.window=4,parallel.ranks_per_node=1

benchmarks/iteration_cpu.py measures CPU time by thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.runs import default_model  # noqa: E402
from moe_ckpt.events import (  # noqa: E402
    CheckpointSaved,
    Event,
    GradientsSent,
    HostMemoryUsed,
    IntervalChosen,
    IterationCommitted,
    ServersWorked,
    SnapshotTaken,
    WindowChosen,
    WindowPersisted,
    WindowReplicated,
    read_events,
)

RANKS = 4
PLAIN, GUARDED = "plain", "supervised"
QUIET = (
    "run.progress=none",
    "run.tensorboard=false",
    "train.eval_every_iters=0",
    "train.eval_batches=1",
)
_MIB = 1 << 20
# Student's t, 97.5 %, by degrees of freedom from 1; beyond the end the last counts
_STUDENT = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Measurements of rank 0 after the skipped iterations.

    Bytes are bytes of this rank; all but `host_bytes` are per iteration.
    """

    iteration_s: float
    """Mean time of an iteration, in seconds."""

    stall: float
    """Share of the iteration time that checkpointing took from training."""

    window: int | None
    """Slots of the last window; None without windows."""

    pause_iters: int | None
    """Iterations without snapshots after that window."""

    every_iters: int | None
    """Iterations from one snapshot to the next; None without intervals."""

    memory_bytes: float
    """Bytes of snapshots and gradients that were copied to host memory."""

    peer_bytes: float
    """Bytes of windows and gradients that a peer or server received."""

    disk_bytes: float
    """Bytes of checkpoints and windows that were written to disk."""

    host_bytes: int
    """Most allocated host memory of the whole run, skipped iterations included."""

    server_s: float | None
    """Mean work of the slowest checkpoint server for an iteration, in seconds.

    None without servers.
    """

    server_deadline_s: float | None
    """Mean deadline of that work: the time of an iteration, in seconds.

    None without servers.
    """


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A geometric mean over rounds with its 95 % interval.

    The interval is infinitely wide after one round.
    """

    mean: float
    """Geometric mean."""

    low: float
    """Lower end of the interval."""

    high: float
    """Upper end of the interval."""

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def student(degrees_of_freedom: int) -> float:
    """Return Student's t for a two-sided 95 % interval."""
    return _STUDENT[min(degrees_of_freedom, len(_STUDENT)) - 1]


def half_interval(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of a mean (Student's t).

    Infinite for one value.
    """
    if len(values) < 2:
        return math.inf
    return student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def ratio(seconds: Sequence[float], beside: Sequence[float]) -> Ratio:
    """Return how much longer iterations of one variant take than those of another.

    Args:
        seconds: Iteration times of the one variant, by round.
        beside: Iteration times of the other variant, by round.
    """
    logs = [math.log(one / other) for one, other in zip(seconds, beside, strict=True)]
    mean, half = statistics.mean(logs), half_interval(logs)
    return Ratio(
        mean=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half)
    )


def measure(folder: Path, skip: int) -> Run:
    """Return the measurements of a finished run.

    Args:
        folder: The run folder.
        skip: The iterations at the start that do not count.
    """
    logged = list(read_events(folder / "events" / "rank0000.jsonl"))
    commits = [
        (each.t_s, each.event)
        for each in logged
        if isinstance(each.event, IterationCommitted)
    ]
    times = [t_s for t_s, event in commits if event.iteration >= skip]
    since = commits[skip - 1][0]
    counted = [event for _, event in commits if event.iteration > skip]
    later = [each.event for each in logged if each.t_s > since]
    number = len(counted)
    windows, intervals = _of(later, WindowChosen), _of(later, IntervalChosen)
    sizes = {taken.window_start: 0 for taken in _of(later, SnapshotTaken)}
    for taken in _of(later, SnapshotTaken):
        sizes[taken.window_start] += taken.size_bytes
    durable_bytes = (
        sum(saved.size_bytes for saved in _of(later, CheckpointSaved)) / RANKS
    )
    disk_bytes = durable_bytes + sum(
        sizes.get(each.window_start, 0) for each in _of(later, WindowPersisted)
    )
    memory = _of([each.event for each in logged], HostMemoryUsed)
    works = _of(later, ServersWorked)
    gradient_bytes = sum(sent.size_bytes for sent in _of(later, GradientsSent))
    return Run(
        iteration_s=statistics.fmean(
            after - before for before, after in itertools.pairwise(times)
        ),
        stall=sum(event.stall_s for event in counted)
        / sum(event.seconds for event in counted),
        window=windows[-1].num_slots if windows else None,
        pause_iters=windows[-1].pause_iters if windows else None,
        every_iters=intervals[-1].every_iters if intervals else None,
        memory_bytes=(sum(sizes.values()) + gradient_bytes) / number,
        peer_bytes=(
            sum(each.size_bytes for each in _of(later, WindowReplicated))
            + gradient_bytes
        )
        / number,
        disk_bytes=disk_bytes / number,
        host_bytes=max((each.allocated_bytes for each in memory), default=0),
        server_s=statistics.fmean(work.busy_s for work in works) if works else None,
        server_deadline_s=statistics.fmean(work.iteration_s for work in works)
        if works
        else None,
    )


def run_once(arguments: Sequence[str], folder: Path, skip: int) -> Run:
    """Train to the end, and measure. A failure ends this process.

    Args:
        arguments: Arguments of torchrun: the script and its settings.
        folder: The run folder; the log is beside the folder.
        skip: The iterations at the start that do not count.
    """
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [
        torchrun,
        "--standalone",
        f"--nproc-per-node={RANKS}",
        *arguments,
        f"run.dir={folder}",
    ]
    log = folder.with_suffix(".log")
    with log.open("w") as said:
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if ended.returncode != 0:
        sys.exit(log.read_text()[-4000:])
    return measure(folder, skip)


def measure_variants(
    variants: Mapping[str, Sequence[str]], *, rounds: int, within: float, skip: int
) -> dict[str, list[Run]]:
    """Run every variant once per round, until all intervals are narrow enough.

    Args:
        variants: Arguments of torchrun by name; `plain` must be among the names.
        rounds: The most rounds.
        within: Half of an interval beside `plain` that is narrow enough.
        skip: The iterations at the start of a run that do not count.

    Returns:
        The measurements of each round, by name.
    """
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with tempfile.TemporaryDirectory() as folder:
                runs[name].append(run_once(variants[name], Path(folder) / "run", skip))
            print(
                f"round {number + 1}, {name}: {runs[name][-1].iteration_s:.3f} s",
                file=sys.stderr,
                flush=True,
            )
        beside = [_ratio_of(runs, name, PLAIN) for name in names if name != PLAIN]
        if all(each.half_width <= within for each in beside):
            break
    return runs


def _ratio_of(runs: dict[str, list[Run]], name: str, beside: str) -> Ratio:
    return ratio(
        [run.iteration_s for run in runs[name]],
        [run.iteration_s for run in runs[beside]],
    )


def variants_of(
    given: dict[str, list[str]], common: Sequence[str]
) -> dict[str, Sequence[str]]:
    """Return torchrun's arguments for each variant, `plain` and `supervised` first.

    Args:
        given: Overrides of the given variants; `supervised` has those of the first one.
        common: Overrides of all variants.
    """
    first = next(iter(given.values()))
    found: dict[str, Sequence[str]] = {
        PLAIN: ["launcher/train.py", "ckpt=none", "runtime.guard=false", *common],
        GUARDED: ["benchmarks/without_hooks.py", *first, *common],
    }
    return found | {
        name: ["launcher/train.py", *overrides, *common]
        for name, overrides in given.items()
    }


def lines(runs: dict[str, list[Run]]) -> list[str]:
    """Return the measurements as a table."""
    head = (
        "| variant | beside plain | beside supervised | stall | window, pause or"
        " interval | MiB: memory, peers, disk |"
    )
    rows = [head, "| --- | --- | --- | --- | --- | --- |"]
    for name, each in runs.items():
        last = each[-1]
        cadence = "-" if last.window is None else f"{last.window}, {last.pause_iters}"
        moved = ", ".join(
            f"{statistics.fmean(values) / _MIB:.1f}"
            for values in zip(
                *((run.memory_bytes, run.peer_bytes, run.disk_bytes) for run in each),
                strict=True,
            )
        )
        beside = [
            str(_ratio_of(runs, name, other)) if name != other else "1"
            for other in (PLAIN, GUARDED)
        ]
        stall = f"{100 * statistics.fmean(run.stall for run in each):.2f} %"
        rows.append(
            f"| {name} | {' | '.join(beside)} | {stall} | {last.every_iters or cadence}"
            f" | {moved} |"
        )
    return rows


def _of(events: list[Event], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def _variant(text: str) -> tuple[str, list[str]]:
    name, _, overrides = text.partition("=")
    return name, overrides.split(",")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=52)
    parser.add_argument(
        "--skip", type=int, default=12, help="iterations at the start that do not count"
    )
    parser.add_argument(
        "--within",
        type=float,
        default=0.02,
        help="half of an interval that is narrow enough",
    )
    parser.add_argument("--variant", type=_variant, action="append", default=[])
    parser.add_argument("--json", type=Path)
    options, overrides = parser.parse_known_args()
    common = [
        *default_model(overrides),
        f"train.iterations={options.iterations}",
        *QUIET,
        *overrides,
    ]
    given = dict(options.variant) or {"policy": ["+ckpt=moevement"]}
    variants = variants_of(given, common)
    runs = measure_variants(
        variants, rounds=options.rounds, within=options.within, skip=options.skip
    )
    print("\n".join(lines(runs)))
    if options.json:
        options.json.write_text(
            json.dumps(
                {name: [asdict(run) for run in each] for name, each in runs.items()}
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
