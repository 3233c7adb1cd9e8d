"""All policies on one machine: the price without faults, and the price of a fault.

    python benchmarks/policies.py [--rounds 4] [--kills 3] [--only POLICY]
        [--write benchmarks/README.md] [OVERRIDES]

With model=small on 4 ranks: whole runs of all policies in interleaved order
(benchmarks/overhead.py), and for each policy one job that loses a random rank again and
again (benchmarks/recovery.py). `--write` puts rows into the table between the marks of
a file, and leaves the rows of policies that were not measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.marks import rewrite  # noqa: E402
from benchmarks.overhead import PLAIN, QUIET, Run, measure_variants, ratio  # noqa: E402
from benchmarks.recovery import Job, Recovered, measure, summary  # noqa: E402
from benchmarks.runs import default_model  # noqa: E402

_MIB = 1 << 20
MARKS = ("<!-- policies: written by benchmarks/policies.py -->", "<!-- end -->")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A policy with its settings."""

    name: str
    """Name of the row in the table."""

    overrides: tuple[str, ...]
    """Settings of the policy."""

    training: tuple[str, ...] = ()
    """Settings of the training, which the runs without checkpoints have as well."""

    restarts: bool = False
    """Whether torchrun starts all ranks again after a fault."""

    @property
    def settings(self) -> tuple[str, ...]:
        return (*self.overrides, *self.training)


VARIANTS = (
    Variant(name="none", overrides=("ckpt=none",), restarts=True),
    Variant(
        name="dense, every 10, in background",
        overrides=("ckpt=dense", "ckpt.every_iters=10", "ckpt.async_save=true"),
        restarts=True,
    ),
    Variant(name="checkfreq", overrides=("ckpt=checkfreq",)),
    Variant(
        name="gemini, every iteration", overrides=("ckpt=gemini", "ckpt.every_iters=1")
    ),
    Variant(
        name="gemini, best for an MTBF of 10 min",
        overrides=("ckpt=gemini", "ckpt.mtbf_s=600"),
    ),
    Variant(name="moevement", overrides=("ckpt=moevement",)),
    Variant(name="moc", overrides=("ckpt=moc",)),
    Variant(name="moetion", overrides=("ckpt=moetion",)),
    Variant(name="flowcheck", overrides=("ckpt=flowcheck",)),
    Variant(
        name="flowcheck, mirror, whole optimizer",
        overrides=("ckpt=flowcheck", "ckpt.capture=mirror", "ckpt.mirror_interface=lo"),
        training=("train.distributed_optimizer=false",),
    ),
)
COLUMNS = (
    "policy",
    "iteration time beside no checkpoints (95 % interval)",
    "stall",
    "window and pause, or interval, iterations",
    "MiB an iteration: memory, peers, disk",
    "host memory, MiB",
    "kill to next new iteration, s",
    "iterations run again",
    "server's work beside its deadline, s",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=4, help="runs of each policy without faults"
    )
    parser.add_argument("--iterations", type=int, default=52)
    parser.add_argument(
        "--skip",
        type=int,
        default=12,
        help="iterations at the start of a run that do not count",
    )
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    names = [variant.name for variant in VARIANTS]
    parser.add_argument(
        "--only",
        action="append",
        choices=names,
        metavar="POLICY",
        help=f"one of: {'; '.join(names)}",
    )
    parser.add_argument("--write", type=Path)
    options, overrides = parser.parse_known_args()
    chosen = [each for each in VARIANTS if each.name in (options.only or names)]
    common = [
        *default_model(overrides),
        f"train.iterations={options.iterations}",
        *QUIET,
        *overrides,
    ]
    others = [each for each in chosen if each.name != VARIANTS[0].name]
    plain = [
        replace(VARIANTS[0], name=_plain(each), training=each.training)
        for each in (VARIANTS[0], *others)
    ]
    arguments = {
        each.name: ["launcher/train.py", *each.settings, *common]
        for each in (*plain, *others)
    }
    runs = measure_variants(
        arguments, rounds=options.rounds, within=0.0, skip=options.skip
    )
    with tempfile.TemporaryDirectory() as folder:
        for number, variant in enumerate(chosen):
            subfolder = Path(folder) / str(number)
            subfolder.mkdir()
            recovered = recovery(
                variant, subfolder, overrides, options.kills, options.seed
            )
            row = row_of(
                variant.name, runs.get(variant.name), runs[_plain(variant)], recovered
            )
            print(" | ".join(row), flush=True)
            if options.write:
                write(options.write, row)
    return 0


