"""Blobs in shared memory: when a blob is visible, and which process owns the memory.

The tests also cover death, damage and a full file system.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.private_files import write_private
from moe_ckpt.snapshot import blobs
from moe_ckpt.snapshot.blobs import BlobFolder, is_key
from tests.harness.gloo.ranks import RankFailedError, run_ranks
from tests.replication.blobs import (
    KIB,
    buffers_of,
    content_of,
    deposit,
    index_of,
    largest_file,
    payload_of,
    publish,
)
from tests.snapshot.samples import damaged


@pytest.fixture
def folder(tmp_path: Path) -> BlobFolder:
    return BlobFolder(tmp_path / "blobs")


@pytest.mark.parametrize("header", [b"", b"\n\x00 two\nlines"])
@pytest.mark.parametrize("content", [None, b"", bytes(range(256)) * 40])
def test_another_process_finds_a_published_blob(
    folder: BlobFolder, header: bytes, content: bytes | None
) -> None:
    publish(folder, "snapshot-7", content, header)
    other = BlobFolder(folder.path)
    assert other.keys() == ["snapshot-7"]
    assert (
        content_of(other, "snapshot-7")
        == content_of(folder, "snapshot-7")
        == (header, content)
    )


def test_a_replaced_blob_leaves_its_memory_to_its_owner(folder: BlobFolder) -> None:
    old = publish(folder, "a", b"old", b"1")
    before = folder.get("a")
    assert folder.is_current("a", before)
    folder.publish("a", b"1", old, 3)
    assert not folder.is_current("a", before), "the same content again is another blob"
    publish(folder, "a", b"newer", b"2")
    assert buffers_of(folder) == ["000001", "000002"]
    folder.free(old)
    with pytest.raises(AssertionError):
        folder.free(old)
    assert buffers_of(folder) == ["000002"]
    assert content_of(BlobFolder(folder.path), "a") == (b"2", b"newer")


@given(st.from_regex(r"[A-Za-z0-9._-]{1,200}", fullmatch=True))
def test_any_key_is_a_name_of_its_own(key: str) -> None:
    assume(key != "other")
    with tempfile.TemporaryDirectory() as root:
        folder = BlobFolder(Path(root))
        publish(folder, key, b"1")
        publish(folder, "other", b"2")
        assert folder.keys() == sorted([key, "other"])
        assert content_of(BlobFolder(folder.path), key) == (b"header", b"1")
        folder.withdraw(key)
        assert folder.keys() == ["other"]


@pytest.mark.parametrize(
    "key", ["", "a/b", "../a", "a b", "a\n", "a\x00", "\u00e4", "k" * 201]
)
def test_other_texts_are_no_keys(folder: BlobFolder, key: str) -> None:
    assert not is_key(key)
    for use in (
        lambda: folder.publish(key, b"", None, 0),
        lambda: folder.get(key),
        lambda: folder.withdraw(key),
    ):
        with pytest.raises(AssertionError, match="not a key"):
            use()


def test_damage_anywhere_in_an_entry_is_found(folder: BlobFolder) -> None:
    publish(folder, "a", b"content", b"the header")
    path = folder.path / "index" / "a.blob"
    intact = path.read_bytes()
    for wrong in damaged(intact):
        path.write_bytes(wrong)
        with pytest.raises(CheckpointLoadError, match="blob a"):
            folder.get("a")
    path.write_bytes(intact[:-1] + b"?")
    with pytest.raises(
        CheckpointLoadError,
        match=r"blob a: .* got XXH3 [0-9a-f]{16}, wanted [0-9a-f]{16}",
    ):
        folder.get("a")
    path.write_bytes(intact)
    path.rename(folder.path / "index" / "b.blob")
    with pytest.raises(CheckpointLoadError, match=r"blob b: .* got the entry of 'a'"):
        folder.get("b")


def test_a_payload_that_is_gone_or_too_short_is_found(folder: BlobFolder) -> None:
    publish(folder, "a", b"content")
    buffer = folder.path / "buffers" / "000001"
    reader = BlobFolder(folder.path)
    os.truncate(buffer, 6)
    with pytest.raises(
        CheckpointLoadError, match=r"blob a in .*: got 6 bytes of payload, wanted 7"
    ):
        reader.get("a")
    buffer.unlink()
    with pytest.raises(
        CheckpointLoadError, match=r"buffers/000001: not a payload: .*No such file"
    ):
        reader.get("a")
    assert not buffer.exists()


def test_a_successor_adopts_intact_blobs_and_drops_others(
    folder: BlobFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.publish("same", b"", publish(folder, "a", b"aaa", b"1"), 2)
    publish(folder, "bare", None)
    for key in ("b", "c"):
        publish(folder, key, b"xxx")
    folder.allocate(100)  # memory that was being filled at death
    (folder.path / "index" / "d.tmp").write_bytes(b"half an en")
    (folder.path / "index" / "b.blob").write_bytes(b"flipped")
    (folder.path / "buffers" / "000003").unlink()
    successor = BlobFolder(folder.path)
    with caplog.at_level(logging.WARNING):
        adopted = successor.adopt()
    assert sorted(adopted) == successor.keys() == ["a", "bare", "same"]
    assert (index_of(folder), buffers_of(folder)) == (
        ["a.blob", "bare.blob", "same.blob"],
        ["000001"],
    )
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "dropped what is damaged"
    ] * 2
    assert adopted["a"].payload is adopted["same"].payload is successor.get("a").payload
    assert content_of(successor, "a") == (b"1", b"aaa")


def test_adopted_memory_is_the_successors(folder: BlobFolder) -> None:
    publish(folder, "a", b"aaa")
    successor = BlobFolder(folder.path)
    payload = payload_of(successor.adopt()["a"])
    fresh = successor.allocate(5)
    assert successor.adopt()["a"].payload is payload
    assert buffers_of(folder) == ["000001", "000002"], (
        "memory that is in use here was removed"
    )
    successor.withdraw("a")
    payload[0] = 0
    successor.publish("b", b"", payload, 3)
    successor.free(fresh)
    assert content_of(BlobFolder(folder.path), "b") == (b"", b"\x00aa")
    successor.free(payload)
    assert buffers_of(folder) == []


def test_a_full_file_system_is_a_failed_save_that_leaves_nothing(
    folder: BlobFolder,
) -> None:
    with largest_file(100 * KIB):
        kept = folder.allocate(100 * KIB)
        with pytest.raises(
            CheckpointSaveError,
            match=r"got .*File too large.*, wanted room for 102401 bytes",
        ):
            folder.allocate(100 * KIB + 1)
    for nbytes in (2**62, 2**63, 2**64):
        with pytest.raises(
            CheckpointSaveError, match=f"wanted room for {nbytes} bytes"
        ):
            folder.allocate(nbytes)
    assert buffers_of(folder) == ["000001"]
    kept.fill_(1)
    assert (folder.path / "buffers" / "000001").stat().st_blocks * 512 >= 100 * KIB, (
        "room was promised, not taken"
    )


def test_an_entry_that_has_no_room_leaves_the_blob_before(folder: BlobFolder) -> None:
    publish(folder, "a", b"old", b"1")
    with (
        largest_file(KIB),
        pytest.raises(CheckpointSaveError, match=r"blob a in .*wanted to write it"),
    ):
        publish(folder, "a", b"new", bytes(2 * KIB))
    assert content_of(BlobFolder(folder.path), "a") == (b"1", b"old")
    publish(folder, "a", b"new", bytes(2 * KIB))
    assert content_of(BlobFolder(folder.path), "a") == (bytes(2 * KIB), b"new")


def test_a_deleted_folder_is_an_empty_one(folder: BlobFolder) -> None:
    before, blob = publish(folder, "a", b"aaa"), folder.get("a")
    shutil.rmtree(folder.path)
    assert not folder.is_current("a", blob)
    with pytest.raises(CheckpointLoadError):
        folder.get("a")
    folder.withdraw("a")
    folder.discard("a")
    folder.sweep()
    with pytest.raises(CheckpointSaveError, match=r"blob a in .*No such file"):
        folder.publish("a", b"", before, 3)
    assert folder.keys() == []
    publish(folder, "a", b"new")
    folder.free(before)
    assert content_of(BlobFolder(folder.path), "a") == (b"header", b"new"), (
        "freed another's memory"
    )


def test_a_deposited_blob_owns_its_memory(folder: BlobFolder) -> None:
    for content in (b"old", b"newer"):
        payload = deposit(folder, "a", content, b"h")
        assert len(buffers_of(folder)) == 1
        assert content_of(folder, "a") == (b"h", content)
        with pytest.raises(AssertionError):
            folder.free(payload)
    folder.deposit("b", b"h", None, 0)
    for key in ("b", "a", "a"):
        folder.discard(key)
    assert (index_of(folder), buffers_of(folder)) == ([], [])


def test_clearing_leaves_only_memory_that_is_being_filled(folder: BlobFolder) -> None:
    for key in ("a", "b"):
        deposit(folder, key, b"abc")
    (folder.path / "index" / "b.blob").write_bytes(b"damaged")
    folder.allocate(5)
    folder.clear()
    assert (folder.keys(), index_of(folder), buffers_of(folder)) == ([], [], ["000003"])


def die_while_publishing(path: str, step: str) -> None:
    """Publish "a" twice; at a step of the second time, die as a worker does."""
    folder = BlobFolder(Path(path))
    publish(folder, "a", b"old", b"1")

    def dying(function: Callable[..., Any]) -> Any:
        return lambda *arguments: (
            function(*arguments),
            os.kill(os.getpid(), signal.SIGKILL),
        )

    if step == "memory":
        os.posix_fallocate = dying(os.posix_fallocate)
    elif step == "renamed":
        os.replace = dying(os.replace)
    else:
        share = 2 if step == "half an entry" else 1
        blobs.write_private = dying(
            lambda path, data: write_private(path, data[: len(data) // share])
        )
    publish(folder, "a", b"newer", b"2")


@pytest.mark.parametrize("step", ["memory", "half an entry", "entry", "renamed"])
def test_death_leaves_the_old_blob_or_the_new(
    folder: BlobFolder, step: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RankFailedError, match="rank 0 died"):
        run_ranks(1, die_while_publishing, str(folder.path), step)
    wanted = (b"2", b"newer") if step == "renamed" else (b"1", b"old")
    assert content_of(folder, "a") == wanted
    successor = BlobFolder(folder.path)
    successor.adopt()
    assert content_of(successor, "a") == wanted
    assert (index_of(folder), len(buffers_of(folder)), caplog.records) == (
        ["a.blob"],
        1,
        [],
    )


class FakeCudart:
    """Stands in for the CUDA runtime.

    Attributes:
        registered: Size of each registered range in bytes, by address.
    """

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


def test_pinned_memory_is_registered_for_as_long_as_it_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCudart()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    folder = BlobFolder(tmp_path, pinned=True)
    payload, empty = folder.allocate(100), folder.allocate(0)
    assert sorted(fake.registered.values()) == [1, 100]
    assert fake.registered[payload.data_ptr()] == 100
    folder.publish("a", b"", payload, 100)
    folder.free(empty)
    successor = BlobFolder(tmp_path, pinned=True)
    successor.get("a")
    assert len(fake.registered) == 1, "what is only read was registered"
    adopted = payload_of(successor.adopt()["a"])
    assert fake.registered[adopted.data_ptr()] == 100
    successor.free(adopted)
    folder.free(payload)
    assert fake.registered == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_memory_is_pinned(tmp_path: Path) -> None:
    folder = BlobFolder(tmp_path, pinned=True)
    payload = folder.allocate(100)
    assert payload.is_pinned()
    folder.free(payload)
