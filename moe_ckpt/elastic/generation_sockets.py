"""The sockets of a generation, which a cut shuts down.

The shutdown ends operations that wait in the sockets, in this process and at the other
ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from moe_ckpt.linux import duplicate_socket, own_files

T = TypeVar("T")

_STARTING = threading.Lock()
"""Held while an event loop starts, so that no other loop starts meanwhile."""

_WATCHED = re.compile(r"^tfd: +([0-9]+) .* ino:([0-9a-f]+) ", re.MULTILINE)
"""A line about an epoll instance in /proc: the descriptor of a watched file, and the
file's inode.
"""


class GenerationSockets:
    """The sockets that this process opens between `begin` and `formed`.

    The process must open no other sockets meanwhile.
    """

    def __init__(self) -> None:
        self._before: frozenset[str] = frozenset()
        # None while sockets are being opened
        self._own: frozenset[str] | None = frozenset()

    def begin(self) -> None:
        self._before = frozenset(_open_sockets())
        self._own = None

    def formed(self) -> None:
        self._own = frozenset(_open_sockets()) - self._before

    def shut_down(self) -> None:
        """Shut the sockets down. An accept in a listening socket then fails."""
        for inode, fd in _open_sockets().items():
            if (
                inode in self._own
                if self._own is not None
                else inode not in self._before
            ):
                _shut_down(fd, inode, listening=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loop:
    """An event loop of gloo."""

    fd: int
    """Descriptor of the epoll instance of the loop's thread."""

    listening: frozenset[str]
    """Listening sockets that the instance watched at first, which distinguish the
    instance from a later one with the same descriptor.
    """


class LoopSockets:
    """The sockets that event loops of gloo watch. Any thread may call any method.

    gloo opens sockets when operations need them, so each call looks for the sockets
    that are open by then.
    """

    def __init__(self) -> None:
        self._loops: list[_Loop] = []

    def add(self, start: Callable[[], T]) -> T:
        """Record the event loops that a call starts.

        Args:
            start: The call.

        Returns:
            The result of `start`.
        """
        with _STARTING:
            before = set(_open_polls())
            started = start()
            new = set(_open_polls()) - before
            self._loops += [
                _Loop(fd=fd, listening=frozenset(_watched(fd))) for fd in new
            ]
        return started

    def shut_down(self) -> None:
        """Shut the sockets down, except for those that listen."""
        for inode, fd in self._watched_now():
            _shut_down(fd, inode, listening=False)

    def have_unread_bytes(self) -> bool:
        """Return whether a socket has bytes that no thread has read yet."""
        return any(_unread_bytes(fd) for _, fd in self._watched_now())

    def _watched_now(self) -> Iterator[tuple[str, int]]:
        for loop in tuple(self._loops):
            watched = _watched(loop.fd)
            if not loop.listening.isdisjoint(watched):
                yield from watched.items()


def _open_sockets() -> dict[str, int]:
    """Return the sockets of this process by inode, as descriptors are soon reused."""
    return {target: fd for fd, target in own_files() if target.startswith("socket:")}


def _open_polls() -> list[int]:
    """Return the epoll instances of this process."""
    return [fd for fd, target in own_files() if target == "anon_inode:[eventpoll]"]


def _watched(poll_fd: int) -> dict[str, int]:
    """Return the sockets that an epoll instance watches, by inode.

    Returns:
        No sockets if the instance is closed.
    """
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for fd, inode in _WATCHED.findall(
            Path(f"/proc/self/fdinfo/{poll_fd}").read_text()
        ):
            name = f"socket:[{int(inode, 16)}]"
            with contextlib.suppress(OSError):  # closed meanwhile
                # otherwise the file is a pipe, which wakes the loop
                if os.readlink(f"/proc/self/fd/{fd}") == name:
                    found[name] = int(fd)
    return found


def _shut_down(fd: int, name: str, *, listening: bool) -> None:
    # OSError: the socket was closed meanwhile
    with contextlib.suppress(OSError), duplicate_socket(fd) as duplicate:
        # Check and shut down a duplicate, which no other thread can close between the
        # two. If the inode differs, the descriptor meanwhile belongs to another socket
        is_same = name == f"socket:[{os.fstat(duplicate.fileno()).st_ino}]"
        if is_same and (
            listening
            or not duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        ):
            duplicate.shutdown(socket.SHUT_RDWR)


def _unread_bytes(fd: int) -> int:
    try:
        return int.from_bytes(
            fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder
        )
    except OSError:  # a listening socket, or closed meanwhile
        return 0
