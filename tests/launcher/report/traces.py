"""Runs whose timelines tests read, and their traces."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.report.facts import gather
from launcher.report.read import read_runs
from launcher.report.timeline import to_trace
from launcher.simulate import main as simulate
from moe_ckpt.events import CheckpointSaved, SnapshotTaken, WindowPersisted, WindowReplicated
from tests.report_runs import Story, committed, write_events, write_run


def simulated(folder: Path) -> list[Path]:
    run = folder / "run"
    assert simulate(["duration_s=100", "mtbf_s=30", "runs=1", f"out={run}"]) == 0
    return [run]


def two_stories(folder: Path) -> list[Path]:
    return [write_run(folder / name, Story(ranks=2)) for name in ("a", "b")]


def overlapping(folder: Path) -> list[Path]:
    """Return a run that tells of things which cannot all have been at once in one lane."""
    snapshot = SnapshotTaken(iteration=1, window_start=1, slot=0, num_slots=1, size_bytes=8, dense_bytes=8, copy_s=5.0)
    sent = WindowReplicated(window_start=1, size_bytes=8, num_peers=1, seconds=1.0, span_s=9.0, ago_s=0.1)
    saved = CheckpointSaved(iteration=1, directory="x", size_bytes=8, seconds=3.0, stall_s=0.0)
    persisted = WindowPersisted(window_start=1, seconds=9.0)
    told = [snapshot, sent, saved, persisted]
    events = [(float(second), event) for second in (4, 6, 7) for event in (*told, committed(second, seconds=4.0))]
    write_events(folder, 0, events)
    return [folder]


RUNS: dict[str, Callable[[Path], list[Path]]] = {
    "a simulated run": simulated,
    "two runs": two_stories,
    "what overlaps": overlapping,
}


def trace_of(runs: list[Path]) -> dict[str, Any]:
    return json.loads(to_trace([gather(run) for run in read_runs(runs)]), parse_constant=_no_number)


def _no_number(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")
