"""An admitted client may send anything: others are served, no own blob changes, and no owner holds more than it may."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.replication.admission import open_connection
from moe_ckpt.replication.copy_server import CopyServer, HoldingRules
from moe_ckpt.replication.messages import Clear, Drop, Found, Get, ListKeys, Message, Put, Sent
from tests.properties import FUZZ_S, examples
from tests.replication.blobs import content_of, publish
from tests.replication.peers import TICKET, Ranks, listed, ranks_in
from tests.waits import WAIT_S

MOST_BYTES = 1000
RANKS = st.integers(0, 3) | st.integers(0, 2**64 - 1)
KEYS = st.sampled_from(["own", "a", "b", "../own", "", ".", "a/b"]) | st.text(max_size=5)
SIZES = st.integers(0, 2 * MOST_BYTES) | st.integers(0, 2**64 - 1)
REQUESTS: st.SearchStrategy[Message | bytes] = st.one_of(
    st.builds(Put, owner_rank=RANKS, key=KEYS),
    st.builds(Get, owner_rank=RANKS, key=KEYS),
    st.builds(Drop, owner_rank=RANKS, keys=st.lists(KEYS, max_size=3).map(tuple)),
    st.builds(Clear, owner_rank=RANKS),
    st.builds(ListKeys, owner_rank=RANKS),
    st.builds(Found, header_bytes=SIZES, payload_bytes=st.none() | SIZES),
    st.builds(Sent, header_xxh3=SIZES, payload_xxh3=SIZES),
    st.binary(max_size=2 * MOST_BYTES),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ranks, CopyServer]]:
    with ranks_in(tmp_path_factory.mktemp("fuzzed")) as ranks:
        publish(ranks.own(1), "own", b"content")
        yield ranks, ranks.serve(1, rules=HoldingRules(most_bytes_per_owner=MOST_BYTES))


def held_bytes(folder: Path) -> int:
    """Return the bytes of the largest owner's payloads."""
    owners = (folder / "held").glob("*")
    return max((sum(path.stat().st_size for path in owner.rglob("buffers/*")) for owner in owners), default=0)


@pytest.mark.timeout(FUZZ_S)
@examples(10_000)
@given(st.lists(REQUESTS, max_size=6))
def test_no_request_harms_others(served: tuple[Ranks, CopyServer], requests: list[Message | bytes]) -> None:
    ranks, server = served
    link = open_connection(server.address, TICKET, WAIT_S)
    try:
        for request in requests:
            if isinstance(request, bytes):
                link._socket.sendall(request)
            else:
                link.send(request)
    except OSError:
        pass  # the server has closed the connection
    finally:
        link.close()
    assert listed(server.address, 1) == ["own"]
    assert content_of(ranks.own(1), "own") == (b"header", b"content")
    assert held_bytes(ranks.folder(1)) <= MOST_BYTES
