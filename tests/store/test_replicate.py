"""Copies over real sockets: what a peer holds is whole or not there, whoever dies and whatever the network does."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import astuple
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import xxhash

from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.store.blobs import BlobFolder, held_path, own_path
from moe_ckpt.store.copy_server import CopyServer
from moe_ckpt.store.fetch import clear_held, fetch_blobs, list_held
from moe_ckpt.store.link import CHUNK_BYTES, Link, RefusedError, open_link
from moe_ckpt.store.messages import Address, Clear, Done, Drop, Found, Get, ListKeys, Put, Ticket
from moe_ckpt.store.replicate import Replicator
from moe_ckpt.store.transfer import MOST_HEADER_BYTES
from tests.ranks import RankFailedError, run_ranks
from tests.store.proxy import Damage, Proxy
from tests.store.test_blobs import buffers_of, content_of, largest_file, publish

TICKET = Ticket(run_id="run-1", token="secret")
WAIT_S = 30.0
START_S = 90.0  # the first process of a test run imports torch and Megatron
FIVE_CHUNKS = bytes(range(250)) * (5 * CHUNK_BYTES // 250)


def always() -> bool:
    return True


class Ranks:
    """Folders, servers and replicators of ranks, without trainers."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self._root = root
        self._stack = stack

    def folder(self, rank: int) -> Path:
        return self._root / f"rank{rank:04d}"

    def own(self, rank: int) -> BlobFolder:
        return BlobFolder(own_path(self.folder(rank)))

    def held(self, rank: int, owner_rank: int) -> BlobFolder:
        return BlobFolder(held_path(self.folder(rank), owner_rank))

    def serve(self, rank: int, timeout_s: float = WAIT_S) -> CopyServer:
        server = CopyServer(self.folder(rank), rank, TICKET, host="127.0.0.1", timeout_s=timeout_s)
        self._stack.callback(server.close)
        return server

    def replicate(
        self,
        rank: int,
        *peers: Address,
        may_send: Callable[[], bool] = always,
        ticket: Ticket = TICKET,
        deadline_s: float = WAIT_S,
    ) -> Replicator:
        replicator = Replicator(self.own(rank), rank, ticket, may_send=may_send, deadline_s=deadline_s)
        self._stack.callback(replicator.close)
        replicator.use_peers(peers)
        return replicator

    def proxy(self, target: Address, *damages: Damage) -> Proxy:
        proxy = Proxy(target, *damages)
        self._stack.callback(proxy.close)
        return proxy

    def link(self, address: Address) -> Link:
        link = open_link(address, TICKET, WAIT_S)
        self._stack.callback(link.close)
        link.allow(WAIT_S)
        return link


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with ExitStack() as stack:
        yield Ranks(tmp_path, stack)


