"""Serves one rank's folder to other ranks.

The server stores copies for other ranks, and returns blobs to ranks that lost their
own. Owns: the answers to requests. The server's only state is the file system, where
the folder may be deleted at any time. Must not: send anything without a request, or
serve a client that has not proved that it has the run's token.

    own/              this rank's blobs: read only
    held/rank0001/    copies for rank 1
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from moe_ckpt.errors import MoeCkptError
from moe_ckpt.replication.admission import admit
from moe_ckpt.replication.connection import Connection, RefusedError
from moe_ckpt.replication.messages import (
    Address,
    Clear,
    Done,
    Drop,
    Found,
    Get,
    Keys,
    ListKeys,
    Message,
    Put,
    Refused,
    Ticket,
)
from moe_ckpt.replication.replica_folder import ReplicaFolder
from moe_ckpt.replication.server import ConnectionServer
from moe_ckpt.replication.strangers import RareWarning, Strangers
from moe_ckpt.replication.transfer import BlobParts, receive_blob, send_blob
from moe_ckpt.snapshot.arriving_update import (
    ArrivingUpdate,
    OpenGradients,
    observes_nothing,
)
from moe_ckpt.snapshot.blob_keys import is_update
from moe_ckpt.snapshot.blobs import BlobFolder, held_path, is_key, own_path

_ADMISSION_S = 10.0  # the server disconnects a client that is not admitted by then
_MOST_STRANGERS = 64  # connections that wait for admission; each has a thread
# threads; as many are in use as owners send updates at the same time
_MOST_UPDATERS = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldingRules:
    """The copies that a server accepts."""

    keeps_own: bool = False
    """Whether the server also keeps copies for its own rank.

    These copies are states of the rank that the server computes from gradients.
    """

    open_gradients: OpenGradients = observes_nothing
    """Opens the gradients that the server observes by a way of its own."""

    most_bytes_per_owner: int | None = None
    """Most bytes of payloads for each owner. None: as much as there is."""


class CopyServer:
    """Serves a rank's folder to clients with the run's ticket, until `close`.

    Attributes:
        address: Address at which the server listens.
    """

    def __init__(
        self,
        rank_folder: Path,
        global_rank: int,
        ticket: Ticket,
        *,
        host: str,
        timeout_s: float,
        rules: HoldingRules | None = None,
    ) -> None:
        """Begin to serve at a free port.

        Args:
            rank_folder: The rank's folder in shared memory.
            global_rank: The rank; negative for a server without a rank.
            ticket: The run, and the run's secret.
            host: Address of this node at which the server listens.
            timeout_s: Time without traffic after which the server closes a connection,
                in seconds. The client connects again when necessary.
            rules: The copies that the server accepts. None: the defaults of
                `HoldingRules`.
        """
        self._rules = rules or HoldingRules()
        self._rank_folder = rank_folder
        self._global_rank = global_rank
        self._ticket = ticket
        self._timeout_s = timeout_s
        self._own = BlobFolder(own_path(rank_folder))
        self._lock = Lock()
        name = f"rank {global_rank}'s daemon" if global_rank >= 0 else "a server"
        self._refusals = RareWarning(_log, f"{name} refused a connection")
        self._strangers = Strangers(_MOST_STRANGERS, RareWarning(_log, name))
        self._held: dict[int, ReplicaFolder] = {}  # folders by the owner's rank
        self._updaters = ThreadPoolExecutor(
            max_workers=_MOST_UPDATERS, thread_name_prefix="updater"
        )
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, 0), family=family)
        self.address = Address(host=host, port=listening.getsockname()[1])
        self._listener = ConnectionServer(listening, self._serve)

    def close(self) -> None:
        """End all connections at once."""
        self._listener.close(self._timeout_s)
        self._updaters.shutdown(wait=False)

    def _serve(self, link: Connection) -> None:
        if not self._admits(link):
            return
        while link.is_readable(self._timeout_s):
            link.allow(self._timeout_s)
            self._answer(link, link.receive())

    def _admits(self, link: Connection) -> bool:
        with self._strangers.waiting(link):
            link.allow(min(self._timeout_s, _ADMISSION_S))
            reason = admit(link, self.address, self._ticket)
        if reason:
            self._refusals.give(reason)
        return reason is None

    def _answer(self, link: Connection, request: Message) -> None:
        try:
            self._carry_out(link, request)
        except RefusedError as error:
            link.send(Refused(reason=str(error), garbled=error.garbled))
        except MoeCkptError as error:
            link.send(Refused(reason=str(error), garbled=False))

    def _carry_out(self, link: Connection, request: Message) -> None:
        match request:
            case Put(owner_rank=owner_rank, key=key):
                self._put(link, owner_rank, key, link.expect(Found))
            case Get(owner_rank=owner_rank, key=key):
                folder = self._folder(owner_rank, [key])
                send_blob(
                    link,
                    folder,
                    key,
                    folder.get(key),
                    lambda _: link.allow(self._timeout_s),
                )
            case ListKeys(owner_rank=owner_rank):
                link.send(Keys(keys=tuple(self._folder(owner_rank).keys())))
            case Drop(owner_rank=owner_rank, keys=keys):
                folder = self._held_folder(owner_rank, keys)
                for key in keys:
                    folder.discard(key)
                link.send(Done())
            case Clear(owner_rank=owner_rank):
                self._held_folder(owner_rank).clear()
                link.send(Done())
            case _:
                raise ConnectionError(f"got {type(request).__name__}, wanted a request")

    def _put(self, link: Connection, owner_rank: int, key: str, found: Found) -> None:
        folder, pace = (
            self._held_folder(owner_rank, [key]),
            lambda _: link.allow(self._timeout_s),
        )
        if not is_update(key):
            receive_blob(link, found, folder, key, pace)
            link.send(Done())
            return
        updates: list[_TimedUpdate] = []

        def begin(*blob: *BlobParts) -> _TimedUpdate:
            updates.append(
                _TimedUpdate(
                    ArrivingUpdate(*blob, self._rules.open_gradients), self._updaters
                )
            )
            return updates[0]

        receive_blob(link, found, folder, key, pace, begin)
        link.send(updates[0].done())

    def _folder(self, owner_rank: int, keys: Sequence[str] = ()) -> BlobFolder:
        """Return the folder of a rank's blobs, for reading."""
        if owner_rank != self._global_rank:
            return self._held_folder(owner_rank, keys)
        _require_keys(keys)
        return self._own

    def _held_folder(self, owner_rank: int, keys: Sequence[str] = ()) -> ReplicaFolder:
        """Return the folder of the copies for a rank.

        The first request of a daemon's lifetime adopts existing files.
        """
        _require_keys(keys)
        if owner_rank == self._global_rank and not self._rules.keeps_own:
            raise RefusedError(
                f"rank {owner_rank} keeps no copies for itself", garbled=False
            )
        with self._lock:
            # one folder for all connections of an owner, which share the owner's limit
            # and pool of free memory
            if owner_rank not in self._held:
                path = held_path(self._rank_folder, owner_rank)
                self._held[owner_rank] = ReplicaFolder(
                    path, most_bytes=self._rules.most_bytes_per_owner
                )
            return self._held[owner_rank]


class _TimedUpdate:
    """An arriving update, with the time of the work.

    The connection's thread receives, and another thread takes the steps.
    """

    def __init__(self, update: ArrivingUpdate, updaters: Executor) -> None:
        self._update = update
        self._last_byte_s = 0.0
        update.start(updaters)

    def arrived(self, num_bytes: int) -> None:
        self._last_byte_s = time.monotonic()
        self._update.arrived(num_bytes)

    def keep(self) -> None:
        self._update.keep()

    def abandon(self) -> None:
        self._update.abandon()

    def done(self) -> Done:
        """Return the answer to an update that was kept."""
        after_s = time.monotonic() - self._last_byte_s
        return Done(
            busy_us=round(1e6 * self._update.busy_s), after_us=round(1e6 * after_s)
        )


def _require_keys(keys: Sequence[str]) -> None:
    for key in keys:
        if not is_key(key):
            raise RefusedError(
                f"got key {key!r}, wanted letters, digits, '.', '_' and '-'",
                garbled=False,
            )