def recovery(
    variant: Variant, folder: Path, overrides: list[str], kills: int, seed: int
) -> list[Recovered]:
    """Run a job of a policy that loses a random rank again and again.

    Returns:
        The recovery from each kill.
    """
    common = [
        "train.iterations=100000",
        "train.eval_every_iters=0",
        "run.tensorboard=false",
    ]
    common += [*default_model(overrides), *overrides]
    restarts = [f"--max-restarts={kills}"] if variant.restarts else []
    return measure(
        Job(
            folder / "kills",
            [*restarts, "launcher/train.py", *variant.settings, *common],
        ),
        kills,
        seed,
    )


def row_of(
    name: str, runs: list[Run] | None, plain: list[Run], recovered: list[Recovered]
) -> list[str]:
    """Return a row of the table.

    Args:
        name: The name of the policy.
        runs: The runs without faults; None: the policy makes no checkpoints.
        plain: The runs without checkpoints.
        recovered: The recoveries from kills.
    """
    again = [float(each.repeated_iters) for each in recovered]
    fault = [
        summary([each.committed_s for each in recovered]),
        f"{statistics.median(again):g}",
    ]
    if runs is None:
        return [name, "1", "0", "-", "0, 0, 0", "0", *fault, "-"]
    last = runs[-1]
    cadence = "-" if last.window is None else f"{last.window}, {last.pause_iters}"
    moved = zip(
        *((run.memory_bytes, run.peer_bytes, run.disk_bytes) for run in runs),
        strict=True,
    )
    return [
        name,
        str(
            ratio([run.iteration_s for run in runs], [run.iteration_s for run in plain])
        ),
        f"{100 * statistics.fmean(run.stall for run in runs):.1f} %",
        str(last.every_iters or cadence),
        ", ".join(f"{statistics.fmean(each) / _MIB:.1f}" for each in moved),
        f"{last.host_bytes / _MIB:.0f}",
        *fault,
        _server_work(runs),
    ]


def _plain(variant: Variant) -> str:
    """Return the name of the runs without checkpoints that train like this variant."""
    return ", ".join((PLAIN, *variant.training))


def _server_work(runs: list[Run]) -> str:
    works = [
        (run.server_s, run.server_deadline_s)
        for run in runs
        if run.server_s is not None and run.server_deadline_s
    ]
    if not works:
        return "-"
    work_s, deadline_s = (statistics.fmean(each) for each in zip(*works, strict=True))
    return f"{work_s:.3f} of {deadline_s:.3f}"


def write(path: Path, row: list[str]) -> None:
    """Put a row into the table of a page, in place of the row of the same policy.

    Args:
        path: The page, with `MARKS` around the table.
        row: The cells; the first cell is the policy's name.
    """

    def with_row(table: str) -> str:
        lines = [
            line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]
        ]
        rows = {line[0]: line for line in [*lines, row]}
        ordered = [rows[variant.name] for variant in VARIANTS if variant.name in rows]
        # rows of an earlier table may lack the last columns
        ordered = [[*line, *["-"] * (len(COLUMNS) - len(line))] for line in ordered]
        return "\n".join(
            f"| {' | '.join(line)} |"
            for line in [COLUMNS, ["---"] * len(COLUMNS), *ordered]
        )

    rewrite(path, MARKS, with_row)


if __name__ == "__main__":
    sys.exit(main())
