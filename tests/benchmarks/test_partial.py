"""The command about partial checkpoints, with two short runs: both files, and nothing is run twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("--iterations", "15", "--only", "none", "--only", "moc")
SMALL = ("model.hidden_size=32", "train.eval_every_iters=3", "train.eval_batches=1", "train.sequence_length=16")


@pytest.mark.timeout(400)  # two starts of torchrun
def test_two_runs_make_a_page_and_a_figure(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "benchmarks/partial.py",
        "--to",
        str(tmp_path / "docs"),
        "--runs",
        str(tmp_path / "runs"),
    ]
    said = [
        subprocess.run([*command, *SHORT, *SMALL], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert [line.partition(":")[0] for line in said[0].splitlines()] == ["none", "moc"]
    assert said[1] == ""
    page = (tmp_path / "docs" / "partial.md").read_text()
    (moc,) = (line.split(" | ") for line in page.splitlines() if line.startswith("| moc |"))
    assert float(moc[2].removesuffix("%")) > 0, "tokens were lost"
    assert len(moc[-1].split(",")) == 4, "faults"
    assert "node of rank 3 in iteration 9" in page
    assert "model.hidden_size=32" in page
    assert (tmp_path / "docs" / "partial.svg").read_text().count("<polyline") == 4