def closed_address() -> Address:
    """Return an address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return Address(host="127.0.0.1", port=listening.getsockname()[1])


class Counted:
    """Calls something at the n-th chunk, and lets all go on."""

    def __init__(self, number: int, act: Callable[[], object]) -> None:
        self.calls = 0
        self._number = number
        self._act = act

    def __call__(self) -> bool:
        self.calls += 1
        if self.calls == self._number:
            self._act()
        return True


def assert_is_free(held: BlobFolder, nbytes: int) -> None:
    """Nothing is held, and the memory that was being filled is that of the next."""
    assert held.keys() == []
    assert [path.stat().st_size for path in (held.path / "buffers").iterdir()] == [nbytes]


@pytest.mark.parametrize("header", [b"", b"header"])
@pytest.mark.parametrize(
    "content",
    [None, b"", b"a", *(bytes([7]) * (CHUNK_BYTES + more) for more in (-1, 0, 1)), FIVE_CHUNKS],
    ids=lambda content: "none" if content is None else f"{len(content)}",
)
def test_a_copy_is_held_and_can_be_had_back(ranks: Ranks, content: bytes | None, header: bytes) -> None:
    publish(ranks.own(0), "a", content, header)
    peers = [ranks.serve(rank) for rank in (1, 2)]
    ranks.replicate(0, *(peer.address for peer in peers)).copy(["a"]).result(WAIT_S)
    for rank, peer in enumerate(peers, 1):
        assert content_of(ranks.held(rank, 0), "a") == (header, content)
        lost = BlobFolder(ranks.folder(0) / f"again{rank}")
        nbytes = fetch_blobs(peer.address, TICKET, 0, lost, timeout_s=WAIT_S)
        assert nbytes == len(header) + len(content or b"")
        assert content_of(lost, "a") == (header, content)
        assert lost.adopt()["a"].payload is lost.get("a").payload


def test_a_header_of_many_chunks(ranks: Ranks) -> None:
    publish(ranks.own(0), "a", b"x", FIVE_CHUNKS)
    ranks.replicate(0, ranks.serve(1).address).copy(["a"]).result(WAIT_S)
    assert content_of(ranks.held(1, 0), "a") == (FIVE_CHUNKS, b"x")


def test_only_the_payload_of_a_larger_buffer_is_sent(ranks: Ranks) -> None:
    own = ranks.own(0)
    payload = own.allocate(1000)
    payload.fill_(3)
    own.publish("a", b"h", payload, 10)
    ranks.replicate(0, ranks.serve(1).address).copy(["a"]).result(WAIT_S)
    held = ranks.held(1, 0).get("a")
    assert held.payload is not None
    assert (held.payload_bytes, held.payload.tolist()) == (10, [3] * 10)


def test_a_replaced_copy_takes_the_memory_of_the_one_before_that(ranks: Ranks) -> None:
    own, replicator, held = ranks.own(0), ranks.replicate(0, ranks.serve(1).address), ranks.held(1, 0)
    for content in (b"1st", b"2nd", b"3rd", b"4th"):
        publish(own, "a", content)
        replicator.copy(["a"]).result(WAIT_S)
        assert content_of(held, "a") == (b"header", content)
    assert len(buffers_of(held)) == 2


def test_copies_of_two_owners_are_apart(ranks: Ranks) -> None:
    server = ranks.serve(2)
    for rank in (0, 1):
        publish(ranks.own(rank), "a", bytes([rank]))
        publish(ranks.own(rank), f"b{rank}", b"b")
        ranks.replicate(rank, server.address).copy(["a", f"b{rank}"]).result(WAIT_S)
    assert [content_of(ranks.held(2, rank), "a")[1] for rank in (0, 1)] == [b"\x00", b"\x01"]
    assert [list_held(server.address, TICKET, rank, timeout_s=WAIT_S) for rank in (0, 1, 2, 3)] == [
        ["a", "b0"],
        ["a", "b1"],
        [],
        [],
    ]
    clear_held(server.address, TICKET, 0, timeout_s=WAIT_S)
    assert [ranks.held(2, rank).keys() for rank in (0, 1)] == [[], ["a", "b1"]]
    assert buffers_of(ranks.held(2, 0)) == []


def test_forgetting_follows_the_copies_before_it(ranks: Ranks) -> None:
    for key in ("a", "b"):
        publish(ranks.own(0), key)
    proxy = ranks.proxy(ranks.serve(1).address)
    replicator = ranks.replicate(0, proxy.address)
    proxy.may_pass.clear()
    copied = replicator.copy(["a"])
    replicator.forget(["a"])
    last = replicator.copy(["b"])
    assert not copied.done()
    proxy.may_pass.set()
    copied.result(WAIT_S)
    last.result(WAIT_S)
    assert ranks.held(1, 0).keys() == ["b"]
    assert len(buffers_of(ranks.held(1, 0))) == 1


def test_some_blobs_are_fetched_and_own_ones_too(ranks: Ranks) -> None:
    server, folder = ranks.serve(1), BlobFolder(ranks.folder(0) / "again")
    for key in ("a", "b", "c"):
        publish(ranks.own(1), key, key.encode())
    assert list_held(server.address, TICKET, 1, timeout_s=WAIT_S) == ["a", "b", "c"]
    assert fetch_blobs(server.address, TICKET, 1, folder, ["c", "a"], timeout_s=WAIT_S) == 2 * (1 + len(b"header"))
    assert folder.keys() == ["a", "c"]
    assert content_of(folder, "c") == (b"header", b"c")


def test_what_a_peer_does_not_have_or_cannot_read_is_an_error(ranks: Ranks) -> None:
    server, folder = ranks.serve(1), BlobFolder(ranks.folder(0) / "again")
    with pytest.raises(CheckpointLoadError, match=r"fetching a of rank 0, refused by 127\.0\.0\.1:\d+: .*No such file"):
        fetch_blobs(server.address, TICKET, 0, folder, ["a"], timeout_s=WAIT_S)
    publish(ranks.own(0), "a")
    publish(ranks.own(0), "b", b"b")
    ranks.replicate(0, server.address).copy(["a", "b"]).result(WAIT_S)
    entry = ranks.held(1, 0).path / "index" / "a.blob"
    entry.write_bytes(entry.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointLoadError, match="got XXH3"):
        fetch_blobs(server.address, TICKET, 0, folder, ["a", "b"], timeout_s=WAIT_S)
    assert folder.keys() == []
    assert fetch_blobs(server.address, TICKET, 0, folder, timeout_s=WAIT_S) == len(b"header") + 1
    assert folder.keys() == ["b"]


@pytest.mark.parametrize(
    ("ticket", "reason"),
    [
        (Ticket(run_id="run-1", token="guess"), "got another token than that of run run-1"),
        (Ticket(run_id="run-2", token="secret"), "got run run-2, wanted run-1"),
    ],
)
def test_another_run_or_token_is_refused_at_once(ranks: Ranks, ticket: Ticket, reason: str) -> None:
    publish(ranks.own(0), "a")
    proxy = ranks.proxy(ranks.serve(1).address)
    with pytest.raises(CheckpointSaveError, match=rf"copy of a, refused by 127\.0\.0\.1:\d+: {reason}"):
        ranks.replicate(0, proxy.address, ticket=ticket).copy(["a"]).result(WAIT_S)
    with pytest.raises(CheckpointLoadError, match=reason):
        list_held(proxy.address, ticket, 0, timeout_s=WAIT_S)
    assert ranks.held(1, 0).keys() == []
    assert proxy.num_connections == 2


def frame(body: bytes) -> bytes:
    return struct.pack(">IIQ", len(body), 2**32 - 1 - len(body), xxhash.xxh3_64_intdigest(body)) + body


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x00" * 5,
        b"\xff" * 100,
        frame(b"nonsense"),
        frame(json.dumps({"Get": {"owner_rank": 0, "key": "a"}}).encode()),
        frame(json.dumps({"Ticket": {"run_id": "run-1", "token": "secret"}}).encode()) + frame(b'{"Done":{}}'),
        frame(json.dumps({"Ticket": {"run_id": "run-1", "token": "secret"}}).encode()) + b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["nothing", "half a head", "too long", "no message", "no ticket", "no request", "no frame"],
)
def test_whoever_says_something_else_is_sent_away_and_others_are_served(ranks: Ranks, said: bytes) -> None:
    publish(ranks.own(0), "a")
    server = ranks.serve(1)
    with socket.create_connection(astuple(server.address), WAIT_S) as stranger, suppress(OSError):
        stranger.sendall(said)  # it may be sent away before it has said all
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):
            pass
    ranks.replicate(0, server.address).copy(["a"]).result(WAIT_S)


@pytest.mark.parametrize("key", ["../../own/index/a", "a/b", "", "a\x00"])
def test_keys_that_are_none_are_refused(ranks: Ranks, key: str) -> None:
    link = ranks.link(ranks.serve(1).address)
    for request in (Put(owner_rank=0, key=key), Get(owner_rank=0, key=key), Drop(owner_rank=0, keys=("a", key))):
        link.send(request)
        if isinstance(request, Put):
            link.send(Found(header_bytes=0, payload_bytes=None))
        with pytest.raises(RefusedError, match=r"got key .*, wanted letters"):
            link.expect(Done)


def test_nobody_writes_a_ranks_own_blobs(ranks: Ranks) -> None:
    publish(ranks.own(1), "a")
    link = ranks.link(ranks.serve(1).address)
    for request in (Put(owner_rank=1, key="a"), Drop(owner_rank=1, keys=("a",)), Clear(owner_rank=1)):
        link.send(request)
        if isinstance(request, Put):
            link.send(Found(header_bytes=0, payload_bytes=None))
        with pytest.raises(RefusedError, match="rank 1 keeps no copies for itself"):
            link.expect(Done)
    assert ranks.own(1).keys() == ["a"]


def test_a_header_that_is_too_large_is_refused_before_it_comes(ranks: Ranks) -> None:
    link = ranks.link(ranks.serve(1).address)
    link.send(Put(owner_rank=0, key="a"))
    link.send(Found(header_bytes=MOST_HEADER_BYTES + 1, payload_bytes=0))
    with pytest.raises(RefusedError, match=f"got a header of {MOST_HEADER_BYTES + 1} bytes"):
        link.expect(Done)


def sizes_on_the_wire(content: bytes) -> dict[str, int]:
    """Return where on a client's stream the parts of its first copy begin, of a blob "a" with header "header"."""
    lengths = {
        "ticket": len(
            frame(json.dumps({"Ticket": {"run_id": "run-1", "token": "secret"}}, separators=(",", ":")).encode())
        ),
        "put": len(frame(b'{"Put":{"owner_rank":0,"key":"a"}}')),
        "found": len(
            frame(
                json.dumps(
                    {"Found": {"header_bytes": 6, "payload_bytes": len(content)}}, separators=(",", ":")
                ).encode()
            )
        ),
        "header": 6,
        "payload": len(content),
    }
    starts, start = {}, 0
    for part, length in lengths.items():
        starts[part] = start
        start += length
    return {**starts, "sent": start}


