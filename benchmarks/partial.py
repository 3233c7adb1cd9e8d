"""What partial checkpoints cost a model: evaluation loss under four faults, lossless and lossy policies side by side.

    python benchmarks/partial.py [--to docs] [--runs DIR] [OVERRIDES]      # model=tiny, 4 ranks, twelve runs

Writes partial.svg and partial.md: what was measured, and whether it bears out what the papers claim. Runs that are
finished in DIR are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RANKS = 4
LIMIT_S = 3600.0
ITERATIONS = 400


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A run. `reference`: the one without faults that trains the same model; None: it is one, and has no faults."""

    name: str
    reference: str | None
    overrides: tuple[str, ...]


NONE, LIMITED = "none", "none, limited capacity"
_OF_LIMITED = ("model.moe_capacity_factor=1.0",)
_MOC = ("ckpt=moc", "ckpt.k_persist=1", "ckpt.dynamic_k=false")
_OFTEN, _SELDOM = ("ckpt.k_snapshot=2",), ("ckpt.k_snapshot=1", "ckpt.every_iters=8")
_MOETION = ("ckpt=moetion", "ckpt.experts=2", "ckpt.remote_experts=1", *_OF_LIMITED)
VARIANTS = (
    Variant(name=NONE, reference=None, overrides=("ckpt=none",)),
    Variant(name="gemini", reference=NONE, overrides=("ckpt=gemini", "ckpt.every_iters=8")),
    Variant(name="moevement", reference=NONE, overrides=("ckpt=moevement", "ckpt.window=4")),
    Variant(name="moc", reference=NONE, overrides=(*_MOC, *_OFTEN)),
    Variant(name="moc, load-aware", reference=NONE, overrides=(*_MOC, *_OFTEN, "ckpt.selection=load")),
    Variant(name="moc, seldom", reference=NONE, overrides=(*_MOC, *_SELDOM)),
    Variant(name="moc, seldom, Dynamic-K", reference=NONE, overrides=(*_MOC, *_SELDOM, "ckpt.dynamic_k=true")),
    Variant(name=LIMITED, reference=None, overrides=("ckpt=none", *_OF_LIMITED)),
    Variant(name="moetion", reference=LIMITED, overrides=(*_MOETION, "ckpt.boost=0.0")),
    Variant(name="moetion, boost", reference=LIMITED, overrides=(*_MOETION, "ckpt.boost=0.10")),
    Variant(name="none, second seed", reference=None, overrides=("ckpt=none", "train.seed=2")),
    Variant(name="none, third seed", reference=None, overrides=("ckpt=none", "train.seed=3")),
)
COMMON = (
    "model.num_layers=2",
    "train.micro_batch_size=8",
    "train.eval_every_iters=10",
    "run.tensorboard=false",
    "run.progress=none",
    "runtime.heartbeat_s=20",  # a machine that others use, too, may leave a process waiting
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--variants", nargs="*", default=[variant.name for variant in VARIANTS])
    parser.add_argument("--to", type=Path, default=ROOT / "docs")
    parser.add_argument("--runs", type=Path)
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.runs or Path(temporary)).resolve()
        for variant in VARIANTS:
            if variant.name in options.variants:
                run(variant, folder, options.iterations, overrides)
    return 0


def run(variant: Variant, folder: Path, iterations: int, overrides: Sequence[str]) -> Path:
    """Train to the end, unless that is done already, and return the run folder."""
    path = folder / variant.name.replace(",", "").replace(" ", "-")
    arguments = [*COMMON, f"train.iterations={iterations}", *variant.overrides, *overrides, f"run.dir={path}"]
    arguments += faults(iterations) if variant.reference else []
    if is_done(path, arguments):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".commit").write_text(commit())
    command = [str(Path(sys.executable).with_name("torchrun")), "--standalone", f"--nproc-per-node={RANKS}"]
    log, started_s = path.with_suffix(".log"), time.monotonic()
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as torchrun would, without saying so
    with log.open("w") as said:
        ended = subprocess.run(
            [*command, "launcher/train.py", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    if ended.returncode != 0:
        sys.exit(f"{variant.name}: status {ended.returncode}\n{log.read_text()[-4000:]}")
    print(f"{variant.name}: {time.monotonic() - started_s:.0f} s", flush=True)
    return path


def is_done(path: Path, arguments: Sequence[str]) -> bool:
    """Return whether this very run has been run to its end."""
    if not (path / "result.json").exists():
        return False
    return json.loads((path / "run.json").read_text())["command"][1:] == list(arguments)


def faults(iterations: int) -> list[str]:
    """Return four kills, a fifth of the run apart, each just before an evaluation; one takes a node with its memory."""
    at = [iterations * fifth // 5 for fifth in range(1, 5)]
    kills = (
        f"{{iteration:{at[0]},rank:2,phase:backward}}",
        f"{{iteration:{at[1]},rank:0,phase:forward}}",
        f"{{iteration:{at[2]},rank:3,scope:node}}",
        f"{{iteration:{at[3]},rank:1,phase:step}}",
    )
    return ["fault=at", f"fault.at=[{','.join(kills)}]"]


def commit() -> str:
    """Return the last commit that changed what runs are made of, marked where files differ from it."""
    what = ("moe_ckpt", "launcher", "conf")
    said = [_git("log", "-1", "--format=%h", "--", *what), _git("status", "--porcelain", "--", *what)]
    return f"{said[0] or 'unknown'}{' with changes' if said[1] else ''}"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
