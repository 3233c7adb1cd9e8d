"""Worker's end of the socket to the replica daemon of the worker's rank.

Owns: the requests that have no answer yet. Must not: wait for the daemon on the
training thread. When a daemon dies, its unanswered requests fail; the next request
connects to the daemon's successor.
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
from moe_ckpt.replication.update_work import UpdateWork

_RETRY_S = 0.02

_log = logging.getLogger(__name__)


def daemon_socket(rank_folder: Path) -> Path:
    """Return the path of the socket at which a rank's daemon serves the worker."""
    return rank_folder / "daemon.sock"


class DaemonClient:
    """Client of a rank's daemon, for any thread; implements `copy_ledger.Copies`.

    The daemon receives requests in the order in which the client sends them.
    """

    def __init__(self, rank_folder: Path, *, timeout_s: float) -> None:
        """Create a client that connects on the first request.

        Args:
            rank_folder: The rank's folder in shared memory.
            timeout_s: Longest time to hand over a request, in seconds.
        """
        self._path = daemon_socket(rank_folder)
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._connection: _Connection | None = None
        self._peers: UsePeers | None = None
        self._is_closed = False

    def use_peers(self, addresses: Sequence[Address]) -> None:
        """Make the daemon, and each successor, copy to these peers from now on.

        Waits for a daemon that is being replaced.

        Args:
            addresses: Addresses of the peers' servers.

        Raises:
            CheckpointSaveError: No daemon accepts the request in time.
        """
        with self._lock:
            # stored before sending: a daemon begins without peers, and `_connected`
            # sends the stored request to each successor
            self._peers = UsePeers(addresses=tuple(map(str, addresses)))
            try:
                self._connected(wait_s=self._timeout_s).send(self._peers)
            # the daemon has just died: connect to its successor
            except CheckpointSaveError:
                self._connected(wait_s=self._timeout_s)

    def copy(self, keys: Sequence[str]) -> Future[UpdateWork]:
        """Start copying own blobs to all peers.

        Args:
            keys: Keys of the blobs.

        Returns:
            A future that completes once all peers hold all of the blobs, or fails with
            a CheckpointSaveError. Without keys, the future completes once all earlier
            copies have ended. The result is the work of the slowest checkpoint server
            among the peers.
        """
        return self._ask(lambda number: Copy(number=number, keys=tuple(keys)))

    def persist(
        self,
        keys: Sequence[str],
        stale: Sequence[str],
        path: Path,
        limit_bytes: int | None,
    ) -> Future[None]:
        """Start copying own blobs to a folder on disk.

        The daemon executes one such request at a time.

        Args:
            keys: Keys of the blobs.
            stale: Keys of the blobs on disk to delete before the copy.
            path: The folder on disk.
            limit_bytes: Most bytes that the folder may hold. None: no limit.

        Returns:
            A future that completes once the blobs are on disk, or fails with a
            CheckpointSaveError.
        """
        request = {
            "keys": tuple(keys),
            "stale": tuple(stale),
            "path": str(path),
            "limit_bytes": limit_bytes,
        }
        return self._ask(lambda number: Persist(number=number, **request))

    def drop(self, keys: Sequence[str]) -> None:
        """Make all peers delete their copies of blobs.

        A peer deletes copies after all earlier requests of the same kind; the kinds are
        steps and all other blobs (see `sender`). The client logs a failure.

        Args:
            keys: Keys of the blobs.
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
        # outside the lock: callbacks of requests that fail now may send more requests
        if connection:
            connection.close()
            connection.join()

    def _ask(self, request: Callable[[int], Message]) -> Future[Any]:
        with self._lock:
            future: Future[Any] = Future()
            # no caller can cancel the future from here on
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
            # without `join`: callbacks on the connection's thread may need locks that
            # this caller holds
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
    """One connection to one daemon, and the thread that reads the daemon's answers."""

    def __init__(self, link: Connection, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._numbers = count()
        # futures by the request's number; None once the connection is closed
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
        """Send a request with a new number.

        Raises:
            CheckpointSaveError: The connection is over, and the future stays unset.
                After any other failure the reading thread fails the future.
        """
        number = next(self._numbers)
        with self._lock:
            if self._unanswered is None:
                raise CheckpointSaveError("the daemon is gone")
            # registered before sending: the answer may arrive before `send` returns
            self._unanswered[number] = future
        # after a failure to send, the reading thread ends and fails the future
        with contextlib.suppress(CheckpointSaveError):
            self.send(request(number))

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            CheckpointSaveError: The daemon does not take the message. The connection is
                then closed.
        """
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
        self._link.close()  # the reading thread has a twin of its own

    def join(self) -> None:
        """Wait until all unanswered requests have failed."""
        self._thread.join(self._timeout_s)

    def _read_all(self, link: Connection) -> None:
        reason: Exception | None = None
        try:
            # no time limit: the kernel closes the socket when the daemon's process ends
            while link.is_readable(None):
                link.allow(self._timeout_s)
                self._finish(link.expect(Copied))
        except Exception as error:  # top of the thread: waiting callers get the error
            reason = error
        finally:
            link.close()
        with self._lock:
            futures, self._unanswered = list((self._unanswered or {}).values()), None
        for future in futures:
            # outside the lock: callbacks may send further requests, for which `is_over`
            # takes the lock
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
                UpdateWork(busy_us=answer.busy_us, after_us=answer.after_us)
            )
        else:
            future.set_exception(CheckpointSaveError(answer.failure))


def _dial(path: Path, wait_s: float, timeout_s: float) -> Connection:
    """Connect to the daemon. Without a daemon, try again for `wait_s` seconds."""
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
