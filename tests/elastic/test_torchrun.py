"""The end of torchrun's report is our error."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from moe_ckpt.elastic.torchrun import write_error_file


def report_of(path: Path) -> str:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    return str(ChildFailedError("train.py", {0: failure}))


def test_the_report_names_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert "To enable traceback see" in report_of(path)
    write_error_file("error: train.lr: got 0, wanted more")
    said = report_of(path)
    assert "traceback : error: train.lr: got 0, wanted more\n" in said
    assert "To enable traceback see" not in said


@pytest.mark.parametrize("path", ["", "/nowhere/error.json"])
def test_without_a_file_nothing_is_written(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    write_error_file("error: train.lr: got 0, wanted more")
