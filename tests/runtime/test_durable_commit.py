"""What a commit rests on: what each rank says of the files that it wrote, and what rank 0 finds beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.events import CheckpointFailed, read_events
from moe_ckpt.store.disk import CheckpointFolder, is_committed, read_manifest, seal_files
from moe_ckpt.types import CheckpointRef
from tests.ranks import run_ranks
from tests.runtime.durable_files import OneFileEach, open_tier


class OnDiskOfItsOwn(OneFileEach):
    """Rank 1's directory is not that of rank 0: it is not on a file system that both share."""

    def start_save(self, directory: Path, iteration: int) -> None:
        own = directory.parent / f"of-rank{dist.get_rank()}"
        own.mkdir()
        super().start_save(directory if dist.get_rank() == 0 else own, iteration)


def _save(folder: Path) -> None:
    open_tier(folder, OneFileEach()).save(1)


def test_the_marker_lists_the_files_of_every_rank_and_all_others(tmp_path: Path) -> None:
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
