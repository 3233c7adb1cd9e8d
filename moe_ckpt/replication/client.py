"""The worker's end of the socket to the replica daemon of its rank.

Owns: the requests that have no answer yet. Must not: wait for the daemon on the
training thread. When a daemon dies, its unanswered requests fail; the next request
connects to its successor.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.replication.connection import Connection
from moe_ckpt.replication.messages import (
    Address,
    Copied,
    Copy,
    Forget,
    Message,
    Persist,
    UsePeers,
)
from moe_ckpt.replication.server_work import ServerWork

_RETRY_S = 0.02

_log = logging.getLogger(__name__)


def daemon_socket(rank_folder: Path) -> Path:
    """Return the path of the socket at which the daemon of a rank serves its worker."""
    return rank_folder / "daemon.sock"


class DaemonClient:
    """Sends requests to the daemon of `rank_folder`, from any thread.

    `timeout_s` limits the time to hand over a request.

    The daemon executes requests in their order.
    """

    def __init__(self, rank_folder: Path, *, timeout_s: float) -> None:
        self._path = daemon_socket(rank_folder)
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._connection: _Connection | None = None
        self._peers: UsePeers | None = None
        self._is_closed = False

    def use_peers(self, addresses: Sequence[Address]) -> None:
        """Let the daemon, and its successors, copy to these addresses from now on.

        Waits for a daemon that is being replaced.

        Raises CheckpointSaveError if no daemon answers in time.
        """
        with self._lock:
            # kept before it is sent: `_connected` gives it to each successor of the
            # daemon, which begins without peers
            self._peers = UsePeers(addresses=tuple(map(str, addresses)))
            try:
                self._connected(wait_s=self._timeout_s).send(self._peers)
            except CheckpointSaveError:  # the connection to a daemon that has just died
                self._connected(wait_s=self._timeout_s)

    def copy(self, keys: Sequence[str]) -> Future[ServerWork]:
        """Start copying own blobs to all peers.

        The future is done once all peers hold all of the blobs, or fails with a
        CheckpointSaveError. Without keys, it is done once all earlier requests are. Its
        result is the work of the slowest checkpoint server among the peers.
        """
        return self._ask(lambda number: Copy(number=number, keys=tuple(keys)))

    def persist(
        self,
        keys: Sequence[str],
        stale: Sequence[str],
        path: Path,
        limit_bytes: int | None,
    ) -> Future[None]:
        """Start copying own blobs to a folder on disk; blobs named in `stale` are
        deleted there first.

        The future is done once the blobs are on disk, or fails with a
        CheckpointSaveError. One request is executed at a time.
        """
        request = {
            "keys": tuple(keys),
            "stale": tuple(stale),
            "path": str(path),
            "limit_bytes": limit_bytes,
        }
        return self._ask(lambda number: Persist(number=number, **request))

    def drop(self, keys: Sequence[str]) -> None:
        """Let all peers drop their copies, after all earlier requests. A failure is
        logged.
        """
        with self._lock:
            try:
                self._connected().send(Forget(keys=tuple(keys)))
            except CheckpointSaveError as error:
                _log.warning("copies stay that are not needed any more: %s", error)

    def close(self) -> None:
        """Close the socket for good: unanswered and later requests fail.

        The daemon still executes the requests that it has received.
        """
        with self._lock:
            self._is_closed = True
            connection, self._connection = self._connection, None
        # without the lock: callbacks of requests that fail now may send more requests
        if connection:
            connection.close()
            connection.join()

    def _ask(self, request: Callable[[int], Message]) -> Future[Any]:
        with self._lock:
            future: Future[Any] = Future()
            # no caller can cancel it from here on
            future.set_running_or_notify_cancel()
            try:
                self._connected().ask(request, future)
            except CheckpointSaveError as error:
                future.set_exception(error)
            return future

    def _connected(self, wait_s: float = 0.0) -> _Connection:
        if self._is_closed:
            raise CheckpointSaveError("the connection to the daemon was closed")
        if self._connection and self._connection.is_over:
            # and no wait for its thread: callbacks there may need locks of this caller
            self._connection.close()
            self._connection = None
        if self._connection is None:
            self._connection = _Connection(
                _dial(self._path, wait_s, self._timeout_s), self._timeout_s
            )
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
        # by number; None once the connection is closed
        self._unanswered: dict[int, Future[Any]] | None = {}
        self._thread = Thread(
            target=self._read_all,
            args=(link.twin(),),
            name="daemon-client",
            daemon=True,
        )
        self._thread.start()

    @property
    def is_over(self) -> bool:
        with self._lock:
            return self._unanswered is None

    def ask(self, request: Callable[[int], Message], future: Future[Any]) -> None:
        """Send a request with a new number. Raises CheckpointSaveError only if the
        future will not be set.
        """
        number = next(self._numbers)
        with self._lock:
            if self._unanswered is None:
                raise CheckpointSaveError("the daemon is gone")
            # before the request is sent: its answer may arrive before `send` returns
            self._unanswered[number] = future
        # then the reading thread ends, and fails the future
        with contextlib.suppress(CheckpointSaveError):
            self.send(request(number))

    def send(self, message: Message) -> None:
        """Send a message. Raises CheckpointSaveError; the connection is then closed."""
        try:
            self._link.allow(self._timeout_s)
            self._link.send(message)
        except OSError as error:
            self._link.shut_down()
            raise CheckpointSaveError(
                f"the daemon does not take requests: {error}"
            ) from error

    def close(self) -> None:
        self._link.shut_down()
        self._link.close()  # the thread reads from a twin

    def join(self) -> None:
        """Wait until all unanswered requests have failed."""
        self._thread.join(self._timeout_s)

    def _read_all(self, link: Connection) -> None:
        reason: Exception | None = None
        try:
            # the kernel closes the socket of any local process that ends
            while link.is_readable(None):
                link.allow(self._timeout_s)
                self._finish(link.expect(Copied))
        except Exception as error:  # the top of a thread: waiting callers get the error
            reason = error
        finally:
            link.close()
        with self._lock:
            futures, self._unanswered = list((self._unanswered or {}).values()), None
        for future in futures:
            # without the lock, which `is_over` takes: callbacks may send further
            # requests
            future.set_exception(CheckpointSaveError(f"the daemon is gone: {reason}"))

    def _finish(self, answer: Copied) -> None:
        with self._lock:
            future = (
                self._unanswered.pop(answer.number, None) if self._unanswered else None
            )
        if future is None:
            raise ConnectionError(
                f"got an answer with number {answer.number}, which was not asked"
            )
        if answer.failure is None:
            future.set_result(
                ServerWork(busy_us=answer.busy_us, after_us=answer.after_us)
            )
        else:
            future.set_exception(CheckpointSaveError(answer.failure))


def _dial(path: Path, wait_s: float, timeout_s: float) -> Connection:
    """Connect to the daemon. If there is none, try again for `wait_s` seconds."""
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
