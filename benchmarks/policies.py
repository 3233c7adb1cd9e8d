"""All policies on one machine: what they cost while nothing fails, and what a fault costs.

    python benchmarks/policies.py [--pairs 6] [--kills 3] [--only POLICY] [--write README.md] [OVERRIDES]

For each policy, with model=small on 4 ranks: one job with and without checkpoints in alternating blocks
(benchmarks/overhead.py), and one that loses a random rank again and again (benchmarks/recovery.py). `--write` puts rows
into the table between the marks in a file, each as soon as it is measured, and leaves those of other policies.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.marks import rewrite  # noqa: E402
from benchmarks.recovery import RANKS, Job, Recovered, measure, summary  # noqa: E402

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
)
COLUMNS = (
    "policy",
    "iteration time, with / without (pairs)",
    "stall",
    "interval, iterations",
    "MiB an iteration: memory, peers, disk",
    "host memory, MiB",
    "kill to next new iteration, s",
    "iterations run again",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6, help="blocks with and without checkpoints")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--only", action="append", choices=names, metavar="POLICY", help=f"one of: {'; '.join(names)}")
    parser.add_argument("--write", type=Path)
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        for number, variant in enumerate(each for each in VARIANTS if each.name in (options.only or names)):
            place = Path(folder) / str(number)
            place.mkdir()
            cost = overhead(variant, place, overrides, options.pairs)
            row = row_of(variant, cost, recovery(variant, place, overrides, options.kills, options.seed))
            print(" | ".join(row), flush=True)
            if options.write:
                write(options.write, row)
    return 0


def overhead(variant: Variant, folder: Path, overrides: list[str], pairs: int) -> dict[str, Any] | None:
    """Return what the job measured; None for the policy that costs nothing."""
    if variant.overrides == ("ckpt=none",):
        return None
    found = folder / "overhead.json"
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    benchmark = ["benchmarks/overhead.py", f"--pairs={pairs}", "--json", str(found), f"run.dir={folder / 'overhead'}"]
    command = [torchrun, f"--nproc-per-node={RANKS}", *benchmark, *variant.overrides, *overrides]
    with (folder / "overhead.log").open("w") as log:
        ended = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False)
    if ended.returncode != 0:
        sys.exit((folder / "overhead.log").read_text()[-4000:])
    return json.loads(found.read_text())


def recovery(variant: Variant, folder: Path, overrides: list[str], kills: int, seed: int) -> list[Recovered]:
    model = [] if any(override.startswith("model=") for override in overrides) else ["model=small"]
    common = ["train.iterations=100000", "train.eval_every_iters=0", "run.tensorboard=false", *model, *overrides]
    restarts = [f"--max-restarts={kills}"] if variant.restarts else []
    return measure(Job(folder / "kills", [*restarts, "launcher/train.py", *variant.overrides, *common]), kills, seed)


def row_of(variant: Variant, cost: dict[str, Any] | None, recovered: list[Recovered]) -> list[str]:
    again = [float(each.repeated_iters) for each in recovered]
    fault = [summary([each.committed_s for each in recovered]), f"{statistics.median(again):g}"]
    if cost is None:
        return [variant.name, "1", "0", "-", "0, 0, 0", "0", *fault]
    pairs = cost["ratio_of_pairs"]
    moved = (cost[f"{place}_bytes_per_iter"] / _MIB for place in ("memory", "peer", "disk"))
    return [
        variant.name,
        f"{cost['ratio']:.3f} ({min(pairs):.3f} to {max(pairs):.3f})",
        f"{100 * cost['stall']:.1f} %",
        str(cost["every_iters"] or ("-" if cost["window"] is None else f"1, window {cost['window']}")),
        ", ".join(f"{each:.1f}" for each in moved),
        f"{cost['host_bytes'] / _MIB:.0f}",
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
