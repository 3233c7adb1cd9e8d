"""Copies over real sockets are whole or absent, whatever process or network fails."""

from __future__ import annotations

import os
import shutil
import socket
from contextlib import suppress
from dataclasses import astuple

import pytest
import torch
from xxhash import xxh3_64_intdigest

from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.replication.admission import MOST_GREETING_BYTES
from moe_ckpt.replication.connection import CHUNK_BYTES, RefusedError
from moe_ckpt.replication.copy_server import HoldingRules
from moe_ckpt.replication.fetch import clear_held, list_held
from moe_ckpt.replication.messages import (
    Address,
    Clear,
    Done,
    Drop,
    Found,
    Get,
    ListKeys,
    Message,
    Put,
    Ticket,
    message_to_bytes,
)
from moe_ckpt.replication.sender import Replicator
from moe_ckpt.replication.transfer import MOST_HEADER_BYTES
from moe_ckpt.snapshot.blobs import BlobFolder
from tests.replication.blobs import (
    buffers_of,
    content_of,
    filled,
    largest_file,
    payload_of,
    publish,
)
from tests.replication.peers import (
    TICKET,
    Counted,
    Ranks,
    always,
    closed_address,
    copy,
    fetch,
    frame,
    listed,
)
from tests.replication.proxy import Damage
from tests.waits import WAIT_S