@pytest.mark.parametrize("part", ["ticket", "put", "found", "header", "payload", "sent"])
@pytest.mark.parametrize("cut", [False, True], ids=["flipped", "cut"])
def test_a_byte_that_is_flipped_or_cut_on_the_way_is_sent_again(ranks: Ranks, part: str, cut: bool) -> None:
    content = FIVE_CHUNKS[: CHUNK_BYTES + 10]
    publish(ranks.own(0), "a", content)
    inside = sizes_on_the_wire(content)[part] + {"header": 3, "payload": CHUNK_BYTES - 1}.get(part, 15)
    proxy = ranks.proxy(ranks.serve(1).address, *(Damage(offset=inside, cut=cut) for _ in range(3)))
    ranks.replicate(0, proxy.address).copy(["a"]).result(WAIT_S)
    assert content_of(ranks.held(1, 0), "a") == (b"header", content)
    assert len(buffers_of(ranks.held(1, 0))) == 1
    assert proxy.num_connections == 4


@pytest.mark.parametrize("cut", [False, True], ids=["flipped", "cut"])
def test_bytes_that_are_damaged_every_time_fail_the_copy(ranks: Ranks, cut: bool) -> None:
    publish(ranks.own(0), "a", FIVE_CHUNKS)
    server = ranks.serve(1)
    proxy = ranks.proxy(server.address, *(Damage(offset=3 * CHUNK_BYTES, cut=cut) for _ in range(5)))
    replicator = ranks.replicate(0, proxy.address)
    reason = "reset|closed|Broken pipe" if cut else "blob a was garbled on its way: got .*, wanted .*"
    with pytest.raises(CheckpointSaveError, match=rf"copy of a, 127\.0\.0\.1:\d+: .*({reason}).*, after 5 attempts"):
        replicator.copy(["a"]).result(WAIT_S)
    assert list_held(server.address, TICKET, 0, timeout_s=WAIT_S) == []
    replicator.copy(["a"]).result(WAIT_S)
    server.close()
    assert len(buffers_of(ranks.held(1, 0))) == 1


