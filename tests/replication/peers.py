"""Ranks without workers that copy blobs to each other over real sockets.

The module creates the folders, servers and replicators of ranks.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import xxhash

from moe_ckpt.replication import retrying_client
from moe_ckpt.replication.admission import open_connection
from moe_ckpt.replication.connection import Connection
from moe_ckpt.replication.copy_server import CopyServer, HoldingRules
from moe_ckpt.replication.fetch import fetch_blobs, list_held
from moe_ckpt.replication.messages import Address, Ticket
from moe_ckpt.replication.sender import Replicator
from moe_ckpt.snapshot.blobs import BlobFolder, held_path, own_path
from moe_ckpt.snapshot.token_bucket import Throttle
from tests.replication.proxy import Damage, Proxy
from tests.waits import WAIT_S

TICKET = Ticket(run_id="run-1", token="secret")


def always() -> bool:
    return True


def closed_address() -> Address:
    """Return an address at which no server listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return Address(host="127.0.0.1", port=listening.getsockname()[1])


def frame(body: bytes, *, length: int | None = None) -> bytes:
    """Return a message's frame: a head that fits the body, and the body.

    Args:
        body: Body of the message.
        length: Length that the head states in place of the body's length.
    """
    size = len(body) if length is None else length
    return (
        struct.pack(">IIQ", size, size ^ 0xFFFFFFFF, xxhash.xxh3_64_intdigest(body))
        + body
    )


class Counted:
    """A `may_send` that counts its calls, and acts at one of them.

    A replicator that gets True calls once for each chunk.

    Args:
        number: Number of the call at which `act` runs, from 1. 0: never.
        act: The action.
        answer: Result of each call: whether chunks may be sent without a wait.
    """

    def __init__(
        self, number: int, act: Callable[[], object], *, answer: bool = True
    ) -> None:
        self.calls = 0
        self._number = number
        self._act = act
        self._answer = answer

    def __call__(self) -> bool:
        self.calls += 1
        if self.calls == self._number:
            self._act()
        return self._answer


class Ranks:
    """Creates the folders, servers and replicators of ranks.

    The stack closes servers, replicators, proxies and connections.
    """

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self._root = root
        self._stack = stack

    def folder(self, rank: int) -> Path:
        """Return a rank's folder."""
        return self._root / f"rank{rank:04d}"

    def own(self, rank: int) -> BlobFolder:
        """Return the folder of a rank's own blobs."""
        return BlobFolder(own_path(self.folder(rank)))

    def held(self, rank: int, owner_rank: int) -> BlobFolder:
        """Return the folder in which a rank holds copies for another rank."""
        return BlobFolder(held_path(self.folder(rank), owner_rank))

    def again(self, number: int = 1) -> BlobFolder:
        """Return an empty folder for blobs that a rank fetches after a loss."""
        return BlobFolder(self._root / f"again{number}")

    def serve(
        self,
        rank: int,
        timeout_s: float = WAIT_S,
        *,
        rules: HoldingRules | None = None,
        ticket: Ticket = TICKET,
    ) -> CopyServer:
        """Start the server of a rank."""
        server = CopyServer(
            self.folder(rank),
            rank,
            ticket,
            host="127.0.0.1",
            timeout_s=timeout_s,
            rules=rules,
        )
        self._stack.callback(server.close)
        return server

    def replicate(
        self,
        rank: int,
        *peers: Address,
        may_send: Callable[[], bool] = always,
        ticket: Ticket = TICKET,
        deadline_s: float = WAIT_S,
        bytes_per_s: float | None = None,
    ) -> Replicator:
        """Start the replicator of a rank, which copies to these peers."""
        throttle = Throttle(bytes_per_s)
        own = self.own(rank)
        replicator = Replicator(
            own,
            rank,
            ticket,
            may_send=may_send,
            deadline_s=deadline_s,
            throttle=throttle,
        )
        self._stack.callback(replicator.close)
        replicator.use_peers(peers)
        return replicator

    def proxy(self, target: Address, *damages: Damage) -> Proxy:
        """Start a proxy to a server."""
        proxy = Proxy(target, *damages)
        self._stack.callback(proxy.close)
        return proxy

    def link(self, address: Address) -> Connection:
        """Return an admitted connection to a server."""
        link = open_connection(address, TICKET, WAIT_S)
        self._stack.callback(link.close)
        link.allow(WAIT_S)
        return link


@contextmanager
def ranks_in(root: Path) -> Iterator[Ranks]:
    """Yield ranks whose clients make all attempts without a pause between them."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            retrying_client, "_DELAYS_S", [0.0] * len(retrying_client._DELAYS_S)
        )
        yield Ranks(root, stack)


def copy(replicator: Replicator, *keys: str) -> None:
    """Copy blobs to all peers, and wait for the confirmation."""
    replicator.copy(keys).result(WAIT_S)


def fetch(
    address: Address,
    owner_rank: int,
    into: BlobFolder,
    keys: Sequence[str] | None = None,
) -> int:
    """Fetch blobs of a rank from a server, and return their size in bytes."""
    return fetch_blobs(address, TICKET, owner_rank, into, keys, timeout_s=WAIT_S)


def listed(address: Address, owner_rank: int = 0) -> list[str]:
    """Return the keys of a rank's blobs that a server has."""
    return list_held(address, TICKET, owner_rank, timeout_s=WAIT_S)
