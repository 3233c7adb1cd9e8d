"""A file system of 64 MiB in a test's folder.

The test can fill the file system, make the file system read-only, and undo both.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SIZE_BYTES = 64 << 20
_PAGE_BYTES = 4096


class SmallDisk:
    """A tmpfs at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, *, left_bytes: int = _PAGE_BYTES) -> None:
        """Take all room except `left_bytes`."""
        there = os.statvfs(self.path)
        with (self.path / "filling").open("wb") as file:
            os.posix_fallocate(
                file.fileno(), 0, there.f_bavail * there.f_frsize - left_bytes
            )

    def fill_to_the_last_page(self) -> None:
        """Take all room, even while other threads write."""
        with (
            (self.path / "filling").open("wb", buffering=0) as file,
            contextlib.suppress(OSError),
        ):
            while True:
                file.write(bytes(_PAGE_BYTES))

    def empty(self) -> None:
        (self.path / "filling").unlink()

    def forbid_writes(self) -> None:
        _mount("-o", "remount,ro", str(self.path))

    def allow_writes(self) -> None:
        _mount("-o", "remount,rw", str(self.path))


@contextmanager
def small_disk(path: Path) -> Iterator[SmallDisk]:
    """Mount a small disk at a folder. Skip the test where mounting is impossible."""
    if os.geteuid() != 0:
        pytest.skip(
            "a file system of its own: got a process without root's privileges, wanted"
            " root"
        )
    path.mkdir(parents=True, exist_ok=True)
    try:
        _mount("-t", "tmpfs", "-o", f"size={_SIZE_BYTES},mode=0700", "tmpfs", str(path))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"a file system of its own: {error.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True, text=True)
