"""Files and folders that only their user may read, whatever the umask.

These files hold training state and the paths of the state. Owns: the modes, 0600 and
0700, and that a file is this process's own: a link, or a file that another user has put
at a path before, is neither followed nor filled. Must not: change the mode of an
existing folder, which its owner has chosen.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

FILE_MODE, FOLDER_MODE = 0o600, 0o700
_OF_OTHERS = 0o077


def make_private(folder: Path) -> None:
    """Create a folder and the missing folders above."""
    try:
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    # `mkdir(parents=True)` would create the folders above with the mode of the umask
    except FileNotFoundError:
        make_private(folder.parent)
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)


def write_private(path: str | Path, content: str | bytes) -> None:
    """Write a file, in place of an existing one.

    Args:
        path: The file.
        content: The content; a text is written in UTF-8.

    Raises:
        OSError: The file cannot be written.
    """
    data = memoryview(content.encode() if isinstance(content, str) else content)
    fd = _new_file(path)
    try:
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)


def _new_file(path: str | Path) -> int:
    """Create a file in place of an existing one, and return its descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return open_private(path, flags)
    except FileExistsError:
        # the existing file may be another user's, who could read the new content
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return open_private(path, flags)


def bind_private(path: Path) -> socket.socket:
    """Return a Unix socket that listens at a path.

    Replaces the socket's file that an earlier process has left.

    Raises:
        OSError: The socket cannot listen.
    """
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    try:
        # before bind, so that the socket's file has this mode from the start
        os.fchmod(listening.fileno(), FILE_MODE)
        listening.bind(str(path))
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening


def replace_private(path: Path, content: str) -> None:
    """Write a file in place of an existing one, while other processes may read.

    After a loss of power the path has the old content or the new one.

    Raises:
        OSError: The file cannot be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    write_private(temporary, content)
    fd = open_private(temporary, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)


def open_private(path: str | Path, flags: int) -> int:
    """Open a file as `os.open` does, but follow no link; also an `opener` for `open`.

    Raises:
        OSError: The file cannot be opened, or is a link (ELOOP).
    """
    return os.open(path, flags | os.O_NOFOLLOW, FILE_MODE)


def is_private(about: os.stat_result, user: int) -> bool:
    """Return whether a file or folder belongs to a user, and others have no access.

    Args:
        about: The facts of the file itself (`os.fstat`), not of a path that may change
            meanwhile.
        user: The user's number.
    """
    return about.st_uid == user and not about.st_mode & _OF_OTHERS


def user_in(folder: Path) -> int:
    """Return the number under which a folder's file system knows this process's user.

    A network file system may map root, or all users, to another number.

    Raises:
        OSError: No file can be created in the folder.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[Path]:
    """Lock a file exclusively inside the block; a missing file is created.

    Args:
        path: The file.
        wait: Whether to wait for another process that has locked the file.

    Raises:
        BlockingIOError: Another process has locked the file, and `wait` is false.
    """
    fd = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path
    finally:
        os.close(fd)
