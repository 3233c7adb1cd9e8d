"""Modes of files, for tests: no umask, and files that other users may read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def no_umask() -> Iterator[None]:
    usual = os.umask(0)
    try:
        yield
    finally:
        os.umask(usual)


def let_others_in() -> None:
    """Set a umask that protects nothing, for this process and its later children."""
    os.umask(0)


def open_to_others(root: Path) -> list[str]:
    """Return modes and paths of files that are not 0600 and folders that are not 0700.

    Args:
        root: The folder, which is checked as well as all files and folders in it.
    """
    modes = {
        path: path.lstat().st_mode
        for path in (root, *root.rglob("*"))
        if not path.is_symlink()
    }
    wrong = {
        path: mode
        for path, mode in modes.items()
        if mode & 0o777 != (0o700 if path.is_dir() else 0o600)
    }
    return [
        f"{mode:o} {path.relative_to(root)}" for path, mode in sorted(wrong.items())
    ]
