"""The replica daemon of one rank: a process that outlives the rank's workers.

The daemon lives as long as the supervisor. Owns: the rank's server of copies, the
threads that send copies of the rank's own blobs, and the socket for the rank's worker.
Must not: train, touch a process group, or keep state in its memory: all state is in the
rank's folder, which may be deleted.

    supervisor --fork--> daemon <--Unix socket-- worker 0, 1, ...
                         daemon <--TCP--> daemons and workers of other ranks
"""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import NoReturn

from moe_ckpt.agent import die_with_parent
from moe_ckpt.config import NO_CAPS, MaxBytesPerS
from moe_ckpt.private_files import bind_private, make_private
from moe_ckpt.replication.client import daemon_socket
from moe_ckpt.replication.connection import Connection
from moe_ckpt.replication.copy_server import CopyServer, HoldingRules
from moe_ckpt.replication.local_disk import persist
from moe_ckpt.replication.messages import (
    Address,
    Copied,
    Copy,
    Forget,
    Message,
    Persist,
    Ticket,
    UsePeers,
    parse_address,
)
from moe_ckpt.replication.sender import Replicator
from moe_ckpt.replication.server import ConnectionServer
from moe_ckpt.replication.update_work import NO_WORK, UpdateWork
from moe_ckpt.snapshot.arriving_update import OpenGradients, observes_nothing
from moe_ckpt.snapshot.blobs import BlobFolder, own_path
from moe_ckpt.snapshot.token_bucket import Throttle

# interval of checks that the folder exists: only a loss of the node's memory deletes it
_LOOK_EVERY_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonSettings:
    """Settings and time limits of a daemon."""

    rank_folder: Path
    """The rank's folder in shared memory."""

    global_rank: int
    """The rank."""

    ticket: Ticket
    """The run, and the run's secret."""

    host: str
    """Address of this node at which the daemon's server listens."""

    timeout_s: float
    """Longest time without progress on a connection, in seconds."""

    copy_deadline_s: float
    """Longest time of a whole copy, in seconds."""

    caps: MaxBytesPerS = NO_CAPS
    """Caps on the daemon's traffic, in bytes per second."""

    keeps_own: bool = False
    """Whether the daemon also keeps states of its own rank, computed from gradients."""

    most_bytes_per_owner: int | None = None
    """Most bytes of payloads that the daemon holds for one rank. None: no limit."""


def run_daemon(
    settings: DaemonSettings,
    *,
    supervisor_pid: int,
    may_send: Callable[[], bool],
    announce: Callable[[Address], None],
    observe: Callable[[], OpenGradients] | None = None,
) -> NoReturn:
    """Run the daemon in this process, which the supervisor has forked.

    The kernel ends this process when the supervisor ends.

    Args:
        settings: The daemon's settings.
        supervisor_pid: Process id of the supervisor.
        may_send: Returns whether copies may be sent without a wait; False while
            training communicates.
        announce: Called once with the server's address, when the daemon is ready for
            its worker.
        observe: Begins to observe gradients in this process, and returns their opener.
            None: this process observes no gradients.

    Raises:
        OSError: The daemon cannot listen.
        ConfigError: Gradients cannot be observed.
    """
    die_with_parent(signal.SIGKILL, parent=supervisor_pid)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        # ignore signals to the whole job: this process ends with its supervisor
        signal.signal(number, signal.SIG_IGN)
    deadline_s = settings.copy_deadline_s
    server = CopyServer(
        settings.rank_folder,
        settings.global_rank,
        settings.ticket,
        host=settings.host,
        timeout_s=settings.timeout_s,
        rules=HoldingRules(
            keeps_own=settings.keeps_own,
            open_gradients=observe() if observe else observes_nothing,
            most_bytes_per_owner=settings.most_bytes_per_owner,
        ),
    )
    own = BlobFolder(own_path(settings.rank_folder))
    replicator = Replicator(
        own,
        settings.global_rank,
        settings.ticket,
        may_send=may_send,
        deadline_s=deadline_s,
        throttle=Throttle(settings.caps.peers),
    )
    door = WorkerServer(
        settings.rank_folder,
        replicator,
        timeout_s=settings.timeout_s,
        disk=Throttle(settings.caps.disk),
    )
    announce(server.address)
    while True:
        time.sleep(_LOOK_EVERY_S)
        try:
            door.keep_open()
        except OSError as error:
            # the folder is being deleted right now, or the disk is full
            _log.warning(
                "rank %d's daemon cannot listen to its worker yet: %s",
                settings.global_rank,
                error,
            )