@pytest.mark.parametrize("offset", range(0, 320, 7))
def test_wherever_a_byte_is_flipped_it_is_found_at_once(ranks: Ranks, offset: int) -> None:
    content = bytes(range(50))
    publish(ranks.own(0), "a", content)
    proxy = ranks.proxy(ranks.serve(1).address, Damage(offset=offset))
    ranks.replicate(0, proxy.address).copy(["a"]).result(WAIT_S / 2)
    assert content_of(ranks.held(1, 0), "a") == (b"header", content)
    assert proxy.num_connections == 2


@pytest.mark.parametrize("offset", [0, 3, 8, 20, 60, 150, CHUNK_BYTES, 2 * CHUNK_BYTES, 5 * CHUNK_BYTES])
@pytest.mark.parametrize("cut", [False, True], ids=["flipped", "cut"])
def test_a_byte_that_is_damaged_on_the_way_back_is_fetched_again(ranks: Ranks, offset: int, cut: bool) -> None:
    publish(ranks.own(1), "a", FIVE_CHUNKS)
    damage = Damage(offset=offset, from_client=False, cut=cut)
    proxy = ranks.proxy(ranks.serve(1).address, damage, damage)
    folder = BlobFolder(ranks.folder(0) / "again")
    fetch_blobs(proxy.address, TICKET, 1, folder, timeout_s=WAIT_S)
    assert content_of(folder, "a") == (b"header", FIVE_CHUNKS)
    assert len(buffers_of(folder)) == 1
    assert proxy.num_connections == 3


