"""Memory of copies: what is free is used again, however often, and none is kept beyond what was in use at once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.store.blobs import BlobFolder
from moe_ckpt.store.held import HeldFolder
from tests.store.blobs import buffers_of, content_of, deposit


@pytest.fixture
def folder(tmp_path: Path) -> HeldFolder:
    return HeldFolder(tmp_path / "held")


def sizes_of(folder: BlobFolder) -> list[int]:
    return sorted(path.stat().st_size for path in (folder.path / "buffers").iterdir())


def contents_of(folder: BlobFolder, *keys: str) -> list[bytes | None]:
    return [content_of(BlobFolder(folder.path), key)[1] for key in keys]


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
    assert contents_of(folder, "b", "c") == [b"six", b"ten"]
    assert len(buffers_of(folder)) == 2


def test_a_blob_without_a_payload_has_nothing_to_give_back(folder: HeldFolder) -> None:
    for header in (b"1", b"2"):
        folder.deposit("a", header, None, 0)
    for _ in range(2):
        folder.discard("a")
    assert folder.keys() == []


def test_another_size_takes_the_place_of_what_is_free_for_longest(folder: HeldFolder) -> None:
    for key, size in (("a", 100), ("b", 200), ("c", 300)):
        deposit(folder, key, bytes(size))
    for key in ("a", "b", "c"):
        folder.discard(key)
    deposit(folder, "d", bytes(150))
    assert sizes_of(folder) == [150, 300]


def test_clearing_gives_back_all_that_is_not_being_filled(folder: HeldFolder) -> None:
    for content in (b"one", b"two"):
        deposit(folder, "a", content)
    filling = folder.allocate(3)
    folder.clear()
    assert (folder.keys(), len(buffers_of(folder))) == ([], 1)
    folder.deposit("a", b"header", filling, 3)
    assert folder.keys() == ["a"]


def test_what_is_there_is_adopted_and_what_was_free_is_not(folder: HeldFolder) -> None:
    for content in (b"one", b"two"):
        deposit(folder, "a", content)
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
    assert contents_of(folder, "c", "b") == [b"six", b"ten"]


def test_what_could_not_be_deposited_stays_the_callers(folder: HeldFolder, tmp_path: Path) -> None:
    before = deposit(folder, "a", b"one")
    payload = folder.allocate(3)
    (folder.path / "buffers" / buffers_of(folder)[1]).unlink()
    with pytest.raises(CheckpointSaveError, match="blob a"):
        folder.deposit("a", b"header", payload, 3)
    assert folder.get("a").payload is before
    folder.free(payload)
    assert folder.allocate(3) is not payload
    with pytest.raises(AssertionError, match="not allocated in this folder"):
        folder.free(HeldFolder(tmp_path / "other").allocate(1))


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
        assert sum(sizes_of(folder)) <= most
    assert {key: content_of(folder, key)[1] for key in folder.keys()} == held  # noqa: SIM118
