"""Reading a run folder: missing and damaged data are listed, not raised.

Data of another version are listed, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.report import rank_log
from launcher.report.rank_log import read_rank
from launcher.report.read import read_run, read_runs
from moe_ckpt.errors import ConfigError
from moe_ckpt.events import Evaluated, EventsLost, RunFinished, SnapshotTaken
from tests.report_runs import Story, committed, line_of, log_of, write_events, write_run


def test_columns_have_what_was_written(tmp_path: Path) -> None:
    log = log_of(
        tmp_path,
        [
            (0.5, committed(1)),
            (0.75, Evaluated(iteration=1, loss=2.0)),
            (1.0000004, committed(2)),
        ],
    )
    assert log.commits.at_us.tolist() == [500_000, 1_000_000]
    assert log.commits.iteration.tolist() == [1, 2]
    assert log.commits.us("stall_s").tolist() == [50_000, 50_000]
    assert [(noted.at_us, noted.after_commits) for noted in log.events] == [
        (750_000, 1)
    ]
    assert (log.num_events, log.end_us, log.has_finished, log.problems) == (
        3,
        1_000_000,
        False,
        (),
    )


@pytest.mark.parametrize("block_bytes", [1, 700, 1 << 20])
def test_blocks_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    path = write_events(tmp_path, 0, Story().events(0))
    whole = read_rank(0, path)
    monkeypatch.setattr(rank_log, "_BLOCK_BYTES", block_bytes)
    parts = read_rank(0, path)
    assert parts.events == whole.events
    for kind, table in whole.tables.items():
        assert parts.tables[kind].rows.tolist() == table.rows.tolist()


def test_a_loss_that_is_no_number_leaves_the_others_be(tmp_path: Path) -> None:
    log = log_of(
        tmp_path,
        [(1.0, committed(1)), (2.0, committed(2, loss=math.nan)), (3.0, committed(3))],
    )
    assert log.commits.iteration.tolist() == [1, 2, 3]
    assert math.isnan(log.commits["loss"][1])
    assert log.problems == ()


def record_of(**changes: Any) -> str:
    record = json.loads(line_of(9.0, 0, committed(9))) | changes
    return (
        json.dumps({key: value for key, value in record.items() if value is not ...})
        + "\n"
    )


DAMAGE: dict[str, tuple[str, list[str]]] = {
    "a half-written last line": (
        record_of()[:60],
        ["rank 0: the last line is half-written, left out"],
    ),
    "a line that is no JSON": ("{]\n", ["rank 0: damaged, left out: 1 lines"]),
    "a commit that is no JSON": (
        record_of()[:-3] + "\n",
        ["rank 0: damaged, left out: 1 lines"],
    ),
    "a line that is no object": (
        '["IterationCommitted"]\n7\n',
        ["rank 0: damaged, left out: 2 lines"],
    ),
    "bytes that are no text": (
        "\x00\x01\udcff\n",
        ["rank 0: damaged, left out: 1 lines"],
    ),
    "a commit without a time": (
        record_of(t_s=...),
        ["rank 0: damaged, left out: 1 lines"],
    ),
    "an event of another version": (
        line_of(9.0, 0, committed(1)).replace("IterationCommitted", "Sung") * 2,
        ["left out, of another version: 2 x event Sung"],
    ),
    "a field that is not known": (
        json.dumps(
            {
                "t_s": 9.0,
                "event": "Evaluated",
                "iteration": 1,
                "loss": 2.0,
                "mood": "good",
            }
        )
        + "\n",
        ["left out, of another version: 1 x Evaluated with mood"],
    ),
    "a field that lacks": (
        json.dumps({"t_s": 9.0, "event": "Evaluated", "iteration": 1}) + "\n",
        ["left out, of another version: 1 x Evaluated without loss"],
    ),
    "a field of another type": (
        json.dumps({"t_s": 9.0, "event": "Evaluated", "iteration": 1, "loss": "two"})
        + "\n",
        ["left out, of another version: 1 x Evaluated with another kind of loss"],
    ),
    "a commit without its stall": (
        record_of(stall_s=...),
        ["left out, of another version: 1 x IterationCommitted without stall_s"],
    ),
    "a commit without its iteration": (
        record_of(iteration=...),
        ["left out, of another version: 1 x IterationCommitted without iteration"],
    ),
    "events that could not be written": (
        line_of(9.0, 0, EventsLost(count=3)),
        ["rank 0: 3 events could not be written when they happened"],
    ),
}


@pytest.mark.parametrize(("tail", "problems"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_said_and_the_rest_is_read(
    tmp_path: Path, tail: str, problems: list[str]
) -> None:
    run = write_run(tmp_path / "run", Story(ranks=1))
    path = run / "events" / "rank0000.jsonl"
    path.write_bytes(path.read_bytes() + tail.encode(errors="surrogateescape"))
    read = read_run(run)
    assert list(read.problems) == problems
    assert read.ranks[0].iterations.iteration.tolist()[:12] == list(range(1, 13))


def test_order_is_that_of_the_file_where_lines_are_damaged(tmp_path: Path) -> None:
    path = write_events(tmp_path, 0, [(1.0, committed(1))])
    lines = [
        path.read_text(),
        record_of(iteration=...),
        line_of(1.0, 0, RunFinished(iteration=1, digest="")),
    ]
    path.write_text("".join(lines))
    assert [noted.after_commits for noted in read_rank(0, path).events] == [1]


FOLDERS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no events": (
        lambda run: [path.unlink() for path in run.glob("events/*")],
        "finished",
        "no events in",
    ),
    "no events at all": (
        lambda run: _remove(run, *run.glob("events/*"), run / "result.json"),
        "ended",
        "no events in",
    ),
    "no description": (
        lambda run: (run / "run.json").unlink(),
        "finished",
        "no readable run.json",
    ),
    "a damaged description": (
        lambda run: (run / "run.json").write_text("{"),
        "finished",
        "no readable run.json",
    ),
    "a rank is missing": (
        lambda run: (run / "events" / "rank0002.jsonl").unlink(),
        "finished",
        "no events of rank 2, of 4 ranks",
    ),
    "a rank has no readable event": (
        lambda run: (run / "events" / "rank0002.jsonl").write_text(""),
        "finished",
        "no readable event of rank 2",
    ),
}


def _remove(run: Path, *paths: Path) -> None:
    for path in paths:
        path.unlink()


@pytest.mark.parametrize(
    ("break_it", "state", "problem"), FOLDERS.values(), ids=FOLDERS.keys()
)
def test_folders_that_lack_something(
    tmp_path: Path, break_it: Callable[[Path], object], state: str, problem: str
) -> None:
    run = write_run(tmp_path / "run")
    break_it(run)
    read = read_run(run)
    assert read.state == state
    assert any(problem in said for said in read.problems)


def test_a_folder_of_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", policy="gemini")
    fault = {
        "rank": 1,
        "pid": 2,
        "signal": "KILL",
        "scope": "process",
        "generation": 1,
        "iteration": 1,
        "phase": "x",
    }
    lines = [{**fault, "unix_s": 1004.5, "ordered": False}, {"another": "version"}]
    (run / "faults.jsonl").write_text("\n".join(map(json.dumps, lines)))
    read = read_run(run)
    assert (read.name, read.policy, read.state, read.world_size) == (
        "run",
        "gemini",
        "finished",
        4,
    )
    assert [log.rank for log in read.ranks] == [0, 1, 2, 3]
    assert [at_s for at_s, _ in read.faults] == [4.5]
    assert read.problems == ()


def test_a_run_without_an_end_has_ended_badly(tmp_path: Path) -> None:
    assert read_run(write_run(tmp_path, ends_well=False)).state == "ended"


def test_a_simulated_run_needs_nothing_but_events(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    _remove(run, run / "run.json", run / "config.yaml", run / "result.json")
    read = read_run(run)
    assert (read.state, read.world_size, read.policy) == ("finished", 4, "unknown")


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / name, Story(ranks=1))
        for name in ("a/run", "b/run", "b/other")
    ]
    assert [run.name for run in read_runs(paths)] == ["a/run", "b/run", "b/other"]
    assert [run.name for run in read_runs([paths[0], paths[0]])] == [
        "run (1)",
        "run (2)",
    ]


def test_a_folder_of_runs_stands_for_all_of_them(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "several" / name, Story(ranks=1)) for name in ("b", "a")
    ]
    (tmp_path / "several" / "a.log").touch()
    (tmp_path / "several" / "other").mkdir()
    alone = write_run(tmp_path / "alone", Story(ranks=1))
    assert [run.name for run in read_runs([tmp_path / "several", alone])] == [
        "a",
        "b",
        "alone",
    ]
    (runs[0] / "run.json").unlink()
    assert [run.name for run in read_runs([runs[0]])] == ["b"]


def test_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"run: got .*nothing.*, wanted the folder of a run"
    ):
        read_run(tmp_path / "nothing")


def test_snapshots_are_columns_too(tmp_path: Path) -> None:
    taken = SnapshotTaken(
        iteration=3,
        window_start=3,
        slot=0,
        num_slots=1,
        size_bytes=1 << 40,
        dense_bytes=1 << 41,
        copy_s=0.25,
    )
    log = log_of(tmp_path, [(1.0, taken)])
    assert log.tables["SnapshotTaken"]["size_bytes"].tolist() == [float(1 << 40)]
    assert log.tables["SnapshotTaken"].us("copy_s").tolist() == [250_000]
