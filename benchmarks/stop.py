"""Seconds and bytes from SIGTERM to a state that is safe on disk, while the job trains.

    python benchmarks/stop.py [--stops 3] [--model tiny small]
        [OVERRIDES]        # ckpt=moevement, 4 ranks, PP=2

SIGTERM to torchrun stops each job once the job has trained for some iterations. The job
is started again from its disks. Printed: the seconds until all ranks have an iteration
on disk ("safe to kill"), the seconds until the last process has ended, the bytes on
disk of all ranks, and the number of iterations that were trained after the safe one.
"""

from __future__ import annotations

import argparse
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.runs import current_commit, hardware  # noqa: E402
from moe_ckpt.events import IterationCommitted, read_events  # noqa: E402

RANKS = 4
WARM_ITERATIONS = 8
PATIENCE_S = 300.0
_LOOK_EVERY_S = 0.01
_SAFE = re.compile(r"safe to kill at iteration (\d+)")


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """One stop of a job by SIGTERM."""

    safe_s: float
    """Time from SIGTERM until all ranks have an iteration on disk, in seconds."""

    ended_s: float
    """Time from SIGTERM until the last process has ended, in seconds."""

    disk_bytes: int
    """Bytes on disk of all ranks."""

    lost_iters: int
    """Iterations that were trained after the iteration on disk."""


def stop_once(folder: Path, number: int, arguments: Sequence[str]) -> Stopped:
    """Start a job, stop the job after some iterations, and return the figures.

    Args:
        folder: The run folder; a later stop continues from its disks.
        number: The number of the stop, for the name of the log.
        arguments: Settings of the launcher.
    """
    log = folder.with_suffix(f".{number}.log")
    with log.open("w") as said:
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        command = [
            torchrun,
            "--standalone",
            f"--nproc-per-node={RANKS}",
            "launcher/train.py",
            *arguments,
        ]
        process = subprocess.Popen(
            [*command, f"run.dir={folder}", "run.progress=none"],
            cwd=ROOT,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    first = _committed(folder)
    _wait(lambda: _committed(folder) >= first + WARM_ITERATIONS, process, log)
    since_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _wait(lambda: _SAFE.search(log.read_text()) is not None, None, log)
    safe_s = time.monotonic() - since_s
    process.wait(PATIENCE_S)
    ended_s = time.monotonic() - since_s
    safe = _SAFE.search(log.read_text())
    assert safe is not None
    disk_bytes = sum(
        path.stat().st_size
        for path in (folder / "snapshots").rglob("*")
        if path.is_file()
    )
    lost_iters = _committed(folder) - int(safe[1])
    return Stopped(
        safe_s=safe_s, ended_s=ended_s, disk_bytes=disk_bytes, lost_iters=lost_iters
    )


def _committed(folder: Path) -> int:
    """Return the newest iteration that rank 0 has committed."""
    path = folder / "events" / "rank0000.jsonl"
    logged = read_events(path) if path.exists() else ()
    return max(
        (
            each.event.iteration
            for each in logged
            if isinstance(each.event, IterationCommitted)
        ),
        default=0,
    )


def _wait(
    is_there: Callable[[], bool], process: subprocess.Popen[bytes] | None, log: Path
) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_there():
        if time.monotonic() > until_s or (
            process is not None and process.poll() is not None
        ):
            sys.exit(
                f"the job ended, or {PATIENCE_S:g} s were not"
                f" enough:\n{log.read_text()[-4000:]}"
            )
        time.sleep(_LOOK_EVERY_S)


def table(stops: dict[str, list[Stopped]]) -> Iterator[str]:
    """Yield the lines of a table: medians, and the range of the seconds."""
    yield (
        "| model | SIGTERM to durable, s | to the last process's end, s | MB on disk,"
        " all ranks | iterations lost |"
    )
    yield "| --- | --- | --- | --- | --- |"
    for model, each in stops.items():
        safe = [stop.safe_s for stop in each]
        ended = statistics.median(stop.ended_s for stop in each)
        size = statistics.median(stop.disk_bytes for stop in each) / 1e6
        lost = sorted({stop.lost_iters for stop in each})
        spread = f"{statistics.median(safe):.2f} ({min(safe):.2f} to {max(safe):.2f})"
        yield (
            f"| `{model}` | {spread} | {ended:.2f} | {size:.1f} |"
            f" {', '.join(map(str, lost))} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stops", type=int, default=3)
    parser.add_argument("--model", nargs="+", default=["tiny", "small"])
    options, overrides = parser.parse_known_args()
    stops: dict[str, list[Stopped]] = {}
    for model in options.model:
        with tempfile.TemporaryDirectory() as folder:
            arguments = [
                f"model={model}",
                "parallel.pp=2",
                "train.iterations=100000",
                "+ckpt=moevement",
                *overrides,
            ]
            stops[model] = [
                stop_once(Path(folder) / "run", number, arguments)
                for number in range(options.stops)
            ]
    print(
        f"{hardware()}, {RANKS} processes, commit {current_commit()}, {options.stops}"
        " stops each; medians (range)\n"
    )
    print("\n".join(table(stops)))


if __name__ == "__main__":
    main()
