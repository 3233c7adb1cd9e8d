"""Ranks that copy blobs to each other over real sockets: their folders, servers and
replicators, without workers.
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
    """Return an address where no server listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return Address(host="127.0.0.1", port=listening.getsockname()[1])


def frame(body: bytes, *, length: int | None = None) -> bytes:
    """Return the frame of a body; its head fits, but for a `length` that is given."""
    size = len(body) if length is None else length
    return (
        struct.pack(">IIQ", size, size ^ 0xFFFFFFFF, xxhash.xxh3_64_intdigest(body))
        + body
    )


class Counted:
    """Calls something at the n-th chunk, and lets all go on, or none if the `answer` is
    no.
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
    """Folders, servers and replicators of ranks; attempts follow each other without a
    pause.
    """

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self._root = root
        self._stack = stack

    def folder(self, rank: int) -> Path:
        return self._root / f"rank{rank:04d}"

    def own(self, rank: int) -> BlobFolder:
        return BlobFolder(own_path(self.folder(rank)))

    def held(self, rank: int, owner_rank: int) -> BlobFolder:
        return BlobFolder(held_path(self.folder(rank), owner_rank))

    def again(self, number: int = 1) -> BlobFolder:
        return BlobFolder(self._root / f"again{number}")

    def serve(
        self,
        rank: int,
        timeout_s: float = WAIT_S,
        *,
        rules: HoldingRules | None = None,
        ticket: Ticket = TICKET,
    ) -> CopyServer:
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
        proxy = Proxy(target, *damages)
        self._stack.callback(proxy.close)
        return proxy

    def link(self, address: Address) -> Connection:
        link = open_connection(address, TICKET, WAIT_S)
        self._stack.callback(link.close)
        link.allow(WAIT_S)
        return link


@contextmanager
def ranks_in(root: Path) -> Iterator[Ranks]:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            retrying_client, "_DELAYS_S", [0.0] * len(retrying_client._DELAYS_S)
        )
        yield Ranks(root, stack)


def copy(replicator: Replicator, *keys: str) -> None:
    replicator.copy(keys).result(WAIT_S)


def fetch(
    address: Address,
    owner_rank: int,
    into: BlobFolder,
    keys: Sequence[str] | None = None,
) -> int:
    return fetch_blobs(address, TICKET, owner_rank, into, keys, timeout_s=WAIT_S)


def listed(address: Address, owner_rank: int = 0) -> list[str]:
    return list_held(address, TICKET, owner_rank, timeout_s=WAIT_S)
