"""Small files with reserved space: a full memory and a torn write leave a content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moe_ckpt.errors import ConfigError
from moe_ckpt.reserved_file import CONTENT_BYTES, ReservedFile
from tests.small_disk import small_disk


def test_the_last_write_counts(tmp_path: Path) -> None:
    file = ReservedFile(tmp_path / "file")
    assert file.read() == b""
    for content in (b"first", b"", b"x" * CONTENT_BYTES, b"last"):
        file.write(content)
        assert ReservedFile(tmp_path / "file").read() == content


def test_a_reserved_file_is_written_while_the_memory_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path) as memory:
        file = ReservedFile(tmp_path / "file")
        file.reserve()
        memory.fill_to_the_last_page()
        for content in (b"one", b"x" * CONTENT_BYTES, b"three"):
            file.write(content)
            assert file.read() == content


def test_a_memory_without_room_is_named(tmp_path: Path) -> None:
    with small_disk(tmp_path) as memory:
        memory.fill_to_the_last_page()
        with pytest.raises(
            ConfigError,
            match=r"^runtime.shared_memory: got .*wanted room for 16384 more bytes",
        ):
            ReservedFile(tmp_path / "file").reserve()


@pytest.mark.parametrize("num_bytes", [0, 1, 8, 23, 24, 25, 30])
def test_a_write_that_is_cut_off_leaves_the_content_before(
    num_bytes: int, tmp_path: Path
) -> None:
    """Only the first `num_bytes` changed bytes of the third write are in the file."""
    path = tmp_path / "file"
    file = ReservedFile(path)
    file.write(b"content one")
    file.write(b"content two")
    before = path.read_bytes()
    file.write(b"another one")
    after = path.read_bytes()
    changed = [
        i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new
    ]
    cut = changed[0] + num_bytes
    path.write_bytes(after[:cut] + before[cut:])
    assert file.read() == (b"content two" if cut <= changed[-1] else b"another one")


def test_reserving_again_keeps_the_content(tmp_path: Path) -> None:
    file = ReservedFile(tmp_path / "file")
    file.write(b"content")
    file.reserve()
    assert file.read() == b"content"
    assert os.stat(tmp_path / "file").st_mode & 0o777 == 0o600
