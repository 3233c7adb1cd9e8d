"""The shown status of running and ended jobs.

The jobs are of real processes (tests/harness/jobs/walking_job.py).
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.status import main
from moe_ckpt.elastic.live_workers import read_live, write_live
from moe_ckpt.elastic.status_page import Phase, StatusPage
from moe_ckpt.events import CopiesRestored, GenerationEnded
from tests.harness.jobs.walking_job import make_run, parked_job, rewrite_live
from tests.report_runs import rejoined, write_events
from tests.waits import WAIT_S


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two ranks, of which only rank 1 lives: this process."""
    run = make_run(tmp_path / "run", 2)
    page = StatusPage(tmp_path / "page")
    page.join(3)
    page.enter(Phase.STEP, 17)
    page.beat()
    write_live(
        run,
        global_rank=1,
        node=0,
        supervisor_pid=os.getppid(),
        memory=tmp_path,
        incarnation=2,
    )
    return run


def shown(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def text_of(capsys: pytest.CaptureFixture[str], run: Path) -> str:
    assert main([str(run)]) == 0
    return capsys.readouterr().out


def test_a_running_job_is_shown_rank_by_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with parked_job(tmp_path, 3, ranks_per_node=2) as (job, pids):
        record = shown(capsys, job.run)
        assert (record["run"], record["ended"], record["result"]) == (
            str(job.run),
            False,
            None,
        )
        expected = [(0, 0, pids[0], 0), (1, 0, pids[1], 0), (2, 1, pids[2], 0)]
        assert [
            (rank["rank"], rank["node"], rank["pid"], rank["incarnation"])
            for rank in record["ranks"]
        ] == expected
        for rank in record["ranks"]:
            assert 0.0 <= rank["doing"].pop("heartbeat_age_s") < 5.0
            assert rank["state"] == "computing"
            assert rank["doing"] == {
                "generation": 1,
                "iteration": 3,
                "phase": "backward",
                "waiting": False,
            }
        text = text_of(capsys, job.run)
        assert text.startswith(f"{job.run}: 3 ranks\n")
        assert all(str(pid) in text for pid in pids)


def test_the_table_has_a_row_for_each_rank_in_80_columns(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rewrite_live(run, 1, host="h" * 14, boot="of h", pid=2**22)
    lines = text_of(capsys, run).splitlines()
    assert max(map(len, lines[1:])) <= 80
    (row,) = [line for line in lines if str(2**22) in line]
    assert row.split() == [
        "1",
        "0",
        "h" * 14,
        str(2**22),
        "2",
        "-",
        "-",
        "-",
        "elsewhere",
        "-",
    ]
    assert (
        " ".join(" ".join(lines[1:3]).split())
        == "incar- gener- iter- heart- rank node host pid nation ation ation phase"
        " state beat"
    )


def test_a_row_has_what_a_rank_does(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (row,) = [
        line for line in text_of(capsys, run).splitlines() if str(os.getpid()) in line
    ]
    (worker,) = read_live(run)
    *cells, heartbeat, unit = row.split()
    assert cells == [
        "1",
        "0",
        worker.host,
        str(os.getpid()),
        "2",
        "3",
        "17",
        "step",
        "computing",
    ]
    assert heartbeat.isdecimal()
    assert unit == "ms"


def test_the_newest_run_is_shown(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "latest").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    assert shown(capsys)["run"] == str(run)


def test_a_rank_that_waits_for_others_is_shown(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    StatusPage(tmp_path / "page").wait(True)
    (rank,) = shown(capsys, run)["ranks"]
    assert (rank["state"], rank["doing"]["waiting"]) == ("waiting", True)


@pytest.mark.parametrize(
    ("changes", "state", "ended"),
    [
        ({"start_ticks": 1}, "being replaced", False),
        ({"start_ticks": 1, "supervisor_pid": 2**22 + 1}, "dead", True),
        ({"host": "far-away", "boot": "of far-away"}, "elsewhere", False),
    ],
)
def test_a_worker_that_cannot_be_asked_is_shown(
    run: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    state: str,
    ended: bool,
) -> None:
    rewrite_live(run, 1, **changes)
    record = shown(capsys, run)
    assert [(rank["state"], rank["doing"]) for rank in record["ranks"]] == [
        (state, None)
    ]
    assert record["ended"] is ended
    assert ("ended without a result" in text_of(capsys, run)) is ended


def test_the_result_of_a_run_that_has_ended_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", 2)
    result = {"iteration": 200, "eval_loss": 2.53912, "digest": "c7" * 32}
    (run / "result.json").write_text(json.dumps(result))
    wanted = {
        "run": str(run),
        "ended": True,
        "result": result,
        "faults": {},
        "recovery": None,
        "ranks_without_copies": None,
        "exactness": None,
        "ranks": [],
    }
    assert shown(capsys, run) == wanted
    assert text_of(capsys, run).splitlines() == [
        f"{run}: 2 ranks",
        f"ended: iteration 200, evaluation loss 2.5391, digest {'c7' * 32}",
        "faults so far: none",
    ]


def test_faults_are_counted_by_class(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deaths = ["rank 0 (pid 7) died of SIGKILL", "rank 1 (pid 8) hung"]
    write_events(
        run, 0, [(1.0, rejoined(5, deaths=deaths, classes=["signal", "hang"]))]
    )
    assert shown(capsys, run)["faults"] == {"signal": 1, "hang": 1}
    assert "faults so far: 1 signal, 1 hang\n" in text_of(capsys, run)


def test_hosts_are_named_if_there_are_several(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "hosts:" not in text_of(capsys, run)
    for rank, host in ((0, "near"), (2, "far"), (3, "far")):
        write_live(
            run,
            global_rank=rank,
            node=rank // 2,
            supervisor_pid=os.getppid(),
            memory=tmp_path,
            incarnation=0,
        )
        rewrite_live(run, rank, host=host, boot=f"of {host}")
    rewrite_live(run, 1, host="near")
    text = text_of(capsys, run)
    assert "hosts: near: ranks 0 to 1; far: ranks 2 to 3\n" in text
    assert "elsewhere: whether these workers live cannot be seen from here\n" in text


def test_a_recovery_and_missing_copies_are_shown(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = GenerationEnded(generation=2, reason="", left_unix_s=time.time() - 40.0)
    copied = CopiesRestored(num_peers=1)
    write_events(run, 0, [(1.0, copied), (2.0, left)])
    write_events(run, 1, [(1.0, rejoined(4)), (1.5, copied)])
    record = shown(capsys, run)
    assert 40.0 <= record["recovery"].pop("seconds") < 40.0 + WAIT_S
    assert record["recovery"] == {"left": [0], "started": [], "missing": [1]}
    assert record["ranks_without_copies"] == [0]
    text = text_of(capsys, run)
    found = re.search(r"recovering for \d+ s: (.*)\n", text)
    assert found is not None
    assert found[1] == (
        "rank 0 left the generation that ended, rank 1 missing or being replaced"
    )
    assert "copies: not all on peers since the last loss or start: rank 0\n" in text

    write_events(run, 0, [(2.0, left), (3.0, rejoined(4)), (3.5, copied)])
    assert shown(capsys, run)["recovery"] is None
    assert "copies: the snapshots of all ranks are on peers" in text_of(capsys, run)


def test_nothing_is_said_of_copies_once_the_run_has_ended(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_events(run, 1, [(1.0, CopiesRestored(num_peers=1))])
    rewrite_live(run, 1, start_ticks=1, supervisor_pid=2**22 + 1)
    assert "copies:" not in text_of(capsys, run)


def test_no_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().err == (
        f"error: no run in {tmp_path}/nowhere: start one, or name another's folder\n"
    )
