"""What `make demo` shows: a job on 4 local ranks that is killed in the middle and ends as if nothing had happened.

Twice the same training, `ckpt=dense`: once left alone, once with `kill -9` on a rank. torchrun restarts the workers,
they resume from the newest checkpoint, and the digest of the whole state says at the end whether anything was lost.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

from moe_ckpt.events import IterationCommitted, StateResumed, TrainerStarted, read_events

ROOT = Path(__file__).resolve().parent.parent
RANKS = 4
ITERATIONS = 60
SAVE_EVERY = 20
KILL_AFTER = 33
SHOWN_LINES = ("iteration", "resumed", "done:", "error:")

console = Console(highlight=False)


def main() -> int:
    base = ROOT / "outputs" / f"demo-{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    base.mkdir(parents=True)
    console.rule("1. Left alone")
    _run(base / "left-alone", kill=False)
    console.rule(f"2. The same, and a rank is killed after iteration {KILL_AFTER}")
    _run(base / "killed", kill=True)
    console.rule("What happened")
    return _compare(base / "left-alone", base / "killed")


def _run(folder: Path, *, kill: bool) -> None:
    """Run the job, show the lines of its output that matter and, where asked, kill a rank once the iteration came."""
    command = ["torchrun", f"--nproc-per-node={RANKS}", "--max-restarts=1", "launcher/train.py", "+ckpt=dense"]
    command += [f"ckpt.every_iters={SAVE_EVERY}", f"train.iterations={ITERATIONS}", "train.eval_every_iters=0"]
    command += [f"run.dir={folder.relative_to(ROOT)}", "run.progress=lines"]
    console.print("$ " + " ".join(command), style="bold", soft_wrap=True)
    log = folder.with_suffix(".log")
    with log.open("w") as sink, log.open() as source:
        torchrun = Path(sys.executable).with_name("torchrun")
        process = subprocess.Popen([str(torchrun), *command[1:]], cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if kill and _last_iteration(folder) >= KILL_AFTER:
                _kill_a_rank(folder)
                kill = False
            _show(source)
            time.sleep(0.05)
        _show(source)
    if process.returncode != 0:
        sys.exit(log.read_text())


def _show(source: TextIO) -> None:
    for line in source:
        if line.startswith(SHOWN_LINES):
            console.print("  " + line.rstrip(), soft_wrap=True)


def _last_iteration(folder: Path) -> int:
    path = folder / "events" / "rank0000.jsonl"
    if not path.exists():
        return 0
    committed = [entry.event for entry in read_events(path) if isinstance(entry.event, IterationCommitted)]
    return committed[-1].iteration if committed else 0


def _kill_a_rank(folder: Path) -> None:
    rank = random.randrange(RANKS)
    started = [entry.event for entry in read_events(folder / "events" / f"rank{rank:04d}.jsonl")]
    pid = next(event.pid for event in reversed(started) if isinstance(event, TrainerStarted))
    console.print(f"  kill -9 {pid}   (rank {rank})", style="bold red")
    os.kill(pid, signal.SIGKILL)


def _compare(alone: Path, killed: Path) -> int:
    results = [json.loads((folder / "result.json").read_text()) for folder in (alone, killed)]
    entries = list(read_events(killed / "events" / "rank0000.jsonl"))
    resumed = next(entry.event.iteration for entry in entries if isinstance(entry.event, StateResumed))
    ran = [entry.event.iteration for entry in entries if isinstance(entry.event, IterationCommitted)]
    table = Table("", "left alone", "killed")
    table.add_row("iterations run", str(ITERATIONS), f"{len(ran)} ({len(ran) - len(set(ran))} of them again)")
    table.add_row("resumed after iteration", "-", str(resumed))
    table.add_row("wall time, seconds", *(f"{result['wall_s']:.0f}" for result in results))
    table.add_row("evaluation loss", *(f"{result['eval_loss']:.10f}" for result in results))
    table.add_row("digest of the whole state", *(result["digest"][:16] for result in results))
    console.print(table)
    same = results[0]["digest_per_rank"] == results[1]["digest_per_rank"]
    verdict = "The same, bit for bit, on every rank." if same else "DIFFERENT: something was lost."
    console.print(verdict, style="bold green" if same else "bold red")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