def test_a_fetch_that_is_garbled_every_time_fails_and_leaves_nothing(ranks: Ranks) -> None:
    publish(ranks.own(1), "a", FIVE_CHUNKS)
    damage = Damage(offset=CHUNK_BYTES, from_client=False)
    proxy = ranks.proxy(ranks.serve(1).address, *[damage] * 5)
    folder = BlobFolder(ranks.folder(0) / "again")
    with pytest.raises(CheckpointLoadError, match=r"fetching a of rank 1, .*garbled on its way.*, after 5 attempts"):
        fetch_blobs(proxy.address, TICKET, 1, folder, ["a"], timeout_s=WAIT_S)
    assert (folder.keys(), buffers_of(folder)) == ([], [])


def test_a_slow_peer_holds_up_nobody_but_the_confirmation(ranks: Ranks) -> None:
    publish(ranks.own(0), "a", FIVE_CHUNKS)
    publish(ranks.own(0), "b")
    fast, slow = ranks.serve(1), ranks.proxy(ranks.serve(2).address)
    slow.may_pass.clear()
    replicator = ranks.replicate(0, fast.address, slow.address)
    copied = replicator.copy(["a"]), replicator.copy(["b"])
    while list_held(fast.address, TICKET, 0, timeout_s=WAIT_S) != ["a", "b"]:
        pass
    assert not any(future.done() for future in copied)
    assert ranks.held(2, 0).keys() == []
    slow.may_pass.set()
    for future in copied:
        future.result(WAIT_S)
    assert ranks.held(2, 0).keys() == ["a", "b"]


def test_a_dead_peer_fails_the_copy_and_says_which_and_the_others_get_it(ranks: Ranks) -> None:
    for key in ("a", "b"):
        publish(ranks.own(0), key)
    dead, server = closed_address(), ranks.serve(1)
    replicator = ranks.replicate(0, dead, server.address)
    for key in ("a", "b"):
        with pytest.raises(CheckpointSaveError, match=f"copy of {key}, {dead}: .*refused, after 5 attempts"):
            replicator.copy([key]).result(WAIT_S)
    assert list_held(server.address, TICKET, 0, timeout_s=WAIT_S) == ["a", "b"]
    with pytest.raises(CheckpointLoadError, match="refused, after 5 attempts"):
        list_held(dead, TICKET, 0, timeout_s=WAIT_S)


def test_a_peer_that_never_answers_fails_the_copy_at_the_deadline(ranks: Ranks) -> None:
    publish(ranks.own(0), "a")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address(host="127.0.0.1", port=silent.getsockname()[1])
        replicator = ranks.replicate(0, address, deadline_s=0.1)
        copied = [replicator.copy(["a"]) for _ in range(3)]
        for future in copied:
            with pytest.raises(CheckpointSaveError, match=f"copy of a, {address}: (timed out|no time is left)"):
                future.result(WAIT_S)
        with pytest.raises(CheckpointLoadError, match="timed out"):
            list_held(address, TICKET, 0, timeout_s=0.1)


def test_a_peer_that_stops_reading_fails_the_copy_at_the_deadline(ranks: Ranks) -> None:
    publish(ranks.own(0), "a", FIVE_CHUNKS * 4)
    proxy = ranks.proxy(ranks.serve(1).address)
    stop = Counted(3, proxy.may_pass.clear)
    with pytest.raises(CheckpointSaveError, match="timed out"):
        ranks.replicate(0, proxy.address, may_send=stop, deadline_s=0.5).copy(["a"]).result(WAIT_S)


def test_a_server_gives_up_on_whoever_falls_silent(ranks: Ranks) -> None:
    server = ranks.serve(1, timeout_s=0.05)
    link = ranks.link(server.address)
    assert link.is_readable(WAIT_S)
    with pytest.raises(ConnectionResetError):
        link.receive()
    publish(ranks.own(0), "a")
    link = ranks.link(server.address)
    link.send(Put(owner_rank=0, key="a"))
    link.send(Found(header_bytes=10, payload_bytes=10))
    link.expect(Done)
    assert link.is_readable(WAIT_S)
    with pytest.raises(ConnectionResetError):
        link.receive()
    server.close()
    assert_is_free(ranks.held(1, 0), 10)