FIVE_CHUNKS = bytes(range(250)) * (5 * CHUNK_BYTES // 250)
CUTS = pytest.mark.parametrize("cut", [False, True], ids=["flipped", "cut"])


def assert_is_free(held: BlobFolder, nbytes: int) -> None:
    """Require that no blob is held, and one buffer of `nbytes` is free for reuse."""
    sizes = [path.stat().st_size for path in (held.path / "buffers").iterdir()]
    assert (held.keys(), sizes) == ([], [nbytes])


SIZES = (None, 0, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES)


# the last header is too large for the message `Found`
@pytest.mark.parametrize("header", [b"", b"header", bytes(CHUNK_BYTES + 1)])
@pytest.mark.parametrize("payload_bytes", SIZES)
def test_a_copy_is_held_and_can_be_had_back(
    ranks: Ranks, payload_bytes: int | None, header: bytes
) -> None:
    content = None if payload_bytes is None else FIVE_CHUNKS[:payload_bytes]
    publish(ranks.own(0), "a", content, header)
    peers = [ranks.serve(rank) for rank in (1, 2)]
    copy(ranks.replicate(0, *(peer.address for peer in peers)), "a")
    for rank, peer in enumerate(peers, 1):
        lost = ranks.again(rank)
        assert fetch(peer.address, 0, lost) == len(header) + len(content or b"")
        assert (
            content_of(ranks.held(rank, 0), "a")
            == content_of(lost, "a")
            == (header, content)
        )
        assert lost.adopt()["a"].payload is lost.get("a").payload


def test_only_the_payload_of_a_larger_buffer_is_sent_after_any_header(
    ranks: Ranks,
) -> None:
    own = ranks.own(0)
    own.publish("a", FIVE_CHUNKS, own.allocate(1000).fill_(3), 10)
    copy(ranks.replicate(0, ranks.serve(1).address), "a")
    held = ranks.held(1, 0).get("a")
    assert (held.header, held.payload_bytes, payload_of(held).tolist()) == (
        FIVE_CHUNKS,
        10,
        [3] * 10,
    )


def test_a_payload_that_changed_after_its_hash_is_not_held(ranks: Ranks) -> None:
    """The sender sends the hash that was given at the publication.

    A hash that the sender computes would fit the changed payload.
    """
    own = ranks.own(0)
    own.publish(
        "a", b"header", filled(own, b"changed"), 7, xxh3_64_intdigest(b"content")
    )
    own.publish(
        "b", b"header", filled(own, b"content"), 7, xxh3_64_intdigest(b"content")
    )
    replicator = ranks.replicate(0, ranks.serve(1).address)
    with pytest.raises(CheckpointSaveError, match="blob a was garbled on its way"):
        copy(replicator, "a")
    copy(replicator, "b")
    assert ranks.held(1, 0).keys() == ["b"]


def test_copies_of_two_owners_are_apart(ranks: Ranks) -> None:
    server = ranks.serve(2)
    for rank in (0, 1):
        publish(ranks.own(rank), "a", bytes([rank]))
        publish(ranks.own(rank), f"b{rank}", b"b")
        copy(ranks.replicate(rank, server.address), "a", f"b{rank}")
    assert [content_of(ranks.held(2, rank), "a")[1] for rank in (0, 1)] == [
        b"\x00",
        b"\x01",
    ]
    assert [listed(server.address, rank) for rank in range(4)] == [
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
    replicator.drop(["a"])
    last = replicator.copy(["b"])
    assert not copied.done()
    proxy.may_pass.set()
    for future in (copied, last):
        future.result(WAIT_S)
    held = ranks.held(1, 0)
    assert (held.keys(), len(buffers_of(held))) == (["b"], 1)


@pytest.mark.parametrize("key", ["snapshot-1", "start-2"])
def test_a_copy_of_nothing_ends_after_all_earlier_ones(ranks: Ranks, key: str) -> None:
    """A survey waits for servers with such a copy.

    A state that a server computes after the survey would never be dropped.
    """
    publish(ranks.own(0), key)
    proxy = ranks.proxy(ranks.serve(1).address)
    replicator = ranks.replicate(0, proxy.address)
    proxy.may_pass.clear()
    copied, after_all = replicator.copy([key]), replicator.copy([])
    assert not after_all.done()
    proxy.may_pass.set()
    after_all.result(WAIT_S)
    assert copied.done()


def test_a_step_does_not_wait_behind_a_snapshot(ranks: Ranks) -> None:
    """Every iteration waits for its step.

    Under the cap of this test the second chunk of the snapshot would take hours.
    """
    publish(ranks.own(0), "snapshot-1", FIVE_CHUNKS)
    for key in ("start-2", "step-2"):
        publish(ranks.own(0), key, None)
    replicator = ranks.replicate(0, ranks.serve(1).address, bytes_per_s=100.0)
    snapshot = replicator.copy(["snapshot-1"])
    replicator.copy(["start-2", "step-2"]).result(WAIT_S)
    assert not snapshot.done()
    assert ranks.held(1, 0).keys() == ["start-2", "step-2"]


def test_some_blobs_are_fetched_and_own_ones_too(ranks: Ranks) -> None:
    server, folder = ranks.serve(1), ranks.again()
    for key in ("a", "b", "c"):
        publish(ranks.own(1), key, key.encode())
    assert listed(server.address, 1) == ["a", "b", "c"]
    assert fetch(server.address, 1, folder, ["c", "a"]) == 2 * (1 + len(b"header"))
    assert folder.keys() == ["a", "c"]
    assert content_of(folder, "c") == (b"header", b"c")


def test_a_missing_or_unreadable_blob_of_a_peer_is_an_error(ranks: Ranks) -> None:
    server, folder = ranks.serve(1), ranks.again()
    with pytest.raises(
        CheckpointLoadError,
        match=r"fetching a of rank 0, refused by 127\.0\.0\.1:\d+: .*No such file",
    ):
        fetch(server.address, 0, folder, ["a"])
    publish(ranks.own(0), "a")
    publish(ranks.own(0), "b", b"b")
    copy(ranks.replicate(0, server.address), "a", "b")
    entry = ranks.held(1, 0).path / "index" / "a.blob"
    entry.write_bytes(entry.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointLoadError, match="got XXH3"):
        fetch(server.address, 0, folder, ["a", "b"])
    assert folder.keys() == []
    assert fetch(server.address, 0, folder) == len(b"header") + 1
    assert folder.keys() == ["b"]


def test_another_token_is_refused_at_once(ranks: Ranks) -> None:
    publish(ranks.own(0), "a")
    ticket, proxy = (
        Ticket(run_id="run-1", token="guess"),
        ranks.proxy(ranks.serve(1).address),
    )
    reason = "got another token than that of run run-1"
    with pytest.raises(
        CheckpointSaveError, match=rf"copy of a, refused by 127\.0\.0\.1:\d+: {reason}"
    ):
        copy(ranks.replicate(0, proxy.address, ticket=ticket), "a")
    with pytest.raises(CheckpointLoadError, match=reason):
        list_held(proxy.address, ticket, 0, timeout_s=WAIT_S)
    assert (ranks.held(1, 0).keys(), proxy.num_connections) == ([], 2)


STRANGERS = {
    "nothing": b"",
    "half a head": b"\x00" * 5,
    "too long": b"\xff" * 100,
    "no message": frame(b"nonsense"),
    "no ticket": frame(message_to_bytes(Get(owner_rank=0, key="a"))),
    "a long greeting": frame(b"", length=MOST_GREETING_BYTES + 1),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_garbage_is_sent_away_and_others_are_served(ranks: Ranks, name: str) -> None:
    publish(ranks.own(0), "a")
    server = ranks.serve(1)
    with (
        socket.create_connection(astuple(server.address), WAIT_S) as stranger,
        suppress(OSError),
    ):
        # the server may close the connection before all bytes are sent
        stranger.sendall(STRANGERS[name])
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):
            pass
    copy(ranks.replicate(0, server.address), "a")


def refused(
    ranks: Ranks, request: Message, reason: str, *, header_bytes: int = 0
) -> None:
    """Require that the server of rank 1 refuses a request.

    Args:
        ranks: The ranks.
        request: The request.
        reason: Pattern of the refusal's reason.
        header_bytes: Size of the header that a `Put` announces.
    """
    link = ranks.link(ranks.serve(1).address)
    link.send(request)
    if isinstance(request, Put):
        link.send(Found(header_bytes=header_bytes, payload_bytes=None))
    with pytest.raises(RefusedError, match=reason):
        link.expect(Done)


def test_keys_that_are_none_are_refused(ranks: Ranks) -> None:
    key = "../../own/index/a"
    for request in (
        Put(owner_rank=0, key=key),
        Get(owner_rank=0, key=key),
        Drop(owner_rank=0, keys=("a", key)),
    ):
        refused(ranks, request, r"got key .*, wanted letters")


def test_no_peer_writes_a_ranks_own_blobs(ranks: Ranks) -> None:
    publish(ranks.own(1), "a")
    for request in (
        Put(owner_rank=1, key="a"),
        Drop(owner_rank=1, keys=("a",)),
        Clear(owner_rank=1),
    ):
        refused(ranks, request, "rank 1 keeps no copies for itself")
    assert ranks.own(1).keys() == ["a"]


def test_a_header_that_is_too_large_is_refused_before_it_comes(ranks: Ranks) -> None:
    nbytes = MOST_HEADER_BYTES + 1
    refused(
        ranks,
        Put(owner_rank=0, key="a"),
        f"got a header of {nbytes} bytes",
        header_bytes=nbytes,
    )


def test_a_payload_beyond_the_owners_limit_is_refused_before_it_comes(
    ranks: Ranks,
) -> None:
    """Each owner has a limit of its own, and free memory does not count."""
    server = ranks.serve(1, rules=HoldingRules(most_bytes_per_owner=2 * CHUNK_BYTES))
    full, other = (ranks.replicate(rank, server.address) for rank in (0, 2))
    for rank, key, nbytes in (
        (0, "a", 2 * CHUNK_BYTES),
        (0, "b", CHUNK_BYTES),
        (2, "c", CHUNK_BYTES),
    ):
        publish(ranks.own(rank), key, FIVE_CHUNKS[:nbytes])
    copy(full, "a")
    with pytest.raises(
        CheckpointSaveError, match=r"wanted at most ckpt.memory_budget_bytes=2097152"
    ):
        copy(full, "b")
    copy(other, "c")
    full.drop(["a"])
    copy(full, "b")
    assert (ranks.held(1, 0).keys(), ranks.held(1, 2).keys()) == (["b"], ["c"])


def test_a_size_beyond_the_free_memory_is_refused_untried(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would fill the file system to the last byte before the error.

    Snapshots of other ranks would then fail.
    """
    tried: list[int] = []
    monkeypatch.setattr(
        os, "posix_fallocate", lambda _fd, _offset, nbytes: tried.append(nbytes)
    )
    link = ranks.link(ranks.serve(1).address)
    room = os.statvfs(ranks.folder(1).parent)
    link.send(Put(owner_rank=0, key="a"))
    link.send(Found(header_bytes=0, payload_bytes=room.f_frsize * room.f_blocks + 1))
    with pytest.raises(RefusedError, match="No space left on device"):
        link.expect(Done)
    assert tried == []


@CUTS
def test_bytes_that_are_damaged_every_time_fail_the_copy(
    ranks: Ranks, cut: bool
) -> None:
    publish(ranks.own(0), "a", FIVE_CHUNKS)
    server = ranks.serve(1)
    proxy = ranks.proxy(
        server.address, *(Damage(offset=3 * CHUNK_BYTES, cut=cut) for _ in range(5))
    )
    replicator = ranks.replicate(0, proxy.address)
    reason = (
        "reset|closed|Broken pipe"
        if cut
        else "blob a was garbled on its way: got .*, wanted .*"
    )
    with pytest.raises(
        CheckpointSaveError,
        match=rf"copy of a, 127\.0\.0\.1:\d+: .*({reason}).*, after 5 attempts",
    ):
        copy(replicator, "a")
    assert listed(server.address) == []
    copy(replicator, "a")
    server.close()
    assert cut or len(buffers_of(ranks.held(1, 0))) == 1


# from the client's greeting to the end of the copy
@pytest.mark.parametrize("offset", range(0, 320, 7))
@CUTS
def test_a_byte_that_is_damaged_on_the_way_is_sent_again(
    ranks: Ranks, offset: int, cut: bool
) -> None:
    content = bytes(range(50))
    publish(ranks.own(0), "a", content)
    proxy = ranks.proxy(ranks.serve(1).address, *[Damage(offset=offset, cut=cut)] * 2)
    copy(ranks.replicate(0, proxy.address), "a")
    assert content_of(ranks.held(1, 0), "a") == (b"header", content)
    assert cut or len(buffers_of(ranks.held(1, 0))) == 1, (
        "a cut is noticed later than the next attempt may come"
    )
    assert proxy.num_connections == 3


@pytest.mark.parametrize(
    "offset", [0, 3, 8, 20, 60, 150, CHUNK_BYTES, 2 * CHUNK_BYTES, 5 * CHUNK_BYTES]
)
@CUTS
def test_a_byte_that_is_damaged_on_the_way_back_is_fetched_again(
    ranks: Ranks, offset: int, cut: bool
) -> None:
    publish(ranks.own(1), "a", FIVE_CHUNKS)
    damage = Damage(offset=offset, from_client=False, cut=cut)
    proxy, folder = ranks.proxy(ranks.serve(1).address, damage, damage), ranks.again()
    fetch(proxy.address, 1, folder)
    assert content_of(folder, "a") == (b"header", FIVE_CHUNKS)
    assert (len(buffers_of(folder)), proxy.num_connections) == (1, 3)


def test_a_fetch_that_is_garbled_every_time_fails_and_leaves_nothing(
    ranks: Ranks,
) -> None:
    publish(ranks.own(1), "a", FIVE_CHUNKS)
    damage = Damage(offset=CHUNK_BYTES, from_client=False)
    proxy, folder = ranks.proxy(ranks.serve(1).address, *[damage] * 5), ranks.again()
    with pytest.raises(
        CheckpointLoadError,
        match=r"fetching a of rank 1, .*garbled on its way.*, after 5 attempts",
    ):
        fetch(proxy.address, 1, folder, ["a"])
    assert (folder.keys(), buffers_of(folder)) == ([], [])


def test_a_slow_peer_holds_up_only_the_confirmation(ranks: Ranks) -> None:
    publish(ranks.own(0), "a", FIVE_CHUNKS)
    publish(ranks.own(0), "b")
    fast, slow = ranks.serve(1), ranks.proxy(ranks.serve(2).address)
    slow.may_pass.clear()
    replicator = ranks.replicate(0, fast.address, slow.address)
    copied = replicator.copy(["a"]), replicator.copy(["b"])
    while listed(fast.address) != ["a", "b"]:
        pass
    assert not any(future.done() for future in copied)
    assert ranks.held(2, 0).keys() == []
    slow.may_pass.set()
    for future in copied:
        future.result(WAIT_S)
    assert ranks.held(2, 0).keys() == ["a", "b"]


def test_a_dead_peer_fails_the_copy_and_others_get_it(ranks: Ranks) -> None:
    for key in ("a", "b"):
        publish(ranks.own(0), key)
    dead, server = closed_address(), ranks.serve(1)
    replicator = ranks.replicate(0, dead, server.address)
    for key in ("a", "b"):
        with pytest.raises(
            CheckpointSaveError,
            match=f"copy of {key}, {dead}: .*refused, after 5 attempts",
        ):
            copy(replicator, key)
    assert listed(server.address) == ["a", "b"]
    with pytest.raises(CheckpointLoadError, match="refused, after 5 attempts"):
        listed(dead)


def test_a_peer_that_never_answers_fails_the_copy_at_the_deadline(ranks: Ranks) -> None:
    publish(ranks.own(0), "a")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address(host="127.0.0.1", port=silent.getsockname()[1])
        replicator = ranks.replicate(0, address, deadline_s=0.1)
        for future in [replicator.copy(["a"]) for _ in range(3)]:
            with pytest.raises(
                CheckpointSaveError,
                match=f"copy of a, {address}: (timed out|no time is left)",
            ):
                future.result(WAIT_S)
        with pytest.raises(CheckpointLoadError, match="timed out"):
            list_held(address, TICKET, 0, timeout_s=0.1)


def test_a_peer_that_stops_reading_fails_the_copy_at_the_deadline(ranks: Ranks) -> None:
    publish(ranks.own(0), "a", FIVE_CHUNKS * 4)
    proxy = ranks.proxy(ranks.serve(1).address)
    stop = Counted(3, proxy.may_pass.clear)
    with pytest.raises(CheckpointSaveError, match="timed out"):
        copy(ranks.replicate(0, proxy.address, may_send=stop, deadline_s=0.5), "a")


def test_a_server_gives_up_on_a_client_that_falls_silent(ranks: Ranks) -> None:
    server = ranks.serve(1, timeout_s=0.05)
    publish(ranks.own(0), "a")
    for is_copying in (False, True):
        link = ranks.link(server.address)
        if is_copying:
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
    replicator = ranks.replicate(0, proxy.address, deadline_s=2)
    copy(replicator, "a")
    proxy.cut_all()
    copy(replicator, "b")
    proxy.target = closed_address()
    proxy.cut_all()
    with pytest.raises(
        CheckpointSaveError, match=r"copy of c, .*(reset|closed|Broken pipe|no time)"
    ):
        copy(replicator, "c")
    proxy.target = ranks.serve(1).address
    copy(replicator, "c")
    assert ranks.held(1, 0).keys() == ["a", "b", "c"]


def test_other_peers_take_over_and_copies_to_the_old_fail(ranks: Ranks) -> None:
    publish(ranks.own(0), "a")
    kept, old, new = ranks.serve(1), ranks.proxy(ranks.serve(2).address), ranks.serve(3)
    replicator = ranks.replicate(0, kept.address, old.address)
    copy(replicator, "a")
    old.may_pass.clear()
    waiting = [replicator.copy(["a"]) for _ in range(3)]
    replicator.use_peers([kept.address, new.address])
    for future in waiting:
        with pytest.raises(
            CheckpointSaveError,
            match=f"copy of a, {old.address}: .*(closed|Broken pipe|reset)",
        ):
            future.result(WAIT_S)
    copy(replicator, "a")
    assert ranks.held(3, 0).keys() == ["a"]


def test_without_having_been_told_of_peers_nothing_is_confirmed(ranks: Ranks) -> None:
    own = ranks.own(0)
    publish(own, "a")
    replicator = Replicator(own, 0, TICKET, may_send=always, deadline_s=WAIT_S)
    with pytest.raises(CheckpointSaveError, match="got no peers yet"):
        copy(replicator, "a")
    # in a new daemon, after the loss of a node: there are no copies to wait for
    replicator.copy([]).result(WAIT_S)
    replicator.drop(["a"])
    replicator.use_peers([])
    copy(replicator, "a")
    replicator.close()
    with pytest.raises(CheckpointSaveError, match="got a request after the end"):
        copy(replicator, "a")


def test_copying_asks_before_every_chunk_and_waits_but_not_for_ever(
    ranks: Ranks,
) -> None:
    publish(ranks.own(0), "a", FIVE_CHUNKS)
    refusing, allowing = (Counted(0, always, answer=answer) for answer in (False, True))
    for rank, may_send in enumerate((refusing, allowing), 1):
        copy(ranks.replicate(0, ranks.serve(rank).address, may_send=may_send), "a")
    assert refusing.calls > 2 * 5, "went on at once"
    assert allowing.calls == 5


def reuse(own: BlobFolder, payload: torch.Tensor) -> None:
    """Withdraw blob `a`, and publish other content in the same memory."""
    own.withdraw("a")
    payload.fill_(0)
    own.publish("a", b"header", payload, payload.numel())


def replace(own: BlobFolder, payload: torch.Tensor) -> None:
    """Withdraw blob `a`, and publish other content in other memory."""
    own.withdraw("a")
    publish(own, "a", bytes(len(FIVE_CHUNKS)))


CHANGES = {
    "withdrawn": lambda own, _: own.withdraw("a"),
    "replaced": replace,
    "memory used again": reuse,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_blob_that_is_withdrawn_while_it_is_copied_is_not_held(
    ranks: Ranks, name: str
) -> None:
    own, held = ranks.own(0), ranks.held(1, 0)
    payload = publish(own, "a", FIVE_CHUNKS)
    change = Counted(4, lambda: CHANGES[name](own, payload))
    replicator = ranks.replicate(0, ranks.serve(1).address, may_send=change)
    with pytest.raises(
        CheckpointSaveError, match="blob a was withdrawn while it was sent"
    ):
        copy(replicator, "a")
    assert (held.keys(), len(buffers_of(held))) == ([], 1)
    if name == "withdrawn":
        publish(own, "a", bytes(len(FIVE_CHUNKS)))
    copy(replicator, "a")
    assert content_of(held, "a") == (b"header", bytes(len(FIVE_CHUNKS)))
    assert len(buffers_of(held)) == 1


def test_a_capped_copy_that_is_given_up_waits_for_no_tokens(ranks: Ranks) -> None:
    own, old, new = ranks.own(0), ranks.serve(1), ranks.serve(2)
    publish(own, "a", FIVE_CHUNKS)
    publish(own, "b")
    replicator = ranks.replicate(0, old.address, bytes_per_s=1000.0)
    dropped, behind = replicator.copy(["a"]), replicator.copy(["b"])
    own.withdraw("a")
    with pytest.raises(
        CheckpointSaveError,
        match=r"blob a was withdrawn while it was sent|No such file",
    ):
        dropped.result(WAIT_S)
    behind.result(WAIT_S)
    publish(own, "a", FIVE_CHUNKS)
    waiting = replicator.copy(["a"])
    replicator.use_peers([new.address])
    with pytest.raises(CheckpointSaveError, match="copy of a"):
        waiting.result(WAIT_S)
    copy(replicator, "b")
    assert ranks.held(2, 0).keys() == ["b"]


def test_a_folder_deleted_in_the_middle_of_a_copy_fails_it(ranks: Ranks) -> None:
    publish(ranks.own(0), "a", FIVE_CHUNKS)
    server, held = ranks.serve(1), ranks.held(1, 0)
    replicator = ranks.replicate(
        0, server.address, may_send=Counted(4, lambda: shutil.rmtree(ranks.folder(1)))
    )
    with pytest.raises(
        CheckpointSaveError, match=r"copy of a, refused by .*: blob a in .*No such file"
    ):
        copy(replicator, "a")
    assert listed(server.address) == []
    copy(replicator, "a")
    assert content_of(held, "a") == (b"header", FIVE_CHUNKS)
    assert len(buffers_of(held)) == 1


def test_a_peer_without_room_refuses_and_stays_usable(ranks: Ranks) -> None:
    publish(ranks.own(0), "large", FIVE_CHUNKS)
    publish(ranks.own(0), "small")
    replicator = ranks.replicate(0, ranks.serve(1).address)
    reason = r"copy of large, refused by .*wanted room for \d+ bytes"
    with largest_file(CHUNK_BYTES), pytest.raises(CheckpointSaveError, match=reason):
        copy(replicator, "large")
    assert buffers_of(ranks.held(1, 0)) == []
    copy(replicator, "small", "large")
    assert ranks.held(1, 0).keys() == ["large", "small"]


def test_a_worker_without_room_fails_its_fetch(ranks: Ranks) -> None:
    server, folder = ranks.serve(1), ranks.again()
    publish(ranks.own(1), "a", FIVE_CHUNKS)
    reason = r"fetching a of rank 1, .*wanted room for \d+ bytes"
    with largest_file(CHUNK_BYTES), pytest.raises(CheckpointLoadError, match=reason):
        fetch(server.address, 1, folder)
    assert (folder.keys(), buffers_of(folder)) == ([], [])


def test_a_link_is_of_no_use_beyond_its_time(ranks: Ranks) -> None:
    link = ranks.link(ranks.serve(1).address)
    link.allow(0.0)
    with pytest.raises(TimeoutError, match="no time is left"):
        link.send(ListKeys(owner_rank=0))
    link.allow(0.05)
    with pytest.raises(TimeoutError):
        link.receive()
