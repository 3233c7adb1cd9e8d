"""An admitted client may send any requests and bytes without harm to other ranks.

The server still serves other clients, the rank's own blobs do not change, and no owner
holds more bytes than the limit.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given

from moe_ckpt.replication.admission import open_connection
from moe_ckpt.replication.copy_server import CopyServer, HoldingRules
from moe_ckpt.replication.messages import (
    Address,
    Clear,
    Drop,
    Found,
    Get,
    ListKeys,
    Message,
    Put,
    Sent,
)
from tests.properties import GENERATORS, examples, random_number, random_text
from tests.replication.blobs import content_of, publish
from tests.replication.peers import TICKET, Ranks, listed, ranks_in
from tests.waits import WAIT_S

MOST_BYTES = 1000
SEQUENCES = 20
"""Number of request sequences of one example."""


def random_request(chosen: random.Random) -> Message | bytes:
    """Return a request, a part of a blob's transfer, or random bytes."""
    rank, key, size = _rank(chosen), _key(chosen), _size(chosen)
    requests: list[Message | bytes] = [
        Put(owner_rank=rank, key=key),
        Get(owner_rank=rank, key=key),
        Drop(owner_rank=rank, keys=(key, _key(chosen))),
        Clear(owner_rank=rank),
        ListKeys(owner_rank=rank),
        Found(header_bytes=size, payload_bytes=chosen.choice((None, _size(chosen)))),
        Sent(header_xxh3=size, payload_xxh3=size),
        chosen.randbytes(chosen.randrange(2 * MOST_BYTES)),
    ]
    return chosen.choice(requests)


def _rank(chosen: random.Random) -> int:
    return chosen.choice((chosen.randrange(4), random_number(chosen, 2**64)))


def _key(chosen: random.Random) -> str:
    return chosen.choice(
        ("own", "a", "b", "../own", "", ".", "a/b", random_text(chosen, 5))
    )


def _size(chosen: random.Random) -> int:
    return chosen.choice(
        (chosen.randrange(2 * MOST_BYTES), random_number(chosen, 2**64))
    )


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Ranks, CopyServer]]:
    """Yield ranks, and the server of rank 1, which has one own blob."""
    with ranks_in(tmp_path_factory.mktemp("fuzzed")) as ranks:
        publish(ranks.own(1), "own", b"content")
        yield ranks, ranks.serve(1, rules=HoldingRules(most_bytes_per_owner=MOST_BYTES))


def held_bytes(folder: Path) -> int:
    """Return the size of the largest owner's payloads, in bytes."""
    owners = (folder / "held").glob("*")
    return max(
        (
            sum(path.stat().st_size for path in owner.rglob("buffers/*"))
            for owner in owners
        ),
        default=0,
    )


@examples(10_000 // SEQUENCES)
@given(GENERATORS)
def test_no_request_harms_others(
    served: tuple[Ranks, CopyServer], chosen: random.Random
) -> None:
    ranks, server = served
    for _ in range(SEQUENCES):
        send_all(
            server.address, [random_request(chosen) for _ in range(chosen.randrange(7))]
        )
    assert listed(server.address, 1) == ["own"]
    assert content_of(ranks.own(1), "own") == (b"header", b"content")
    assert held_bytes(ranks.folder(1)) <= MOST_BYTES


def send_all(address: Address, requests: Sequence[Message | bytes]) -> None:
    """Send requests over one connection, until the server closes the connection."""
    link = open_connection(address, TICKET, WAIT_S)
    with contextlib.closing(link), contextlib.suppress(OSError):
        for request in requests:
            if isinstance(request, bytes):
                link.send_stream(memoryview(request), lambda _: None)
            else:
                link.send(request)
