"""The command about partial checkpoints writes both files, and runs nothing twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lossy.variants import faults
from benchmarks.partial import main
from launcher.faults.log import append_faults
from tests.benchmarks.faults import injected
from tests.harness.jobs.stand_in_torchrun import StandIn
from tests.report_runs import Story, write_run

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("--iterations", "15", "--only", "none", "--only", "moc")
SMALL = (
    "model.hidden_size=32",
    "train.eval_every_iters=3",
    "train.eval_batches=1",
    "train.sequence_length=16",
)


def _finished_run(run: Path, story: Story, policy: str) -> None:
    """Write a finished run of a story."""
    write_run(run, story, policy=policy)
    described = json.loads((run / "run.json").read_text())
    packages = {"torch": "2", "megatron-core": "0"}
    (run / "run.json").write_text(
        json.dumps(described | {"packages": packages, "python": "3"})
    )
    result = {
        "iteration": story.iterations,
        "digest_per_rank": ["a", "b", "c", "d"],
        "wall_s": 3.0,
    }
    (run / "result.json").write_text(json.dumps(result))


def test_two_runs_make_a_page_and_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = StandIn(tmp_path / "bin", monkeypatch)
    _finished_run(stand_in.run_of("none"), Story(fault_after=None), "none")
    _finished_run(stand_in.run_of("moc"), Story(), "moc")
    append_faults(stand_in.run_of("moc"), [injected(3, 6, "node")])
    docs, runs = tmp_path / "docs", tmp_path / "runs"
    monkeypatch.setattr(
        sys,
        "argv",
        ["partial.py", "--to", str(docs), "--runs", str(runs), *SHORT, *SMALL],
    )
    assert main() == 0
    assert [
        line.partition(":")[0] for line in capsys.readouterr().out.splitlines()
    ] == ["none", "moc"]
    assert main() == 0
    assert capsys.readouterr().out == ""
    none, moc = stand_in.commands
    for command in (none, moc):
        assert command[:3] == [
            "--standalone",
            "--nproc-per-node=4",
            "launcher/train.py",
        ]
        assert {"train.iterations=15", *SMALL} <= set(command)
    assert {"ckpt=moc", *faults(15)} <= set(moc)
    assert "ckpt=none" in none
    assert not set(faults(15)) & set(none)
    _check_files(docs, "node of rank 3 in iteration 6", num_faults=1)


def test_a_run_that_fails_ends_the_command_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StandIn(tmp_path / "bin", monkeypatch).fail("none")
    monkeypatch.setattr(
        sys,
        "argv",
        ["partial.py", "--to", str(tmp_path), "--runs", str(tmp_path), *SHORT],
    )
    with pytest.raises(SystemExit, match="none: status 1"):
        main()
    assert not (tmp_path / "partial.md").exists()


@pytest.mark.full
def test_two_real_runs_make_a_page_and_a_figure(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    command = [
        sys.executable,
        "benchmarks/partial.py",
        "--to",
        str(docs),
        "--runs",
        str(tmp_path / "runs"),
    ]
    said = [
        subprocess.run(
            [*command, *SHORT, *SMALL],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert [line.partition(":")[0] for line in said[0].splitlines()] == ["none", "moc"]
    assert said[1] == ""
    _check_files(docs, "node of rank 3 in iteration 9", num_faults=4)


def _check_files(docs: Path, fault: str, *, num_faults: int) -> None:
    page = (docs / "partial.md").read_text()
    (moc,) = (
        line.split(" | ") for line in page.splitlines() if line.startswith("| moc |")
    )
    assert float(moc[2].removesuffix("%")) > 0, "tokens were lost"
    assert len(moc[-1].split(",")) == num_faults
    assert fault in page
    assert "model.hidden_size=32" in page
    assert (docs / "partial.svg").read_text().count("<polyline") == 4
