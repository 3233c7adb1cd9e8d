"""Small files in shared memory whose room is reserved before snapshots can take it.

Owns: the two halves of such a file, and the checksum that detects a torn write. Must
not: know the content of a file.

    half 0   number | length | checksum | content      the newer intact half counts,
    half 1   number | length | checksum | content      the next write goes to the other
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import xxhash

from moe_ckpt.config import require
from moe_ckpt.private_files import open_private

_HEAD = struct.Struct("<QQQ")  # number, length, checksum of both and the content
_HALF_BYTES = 8192

CONTENT_BYTES = _HALF_BYTES - _HEAD.size
"""Largest size of a file's content, in bytes."""


def reserve(fd: int, path: Path, nbytes: int) -> None:
    """Allocate the memory of an open file in `runtime.shared_memory`.

    Later writes need no more room, and a mapping of the file cannot end its process by
    SIGBUS.

    Args:
        fd: The descriptor of the file.
        path: The path of the file, for the message.
        nbytes: Size of the file, in bytes.

    Raises:
        ConfigError: The memory has no room.
    """
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        wanted = f"room for {nbytes} more bytes ({error})"
        require(False, "runtime.shared_memory", str(path.parent), wanted)


class ReservedFile:
    """A file that is overwritten in place, by one process at a time.

    If a process dies during a write, the content from before remains.
    """

    def __init__(self, path: Path) -> None:
        """Name the file; the file may be missing.

        Args:
            path: The file.
        """
        self._path = path

    def reserve(self) -> None:
        """Create the file with all of its room, unless the file exists.

        Raises:
            ConfigError: The memory has no room.
        """
        fd = open_private(self._path, os.O_RDWR | os.O_CREAT)
        try:
            reserve(fd, self._path, 2 * _HALF_BYTES)
        finally:
            os.close(fd)

    def read(self) -> bytes:
        """Return the content; empty without content or file."""
        return max(self._halves(), default=(0, 0, b""))[2]

    def write(self, content: bytes) -> None:
        """Replace the content.

        Args:
            content: At most `CONTENT_BYTES`.

        Raises:
            OSError: The file was not reserved, and the memory has no room.
        """
        assert len(content) <= CONTENT_BYTES, len(content)
        number, half, _ = max(self._halves(), default=(0, 1, b""))
        head = _head(number + 1, content)
        fd = open_private(self._path, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(fd, head + content, (1 - half) * _HALF_BYTES)
        finally:
            os.close(fd)

    def _halves(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield the number, the index and the content of each intact half."""
        if not self._path.exists():
            return
        data = self._path.read_bytes()
        for half in (0, 1):
            there = data[half * _HALF_BYTES : (half + 1) * _HALF_BYTES]
            if len(there) < _HEAD.size:
                continue
            number, length, _ = _HEAD.unpack_from(there)
            content = there[_HEAD.size : _HEAD.size + length]
            # a half that was never written has the number 0
            if number and there.startswith(_head(number, content)):
                yield number, half, content


def _head(number: int, content: bytes) -> bytes:
    counted = struct.pack("<QQ", number, len(content)) + content
    return _HEAD.pack(number, len(content), xxhash.xxh3_64_intdigest(counted))
