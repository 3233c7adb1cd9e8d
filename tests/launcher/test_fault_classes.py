"""Faults are counted once each, by class, from the events of all ranks."""

from __future__ import annotations

import json
from pathlib import Path

from launcher.fault_classes import EXPLAINED, count_faults, count_faults_in
from launcher.report.as_json import to_json
from launcher.report.facts import gather
from launcher.report.markdown import to_markdown
from launcher.report.read import read_run
from moe_ckpt.elastic.process_failure import FaultClass
from moe_ckpt.events import (
    CorruptionFound,
    LossNotFinite,
    ReplayDiffered,
    StateLost,
    TrainingFailed,
    WorkerStarted,
)
from tests.report_runs import (
    LOST_NODE,
    Story,
    committed,
    rejoined,
    write_events,
    write_run,
)

ANEW = WorkerStarted(pid=2, host="here", incarnation=1, device="cpu")
FAILED = TrainingFailed(iteration=4, error="ValueError: shapes do not match")


def test_every_class_of_a_fault_is_explained() -> None:
    assert set(FaultClass) <= set(EXPLAINED)


def test_a_death_that_all_ranks_report_counts_once() -> None:
    killed = rejoined(
        5, deaths=["rank 1 died", "rank 2 hung"], classes=["signal", "hang"]
    )
    replaced = rejoined(5, deaths=["rank 2 hung"], classes=["hang"])
    again = rejoined(7, generation=3, deaths=["rank 1 died again"], classes=["signal"])
    assert count_faults(
        [[killed, again], [ANEW, killed, again], [ANEW, replaced, again]]
    ) == {"signal": 2, "hang": 1}


def test_a_lost_node_counts_once_for_all_ranks(tmp_path: Path) -> None:
    lost = rejoined(5, deaths=[LOST_NODE], classes=["node"])
    both = rejoined(5, deaths=["rank 0 died", LOST_NODE], classes=["signal", "node"])
    # a new worker whose forerunner's record is of an earlier generation
    new = rejoined(5, deaths=[], classes=["restart"])
    assert count_faults([[both], [lost], [ANEW, new]]) == {"signal": 1, "node": 1}
    run = write_run(tmp_path / "run", Story(death=LOST_NODE, fault="node"))
    facts = gather(read_run(run))
    assert dict(facts.faults) == {"node": 1}
    assert [episode.causes for episode in facts.episodes] == [(LOST_NODE,)]
    text = to_markdown([facts])
    assert f"| node | 1 | {EXPLAINED['node']} |" in text
    assert LOST_NODE in text


def test_an_end_without_a_death_counts_once_for_its_class() -> None:
    connection = rejoined(5, deaths=[], classes=["connection"])
    daemon = rejoined(6, generation=3, deaths=[], classes=["daemon"])
    assert count_faults([[connection, daemon], [connection, daemon]]) == {
        "daemon": 1,
        "connection": 1,
    }


def test_a_rank_without_deaths_says_nothing_about_others_deaths() -> None:
    late = rejoined(5, deaths=[], classes=["restart"])
    assert count_faults([[rejoined(5, classes=["exception"])], [late]]) == {
        "exception": 1
    }


def test_bad_states_count_once_for_all_ranks_that_see_them() -> None:
    bad = LossNotFinite(iteration=9, loss="nan", source="disk", action="goes on")
    lost, differed = (
        StateLost(iteration=3, phase="backward"),
        ReplayDiffered(iteration=8, operators=["layer 0"]),
    )
    corrupt = CorruptionFound(iteration=20, where=["rank 1: gate"], action="back")
    seen = [lost, differed, bad, corrupt]
    assert count_faults([seen, seen]) == {
        "state lost": 1,
        "bad loss": 1,
        "bit flip": 2,
    }


def test_an_error_counts_unless_another_worker_followed() -> None:
    assert count_faults([[FAILED], [FAILED]]) == {"error": 1}, "all ranks may meet it"
    assert count_faults([[FAILED, ANEW, rejoined(3, classes=["exception"])]]) == {
        "exception": 1
    }


def test_deaths_in_logs_without_classes_are_unknown() -> None:
    assert count_faults([[rejoined(5, deaths=["rank 1 died"])]]) == {"unknown": 1}


def test_a_run_folder_is_counted_without_its_other_events(tmp_path: Path) -> None:
    events = [(1.0, committed(1)), (2.0, rejoined(1, classes=["hang"])), (3.0, FAILED)]
    write_events(tmp_path, 0, events)
    assert count_faults_in(tmp_path) == {"hang": 1, "error": 1}


def test_reports_name_the_counts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Story())
    facts = gather(read_run(run))
    (told,) = json.loads(to_json([facts]))["runs"]
    assert told["faults"] == {"signal": 1}
    assert f"| signal | 1 | {EXPLAINED['signal']} |" in to_markdown([facts])
