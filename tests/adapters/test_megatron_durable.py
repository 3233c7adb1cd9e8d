"""What is written is the state at the call, and what is read back is that state, whatever happened in between."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from moe_ckpt.adapters.megatron_durable import MegatronDurableState
from moe_ckpt.adapters.megatron_state import TrainingState, digest_of, named_state
from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.store.disk import verify_files
from tests.adapters.stage import build_stage
from tests.ranks import run_ranks

BIASED = ("model.moe_balancing=bias", "model.moe_score_function=sigmoid", "precision=fp16")


def _spoil(state: TrainingState) -> None:
    """Change every number of the state, and draw from the generators, as later training would."""
    for name, tensor in named_state(state):
        if not name.startswith("rng."):
            tensor.add_(1)
    torch.rand(7)
    state.scheduler.step(increment=1)


def _digests_around_a_save(folder: Path, asynchronous: bool) -> tuple[str, str, str]:
    state, trainer = build_stage(*BIASED, "precision.initial_loss_scale=1024.0")
    durable = MegatronDurableState(state, asynchronous=asynchronous)
    for iteration in (1, 2):
        trainer.run_iteration(iteration)
    saved = digest_of(state)
    folder.mkdir(exist_ok=True)
    durable.start_save(folder, 2)
    _spoil(state)
    assert durable.finish_save(wait=True) is not None
    spoiled = digest_of(state)
    assert durable.load(folder) == 2
    return saved, spoiled, digest_of(state)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_state_at_the_call_is_saved_and_comes_back_whole(asynchronous: bool, tmp_path: Path) -> None:
    for saved, spoiled, loaded in run_ranks(4, _digests_around_a_save, tmp_path / "checkpoint", asynchronous):
        assert spoiled != saved
        assert loaded == saved


def _reason_of_a_failed_save(folder: Path) -> str:
    state, _ = build_stage()
    with pytest.raises(CheckpointSaveError) as failure:
        MegatronDurableState(state, asynchronous=False).start_save(folder, 0)
    return str(failure.value)


def test_a_disk_that_is_full_for_the_common_file_is_a_failed_save_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "common.pt").symlink_to("/dev/full")
    assert all("No space left on device" in reason for reason in run_ranks(2, _reason_of_a_failed_save, tmp_path))


def _digests_around_an_abandoned_save(folder: Path) -> tuple[str, str]:
    """Abandon a save whose writers have begun, and let the next one wait until they have ended."""
    state, _ = build_stage()
    durable = MegatronDurableState(state, asynchronous=True)
    gate = _hold_writers()
    durable.start_save(_new(folder / "abandoned"), 1)
    durable.abandon_save()
    assert durable.is_writing()
    gate.set()
    _join_writers()
    assert not durable.is_writing()
    assert durable.finish_save(wait=True) == (), "nothing is in flight"
    assert sum(file.stat().st_size for file in (folder / "abandoned").glob("*.distcp")) == 0
    saved = digest_of(state)
    durable.start_save(_new(folder / "next"), 2)
    assert durable.finish_save(wait=True) is not None
    _spoil(state)
    assert durable.load(folder / "next") == 2
    return saved, digest_of(state)


def _join_writers() -> None:
    for thread in threading.enumerate():
        if thread.name == "checkpoint-writer":
            thread.join()


def _hold_writers() -> threading.Event:
    gate, write_data = threading.Event(), FileSystemWriter.write_data

    def held(self: FileSystemWriter, *arguments: Any) -> Any:
        gate.wait()
        return write_data(self, *arguments)

    FileSystemWriter.write_data = held  # type: ignore[method-assign]
    return gate


def _damage_between_write_and_finish(folder: Path, asynchronous: bool) -> list[str]:
    """Return the names of the files that this rank has written, each of which has lost a byte since."""
    state, _ = build_stage()
    durable = MegatronDurableState(state, asynchronous=asynchronous)
    durable.start_save(folder, 1)
    _join_writers()
    mine = folder / f"__{dist.get_rank()}_0.distcp"
    os.truncate(mine, mine.stat().st_size - 1)
    files = durable.finish_save(wait=True)
    assert files is not None
    with pytest.raises(CheckpointLoadError, match=mine.name):
        verify_files(folder, files)
    return [file.name for file in files]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_file_is_checked_as_it_was_written_by_the_rank_that_wrote_it(asynchronous: bool, tmp_path: Path) -> None:
    names = run_ranks(2, _damage_between_write_and_finish, tmp_path, asynchronous)
    assert names == [["__0_0.distcp"], ["__1_0.distcp"]]


def _reason_where_rank_one_cannot_sync(folder: Path, asynchronous: bool) -> str:
    state, _ = build_stage()
    durable = MegatronDurableState(state, asynchronous=asynchronous)
    if dist.get_rank() == 1:
        os.fsync = _refuse_to_sync
    durable.start_save(folder, 1)
    with pytest.raises(CheckpointSaveError) as failure:
        durable.finish_save(wait=True)
    return str(failure.value)


def _refuse_to_sync(fd: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_file_that_cannot_be_synced_is_a_failed_save_on_every_rank(asynchronous: bool, tmp_path: Path) -> None:
    reasons = run_ranks(2, _reason_where_rank_one_cannot_sync, tmp_path, asynchronous)
    assert all("rank 1: OSError(5, 'Input/output error')" in reason for reason in reasons)


def _new(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def test_an_abandoned_save_writes_no_more_and_the_next_one_is_whole(tmp_path: Path) -> None:
    for saved, loaded in run_ranks(4, _digests_around_an_abandoned_save, tmp_path):
        assert loaded == saved
