"""The timeline is what Perfetto and Chrome can open: the trace event format, to the letter, of real runs and others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.types import Phase
from tests.elastic_job import ElasticJob
from tests.launcher.report.traces import RUNS, trace_of
from tests.scenarios import PP2

LANES = ["compute", "copy", "replication", "log", "recovery", "disk", "checkpoint"]
NEEDED = {
    "X": {"ts", "dur", "pid", "tid", "name"},
    "C": {"ts", "pid", "name", "args"},
    "i": {"ts", "pid", "name", "s"},
    "M": {"pid", "name", "args"},
}
METADATA = {"process_name": str, "process_sort_index": int, "thread_name": str, "thread_sort_index": int}


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS.keys())
def test_traces_are_valid(runs: Callable[[Path], list[Path]], tmp_path: Path) -> None:
    _require_valid(trace_of(runs(tmp_path)))


def test_the_trace_of_a_real_run_is_valid_and_fills_its_lanes(tmp_path: Path) -> None:
    saves = ("ckpt.disk_every_iters=2", "ckpt.durable_every_iters=4", "ckpt.window=2")
    with ElasticJob(2, tmp_path, *PP2, "train.iterations=10", *saves, timeout_s=120.0) as job:
        job.order(1, Phase.BACKWARD, iteration=5)
        job.wait()
    trace = trace_of([job.run])
    _require_valid(trace)
    for rank in range(2):
        mine = [event for event in trace["traceEvents"] if event["pid"] == rank + 1]
        names = {event["tid"]: event["args"]["name"] for event in mine if event["name"] == "thread_name"}
        filled = {names[event["tid"]] for event in mine if event["ph"] == "X" and event["dur"] > 0}
        assert filled >= set(LANES) - ({"checkpoint"} if rank else set())


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
