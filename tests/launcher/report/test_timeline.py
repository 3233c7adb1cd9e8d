"""The timeline is what Perfetto and Chrome can open: the trace event format, to the letter, of real runs and others."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from launcher.report.facts import gather
from launcher.report.read import read_runs
from launcher.report.timeline import to_trace
from launcher.simulate import main as simulate
from moe_ckpt.events import CheckpointSaved, SnapshotTaken, WindowPersisted, WindowReplicated
from moe_ckpt.types import Phase
from tests.elastic import ElasticJob
from tests.launcher.test_elastic import Death
from tests.report_runs import Story, committed, write_events, write_run

LANES = ["compute", "copy", "replication", "log", "recovery", "disk", "checkpoint"]
NEEDED = {
    "X": {"ts", "dur", "pid", "tid", "name"},
    "C": {"ts", "pid", "name", "args"},
    "i": {"ts", "pid", "name", "s"},
    "M": {"pid", "name", "args"},
}
METADATA = {"process_name": str, "process_sort_index": int, "thread_name": str, "thread_sort_index": int}


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


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS.keys())
def test_traces_are_valid(runs: Callable[[Path], list[Path]], tmp_path: Path) -> None:
    _require_valid(trace_of(runs(tmp_path)))


def test_the_trace_of_a_real_run_is_valid_and_fills_its_lanes(tmp_path: Path) -> None:
    saves = ("ckpt.disk_every_iters=2", "ckpt.durable_every_iters=4", "ckpt.window=2")
    with ElasticJob(4, tmp_path, "train.iterations=10", *saves, timeout_s=120.0) as job:
        Death(rank=2, phase=Phase.BACKWARD, iteration=5).order(job)
        job.wait()
    trace = trace_of([job.run])
    _require_valid(trace)
    for rank in range(4):
        mine = [event for event in trace["traceEvents"] if event["pid"] == rank + 1]
        names = {event["tid"]: event["args"]["name"] for event in mine if event["name"] == "thread_name"}
        filled = {names[event["tid"]] for event in mine if event["ph"] == "X" and event["dur"] > 0}
        assert filled >= set(LANES) - ({"checkpoint"} if rank else set())


def trace_of(runs: list[Path]) -> dict[str, Any]:
    return json.loads(to_trace([gather(run) for run in read_runs(runs)]), parse_constant=_no_number)


def _require_valid(trace: dict[str, Any]) -> None:
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    for event in events:
        _require_form(event)
    processes = {event["pid"] for event in events}
    names = [event for event in events if event["name"] == "process_name"]
    assert sorted(event["pid"] for event in names) == sorted(processes), "one name each"
    assert len({event["args"]["name"] for event in names}) == len(processes)
    for pid in processes:
        _require_lanes([event for event in events if event["pid"] == pid])


def _no_number(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def _require_form(event: dict[str, Any]) -> None:
    assert NEEDED[event["ph"]] <= event.keys(), event
    assert isinstance(event["pid"], int), event
    assert isinstance(event["name"], str), event
    assert event["name"], event
    if event["ph"] == "M":
        (value,) = event["args"].values()
        assert isinstance(value, METADATA[event["name"]]), event
        return
    assert isinstance(event["ts"], int), "microseconds"
    assert event["ts"] >= 0, event
    assert isinstance(event.get("dur", 0), int), event
    assert event.get("dur", 0) >= 0, event
    assert event.get("s", "t") in ("t", "p", "g"), event
    if event["ph"] == "C":
        assert all(isinstance(value, int | float) for value in event["args"].values()), event


def _require_lanes(events: list[dict[str, Any]]) -> None:
    """Require named lanes, and in each of them slices by time that do not overlap."""
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert [names[tid] for tid in sorted(names)] == LANES
    slices: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["tid"]].append(event)
    assert slices.keys() <= names.keys()
    for lane, found in slices.items():
        for before, after in pairwise(found):
            assert before["ts"] + before["dur"] <= after["ts"], (names[lane], before, after)
    times = [event["ts"] for event in events if event["ph"] == "X"]
    assert times == sorted(times)
