"""What a commit rests on: what each rank says of the files that it wrote, and what rank 0 finds beside them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from moe_ckpt.collectives import TorchRanks
from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.events import CheckpointFailed, EventLog, read_events
from moe_ckpt.runtime.durable import DurableTier
from moe_ckpt.store.disk import CheckpointFolder, is_committed, read_manifest, seal_files
from moe_ckpt.types import CheckpointRef, FileRecord, ParallelLayout, RunIdentity
from tests.ranks import rank_store, run_ranks

IDENTITY = RunIdentity(run_id="run-1", model="0123abcd", layout=ParallelLayout(pp=1, dp=2, ep=1, tp=1))


class OneFileEach:
    """Implements `ports.DurableState`: every rank writes a file, rank 0 one more, of which it does not tell."""

    def __init__(self, spoiling: str = "") -> None:
        self._spoiling = spoiling
        self._files: Sequence[FileRecord] = ()

    def start_save(self, directory: Path, iteration: int) -> None:
        mine = directory / f"rank{dist.get_rank()}"
        mine.write_bytes(b"weights")
        if dist.get_rank() == 0:
            (directory / "metadata").write_bytes(b"names")
        self._files = seal_files(directory, [mine.name])
        if mine.name == self._spoiling:
            mine.write_bytes(b"Weights")

    def finish_save(self, *, wait: bool) -> Sequence[FileRecord] | None:
        return self._files

    def abandon_save(self) -> None:
        pass

    def is_writing(self) -> bool:
        return False

    def load(self, directory: Path, resharded_from: ParallelLayout | None = None) -> int:
        return 1


class OnDiskOfItsOwn(OneFileEach):
    """Rank 1's directory is not that of rank 0: it is not on a file system that both share."""

    def start_save(self, directory: Path, iteration: int) -> None:
        own = directory.parent / f"of-rank{dist.get_rank()}"
        own.mkdir()
        super().start_save(directory if dist.get_rank() == 0 else own, iteration)


def open_tier(folder: Path, state: OneFileEach, keep: int = 1) -> DurableTier:
    """Join the others and return what saves and loads through `state`; inside `run_ranks`."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=rank_store(), rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    events = EventLog(folder / "events" / f"{rank}.jsonl", global_rank=rank, clock_origin_unix_s=0.0)
    return DurableTier(state, CheckpointFolder(folder), IDENTITY, TorchRanks(), events, keep=keep)


def _save(folder: Path) -> None:
    open_tier(folder, OneFileEach()).save(1)


def test_the_marker_lists_every_rank_s_files_and_those_that_nobody_tells_of(tmp_path: Path) -> None:
    run_ranks(2, _save, tmp_path)
    directory = CheckpointFolder(tmp_path).directory(1)
    assert list(read_manifest(directory).files) == seal_files(directory, ["metadata", "rank0", "rank1"])


def _reason_after_a_file_changed(folder: Path) -> str:
    tier = open_tier(folder, OneFileEach(spoiling="rank1"))
    tier.save(1)
    with pytest.raises(CheckpointLoadError) as failure:
        tier.resume(CheckpointRef(iteration=1, directory=str(CheckpointFolder(folder).directory(1))))
    return str(failure.value)


def test_a_file_that_changes_before_the_commit_is_not_blessed_by_it(tmp_path: Path) -> None:
    assert all(
        "rank1: got 7 bytes with CRC-32" in reason for reason in run_ranks(2, _reason_after_a_file_changed, tmp_path)
    )


def _reason_of_a_failed_commit(folder: Path) -> str:
    with pytest.raises(CheckpointSaveError) as failure:
        open_tier(folder, OnDiskOfItsOwn()).save(1)
    return str(failure.value)


def test_a_file_that_rank_zero_does_not_see_is_a_failed_save_on_every_rank(tmp_path: Path) -> None:
    reasons = run_ranks(2, _reason_of_a_failed_commit, tmp_path)
    assert all("iter_0000001: rank1: written, and not there" in reason for reason in reasons)
    assert not is_committed(CheckpointFolder(tmp_path).directory(1))
    for rank in range(2):
        (logged,) = read_events(tmp_path / "events" / f"{rank}.jsonl")
        assert isinstance(logged.event, CheckpointFailed)
