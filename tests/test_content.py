"""Content identities change with any change of a small file.

The identity of a large file changes with the file's size, ends and sampled blocks.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from moe_ckpt.content import (
    NUM_BLOCKS,
    WHOLE_BYTES,
    bytes_identity,
    file_identity,
    files_identity,
    mapped_identity,
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 8)
    return path


def test_a_copy_has_the_identity_of_its_original_whenever_it_was_made(
    text: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copy(text, tmp_path / "copy"))
    os.utime(copy, (0, 0))
    assert file_identity(copy) == file_identity(text)


@pytest.mark.parametrize("position", [0, 1000, 2047])
def test_a_changed_byte_of_a_small_file_shows(position: int, text: Path) -> None:
    before, content = file_identity(text), bytearray(text.read_bytes())
    content[position] ^= 1
    text.write_bytes(content)
    assert file_identity(text) != before


def test_a_large_file_counts_with_its_size_its_ends_and_its_sampled_blocks(
    tmp_path: Path,
) -> None:
    path, size = tmp_path / "large", 4 * WHOLE_BYTES
    with path.open("wb") as file:
        file.truncate(size)
    known = [file_identity(path)]
    for position in (0, size - 1, size // (NUM_BLOCKS - 1)):
        with path.open("r+b") as file:
            file.seek(position)
            file.write(b"x")
        known.append(file_identity(path))
    with path.open("ab") as file:
        file.write(b"\0")
    known.append(file_identity(path))
    assert len(set(known)) == 5


def test_files_count_in_their_order(text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"other")
    assert files_identity([text, other]) != files_identity([other, text])


def test_bytes_in_memory_count_where_parts_begin_or_not(text: Path) -> None:
    content = memoryview(text.read_bytes())
    halves = content[:1000], content[1000:]
    assert (
        bytes_identity(*halves)
        == bytes_identity(content)
        == mapped_identity(content, content[:0])
    )
    assert bytes_identity(*reversed(halves)) != bytes_identity(content)
