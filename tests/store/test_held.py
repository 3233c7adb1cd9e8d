"""Memory of copies: what is free is used again, however often, and none is kept beyond what was in use at once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.store.blobs import BlobFolder
from moe_ckpt.store.held import HeldFolder
from tests.properties import examples
from tests.store.test_blobs import buffers_of, content_of


@pytest.fixture
def folder(tmp_path: Path) -> HeldFolder:
    return HeldFolder(tmp_path / "held")


def deposit(folder: BlobFolder, key: str, content: bytes) -> torch.Tensor:
    payload = folder.allocate(len(content))
    payload.numpy()[:] = bytearray(content)
    folder.deposit(key, b"header", payload, len(content))
    return payload


def bytes_of(folder: BlobFolder) -> int:
    return sum(path.stat().st_size for path in (folder.path / "buffers").iterdir())


def test_what_is_discarded_or_replaced_or_given_back_is_used_again(folder: HeldFolder) -> None:
    first = deposit(folder, "a", b"one")
    second = deposit(folder, "a", b"two")
    assert second is not first
    assert deposit(folder, "b", b"six") is first
    folder.discard("a")
    filling = folder.allocate(3)
    assert filling is second
    folder.free(filling)
    assert deposit(folder, "c", b"ten") is second
    assert [content_of(BlobFolder(folder.path), key)[1] for key in ("b", "c")] == [b"six", b"ten"]
    assert len(buffers_of(folder)) == 2


def test_a_blob_without_a_payload_has_nothing_to_give_back(folder: HeldFolder) -> None:
    folder.deposit("a", b"1", None, 0)
    folder.deposit("a", b"2", None, 0)
    folder.discard("a")
    folder.discard("a")
    assert folder.keys() == []


def test_another_size_takes_the_place_of_what_is_free_for_longest(folder: HeldFolder) -> None:
    for key, size in (("a", 100), ("b", 200), ("c", 300)):
        deposit(folder, key, bytes(size))
    for key in ("a", "b", "c"):
        folder.discard(key)
    deposit(folder, "d", bytes(150))
    assert sorted(path.stat().st_size for path in (folder.path / "buffers").iterdir()) == [150, 300]


def test_clearing_gives_back_all_that_is_not_being_filled(folder: HeldFolder) -> None:
    deposit(folder, "a", b"one")
    deposit(folder, "a", b"two")
    filling = folder.allocate(3)
    folder.clear()
    assert (folder.keys(), len(buffers_of(folder))) == ([], 1)
    folder.deposit("a", b"header", filling, 3)
    assert folder.keys() == ["a"]


def test_what_is_there_is_adopted_and_what_was_free_is_not(folder: HeldFolder) -> None:
    deposit(folder, "a", b"one")
    deposit(folder, "a", b"two")
    successor = HeldFolder(folder.path)
    assert content_of(successor, "a") == (b"header", b"two")
    assert len(buffers_of(successor)) == 1
    adopted = successor.get("a").payload
    successor.discard("a")
    assert successor.allocate(3) is adopted


def test_free_memory_that_was_deleted_is_not_used(folder: HeldFolder) -> None:
    deposit(folder, "a", b"one")
    deposit(folder, "b", b"two")
    folder.discard("a")
    shutil.rmtree(folder.path)
    deposit(folder, "c", b"six")
    deposit(folder, "b", b"ten")
    assert [content_of(BlobFolder(folder.path), key)[1] for key in ("c", "b")] == [b"six", b"ten"]


def test_what_could_not_be_deposited_stays_the_callers(folder: HeldFolder) -> None:
    before = deposit(folder, "a", b"one")
    payload = folder.allocate(3)
    (folder.path / "buffers" / buffers_of(folder)[1]).unlink()
    with pytest.raises(CheckpointSaveError, match="blob a"):
        folder.deposit("a", b"header", payload, 3)
    assert folder.get("a").payload is before
    folder.free(payload)
    assert folder.allocate(3) is not payload


def test_memory_of_another_folder_cannot_be_given_back(folder: HeldFolder, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not allocated in this folder"):
        folder.free(HeldFolder(tmp_path / "other").allocate(1))


@examples(50)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=40))
def test_no_more_memory_is_kept_than_was_in_use_at_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    folder, held, most = HeldFolder(tmp_path_factory.mktemp("held")), {}, 1
    folder.path.joinpath("buffers").mkdir()
    for key, size in steps:
        if size == 0:
            folder.discard(key)
            held.pop(key, None)
            continue
        content = key.encode() * 100 * size
        most = max(most, sum(map(len, held.values())) + len(content))  # the one that is replaced is there until then
        deposit(folder, key, content)
        held[key] = content
        assert bytes_of(folder) <= most
    assert {key: content_of(folder, key)[1] for key in folder.keys()} == held  # noqa: SIM118
