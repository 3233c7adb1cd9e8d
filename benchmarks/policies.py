"""All policies on one machine: what they cost while nothing fails, and what a fault costs.

    python benchmarks/policies.py [--rounds 4] [--kills 3] [--only POLICY] [--write benchmarks/README.md] [OVERRIDES]

With model=small on 4 ranks: whole runs of all policies in interleaved order (benchmarks/overhead.py), and for each
policy one job that loses a random rank again and again (benchmarks/recovery.py). `--write` puts rows into the table
between the marks in a file, and leaves those of policies that were not measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
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
    """A policy with its settings; `restarts`: torchrun starts all ranks anew after a fault."""

    name: str
    overrides: tuple[str, ...]
    restarts: bool = False


VARIANTS = (
    Variant(name="none", overrides=("ckpt=none",), restarts=True),
    Variant(
        name="dense, every 10, in background",
        overrides=("ckpt=dense", "ckpt.every_iters=10", "ckpt.async_save=true"),
        restarts=True,
    ),
    Variant(name="checkfreq", overrides=("ckpt=checkfreq",)),
    Variant(name="gemini, every iteration", overrides=("ckpt=gemini", "ckpt.every_iters=1")),
    Variant(name="gemini, best for an MTBF of 10 min", overrides=("ckpt=gemini", "ckpt.mtbf_s=600")),
    Variant(name="moevement", overrides=("ckpt=moevement",)),
    Variant(name="moc", overrides=("ckpt=moc",)),
    Variant(name="moetion", overrides=("ckpt=moetion",)),
    Variant(name="flowcheck", overrides=("ckpt=flowcheck",)),
    Variant(
        name="flowcheck, mirror, whole optimizer",
        overrides=(
            *("ckpt=flowcheck", "ckpt.capture=mirror", "ckpt.mirror_interface=lo"),
            "train.distributed_optimizer=false",
        ),
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
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="runs of each policy without faults")
    parser.add_argument("--iterations", type=int, default=52)
    parser.add_argument("--skip", type=int, default=12, help="iterations at the start of a run that do not count")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--only", action="append", choices=names, metavar="POLICY", help=f"one of: {'; '.join(names)}")
    parser.add_argument("--write", type=Path)
    options, overrides = parser.parse_known_args()
    chosen = [each for each in VARIANTS if each.name in (options.only or names)]
    common = [*default_model(overrides), f"train.iterations={options.iterations}", *QUIET, *overrides]
    arguments: dict[str, Sequence[str]] = {PLAIN: ["launcher/train.py", *VARIANTS[0].overrides, *common]}
    others = [each for each in chosen if each.name != VARIANTS[0].name]
    arguments |= {each.name: ["launcher/train.py", *each.overrides, *common] for each in others}
    runs = measure_variants(arguments, rounds=options.rounds, within=0.0, skip=options.skip)
    with tempfile.TemporaryDirectory() as folder:
        for number, variant in enumerate(chosen):
            place = Path(folder) / str(number)
            place.mkdir()
            recovered = recovery(variant, place, overrides, options.kills, options.seed)
            row = row_of(variant.name, runs.get(variant.name), runs[PLAIN], recovered)
            print(" | ".join(row), flush=True)
            if options.write:
                write(options.write, row)
    return 0


def recovery(variant: Variant, folder: Path, overrides: list[str], kills: int, seed: int) -> list[Recovered]:
    common = ["train.iterations=100000", "train.eval_every_iters=0", "run.tensorboard=false"]
    common += [*default_model(overrides), *overrides]
    restarts = [f"--max-restarts={kills}"] if variant.restarts else []
    return measure(Job(folder / "kills", [*restarts, "launcher/train.py", *variant.overrides, *common]), kills, seed)


def row_of(name: str, runs: list[Run] | None, plain: list[Run], recovered: list[Recovered]) -> list[str]:
    """Return a row of the table; `runs` are None for the policy that the others are compared with."""
    again = [float(each.repeated_iters) for each in recovered]
    fault = [summary([each.committed_s for each in recovered]), f"{statistics.median(again):g}"]
    if runs is None:
        return [name, "1", "0", "-", "0, 0, 0", "0", *fault]
    last = runs[-1]
    cadence = "-" if last.window is None else f"{last.window}, {last.pause_iters}"
    moved = zip(*((run.memory_bytes, run.peer_bytes, run.disk_bytes) for run in runs), strict=True)
    return [
        name,
        str(ratio([run.iteration_s for run in runs], [run.iteration_s for run in plain])),
        f"{100 * statistics.fmean(run.stall for run in runs):.1f} %",
        str(last.every_iters or cadence),
        ", ".join(f"{statistics.fmean(each) / _MIB:.1f}" for each in moved),
        f"{last.host_bytes / _MIB:.0f}",
        *fault,
    ]


def write(path: Path, row: list[str]) -> None:
    """Put a row into the table between its marks, in place of the one of the same policy."""

    def with_row(table: str) -> str:
        lines = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
        rows = {line[0]: line for line in [*lines, row]}
        ordered = [rows[variant.name] for variant in VARIANTS if variant.name in rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in [COLUMNS, ["---"] * len(COLUMNS), *ordered])

    rewrite(path, MARKS, with_row)


if __name__ == "__main__":
    sys.exit(main())