def test_a_peer_that_was_away_is_found_again(ranks: Ranks) -> None:
    for key in ("a", "b", "c"):
        publish(ranks.own(0), key)
    proxy = ranks.proxy(ranks.serve(1).address)
    replicator = ranks.replicate(0, proxy.address)
    replicator.copy(["a"]).result(WAIT_S)
    proxy.cut_all()
    replicator.copy(["b"]).result(WAIT_S)
    proxy.target = closed_address()
    proxy.cut_all()
    with pytest.raises(CheckpointSaveError, match="after 5 attempts"):
        replicator.copy(["c"]).result(WAIT_S)
    proxy.target = ranks.serve(1).address
    replicator.copy(["c"]).result(WAIT_S)
    assert ranks.held(1, 0).keys() == ["a", "b", "c"]


def test_other_peers_take_over_and_what_was_asked_of_the_old_fails(ranks: Ranks) -> None:
    publish(ranks.own(0), "a")
    kept, old, new = ranks.serve(1), ranks.proxy(ranks.serve(2).address), ranks.serve(3)
    replicator = ranks.replicate(0, kept.address, old.address)
    replicator.copy(["a"]).result(WAIT_S)
    old.may_pass.clear()
    waiting = [replicator.copy(["a"]) for _ in range(3)]
    replicator.use_peers([kept.address, new.address])
    for future in waiting:
        with pytest.raises(CheckpointSaveError, match=f"copy of a, {old.address}: .*closed"):
            future.result(WAIT_S)
    replicator.copy(["a"]).result(WAIT_S)
    assert ranks.held(3, 0).keys() == ["a"]


def test_without_having_been_told_of_peers_nothing_is_confirmed(ranks: Ranks) -> None:
    own = ranks.own(0)
    publish(own, "a")
    replicator = Replicator(own, 0, TICKET, may_send=always, deadline_s=WAIT_S)
    with pytest.raises(CheckpointSaveError, match="got no peers yet"):
        replicator.copy(["a"]).result(WAIT_S)
    replicator.forget(["a"])
    replicator.use_peers([])
    replicator.copy(["a"]).result(WAIT_S)
    replicator.close()
    with pytest.raises(CheckpointSaveError, match="got no peers"):
        replicator.copy(["a"]).result(WAIT_S)


def test_copying_asks_before_every_chunk_and_waits_but_not_for_ever(ranks: Ranks) -> None:
    publish(ranks.own(0), "a", FIVE_CHUNKS)
    asked = []
    replicator = ranks.replicate(0, ranks.serve(1).address, may_send=lambda: bool(asked.append(None)))
    replicator.copy(["a"]).result(WAIT_S)
    assert len(asked) > 2 * 6, "went on at once"
    counted = Counted(0, always)
    ranks.replicate(0, ranks.serve(2).address, may_send=counted).copy(["a"]).result(WAIT_S)
    assert counted.calls == 1 + 5  # the header is a chunk


def republish(own: BlobFolder) -> None:
    own.withdraw("a")
    publish(own, "a", FIVE_CHUNKS[::-1])


@pytest.mark.parametrize("change", [lambda own: own.withdraw("a"), republish], ids=["withdrawn", "replaced"])
def test_a_blob_that_is_withdrawn_while_it_is_copied_is_not_held(
    ranks: Ranks, change: Callable[[BlobFolder], object]
) -> None:
    own = ranks.own(0)
    publish(own, "a", FIVE_CHUNKS)
    server = ranks.serve(1)
    replicator = ranks.replicate(0, server.address, may_send=Counted(4, lambda: change(own)))
    with pytest.raises(CheckpointSaveError, match="blob a was withdrawn while it was sent"):
        replicator.copy(["a"]).result(WAIT_S)
    held = ranks.held(1, 0)
    assert (held.keys(), len(buffers_of(held))) == ([], 1)
    publish(own, "a", FIVE_CHUNKS)
    replicator.copy(["a"]).result(WAIT_S)
    assert (held.keys(), len(buffers_of(held))) == (["a"], 1)


