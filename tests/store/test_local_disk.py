"""Blobs on a local disk: whole or not there, within bounds, and what comes back is the same."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.store.blobs import BlobFolder
from moe_ckpt.store.local_disk import persist, restore
from tests.ranks import RankFailedError, run_ranks

FIRST, SECOND = ("start-4", "snapshot-3"), ("start-7", "snapshot-6")


def memory(path: Path) -> BlobFolder:
    """Two windows of one rank, in memory: a small blob without payload, and a large one with."""
    own = BlobFolder(path)
    for number, key in enumerate((*FIRST, *SECOND)):
        payload = torch.full((5000,), number, dtype=torch.uint8) if key.startswith("snapshot") else None
        if payload is not None:
            buffer = own.allocate(6000)
            buffer[:5000] = payload
            payload = buffer
        own.publish(key, key.encode(), payload, 0 if payload is None else 5000)
    return own


def content(folder: BlobFolder) -> dict[str, tuple[bytes, bytes]]:
    blobs = {key: folder.get(key) for key in folder.keys()}  # noqa: SIM118 - not a mapping
    return {
        key: (blob.header, b"" if blob.payload is None else bytes(blob.payload[: blob.payload_bytes].tolist()))
        for key, blob in blobs.items()
    }


def test_what_comes_back_is_what_was_there(tmp_path: Path) -> None:
    own, back = memory(tmp_path / "own"), BlobFolder(tmp_path / "back")
    persist(own, tmp_path / "disk", FIRST, (), None)
    assert restore(tmp_path / "disk", back) == len("start-4" + "snapshot-3") + 5000
    assert content(back) == {key: value for key, value in content(own).items() if key in FIRST}


def test_what_is_stale_goes_and_all_else_stays(tmp_path: Path) -> None:
    own, disk = memory(tmp_path / "own"), BlobFolder(tmp_path / "disk")
    persist(own, disk.path, FIRST, (), None)
    persist(own, disk.path, SECOND, (), None)
    assert disk.keys() == sorted(FIRST + SECOND)
    persist(own, disk.path, SECOND, FIRST, None)
    assert disk.keys() == sorted(SECOND)
    assert len(list((disk.path / "buffers").iterdir())) == 1


def test_what_is_there_already_is_not_written_again_unless_it_is_small(tmp_path: Path) -> None:
    own, disk = memory(tmp_path / "own"), BlobFolder(tmp_path / "disk")
    persist(own, disk.path, FIRST, (), None)
    before = {key: disk.get(key).serial for key in FIRST}
    own.publish("start-4", b"after a rollback", None, 0)
    persist(own, disk.path, FIRST, (), None)
    assert disk.get("snapshot-3").serial == before["snapshot-3"]
    assert disk.get("start-4").header == b"after a rollback"


@pytest.mark.parametrize(("limit_bytes", "fits"), [(10_034, True), (10_033, False)])
def test_what_is_there_and_what_is_to_come_has_to_fit(limit_bytes: int, fits: bool, tmp_path: Path) -> None:
    own, disk = memory(tmp_path / "own"), BlobFolder(tmp_path / "disk")
    persist(own, disk.path, FIRST, (), limit_bytes)
    if fits:
        persist(own, disk.path, SECOND, (), limit_bytes)
        assert disk.keys() == sorted(FIRST + SECOND)
        return
    wanted = r"got 5017 bytes in use and 5017 more to hold, wanted at most ckpt.disk_budget_bytes=10033"
    with pytest.raises(CheckpointSaveError, match=wanted):
        persist(own, disk.path, SECOND, (), limit_bytes)
    assert disk.keys() == sorted(FIRST)


def test_a_blob_that_was_withdrawn_is_not_kept_and_the_window_before_stays(tmp_path: Path) -> None:
    own, disk = memory(tmp_path / "own"), BlobFolder(tmp_path / "disk")
    persist(own, disk.path, FIRST, (), None)
    own.withdraw("snapshot-6")
    with pytest.raises(CheckpointLoadError, match="snapshot-6"):
        persist(own, disk.path, SECOND, (), None)
    assert disk.keys() == sorted(FIRST), "what was added until then takes room"


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("in the way")
    with pytest.raises(CheckpointSaveError, match="disk"):
        persist(memory(tmp_path / "own"), tmp_path / "disk", FIRST, (), None)


def test_what_is_cut_off_on_disk_says_so_when_it_is_wanted(tmp_path: Path) -> None:
    persist(memory(tmp_path / "own"), tmp_path / "disk", FIRST, (), None)
    (buffer,) = (tmp_path / "disk" / "buffers").iterdir()
    os.truncate(buffer, 100)
    with pytest.raises(CheckpointLoadError, match="got 100 bytes of payload, wanted 5000"):
        restore(tmp_path / "disk", BlobFolder(tmp_path / "back"))


def persist_and_die(own: str, disk: str, keys: Sequence[str], sync: int) -> None:
    """Die at the `sync`th time that something is made sure to be on disk."""
    real, left = os.fsync, [sync]

    def fsync(fd: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)
        real(fd)

    os.fsync = fsync
    persist(BlobFolder(Path(own)), Path(disk), keys, (), None)


def test_a_keeper_that_dies_at_any_moment_leaves_what_was_there(tmp_path: Path) -> None:
    own, disk = memory(tmp_path / "own"), BlobFolder(tmp_path / "disk")
    wanted = content(own)
    persist(own, disk.path, FIRST, (), None)
    num_deaths = 0
    while True:
        try:
            run_ranks(1, persist_and_die, str(own.path), str(disk.path), SECOND, num_deaths)
        except RankFailedError:
            num_deaths += 1
            there = content(disk)
            assert all(there[key] == wanted[key] for key in there)
            assert set(FIRST) <= set(there)
        else:
            break
    assert num_deaths > 2, "it never died: the test is void"
    assert content(disk) == wanted
