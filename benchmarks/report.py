"""Time to make a report of a large run, and size of the report.

    python benchmarks/report.py [--ranks 64] [--iterations 100000] [--folder DIR]

Writes event files as such a run would, some gigabytes, into a temporary folder or into
the given one: an iteration and a snapshot each time, memory and a window in each sixth
iteration, recoveries, popularity of experts. Then reports on the files in a process of
its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_ckpt.events import (  # noqa: E402
    Evaluated,
    Event,
    ExpertPopularity,
    ExpertsOrdered,
    HostMemoryUsed,
    IterationCommitted,
    Rejoined,
    RunFinished,
    SnapshotTaken,
    StageRecovered,
    WindowChosen,
    WindowReplicated,
    WorkerStarted,
)

WINDOW_ITERS = 6
EVALUATE_EVERY = 1000
RANKS_PER_STAGE = 16
NUM_FAULTS = 200
ITERATION_S = 2.0
WANTED_S, WANTED_MB = 30.0, 10.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=100_000)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = options.folder or Path(temporary) / "run"
        if not (run / "run.json").exists():
            write_run(run, options.ranks, options.iterations)
        size = sum(path.stat().st_size for path in run.glob("events/*"))
        print(
            f"{options.ranks} ranks, {options.iterations:,} iterations:"
            f" {size / 1e9:.2f} GB of events"
        )
        for form in ("html", "md", "trace"):
            measure(run, Path(temporary) / f"report.{form}", form)
    return 0


def measure(run: Path, output: Path, form: str) -> None:
    """Make a report in another process, and print the seconds and the size.

    Args:
        run: The run folder.
        output: The file of the report.
        form: The format, as `--format` of launcher.report.
    """
    command = [
        sys.executable,
        "-m",
        "launcher.report",
        str(run),
        "-o",
        str(output),
        "--format",
        form,
    ]
    started_s = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    took_s = time.monotonic() - started_s
    wanted = (
        f" (wanted: under {WANTED_S:g} s, {WANTED_MB:g} MB)" if form == "html" else ""
    )
    print(
        f"{form}: {took_s:.1f} s, {output.stat().st_size / 1e6:.1f} MB{wanted}",
        flush=True,
    )


def write_run(run: Path, num_ranks: int, iterations: int) -> None:
    """Write the files of a run.

    The event files of ranks differ in little but the number of the rank. Other contents
    would change nothing, because files of the same size cost the same.
    """
    (run / "events").mkdir(parents=True)
    plain, telling = (
        b"".join(lines_of(iterations, tells=tells)) for tells in (False, True)
    )
    for rank in range(num_ranks):
        mine = (plain if rank % RANKS_PER_STAGE else telling).replace(
            b'"global_rank": 0', b'"global_rank": %d' % rank
        )
        (run / "events" / f"rank{rank:04d}.jsonl").write_bytes(mine)
    (run / "run.json").write_text(
        json.dumps({"world_size": num_ranks, "clock_origin_unix_s": 0.0})
    )


def lines_of(iterations: int, *, tells: bool) -> Iterator[bytes]:
    """Yield the lines of one rank's events.

    Args:
        iterations: The iterations of the run.
        tells: Whether the rank logs the popularity of experts; one rank of each stage
            does.
    """
    fault_every = max(iterations // NUM_FAULTS, 2)
    now_s, told = 10.0, 0
    yield line(now_s, WorkerStarted(pid=1, host="here", incarnation=0, device="gpu"))
    for iteration in range(1, iterations + 1):
        noise = (iteration * 2654435761 % 1000) / 1000
        now_s += ITERATION_S + 0.1 * noise
        yield line(now_s - 1.0, snapshot(iteration, noise))
        if iteration % WINDOW_ITERS == 0:
            yield from (line(now_s - 0.5, event) for event in of_window(iteration))
            if tells and 1000 * iteration >= 1001 * told:
                told = iteration
                yield from (line(now_s - 0.5, event) for event in of_experts(iteration))
        yield line(now_s, committed(iteration, noise))
        if iteration % EVALUATE_EVERY == 0:
            now_s += 1.0
            yield line(now_s, Evaluated(iteration=iteration, loss=3.0 + noise))
        if iteration % fault_every == 0:
            now_s += 8.0
            yield from (line(now_s, event) for event in of_fault(iteration))
    yield line(now_s, RunFinished(iteration=iterations, digest=""))


def line(t_s: float, event: Event) -> bytes:
    record = {
        "t_s": round(t_s, 6),
        "global_rank": 0,
        "event": type(event).__name__,
        **asdict(event),
    }
    return json.dumps(record).encode() + b"\n"


def committed(iteration: int, noise: float) -> IterationCommitted:
    return IterationCommitted(
        iteration=iteration,
        loss=3.0 + 10.0 / iteration + 0.1234567890123 * noise,
        grad_norm=1.0123456789012345 + noise,
        loss_scale=1.0,
        learning_rate=1e-4,
        skipped=False,
        seconds=ITERATION_S + 0.0987654321012 * noise,
        stall_s=0.0123456789012 + 0.01 * noise,
        sent_activation_bytes=1 << 28,
        sent_gradient_bytes=1 << 28,
    )


def snapshot(iteration: int, noise: float) -> SnapshotTaken:
    return SnapshotTaken(
        iteration=iteration,
        window_start=iteration - iteration % WINDOW_ITERS,
        slot=iteration % WINDOW_ITERS,
        num_slots=WINDOW_ITERS,
        size_bytes=1_500_000_000 + round(1e6 * noise),
        dense_bytes=9_000_000_000,
        copy_s=0.4123456789 + 0.1 * noise,
    )


def of_window(iteration: int) -> tuple[Event, ...]:
    return (
        HostMemoryUsed(
            full_bytes=9_000_000_000,
            compute_bytes=2_000_000_000,
            buffer_bytes=1_000_000,
            boundary_log_bytes=3_000_000_000,
            step_log_bytes=400_000,
            allocated_bytes=16_000_000_000,
            double_buffered_dense_bytes=18_000_000_000,
        ),
        WindowChosen(
            iteration=iteration,
            num_slots=WINDOW_ITERS,
            iteration_s=ITERATION_S,
            copy_bytes_per_s=2e10,
            reordered=False,
        ),
        WindowReplicated(
            window_start=iteration,
            size_bytes=9_000_000_000,
            num_peers=1,
            seconds=4.0123456789,
            span_s=11.5,
            ago_s=0.5,
        ),
    )


def of_fault(iteration: int) -> tuple[Event, ...]:
    return (
        StageRecovered(
            iteration=iteration,
            window_start=iteration - 2,
            first_stage=0,
            last_stage=0,
            replayed_iters=2,
            fetched_bytes=1 << 30,
            seconds=4.0,
        ),
        Rejoined(
            generation=2,
            iteration=iteration,
            joined_unix_s=0.0,
            deaths=[
                "rank 7 (pid 123) died of SIGKILL in backward of iteration"
                f" {iteration + 1}"
            ],
            detect_s=0.5,
            rebuild_s=1.0,
            fetch_s=0.5,
            replay_s=5.0,
            fetched_bytes=1 << 30,
            executed_iters=2,
        ),
    )


def of_experts(iteration: int) -> tuple[Event, ...]:
    layers = [f"layer {layer}" for layer in range(4)]
    tokens = [
        [1000.0 + (layer * expert * iteration) % 997 for expert in range(64)]
        for layer in range(4)
    ]
    slots = [
        [(layer + expert + iteration) % WINDOW_ITERS for expert in range(64)]
        for layer in range(4)
    ]
    return (
        ExpertPopularity(iteration=iteration, layers=layers, tokens=tokens),
        ExpertsOrdered(
            iteration=iteration, num_slots=WINDOW_ITERS, layers=layers, slots=slots
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
