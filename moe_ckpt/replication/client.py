"""The worker's end of the socket to its own daemon.

Owns: which copies have been asked for and not been answered. Must not: wait for the daemon on the training thread. A
daemon that is gone fails what was asked of it; the next request connects to its successor.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from threading import Lock, Thread

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.replication.connection import Connection
from moe_ckpt.replication.messages import Address, Copied, Copy, Forget, Message, Persist, UsePeers

_RETRY_S = 0.02

_log = logging.getLogger(__name__)


def daemon_socket(rank_folder: Path) -> Path:
    """Return where the daemon of a rank listens for its worker."""
    return rank_folder / "daemon.sock"


class DaemonClient:
    """Asks the daemon of `rank_folder`, from any thread; `timeout_s` bounds what handing over a request may take.

    Requests are carried out in their order.
    """

    def __init__(self, rank_folder: Path, *, timeout_s: float) -> None:
        self._path = daemon_socket(rank_folder)
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._connection: _Connection | None = None
        self._peers: UsePeers | None = None
        self._is_closed = False

    def use_peers(self, addresses: Sequence[Address]) -> None:
        """Let the daemon, and its successors, copy to these from now on; waits for a daemon that is being replaced.

        Raises CheckpointSaveError if there is none in time.
        """
        with self._lock:
            self._peers = UsePeers(addresses=tuple(map(str, addresses)))
            try:
                self._connected(wait_s=self._timeout_s).send(self._peers)
            except CheckpointSaveError:  # that of a daemon that had just died
                self._connected(wait_s=self._timeout_s)

    def copy(self, keys: Sequence[str]) -> Future[None]:
        """Start copying own blobs to all peers.

        The future is done when all of them hold all of it, or failed with a CheckpointSaveError.
        """
        return self._ask(lambda number: Copy(number=number, keys=tuple(keys)))

    def persist(self, keys: Sequence[str], stale: Sequence[str], path: Path, limit_bytes: int | None) -> Future[None]:
        """Start copying own blobs to a folder on disk, after dropping what is stale there.

        The future is done when they are on disk, or failed with a CheckpointSaveError. One is carried out at a time.
        """
        request = functools.partial(
            Persist, keys=tuple(keys), stale=tuple(stale), path=str(path), limit_bytes=limit_bytes
        )
        return self._ask(lambda number: request(number=number))

    def forget(self, keys: Sequence[str]) -> None:
        """Let all peers drop their copies, after what was asked for before; a failure is logged."""
        with self._lock:
            try:
                self._connected().send(Forget(keys=tuple(keys)))
            except CheckpointSaveError as error:
                _log.warning("copies stay that are not needed any more: %s", error)

    def close(self) -> None:
        """Close the socket for good: unanswered requests fail, and so do all later ones.

        The daemon still carries out what it was asked for.
        """
        with self._lock:
            self._is_closed = True
            connection, self._connection = self._connection, None
        if connection:  # without the lock: callbacks of requests that fail now may ask for more
            connection.close()

    def _ask(self, request: Callable[[int], Message]) -> Future[None]:
        with self._lock:
            future: Future[None] = Future()
            future.set_running_or_notify_cancel()  # no caller can cancel it from here on
            try:
                self._connected().ask(request, future)
            except CheckpointSaveError as error:
                future.set_exception(error)
            return future

    def _connected(self, wait_s: float = 0.0) -> _Connection:
        if self._is_closed:
            raise CheckpointSaveError("the connection to the daemon was closed")
        if self._connection and self._connection.is_over:
            self._connection.close()
            self._connection = None
        if self._connection is None:
            self._connection = _Connection(_dial(self._path, wait_s, self._timeout_s), self._timeout_s)
            if self._peers:
                self._connection.send(self._peers)
        return self._connection


class _Connection:
    """One connection to one daemon, and the thread that reads its answers."""

    def __init__(self, link: Connection, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._numbers = count()
        self._unanswered: dict[int, Future[None]] | None = {}  # by number; None once the connection is over
        self._thread = Thread(target=self._read_all, args=(link.twin(),), name="daemon-client", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        with self._lock:
            return self._unanswered is None

    def ask(self, request: Callable[[int], Message], future: Future[None]) -> None:
        """Ask for something by a new number. Raises CheckpointSaveError only if the future will not be set."""
        number = next(self._numbers)
        with self._lock:
            if self._unanswered is None:
                raise CheckpointSaveError("the daemon is gone")
            self._unanswered[number] = future
        with contextlib.suppress(CheckpointSaveError):  # then the reading thread ends, and fails the future
            self.send(request(number))

    def send(self, message: Message) -> None:
        """Hand over a request. Raises CheckpointSaveError; then the connection is over."""
        try:
            self._link.allow(self._timeout_s)
            self._link.send(message)
        except OSError as error:
            self._link.shut_down()
            raise CheckpointSaveError(f"the daemon does not take requests: {error}") from error

    def close(self) -> None:
        self._link.shut_down()
        self._thread.join(self._timeout_s)
        self._link.close()

    def _read_all(self, link: Connection) -> None:
        reason: Exception | None = None
        try:
            while link.is_readable(None):  # a process of this machine that ends, however it does, is noticed
                link.allow(self._timeout_s)
                self._finish(link.expect(Copied))
        except Exception as error:  # the top of a thread: waiting callers get the error
            reason = error
        finally:
            link.close()
        self._fail_all(reason)

    def _finish(self, answer: Copied) -> None:
        with self._lock:
            future = self._unanswered.pop(answer.number, None) if self._unanswered else None
        if future is None:
            raise ConnectionError(f"got an answer with number {answer.number}, which was not asked")
        if answer.failure is None:
            future.set_result(None)
        else:
            future.set_exception(CheckpointSaveError(answer.failure))

    def _fail_all(self, reason: Exception | None) -> None:
        with self._lock:
            futures, self._unanswered = list((self._unanswered or {}).values()), None
        for future in futures:
            future.set_exception(CheckpointSaveError(f"the daemon is gone: {reason}"))


def _dial(path: Path, wait_s: float, timeout_s: float) -> Connection:
    """Connect to the daemon; with `wait_s`, try again so long if there is none."""
    until_s = time.monotonic() + wait_s
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            return Connection(connection)
        except OSError as error:
            connection.close()
            if time.monotonic() >= until_s:
                raise CheckpointSaveError(f"{path}: got no daemon: {error}") from error
        time.sleep(_RETRY_S)
