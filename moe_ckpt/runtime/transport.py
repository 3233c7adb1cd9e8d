"""What is inside a process group, and how all its operations are ended at once: gloo's sockets, NCCL's abort."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import termios
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Transport(Protocol):
    """Forms the inside of groups for one generation after another."""

    device: torch.device
    can_forget: bool
    """Whether an operation may wait on after `cut`, so that it must be abandoned."""

    def begin(self) -> None:
        """A generation is about to be formed: what is opened from now on belongs to it."""
        ...

    def make(self, store: dist.Store, rank: int, size: int, *, form_s: float, operation_s: float) -> Any:
        """Return the inside of one group. Collective over its members; blocks up to `form_s` seconds."""
        ...

    def formed(self) -> None:
        """All groups of this generation are made: nothing more is opened for it."""
        ...

    def cut(self, insides: Sequence[Any]) -> None:
        """End all operations of the generation, from any thread; may be repeated."""
        ...

    def is_quiet(self) -> bool:
        """Return, after `cut`, whether nothing can arrive in a tensor any more that an operation was given."""
        ...


class GlooTransport:
    """gloo over TCP. It has no abort; shutting its sockets down makes operations fail within milliseconds.

    The sockets are those that the process opened between `begin` and `formed`: open no others meanwhile.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.can_forget = True
        self._before: frozenset[str] = frozenset()
        self._own: frozenset[str] | None = None

    def begin(self) -> None:
        self._before = frozenset(_open_sockets())
        self._own = None

    def make(self, store: dist.Store, rank: int, size: int, *, form_s: float, operation_s: float) -> Any:
        backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=form_s))
        backend._set_default_timeout(timedelta(seconds=operation_s))
        return _group_of(backend, store, self.device, dist.ProcessGroup.BackendType.GLOO)

    def formed(self) -> None:
        self._own = frozenset(_open_sockets()) - self._before

    def cut(self, insides: Sequence[Any]) -> None:  # noqa: ARG002 - gloo offers nothing to call
        for inode, fd in _open_sockets().items():
            if inode in self._own if self._own is not None else inode not in self._before:
                _shut_down(fd)

    def is_quiet(self) -> bool:
        own = self._own or frozenset()
        return not any(inode in own and _unread_bytes(fd) for inode, fd in _open_sockets().items())


class NcclTransport:
    """NCCL. Kernels of aborted communicators finish, with garbage: whoever synchronizes asks afterwards if all is well.

    All communicators are aborted at the same time: one after another they can wait for each other.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.can_forget = False

    def begin(self) -> None:
        pass

    def make(self, store: dist.Store, rank: int, size: int, *, form_s: float, operation_s: float) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=form_s)
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
        backend.eager_connect_single_device(self.device)  # communicators made lazily have hung in an abort
        backend._set_default_timeout(timedelta(seconds=operation_s))
        return _group_of(backend, store, self.device, dist.ProcessGroup.BackendType.NCCL)

    def formed(self) -> None:
        pass

    def cut(self, insides: Sequence[Any]) -> None:
        threads = [threading.Thread(target=inside.abort, daemon=True) for inside in insides]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def is_quiet(self) -> bool:
        torch.cuda.current_stream().synchronize()
        return True


def _group_of(backend: Any, store: dist.Store, device: torch.device, kind: Any) -> dist.ProcessGroup:
    """Return the group that torch makes of a backend: its operations are those that `torch.distributed` calls."""
    group = dist.ProcessGroup(store, backend.rank(), backend.size())
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, backend)
    return group


def _open_sockets() -> dict[str, int]:
    """Return the sockets of this process, by inode: a number of a file is soon another file's."""
    found: dict[str, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(entry)
            if target.startswith("socket:"):
                found[target] = int(entry.name)
    return found


def _shut_down(fd: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as duplicate:  # OSError: closed meanwhile
        if not duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            duplicate.shutdown(socket.SHUT_RDWR)


def _unread_bytes(fd: int) -> int:
    try:
        return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:  # a listening socket, or closed meanwhile
        return 0