def test_memory_that_changes_while_it_is_copied_is_never_held_torn(ranks: Ranks) -> None:
    own = ranks.own(0)
    payload = publish(own, "a", FIVE_CHUNKS)

    def reuse() -> None:
        own.withdraw("a")
        payload.fill_(0)
        own.publish("a", b"other", payload, payload.numel())

    replicator = ranks.replicate(0, ranks.serve(1).address, may_send=Counted(4, reuse))
    with pytest.raises(CheckpointSaveError, match="withdrawn while it was sent"):
        replicator.copy(["a"]).result(WAIT_S)
    assert ranks.held(1, 0).keys() == []
    replicator.copy(["a"]).result(WAIT_S)
    assert content_of(ranks.held(1, 0), "a") == (b"other", bytes(len(FIVE_CHUNKS)))


def test_a_blob_that_is_not_there_fails_at_once(ranks: Ranks) -> None:
    replicator = ranks.replicate(0, ranks.serve(1).address)
    with pytest.raises(CheckpointSaveError, match=r"copy of a, .*index/a\.blob: No such file"):
        replicator.copy(["a"]).result(WAIT_S)
    publish(ranks.own(0), "a")
    replicator.copy(["a"]).result(WAIT_S)
    shutil.rmtree(ranks.folder(0))
    with pytest.raises(CheckpointSaveError, match=r"copy of a, .*index/a\.blob: No such file"):
        replicator.copy(["a"]).result(WAIT_S)


def test_a_folder_deleted_under_the_server_is_made_anew(ranks: Ranks) -> None:
    own, server = ranks.own(0), ranks.serve(1)
    for key in ("a", "b"):
        publish(own, key, FIVE_CHUNKS)
    replicator = ranks.replicate(0, server.address)
    replicator.copy(["a"]).result(WAIT_S)
    shutil.rmtree(ranks.folder(1))
    assert list_held(server.address, TICKET, 0, timeout_s=WAIT_S) == []
    with pytest.raises(CheckpointLoadError, match="No such file"):
        fetch_blobs(server.address, TICKET, 0, BlobFolder(ranks.folder(0) / "again"), ["a"], timeout_s=WAIT_S)
    replicator.forget(["a"])
    replicator.copy(["b"]).result(WAIT_S)
    assert content_of(ranks.held(1, 0), "b") == (b"header", FIVE_CHUNKS)


def test_a_folder_deleted_in_the_middle_of_a_copy_fails_it(ranks: Ranks) -> None:
    publish(ranks.own(0), "a", FIVE_CHUNKS)
    server = ranks.serve(1)
    replicator = ranks.replicate(0, server.address, may_send=Counted(4, lambda: shutil.rmtree(ranks.folder(1))))
    with pytest.raises(CheckpointSaveError, match=r"copy of a, refused by .*: blob a in .*No such file"):
        replicator.copy(["a"]).result(WAIT_S)
    assert list_held(server.address, TICKET, 0, timeout_s=WAIT_S) == []
    replicator.copy(["a"]).result(WAIT_S)
    assert content_of(ranks.held(1, 0), "a") == (b"header", FIVE_CHUNKS)
    assert len(buffers_of(ranks.held(1, 0))) == 1


def test_a_peer_without_room_refuses_and_stays_usable(ranks: Ranks) -> None:
    own, server = ranks.own(0), ranks.serve(1)
    publish(own, "large", FIVE_CHUNKS)
    publish(own, "small")
    replicator = ranks.replicate(0, server.address)
    with (
        largest_file(CHUNK_BYTES),
        pytest.raises(CheckpointSaveError, match=r"copy of large, refused by .*wanted room for \d+ bytes"),
    ):
        replicator.copy(["large"]).result(WAIT_S)
    assert buffers_of(ranks.held(1, 0)) == []
    replicator.copy(["small", "large"]).result(WAIT_S)
    assert ranks.held(1, 0).keys() == ["large", "small"]


def test_a_trainer_without_room_fails_its_fetch(ranks: Ranks) -> None:
    server, folder = ranks.serve(1), BlobFolder(ranks.folder(0) / "again")
    publish(ranks.own(1), "a", FIVE_CHUNKS)
    with (
        largest_file(CHUNK_BYTES),
        pytest.raises(CheckpointLoadError, match=r"fetching a of rank 1, .*wanted room for \d+ bytes"),
    ):
        fetch_blobs(server.address, TICKET, 1, folder, timeout_s=WAIT_S)
    assert (folder.keys(), buffers_of(folder)) == ([], [])


