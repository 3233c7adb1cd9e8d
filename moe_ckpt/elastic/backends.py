"""The backend inside a process group, and how it ends all operations at once: gloo's sockets, NCCL's abort."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import signal
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from moe_ckpt.errors import PeersLostError
from moe_ckpt.linux import duplicate_socket

_log = logging.getLogger(__name__)
_LOOK_AGAIN_S = 0.0001
_HOST = torch.device("cpu")
_NCCL_NEVER_ENDS_THE_PROCESS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # else the watchdog asks the store of an ended generation, and sleeps up to a minute in the thread that ends
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}


class Mark(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Return, without waiting, whether the device has reached it."""
        ...


class Backend(Protocol):
    """Forms the inner groups of one generation after another."""

    device: torch.device
    can_forget: bool
    """Whether an operation may continue to wait after `cut`, so that it must be abandoned.

    Else it completes, with wrong data, here and on ranks that have not cut their groups yet.
    """
    closing_s: float | None
    """Seconds to wait for quiet after `cut`, then continue without it; None: never continue without it."""

    def begin(self) -> None:
        """A generation is about to be formed: connections opened from now on belong to it."""
        ...

    def mark(self) -> Mark | None:
        """Return the point behind the operations that this thread has begun; None if they are complete."""
        ...

    def make(self, store: dist.Store, rank: int, size: int, *, form_s: float, operation_s: float) -> Any:
        """Return the inner group. Collective over its members; blocks up to `form_s` seconds."""
        ...

    def formed(self) -> None:
        """All groups of this generation exist: no further connection is opened for it."""
        ...

    def sync(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        """Wait until awaited operations are complete on the device, too, or `is_over` returns True.

        Raises PeersLostError after `timeout_s` seconds.
        """
        ...

    def cut(self, insides: Sequence[Any]) -> None:
        """End all operations of the generation, from any thread; may be repeated."""
        ...

    def is_quiet(self) -> bool:
        """Return, after `cut`, whether no further byte can arrive in a tensor of an operation."""
        ...


class GlooBackend:
    """gloo over TCP. It has no abort; shutting its sockets down makes operations fail within milliseconds.

    The sockets are those that the process opened between `begin` and `formed`: open no others meanwhile. Tensors are on
    `device`; for one that is not the host, `wrap` makes a group of gloo's that copies them.
    """

    def __init__(self, device: torch.device = _HOST, wrap: Callable[[Any], Any] = lambda group: group) -> None:
        self.device = device
        self.wrap = wrap
        self.can_forget = True
        self.closing_s: float | None = 0.5
        self._before: frozenset[str] = frozenset()
        self._own: frozenset[str] | None = frozenset()  # None while they are being opened

    def begin(self) -> None:
        self._before = frozenset(_open_sockets())
        self._own = None

    def mark(self) -> Mark | None:
        return None  # an awaited operation is complete, but for copies of results in the order of the stream

    def make(self, store: dist.Store, rank: int, size: int, *, form_s: float, operation_s: float) -> Any:
        backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=form_s))
        backend._set_default_timeout(timedelta(seconds=operation_s))
        return self.wrap(group_of(backend, store, _HOST, dist.ProcessGroup.BackendType.GLOO))

    def formed(self) -> None:
        self._own = frozenset(_open_sockets()) - self._before

    def sync(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        pass  # as for `mark`: nothing can be lost any more

    def cut(self, insides: Sequence[Any]) -> None:  # noqa: ARG002 - gloo offers nothing to call
        for inode, fd in _open_sockets().items():
            if inode in self._own if self._own is not None else inode not in self._before:
                _shut_down(fd, inode)

    def is_quiet(self) -> bool:
        own = self._own or frozenset()
        # gloo's thread goes on reading, into tensors, the bytes that came before the socket was shut down
        return not any(inode in own and _unread_bytes(fd) for inode, fd in _open_sockets().items())


class NcclBackend:
    """NCCL.

    Kernels of aborted communicators finish, with garbage: after a synchronization the caller checks the outcome.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.can_forget = False
        self.closing_s: float | None = None
        self._lock = threading.Lock()
        self._aborts: dict[int, threading.Thread] = {}
        self._forming: dict[int, Any] = {}  # a rank that dies leaves the others in NCCL's bootstrap: a cut aborts them
        self._is_cut = False
        self._draining: threading.Thread | None = None
        keep_nccl_from_ending_the_process()

    def begin(self) -> None:
        with self._lock:
            self._aborts.clear()
            self._forming.clear()
            self._is_cut = False
        self._draining = None

    def mark(self) -> Mark | None:
        reached = torch.cuda.Event()
        reached.record(torch.cuda.current_stream(self.device))
        return reached

    def make(self, store: dist.Store, rank: int, size: int, *, form_s: float, operation_s: float) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=form_s)
        options.config.blocking = 0  # a blocking ncclCommInitRank cannot be aborted
        os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = str(math.ceil(form_s))  # torch's own is 30 minutes
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
        self._register(backend)
        backend.eager_connect_single_device(self.device)  # communicators made lazily have hung in an abort
        backend._set_default_timeout(timedelta(seconds=operation_s))
        group = group_of(backend, store, self.device, dist.ProcessGroup.BackendType.NCCL)
        self._register(group, replaces=backend)
        return group

    def formed(self) -> None:
        pass

    def sync(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        deadline_s = time.monotonic() + timeout_s
        while not done.query() and not is_over():
            if time.monotonic() > deadline_s:
                raise PeersLostError(f"operations on {self.device} took more than {timeout_s:g} s")
            time.sleep(_LOOK_AGAIN_S)  # a blocking wait could not be left

    def cut(self, insides: Sequence[Any]) -> None:
        with self._lock:
            self._is_cut = True
            all_made = (*insides, *self._forming.values())
            new = {id(inside): inside for inside in all_made if id(inside) not in self._aborts}
            # all at the same time: one after another, aborts of communicators can wait for each other
            for key, inside in new.items():
                self._aborts[key] = threading.Thread(target=inside.abort, name="abort", daemon=True)
                self._aborts[key].start()

    def is_quiet(self) -> bool:
        with self._lock:
            if any(thread.is_alive() for thread in self._aborts.values()):
                return False
            self._forming.clear()
        if self._draining is None:
            # in a thread, as each abort: the thread that leaves must see runtime.abort_s pass while a call hangs
            self._draining = threading.Thread(target=_drain, args=(self.device,), name="drain", daemon=True)
            self._draining.start()
        return not self._draining.is_alive()

    def _register(self, made: Any, replaces: Any = None) -> None:
        """Let a cut abort a group that no handle has yet. Raises PeersLostError if the cut came before."""
        with self._lock:
            if self._is_cut:
                raise PeersLostError("forming process groups: other ranks were lost")
            self._forming.pop(id(replaces), None)
            self._forming[id(made)] = made


def keep_nccl_from_ending_the_process() -> None:
    """Leave errors of NCCL to the caller; call before the first group of NCCL is made.

    torchrun sets the opposite: then torch's watchdog would end the survivors of a peer's loss.
    """
    os.environ.update(_NCCL_NEVER_ENDS_THE_PROCESS)


def die(reason: str) -> NoReturn:
    """End this process as if it had been killed: the supervisor replaces it, while an error would end the job."""
    _log.error("worker ends: %s", reason)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def _drain(device: torch.device) -> None:
    """Wait for all streams of a device: after an abort, only that proves that no kernel writes any more."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:  # it stays: every call from now on fails, and only a new process gets the device back
        die(f"{device} cannot be used any more: {error}")


def group_of(backend: Any, store: dist.Store, device: torch.device, kind: Any) -> dist.ProcessGroup:
    """Return the group that torch makes of a backend, with the operations that `torch.distributed` calls."""
    group = dist.ProcessGroup(store, backend.rank(), backend.size())
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, backend)
    return group


def _open_sockets() -> dict[str, int]:
    """Return the sockets of this process, by inode: a file descriptor's number is soon reused."""
    found: dict[str, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(entry)
            if target.startswith("socket:"):
                found[target] = int(entry.name)
    return found


def _shut_down(fd: int, name: str) -> None:
    with contextlib.suppress(OSError), duplicate_socket(fd) as duplicate:  # OSError: closed meanwhile
        # on a duplicate: no other thread can close it between the check and the shutdown
        is_same = name == f"socket:[{os.fstat(duplicate.fileno()).st_ino}]"  # or the number is another's meanwhile
        if is_same and not duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            duplicate.shutdown(socket.SHUT_RDWR)


def _unread_bytes(fd: int) -> int:
    try:
        return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:  # a listening socket, or closed meanwhile
        return 0
