"""Free memory of copies is reused, and the total never exceeds the peak in use."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.replication.replica_folder import ReplicaFolder
from moe_ckpt.snapshot.blobs import BlobFolder
from tests.replication.blobs import buffers_of, content_of, deposit


@pytest.fixture
def folder(tmp_path: Path) -> ReplicaFolder:
    return ReplicaFolder(tmp_path / "held")


def sizes_of(folder: BlobFolder) -> list[int]:
    return sorted(path.stat().st_size for path in (folder.path / "buffers").iterdir())


def contents_of(folder: BlobFolder, *keys: str) -> list[bytes | None]:
    return [content_of(BlobFolder(folder.path), key)[1] for key in keys]


def test_memory_discarded_or_replaced_or_given_back_is_used_again(
    folder: ReplicaFolder,
) -> None:
    first = deposit(folder, "a", b"one")
    second = deposit(folder, "a", b"two")
    assert second is not first
    assert deposit(folder, "b", b"six") is first
    folder.discard("a")
    filling = folder.allocate(3)
    assert filling is second
    folder.free(filling)
    assert deposit(folder, "c", b"ten") is second
    assert contents_of(folder, "b", "c") == [b"six", b"ten"]
    assert len(buffers_of(folder)) == 2


def test_clearing_gives_back_all_memory_but_that_being_filled(
    folder: ReplicaFolder,
) -> None:
    for content in (b"one", b"two"):
        deposit(folder, "a", content)
    filling = folder.allocate(3)
    folder.clear()
    assert (folder.keys(), len(buffers_of(folder))) == ([], 1)
    folder.deposit("a", b"header", filling, 3)
    assert folder.keys() == ["a"]


def test_blobs_are_adopted_and_free_memory_is_not(folder: ReplicaFolder) -> None:
    for content in (b"one", b"two"):
        deposit(folder, "a", content)
    successor = ReplicaFolder(folder.path)
    assert content_of(successor, "a") == (b"header", b"two")
    assert len(buffers_of(successor)) == 1
    adopted = successor.get("a").payload
    successor.discard("a")
    assert successor.allocate(3) is adopted


def test_free_memory_that_was_deleted_is_not_used(folder: ReplicaFolder) -> None:
    deposit(folder, "a", b"one")
    deposit(folder, "b", b"two")
    folder.discard("a")
    shutil.rmtree(folder.path)
    deposit(folder, "c", b"six")
    deposit(folder, "b", b"ten")
    assert contents_of(folder, "c", "b") == [b"six", b"ten"]


def test_memory_that_could_not_be_deposited_stays_the_callers(
    folder: ReplicaFolder, tmp_path: Path
) -> None:
    before = deposit(folder, "a", b"one")
    payload = folder.allocate(3)
    (folder.path / "buffers" / buffers_of(folder)[1]).unlink()
    with pytest.raises(CheckpointSaveError, match="blob a"):
        folder.deposit("a", b"header", payload, 3)
    assert folder.get("a").payload is before
    folder.free(payload)
    assert folder.allocate(3) is not payload
    with pytest.raises(AssertionError, match="not allocated in this folder"):
        folder.free(ReplicaFolder(tmp_path / "other").allocate(1))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=40))
def test_no_more_memory_is_kept_than_was_in_use_at_once(
    steps: list[tuple[str, int]],
) -> None:
    contents: dict[str, bytes | None] = {}
    most = 1
    with tempfile.TemporaryDirectory() as root:
        folder = ReplicaFolder(Path(root))
        (folder.path / "buffers").mkdir()
        for key, size in steps:
            if size == 0:
                folder.discard(key)
                contents.pop(key, None)
                continue
            content = key.encode() * 100 * size
            # the replaced blob still has its memory
            used_bytes = sum(len(each or b"") for each in contents.values())
            most = max(most, used_bytes + len(content))
            deposit(folder, key, content)
            contents[key] = content
            assert sum(sizes_of(folder)) <= most
        assert {key: content_of(folder, key)[1] for key in folder.keys()} == contents  # noqa: SIM118
