"""The script that accepts a GPU: limits of the stages, and the result of a stage.

Each stage fits into ten minutes, and a stage that fails is one line.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scripts import gpu_acceptance
from scripts.acceptance.stages import STAGES


def test_each_stage_says_its_limit_and_what_it_proves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert gpu_acceptance.main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(STAGES)
    assert all(0 < stage.limit_s <= 600 and stage.proves for stage in STAGES.values())


def test_an_unknown_stage_is_named_with_the_stages_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        gpu_acceptance.main(["fact"])
    assert (
        "STAGE: got fact, wanted some of facts, unit, twice" in capsys.readouterr().err
    )


@pytest.mark.full
def test_a_stage_leaves_a_line_a_log_and_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_acceptance.main(["facts", "--cpu", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("facts        ok")
    assert "XXH3" in (tmp_path / "cpu" / "facts.log").read_text()
    assert json.loads((tmp_path / "cpu" / "results.json").read_text())["facts"][
        "passed"
    ]
    if torch.cuda.is_available():
        return
    assert gpu_acceptance.main(["facts", "--out", str(tmp_path)]) == 1, (
        "a GPU is wanted where there is none"
    )
    assert capsys.readouterr().out.startswith("facts        FAILED")
    assert (
        f"| facts | {STAGES['facts'].proves} | FAILED |"
        in (tmp_path / "full" / "results.md").read_text()
    )