def die_while_copying(root: str, host: str, port: int) -> None:
    own = BlobFolder(own_path(Path(root)))
    publish(own, "a", FIVE_CHUNKS)
    die = Counted(4, lambda: os.kill(os.getpid(), signal.SIGKILL))
    replicator = Replicator(own, 0, TICKET, may_send=die, deadline_s=WAIT_S)
    replicator.use_peers([Address(host=host, port=port)])
    replicator.copy(["a"]).result(WAIT_S)


def test_a_sender_killed_in_the_middle_leaves_nothing(ranks: Ranks) -> None:
    server = ranks.serve(1)
    with pytest.raises(RankFailedError, match="rank 0 died"):
        run_ranks(1, die_while_copying, str(ranks.folder(0)), server.address.host, server.address.port)
    server.close()
    assert_is_free(ranks.held(1, 0), len(FIVE_CHUNKS))
    ranks.replicate(0, ranks.serve(1).address).copy(["a"]).result(WAIT_S)
    assert content_of(ranks.held(1, 0), "a") == (b"header", FIVE_CHUNKS)
    assert len(buffers_of(ranks.held(1, 0))) == 1


def serve_until_killed(rank_folder: str, started: Connection) -> None:
    server = CopyServer(Path(rank_folder), 1, TICKET, host="127.0.0.1", timeout_s=WAIT_S)
    started.send(server.address.port)
    threading.Event().wait()


def test_a_server_killed_in_the_middle_keeps_what_was_confirmed_and_its_successor_sweeps(ranks: Ranks) -> None:
    publish(ranks.own(0), "a")
    publish(ranks.own(0), "b", FIVE_CHUNKS)
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=serve_until_killed, args=(str(ranks.folder(1)), sender))
    process.start()
    sender.close()
    assert receiver.poll(START_S)
    address = Address(host="127.0.0.1", port=receiver.recv())
    replicator = ranks.replicate(0, address, may_send=Counted(2 + 4, process.kill))
    replicator.copy(["a"]).result(WAIT_S)
    with pytest.raises(CheckpointSaveError, match=f"copy of b, {address}: .*, after 5 attempts"):
        replicator.copy(["b"]).result(WAIT_S)
    process.join()
    process.close()
    receiver.close()
    assert (ranks.held(1, 0).keys(), len(buffers_of(ranks.held(1, 0)))) == (["a"], 2)
    successor = ranks.serve(1)
    assert list_held(successor.address, TICKET, 0, timeout_s=WAIT_S) == ["a"]
    assert len(buffers_of(ranks.held(1, 0))) == 1
    assert content_of(ranks.held(1, 0), "a") == (b"header", b"content")
    replicator.use_peers([successor.address])
    replicator.copy(["b"]).result(WAIT_S)


def test_many_ranks_copy_to_one_at_the_same_time(ranks: Ranks) -> None:
    server = ranks.serve(9)
    for rank in range(4):
        publish(ranks.own(rank), "a", FIVE_CHUNKS + bytes([rank]))
    replicators = [ranks.replicate(rank, server.address) for rank in range(4)]
    for copied in [replicator.copy(["a"]) for replicator in replicators for _ in range(3)]:
        copied.result(WAIT_S)
    for rank in range(4):
        assert content_of(ranks.held(9, rank), "a") == (b"header", FIVE_CHUNKS + bytes([rank]))
        assert len(buffers_of(ranks.held(9, rank))) == 2


def test_a_link_is_of_no_use_beyond_its_time(ranks: Ranks) -> None:
    link = ranks.link(ranks.serve(1).address)
    link.allow(0.0)
    with pytest.raises(TimeoutError, match="no time is left"):
        link.send(ListKeys(owner_rank=0))
    link.allow(0.05)
    with pytest.raises(TimeoutError):
        link.receive()


def test_payloads_are_bytes_whatever_the_tensor(ranks: Ranks) -> None:
    own = ranks.own(0)
    payload = own.allocate(64)
    payload.view(torch.float32).copy_(torch.arange(16))
    own.publish("a", b"", payload, 64)
    ranks.replicate(0, ranks.serve(1).address).copy(["a"]).result(WAIT_S)
    held = ranks.held(1, 0).get("a").payload
    assert held is not None
    assert held.view(torch.float32).tolist() == list(range(16))
