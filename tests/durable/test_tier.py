"""Megatron's own files in the durable tier: damage, other models, failed saves.

Further tests choose the run to resume from. Rules that do not depend on the files are
tested in tests/engine/test_durable.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.config import Settings
from launcher.run import run
from moe_ckpt.durable.checkpoint_folder import MARKER
from moe_ckpt.events import (
    CheckpointFailed,
    CheckpointSaved,
    CheckpointSkipped,
    StateResumed,
)
from tests.harness.gloo.ranks import RankFailedError, rank_store, run_ranks
from tests.harness.jobs.training import Kill, events_of, job_settings, train

DENSE = ("ckpt=dense", "ckpt.every_iters=2", "train.iterations=6", "ckpt.keep=3")
Run = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a finished run with checkpoints after iterations 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, train(2, folder, *DENSE)


@pytest.fixture
def interrupted(finished: Run, tmp_path: Path) -> Run:
    """Return a copy of a run that seems to have died after iteration 4.

    The second value is the result that the run would have reached.
    """
    folder = tmp_path / "interrupted"
    shutil.copytree(finished[0], folder)
    shutil.rmtree(folder / "checkpoints" / "iter_0000006")
    return folder, finished[1]


def _checkpoint(folder: Path, iteration: int) -> Path:
    return folder / "checkpoints" / f"iter_{iteration:07d}"


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damaged_checkpoints_are_reported_and_an_older_one_taken(
    finished: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(finished[0], folder)
    damaged = {
        _checkpoint(folder, 6): "common.pt",
        _checkpoint(folder, 4): "__1_0.distcp",
    }
    for directory, file in damaged.items():
        _flip_a_bit(directory / file)

    result = train(2, folder, *DENSE)

    assert [event.source for event in events_of(folder, CheckpointSkipped)] == list(
        map(str, damaged)
    )
    assert [event.iteration for event in events_of(folder, StateResumed)] == [2]
    assert result["digest_per_rank"] == finished[1]["digest_per_rank"]


def _list_fewer_files(marker: dict[str, Any]) -> None:
    marker["files"] = [
        file for file in marker["files"] if not file["name"].endswith("_0.distcp")
    ]


def _name_another_iteration(marker: dict[str, Any]) -> None:
    marker["iteration"] = 3


def _list_nothing(marker: dict[str, Any]) -> None:
    marker["files"] = []


def _swap_the_files(marker: dict[str, Any]) -> None:
    first, second, *_ = (
        file for file in marker["files"] if file["name"].endswith(".distcp")
    )
    first["name"], second["name"] = second["name"], first["name"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_list_fewer_files, r"COMMITTED.json: got no checksum of __0_0.distcp"),
        (
            _list_nothing,
            r"COMMITTED.json: got no checksum of .metadata, .*metadata.json",
        ),
        (_name_another_iteration, r"got the marker of iteration 3, wanted that of 4"),
        (_swap_the_files, r"__\d_0.distcp: got \d+ bytes with CRC-32"),
    ],
)
def test_a_marker_that_is_not_that_of_its_files_is_passed_over(
    interrupted: Run, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    folder, expected = interrupted
    path = _checkpoint(folder, 4) / MARKER
    marker = json.loads(path.read_text())
    change(marker)
    path.write_text(json.dumps(marker))
    (_checkpoint(folder, 2) / "NOTES").write_text("of the user")
    result = train(2, folder, *DENSE)
    [skipped] = events_of(folder, CheckpointSkipped)
    assert re.search(reason, skipped.reason)
    assert [event.iteration for event in events_of(folder, StateResumed)] == [2]
    assert result["digest_per_rank"] == expected["digest_per_rank"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(
            ["train.lr=0.123"],
            r"\n  train.lr: got 0.123, wanted 0.005\n",
            id="another learning rate",
        ),
        pytest.param(
            ["train.global_batch_size=4"],
            r"\n  train.global_batch_size: got 4, wanted 8\n",
            id="other batches",
        ),
        pytest.param(
            ["model.hidden_size=64", "precision=fp32"],
            r"\n  model.hidden_size: got 64, wanted 32\n  precision.dtype: got 'fp32',"
            r" wanted 'bf16'\n",
            id="another model and precision",
        ),
        pytest.param(
            ["train.resume=never"],
            r"train.resume: got 'never'.*iter_0000004",
            id="no resume, and saved ones",
        ),
        pytest.param(
            ["train.iterations=3", "train.lr_decay_iters=6"],
            r"train.iterations: got 3, wanted at least 4",
            id="fewer iterations than done",
        ),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(
    interrupted: Run, overrides: list[str], message: str
) -> None:
    with pytest.raises(RankFailedError, match=message):
        train(2, interrupted[0], *DENSE, *overrides)


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(interrupted: Run) -> None:
    shutil.rmtree(interrupted[0] / "checkpoints")
    gone = (
        r"this run has saved a checkpoint at iteration 6, and no state of it is on"
        r" disk: wanted its checkpoints"
    )
    with pytest.raises(RankFailedError, match=gone):
        train(2, interrupted[0], *DENSE)
    result = train(2, interrupted[0], *DENSE, "train.resume=never")
    assert result["digest_per_rank"] == interrupted[1]["digest_per_rank"]


def test_each_start_says_in_one_line_where_it_begins(
    interrupted: Run, tmp_path: Path
) -> None:
    folder, new = interrupted[0], tmp_path / "new"
    with pytest.raises(RankFailedError):
        train(2, new, *DENSE, kill=Kill(ranks=(0, 1), iteration=2, phase="gradients"))
    resumed, second = tmp_path / "resumed", _checkpoint(folder, 2)
    for run_folder, begins, *overrides in [
        (tmp_path / "first", "begins with iteration 1: a new run"),
        (
            new,
            "begins with iteration 1: earlier processes of this run have left no state",
        ),
        (folder, f"goes on after iteration 4, from {_checkpoint(folder, 4)}"),
        (
            resumed,
            f"goes on after iteration 2, from {second}",
            f"train.resume={second}",
        ),
    ]:
        settings = job_settings(run_folder, *DENSE, "run.progress=lines", *overrides)
        assert run_ranks(2, _begins, settings) == [[f"training {begins}"], []]


def _begins(settings: Settings) -> list[str]:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        run(settings, store=rank_store())
    return [
        line for line in said.getvalue().splitlines() if line.startswith("training ")
    ]


def test_resume_from_the_folder_of_another_run(
    interrupted: Run, tmp_path: Path
) -> None:
    folder, expected = interrupted
    result = train(2, tmp_path / "new", *DENSE, f"train.resume={folder}")
    assert [event.source for event in events_of(tmp_path / "new", StateResumed)] == [
        str(_checkpoint(folder, 4))
    ]
    assert result["digest_per_rank"] == expected["digest_per_rank"]


def test_resume_from_one_checkpoint_and_then_from_own_ones(
    interrupted: Run, tmp_path: Path
) -> None:
    folder, expected = interrupted
    new = tmp_path / "new"
    resume = f"train.resume={_checkpoint(folder, 2)}"
    train(2, new, *DENSE, resume)
    shutil.rmtree(_checkpoint(new, 6))
    result = train(2, new, *DENSE, resume)
    assert [event.iteration for event in events_of(new, StateResumed)] == [2, 4]
    assert result["digest_per_rank"] == expected["digest_per_rank"]


def test_resume_from_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"train.resume: got .*nowhere"):
        train(1, tmp_path, f"train.resume={tmp_path / 'nowhere'}", "train.iterations=2")


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_save_that_fails_is_reported_and_training_goes_on(
    asynchronous: str, finished: Run, tmp_path: Path
) -> None:
    result = train(
        2, tmp_path, *DENSE, f"ckpt.async_save={asynchronous}", max_file_bytes=200_000
    )
    failed = events_of(tmp_path, CheckpointFailed)
    assert [event.iteration for event in failed] == [2, 4, 6]
    assert all("File too large" in event.reason for event in failed)
    assert not events_of(tmp_path, CheckpointSaved)
    assert result["digest_per_rank"] == finished[1]["digest_per_rank"]
