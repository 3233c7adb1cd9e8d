"""The sockets of a generation: to shut them down ends what waits in them, in this process and at their other ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import termios
from pathlib import Path

from moe_ckpt.linux import duplicate_socket


class GenerationSockets:
    """The sockets that this process opened between `begin` and `formed`: open no others meanwhile."""

    def __init__(self) -> None:
        self._before: frozenset[str] = frozenset()
        self._own: frozenset[str] | None = frozenset()  # None while they are being opened

    def begin(self) -> None:
        self._before = frozenset(_open_sockets())
        self._own = None

    def formed(self) -> None:
        self._own = frozenset(_open_sockets()) - self._before

    def shut_down(self, *, listening: bool = False) -> None:
        """Shut the sockets down, those that are `listening` as well: an accept in them then fails."""
        for inode, fd in _open_sockets().items():
            if inode in self._own if self._own is not None else inode not in self._before:
                _shut_down(fd, inode, listening=listening)

    def have_unread_bytes(self) -> bool:
        """Return whether bytes have arrived that no thread has read yet."""
        own = self._own or frozenset()
        return any(inode in own and _unread_bytes(fd) for inode, fd in _open_sockets().items())


def _open_sockets() -> dict[str, int]:
    """Return the sockets of this process, by inode: a file descriptor's number is soon reused."""
    found: dict[str, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(entry)
            if target.startswith("socket:"):
                found[target] = int(entry.name)
    return found


def _shut_down(fd: int, name: str, *, listening: bool) -> None:
    with contextlib.suppress(OSError), duplicate_socket(fd) as duplicate:  # OSError: closed meanwhile
        # on a duplicate: no other thread can close it between the check and the shutdown
        is_same = name == f"socket:[{os.fstat(duplicate.fileno()).st_ino}]"  # or the number is another's meanwhile
        if is_same and (listening or not duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)):
            duplicate.shutdown(socket.SHUT_RDWR)


def _unread_bytes(fd: int) -> int:
    try:
        return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:  # a listening socket, or closed meanwhile
        return 0