class WorkerServer:
    """Serves the workers of one rank, one after another."""

    def __init__(
        self,
        rank_folder: Path,
        replicator: Replicator,
        *,
        timeout_s: float,
        disk: Throttle | None = None,
    ) -> None:
        """Listen at a socket in the rank's folder.

        Args:
            rank_folder: The rank's folder in shared memory.
            replicator: Copies blobs to peers.
            timeout_s: Longest time of an exchange with a worker, in seconds.
            disk: Cap on writes to the local disk. None: no cap.
        """
        self._disk = disk or Throttle()
        self._path = daemon_socket(rank_folder)
        self._own = BlobFolder(own_path(rank_folder))
        self._replicator = replicator
        # one thread: each write removes unfinished files, which must not be the files
        # of another write
        self._disk_thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="local-disk"
        )
        self._timeout_s = timeout_s
        self._listener: ConnectionServer | None = None
        self._inode: int | None = None
        self.keep_open()

    def keep_open(self) -> None:
        """Listen at the path, again if the socket's folder was deleted.

        Raises:
            OSError: Listening fails.
        """
        if self._inode is not None and self._inode == _inode(self._path):
            return
        self.close()
        listening = _listen(self._path)
        self._inode = _inode(self._path)
        self._listener = ConnectionServer(listening, self._serve)

    def close(self) -> None:
        """End all connections. The daemon still executes accepted requests."""
        if self._listener:
            self._listener.close(self._timeout_s)
            self._listener, self._inode = None, None

    def _serve(self, link: Connection) -> None:
        # a twin: threads of copies send answers while this thread waits for requests
        worker = _Worker(link.twin(), self._timeout_s)
        try:
            # no time limit: the kernel closes the socket when the worker's process ends
            while link.is_readable(None):
                link.allow(self._timeout_s)
                self._carry_out(worker, link.receive())
        finally:
            worker.close()

    def _carry_out(self, worker: _Worker, request: Message) -> None:
        match request:
            case Copy(number=number, keys=keys):
                self._replicator.copy(keys).add_done_callback(
                    lambda copied: worker.answer(number, copied)
                )
            case Persist(
                number=number,
                keys=keys,
                stale=stale,
                path=path,
                limit_bytes=limit_bytes,
            ):
                # without keys, a recovery waits for all earlier writes; no training
                # runs meanwhile, so the cap has no use
                (self._disk.apply if keys else self._disk.lift)()
                persisted = self._disk_thread.submit(
                    persist, self._own, Path(path), keys, stale, limit_bytes, self._disk
                )
                persisted.add_done_callback(
                    lambda persisted: worker.answer(number, persisted)
                )
            case Forget(keys=keys):
                self._replicator.drop(keys)
            case UsePeers(addresses=addresses):
                self._replicator.use_peers(
                    [parse_address(address) for address in addresses]
                )
            case _:
                raise ConnectionError(
                    f"got {type(request).__name__}, wanted a worker's request"
                )


class _Worker:
    """Sends the answers to one worker, from the threads that send copies."""

    def __init__(self, link: Connection, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._lock = Lock()

    def answer(self, number: int, copied: Future[UpdateWork] | Future[None]) -> None:
        failure = copied.exception()
        work = NO_WORK if failure else copied.result() or NO_WORK
        reason = None if failure is None else str(failure)
        message = Copied(
            number=number, failure=reason, busy_us=work.busy_us, after_us=work.after_us
        )
        with self._lock:
            self._link.allow(self._timeout_s)
            try:
                self._link.send(message)
            except OSError as error:
                _log.info("a worker is gone that had asked for copies: %s", error)

    def close(self) -> None:
        with self._lock:
            self._link.close()


def _listen(path: Path) -> socket.socket:
    make_private(path.parent)
    return bind_private(path)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
