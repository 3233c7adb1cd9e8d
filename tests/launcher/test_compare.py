"""Comparisons: planned runs and faults, and one comparison from command to page."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from launcher.compare import main, plan_variants
from tests.harness.jobs.stand_in_torchrun import StandIn
from tests.harness.jobs.training import fast
from tests.report_runs import Story, committed, write_run

AT = ("fault=at", "fault.at=[{iteration: 3, rank: 1, phase: backward}]")


def test_policies_without_supervisors_are_struck_from_outside() -> None:
    dense, moevement = plan_variants(
        ["dense", "moevement", *AT, "model.num_layers=2"], 4
    )
    assert moevement.overrides == ("ckpt=moevement", *AT, "model.num_layers=2")
    assert moevement.kills == ()
    assert dense.overrides == ("ckpt=dense", "model.num_layers=2", "fault=none")
    assert [(kill.rank, kill.iteration) for kill in dense.kills] == [(1, 3)]


def test_the_same_seed_is_the_same_plan() -> None:
    words = ["fault=poisson", "fault.mtbf_s=5", "fault.count=3", "fault.seed=7"]
    first, second = plan_variants(["none", "dense", *words], 4)
    assert first.kills == second.kills
    assert len(first.kills) == 3


def test_policies_have_own_settings_and_come_in_the_order_given() -> None:
    variants = plan_variants(
        ["gemini:ckpt.every_iters=5,ckpt.replicas=2", "gemini", "train.iterations=20"],
        4,
    )
    assert [variant.name for variant in variants] == ["1-gemini", "2-gemini"]
    assert variants[0].overrides == (
        "ckpt=gemini",
        "train.iterations=20",
        "ckpt.every_iters=5",
        "ckpt.replicas=2",
    )


def test_without_policies_all_are_run() -> None:
    names = [variant.name for variant in plan_variants([], 4)]
    assert names == ["1-none", "2-dense", "3-checkfreq", "4-gemini", "5-moevement"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["genimi"],
            "POLICY: got 'genimi', wanted one of checkfreq, dense, flowcheck, gemini",
        ),
        (["dense", "train.iteration=5"], "train.iteration"),
        (
            [
                "moevement",
                "fault=state_loss",
                "fault.at=[{iteration: 3, stage: 0, phase: step}]",
            ],
            "fault.kind: got 'state_loss', wanted at, poisson, trace or none",
        ),
        (
            # without a supervisor, no process finds a hang
            ["none", "fault=at", "fault.at=[{iteration: 3, rank: 1, signal: STOP}]"],
            "fault: signal: got 'STOP', wanted one of KILL, SEGV, TERM under ckpt=none",
        ),
    ],
)
def test_a_mistake_is_named_before_anything_runs(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "-o", str(tmp_path / "new")]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_runs_that_are_there_are_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "1-none")
    assert main(["none", "-o", str(tmp_path)]) == 1
    assert "wanted a folder without runs" in capsys.readouterr().err


SETTINGS = tuple(
    setting for setting in fast("train.iterations=6") if setting != "run.progress=none"
)


def test_runs_are_started_struck_and_reported_on_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = StandIn(tmp_path / "bin", monkeypatch)
    stand_in.wait_for_kill("1-none", 1, [(1.0, committed(1)), (2.0, committed(2))])
    write_run(
        stand_in.run_of("1-none"), Story(ranks=2, fault_after=None), policy="none"
    )
    write_run(stand_in.run_of("2-gemini"), Story(ranks=2), policy="gemini")
    stand_in.fail("3-dense")
    folder = tmp_path / "runs"
    assert (
        main(
            [
                "none",
                "gemini",
                "dense",
                *SETTINGS,
                *AT,
                "--ranks",
                "2",
                "-o",
                str(folder),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert stand_in.struck_by == signal.SIGKILL
    starts = [
        ("none", 1, ("fault=none",)),
        ("gemini", 0, AT),
        ("dense", 1, ("fault=none",)),
    ]
    for number, (command, (policy, restarts, faults)) in enumerate(
        zip(stand_in.commands, starts, strict=True), 1
    ):
        first, last = (
            ["--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"],
            f"run.dir={folder}/",
        )
        assert command[:3] == first
        assert command[3].endswith("launcher/train.py")
        assert command[4] == f"ckpt={policy}"
        assert {*SETTINGS, *faults} <= set(command)
        assert command[-1] == f"{last}{number}-{policy}"
    assert "| run | 1-none | 2-gemini |" in said
    assert "| state | finished | finished |" in said
    assert f"ended with status 1; {folder}/3-dense.log says why" in said
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_where_no_run_has_begun_there_is_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    StandIn(tmp_path / "bin", monkeypatch).fail("1-gemini")
    assert main(["gemini", *AT, "-o", str(tmp_path / "runs")]) == 1
    assert "error: no run has begun" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "report.html").exists()


@pytest.mark.full
def test_two_real_policies_under_the_same_kill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["none", "gemini", *SETTINGS, *AT, "--ranks", "2", "-o", str(tmp_path)])
        == 0
    )
    said = capsys.readouterr().out
    assert "| run | 1-none | 2-gemini |" in said
    assert "| state | finished | finished |" in said
    assert "| recoveries | 1 | 1 |" in said
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    results = [
        json.loads((tmp_path / name / "result.json").read_text())
        for name in ("1-none", "2-gemini")
    ]
    assert results[0]["digest"] == results[1]["digest"]
