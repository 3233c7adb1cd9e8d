"""Files and folders that their user alone may read, whatever the umask: training state, and the names of its places.

Owns: the modes, 0600 and 0700. Must not: change the mode of a folder that is there already, which its owner has chosen.
"""

from __future__ import annotations

import os
from pathlib import Path

FILE_MODE, FOLDER_MODE = 0o600, 0o700


def make_private(folder: Path) -> None:
    """Create a folder and the missing folders above it."""
    try:
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    # `mkdir(parents=True)` would create the folders above with the umask's mode, not this one
    except FileNotFoundError:
        make_private(folder.parent)
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)


def write_private(path: Path, content: str | bytes) -> None:
    """Write a file, in place of one that is there."""
    data = content.encode() if isinstance(content, str) else content
    with open(path, "wb", opener=open_private) as file:
        file.write(data)


def open_private(path: str | Path, flags: int) -> int:
    """Open a file as `os.open` does; this is the `opener` of `open`, too."""
    return os.open(path, flags, FILE_MODE)
