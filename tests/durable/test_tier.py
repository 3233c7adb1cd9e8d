"""Megatron's own files in the durable tier: damage, another model, failing saves, and which run to resume from.

Rules that do not depend on the files are those of tests/engine/test_durable.py.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from launcher.config import Settings
from launcher.run import run
from moe_ckpt.events import CheckpointFailed, CheckpointSaved, CheckpointSkipped, StateResumed
from tests.ranks import RankFailedError, rank_store, run_ranks
from tests.training import Kill, events_of, job_settings, train

DENSE = ("ckpt=dense", "ckpt.every_iters=2", "train.iterations=6", "ckpt.keep=3")
Run = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run with checkpoints after iterations 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, train(2, folder, *DENSE)


@pytest.fixture
def interrupted(finished: Run, tmp_path: Path) -> Run:
    """A copy that looks as if the run had died after iteration 4, and how it would have ended."""
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


def test_damaged_checkpoints_are_reported_and_an_older_one_taken(finished: Run, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(finished[0], folder)
    damaged = {_checkpoint(folder, 6): "common.pt", _checkpoint(folder, 4): "__1_0.distcp"}
    for directory, file in damaged.items():
        _flip_a_bit(directory / file)

    result = train(2, folder, *DENSE)

    assert [event.source for event in events_of(folder, CheckpointSkipped)] == list(map(str, damaged))
    assert [event.iteration for event in events_of(folder, StateResumed)] == [2]
    assert result["digest_per_rank"] == finished[1]["digest_per_rank"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(["train.lr=0.123"], r"\n  train.lr: got 0.123, wanted 0.005\n", id="another learning rate"),
        pytest.param(
            ["train.global_batch_size=4"], r"\n  train.global_batch_size: got 4, wanted 8\n", id="other batches"
        ),
        pytest.param(
            ["model.hidden_size=64", "precision=fp32"],
            r"\n  model.hidden_size: got 64, wanted 32\n  precision.dtype: got 'fp32', wanted 'bf16'\n",
            id="another model and precision",
        ),
        pytest.param(
            ["train.resume=never"], r"train.resume: got 'never'.*iter_0000004", id="no resume, and saved ones"
        ),
        pytest.param(
            ["train.iterations=3", "train.lr_decay_iters=6"],
            r"train.iterations: got 3, wanted at least 4",
            id="fewer iterations than done",
        ),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(interrupted: Run, overrides: list[str], message: str) -> None:
    with pytest.raises(RankFailedError, match=message):
        train(2, interrupted[0], *DENSE, *overrides)


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(interrupted: Run) -> None:
    shutil.rmtree(interrupted[0] / "checkpoints")
    gone = r"this run has saved a checkpoint at iteration 6, and no state of it is on disk: wanted its checkpoints"
    with pytest.raises(RankFailedError, match=gone):
        train(2, interrupted[0], *DENSE)
    result = train(2, interrupted[0], *DENSE, "train.resume=never")
    assert result["digest_per_rank"] == interrupted[1]["digest_per_rank"]


def test_a_start_after_one_that_saved_nothing_says_where_it_begins(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError):
        train(2, tmp_path, *DENSE, kill=Kill(ranks=(0, 1), iteration=2, phase="gradients"))
    settings = job_settings(tmp_path, *DENSE)
    assert run_ranks(2, _begins, settings) == [["training begins with iteration 1"], []]


def _begins(settings: Settings) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage().partition(":")[0])  # type: ignore[method-assign]
    logging.getLogger("moe_ckpt.loop").addHandler(handler)
    run(settings, store=rank_store())
    return said


def test_resume_from_the_folder_of_another_run(interrupted: Run, tmp_path: Path) -> None:
    folder, expected = interrupted
    result = train(2, tmp_path / "new", *DENSE, f"train.resume={folder}")
    assert [event.source for event in events_of(tmp_path / "new", StateResumed)] == [str(_checkpoint(folder, 4))]
    assert result["digest_per_rank"] == expected["digest_per_rank"]


def test_resume_from_one_checkpoint_and_then_from_own_ones(interrupted: Run, tmp_path: Path) -> None:
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
def test_a_save_that_fails_is_reported_and_training_goes_on(asynchronous: str, finished: Run, tmp_path: Path) -> None:
    result = train(2, tmp_path, *DENSE, f"ckpt.async_save={asynchronous}", max_file_bytes=200_000)
    failed = events_of(tmp_path, CheckpointFailed)
    assert [event.iteration for event in failed] == [2, 4, 6]
    assert all("File too large" in event.reason for event in failed)
    assert not events_of(tmp_path, CheckpointSaved)
    assert result["digest_per_rank"] == finished[1]["digest_per_rank"]
