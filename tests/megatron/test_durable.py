"""A save writes the state at the call, and a load restores exactly this state.

Later changes, abandoned saves and failed saves have no effect on the written state.
"""

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

from moe_ckpt.durable.checkpoint_folder import verify_files
from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.megatron.durable import MegatronDurableState
from moe_ckpt.megatron.state import TrainingState, digest_of, named_state
from tests.harness.gloo.ranks import run_ranks
from tests.megatron.stage import FP16, build_stage, trained_stage
from tests.scenarios import BIAS


def _new(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _spoil(state: TrainingState) -> None:
    """Change every number of the state, and draw from generators, as training would."""
    for name, tensor in named_state(state):
        if not name.startswith("rng."):
            tensor.add_(1)
    torch.rand(7)
    state.scheduler.step(increment=1)


def _save_spoil_and_load(
    state: TrainingState, durable: MegatronDurableState, folder: Path
) -> None:
    saved = digest_of(state)
    durable.start_save(_new(folder), 2)
    _spoil(state)
    assert durable.finish_save(wait=True) is not None
    assert digest_of(state) != saved
    assert durable.load(folder) == 2
    assert digest_of(state) == saved


def _save_in_both_ways(folder: Path) -> None:
    state, worker = trained_stage(*FP16, *BIAS, iterations=2)
    for iteration, asynchronous in ((3, False), (4, True)):
        durable = MegatronDurableState(state, asynchronous=asynchronous)
        _save_spoil_and_load(state, durable, folder / str(asynchronous))
        worker.run_iteration(iteration)


def test_the_state_at_the_call_is_saved_and_comes_back_whole(tmp_path: Path) -> None:
    run_ranks(4, _save_in_both_ways, tmp_path)


def _reason_of_a_failed_save(folder: Path) -> str:
    state, _ = build_stage()
    with pytest.raises(CheckpointSaveError) as failure:
        MegatronDurableState(state, asynchronous=False).start_save(folder, 0)
    return str(failure.value)


def test_a_full_disk_for_the_common_file_fails_the_save_on_every_rank(
    tmp_path: Path,
) -> None:
    (tmp_path / "common.pt").symlink_to("/dev/full")
    assert all(
        "No space left on device" in reason
        for reason in run_ranks(2, _reason_of_a_failed_save, tmp_path)
    )


def _save_after_an_abandoned_save(folder: Path) -> None:
    """Abandon a save whose writers have begun; save again after the writers' end."""
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
    assert (
        sum(file.stat().st_size for file in (folder / "abandoned").glob("*.distcp"))
        == 0
    )
    _save_spoil_and_load(state, durable, folder / "next")


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


def test_an_abandoned_save_writes_no_more_and_the_next_one_is_whole(
    tmp_path: Path,
) -> None:
    run_ranks(2, _save_after_an_abandoned_save, tmp_path)


def _damage_and_refuse(folder: Path, asynchronous: bool) -> tuple[list[str], str]:
    """Damage this rank's file within one save, and let another save fail on rank 1.

    The file loses a byte between the write and the end of the save. The check of the
    files finds the damage.

    Args:
        folder: The folder of both checkpoints.
        asynchronous: Whether another thread writes the files.

    Returns:
        The names of the files that this rank has written, and the reason why the other
        save fails: rank 1's disk.
    """
    state, _ = build_stage()
    durable = MegatronDurableState(state, asynchronous=asynchronous)
    durable.start_save(_new(folder / "damaged"), 1)
    _join_writers()
    mine = folder / "damaged" / f"__{dist.get_rank()}_0.distcp"
    os.truncate(mine, mine.stat().st_size - 1)
    files = durable.finish_save(wait=True)
    assert files is not None
    with pytest.raises(CheckpointLoadError, match=mine.name):
        verify_files(folder / "damaged", files)
    if dist.get_rank() == 1:
        os.fsync = _refuse_to_sync
    durable.start_save(_new(folder / "unsynced"), 2)
    with pytest.raises(CheckpointSaveError) as failure:
        durable.finish_save(wait=True)
    return [file.name for file in files], str(failure.value)


def _refuse_to_sync(fd: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_check_their_own_files_and_fail_a_save_together(
    asynchronous: bool, tmp_path: Path
) -> None:
    for rank, (names, reason) in enumerate(
        run_ranks(2, _damage_and_refuse, tmp_path, asynchronous)
    ):
        assert names == [f"__{rank}_0.distcp"]
        assert "rank 1: OSError(5, 'Input/output error')" in reason
