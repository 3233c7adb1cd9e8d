"""Formats of a report: Markdown, JSON and timeline, and the command for them."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from launcher.report import timeline
from launcher.report.__main__ import main
from launcher.report.as_json import to_json
from launcher.report.facts import Facts, gather
from launcher.report.markdown import to_markdown
from launcher.report.read import read_run, read_runs
from launcher.report.timeline import to_trace
from moe_ckpt.events import CheckpointSaved, WindowPersisted
from tests.report_runs import DEATH, Story, committed, write_events, write_run


def facts_of(run: Path) -> Facts:
    return gather(read_run(run))


def test_markdown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "events" / "rank0003.jsonl").unlink()
    text = to_markdown([facts_of(run)])
    assert "- no events of rank 3, of 4 ranks: sums and means are of the others" in text
    assert (
        f"| 1 | {DEATH} | 4.85 | 0.65 | 0.35 | 0.1 | 0.2 | 0.05 | 0.1667 | 0.1333 | 5 |"
        " 2 | 0, 1 | 1 |" in text
    )
    tables = [
        block.splitlines() for block in text.split("\n\n") if block.startswith("|")
    ]
    assert all(len({line.count("|") for line in table}) == 1 for table in tables)
    assert len(tables) == 5


def test_markdown_of_several_runs_has_a_column_each(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / name, policy=policy)
        for name, policy in (("a", "gemini"), ("b|c", "moevement"))
    ]
    text = to_markdown([gather(run) for run in read_runs(paths)])
    assert "| run | a | b\\|c |" in text
    assert "| policy | gemini | moevement |" in text


def test_json_has_units_and_no_numbers_that_are_none(tmp_path: Path) -> None:
    write_events(tmp_path, 0, [(1.0, committed(1, loss=float("nan")))])
    (run,) = json.loads(to_json([facts_of(tmp_path)]))["runs"]
    assert run["quantities"]["loss"] is None
    assert run["quantities"]["wall_s"] == 1.0
    assert sum(run["seconds_by_rank"]["0"].values()) == 1.0


def test_json_of_a_recovery(tmp_path: Path) -> None:
    (run,) = json.loads(to_json([facts_of(write_run(tmp_path))]))["runs"]
    (recovery,) = run["recoveries"]
    assert (recovery["start_s"], recovery["end_s"], recovery["causes"]) == (
        4.85,
        5.5,
        [DEATH],
    )
    assert recovery["replaying_ranks"] == [0, 1]
    assert {each["part"] for each in recovery["ranks"]} == {
        "detection",
        "rebuild",
        "fetch",
        "waiting",
        "replay",
    }
    assert run["result"]["eval_loss"] == 2.5


def slices_of(facts: list[Facts]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Return the slices in each lane of each process, in order of time."""
    events = json.loads(to_trace(facts))["traceEvents"]
    lanes = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in events
        if each["name"] == "thread_name"
    }
    found = defaultdict(list)
    for each in events:
        if each["ph"] != "M":
            found[each["pid"], lanes[each["pid"], each["tid"]]].append(each)
    return {key: sorted(of, key=lambda each: each["ts"]) for key, of in found.items()}


def spans(slices: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [
        (each["name"], each["ts"], each["ts"] + each["dur"])
        for each in slices
        if each["ph"] == "X"
    ]


def test_timeline_has_lanes_for_each_rank(tmp_path: Path) -> None:
    run = write_run(tmp_path, Story(ranks=2))
    saved = CheckpointSaved(
        iteration=12, directory="x", size_bytes=7, seconds=0.5, stall_s=0.1
    )
    more = write_events(
        tmp_path / "more",
        0,
        [(9.0, saved), (9.0, WindowPersisted(window_start=3, seconds=0.25))],
    )
    own = run / "events" / "rank0000.jsonl"
    own.write_text(own.read_text() + more.read_text())
    lanes = slices_of([facts_of(run)])
    assert [each for each in spans(lanes[1, "compute"]) if "iteration" in each[0]][
        :3
    ] == [
        ("compute, iteration 1", 2_000_000, 2_450_000),
        ("stall, iteration 1", 2_450_000, 2_500_000),
        ("compute, iteration 2", 2_500_000, 2_950_000),
    ]
    assert [name for name, _, _ in spans(lanes[1, "recovery"])] == [
        "detection",
        "rebuild",
        "fetch",
        "waiting",
        "replay",
        "waiting",
    ]
    assert spans(lanes[1, "copy"])[0] == ("snapshot 1", 2_180_000, 2_200_000)
    assert spans(lanes[1, "replication"])[0] == (
        "window 1 to peers",
        2_350_000,
        2_450_000,
    )
    assert spans(lanes[1, "checkpoint"]) == [("checkpoint 12", 8_500_000, 9_000_000)]
    assert spans(lanes[1, "disk"]) == [("window 3 to disk", 8_750_000, 9_000_000)]
    assert spans(lanes[1, "log"])[0] == ("log of iteration 1", 2_000_000, 2_500_000)
    logged = {"activations, bytes": 65536.0, "gradients, bytes": 0.0}
    assert [each["args"] for each in lanes[1, "log"]] == [logged] * 24, (
        "as slices, and as counters"
    )
    marks = [each["name"] for each in lanes[1, "recovery"] if each["ph"] == "i"]
    assert marks == [DEATH, "2 iterations were replayed up to 5"]


def test_timeline_tiles_each_rank_and_two_runs_do_not_meet(tmp_path: Path) -> None:
    runs = [facts_of(write_run(tmp_path / name, Story(ranks=2))) for name in ("a", "b")]
    lanes = slices_of(runs)
    pids = {pid for pid, _ in lanes}
    assert len(pids) == 4
    for pid in pids:
        both = sorted(
            spans(lanes[pid, "compute"]) + spans(lanes[pid, "recovery"]),
            key=lambda each: each[1],
        )
        assert both[0][1] == 0
        assert both[-1][2] == runs[0].end_us
        assert all(before[2] == after[1] for before, after in pairwise(both))


def test_timeline_of_a_long_run_is_small_and_still_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "_MOST_SLICES", 400)
    facts = facts_of(
        write_run(
            tmp_path,
            Story(ranks=1, iterations=2000, fault_after=1000, with_experts=False),
        )
    )
    lanes = slices_of([facts])
    assert sum(map(len, lanes.values())) < 500
    compute = spans(lanes[1, "compute"])
    both = sorted(compute + spans(lanes[1, "recovery"]), key=lambda each: each[1])
    assert all(before[2] == after[1] for before, after in pairwise(both))
    names = [name for name, _, _ in compute]
    assert "compute, iteration 1000" in names
    assert any(name.startswith("iterations ") for name in names)


@pytest.mark.parametrize(("form", "start"), [("md", "# Report"), ("json", "{\n")])
def test_words_go_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, start: str
) -> None:
    assert main([str(write_run(tmp_path)), "--format", form]) == 0
    assert capsys.readouterr().out.startswith(start)


def test_files_go_into_the_run_unless_told_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    assert main([str(run)]) == 0
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert main([str(run), "--format", "trace"]) == 0
    assert "traceEvents" in json.loads((run / "trace.json").read_text())
    assert main([str(run), "-o", str(tmp_path / "x.md")]) == 0
    assert (tmp_path / "x.md").read_text().startswith("# Report")
    assert "wrote" in capsys.readouterr().out


def test_what_is_wrong_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "nothing")]) == 1
    assert (
        main([str(write_run(tmp_path / "run")), "-o", str(tmp_path / "no" / "such")])
        == 1
    )
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: run: got ")
    assert second.startswith("error: -o: got ")
