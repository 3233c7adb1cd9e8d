"""`make demo` and `moe-ckpt demo`: a job of 4 local ranks in which two workers die.

The training runs twice: undisturbed, and with `ckpt=moevement` and `kill -9` on two
ranks. The other ranks keep their processes, and the stage that lost a rank replays a
few iterations. Equal digests of the whole state show that nothing was lost.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

from launcher.start_train import train_command
from moe_ckpt.arguments import Parser
from moe_ckpt.errors import ConfigError, exit_status
from moe_ckpt.events import (
    Event,
    IterationCommitted,
    Rejoined,
    WorkerStarted,
    read_events,
)

# a wheel does not contain the script
SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "inject_fault.sh"
INJECT = ("scripts/inject_fault.sh",) if SCRIPT.exists() else ("moe-ckpt", "inject")
TRAIN = ("torchrun", "launcher/train.py") if SCRIPT.exists() else ("moe-ckpt train", "")
RANKS = 4
ITERATIONS = 60
KILL_AFTER = (20, 40)
SHOWN_LINES = ("iteration", "rank", "done:", "error:", "killed")

console = Console(highlight=False)


def main(arguments: Sequence[str]) -> int:
    """Run the demonstration.

    Args:
        arguments: The words of the command line.

    Returns:
        0 if the two results are equal, else another exit status.
    """
    description = (
        "Trains on 4 local processes, once left alone and once with two workers killed,"
        " and compares."
    )

    def run() -> int:
        Parser(prog="moe-ckpt demo", description=description).parse_args(arguments)
        return _demonstrate()

    return exit_status(run)


def _demonstrate() -> int:
    base = Path("outputs") / f"demo-{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    try:
        base.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"outputs: got {str(base)!r}, wanted a folder that can be made ({error})"
        ) from error
    console.rule("1. Left alone")
    _run(base / "left-alone", "ckpt=none", kill_after=())
    console.rule("2. The same, and twice a rank is killed")
    _run(base / "killed", "+ckpt=moevement", kill_after=KILL_AFTER)
    console.rule("What happened")
    return _compare(base / "left-alone", base / "killed")


def _run(folder: Path, ckpt: str, *, kill_after: tuple[int, ...]) -> None:
    """Run the job and show the important lines of its output.

    Args:
        folder: The run folder.
        ckpt: The override that chooses the policy.
        kill_after: A rank is killed after each of these iterations.
    """
    ranks, settings = (
        f"--nproc-per-node={RANKS}",
        [ckpt, f"train.iterations={ITERATIONS}", "train.eval_every_iters=0"],
    )
    settings += [f"run.dir={folder}", "run.progress=lines"]
    console.print(
        "$ " + " ".join((TRAIN[0], ranks, *TRAIN[1:], *settings)),
        style="bold",
        soft_wrap=True,
    )
    log, waiting = folder.with_suffix(".log"), list(kill_after)
    with log.open("w") as sink, log.open() as source:
        process = subprocess.Popen(
            train_command([ranks, *settings]), stdout=sink, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            if waiting and _last_iteration(folder) >= waiting[0]:
                _inject_fault(folder)
                del waiting[0]
            _show(source)
            time.sleep(0.05)
        _show(source)
    if process.returncode != 0:
        sys.exit(log.read_text())


def _show(source: TextIO) -> None:
    for line in source:
        if line.startswith(SHOWN_LINES):
            console.print("  " + line.rstrip(), soft_wrap=True)


def _events(folder: Path, rank: int) -> Iterator[Event]:
    path = folder / "events" / f"rank{rank:04d}.jsonl"
    return (logged.event for logged in read_events(path)) if path.exists() else iter(())


def _last_iteration(folder: Path) -> int:
    return max(
        (
            event.iteration
            for event in _events(folder, 0)
            if isinstance(event, IterationCommitted)
        ),
        default=0,
    )


def _inject_fault(folder: Path) -> None:
    console.print("$ " + " ".join(INJECT), style="bold red")
    command = (
        [str(SCRIPT)]
        if SCRIPT.exists()
        else [sys.executable, "-m", "moe_ckpt.cli", "inject"]
    )
    said = subprocess.run(
        [*command, "--run", str(folder.resolve())],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    console.print("  " + said.strip(), style="red", soft_wrap=True)


def _compare(alone: Path, killed: Path) -> int:
    results = [
        json.loads((folder / "result.json").read_text()) for folder in (alone, killed)
    ]
    console.print(_costs(killed))
    started = (
        event
        for rank in range(RANKS)
        for event in _events(killed, rank)
        if isinstance(event, WorkerStarted)
    )
    table = Table("", "left alone", "killed twice")
    table.add_row("processes started", str(RANKS), str(sum(1 for _ in started)))
    table.add_row(
        "seconds without imports", *(f"{result['wall_s']:.0f}" for result in results)
    )
    table.add_row(
        "evaluation loss", *(f"{result['eval_loss']:.10f}" for result in results)
    )
    table.add_row(
        "digest of the whole state", *(result["digest"][:16] for result in results)
    )
    console.print(table)
    same = results[0]["digest_per_rank"] == results[1]["digest_per_rank"]
    verdict = (
        "The same, bit for bit, on every rank."
        if same
        else "DIFFERENT: something was lost."
    )
    console.print(verdict, style="bold green" if same else "bold red")
    return 0 if same else 1


def _costs(killed: Path) -> Table:
    """Return a table of the cost of each fault.

    A column is a fault; times are the seconds of the slowest rank.
    """
    rejoined = [
        [event for event in _events(killed, rank) if isinstance(event, Rejoined)]
        for rank in range(RANKS)
    ]
    faults = [
        {
            rank: event
            for rank, events in enumerate(rejoined)
            for event in events
            if event.generation == generation
        }
        for generation in sorted(
            {event.generation for events in rejoined for event in events}
        )
    ]
    table = Table("", *(f"fault {number}" for number in range(1, len(faults) + 1)))

    def add_row(name: str, cell: Callable[[dict[int, Rejoined]], str]) -> None:
        table.add_row(name, *(cell(of_rank) for of_rank in faults))

    add_row(
        "what died",
        lambda of_rank: "; ".join(
            re.sub(r",? (found|in) .*", "", d) for d in of_rank[0].deaths
        ),
    )
    for part in ("detect_s", "rebuild_s", "fetch_s", "replay_s"):
        name = f"{part.removesuffix('_s')}, seconds"
        add_row(
            name,
            lambda of_rank, part=part: (
                f"{max(getattr(event, part) for event in of_rank.values()):.2f}"
            ),
        )
    add_row(
        "iterations run again",
        lambda of_rank: str(max(event.executed_iters for event in of_rank.values())),
    )
    ran = lambda of_rank: [  # noqa: E731
        str(rank) for rank, event in of_rank.items() if event.executed_iters
    ]
    add_row("ranks that ran them", lambda of_rank: ", ".join(ran(of_rank)) or "none")
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
