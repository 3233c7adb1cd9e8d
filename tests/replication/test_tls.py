"""TLS between nodes: copies, refused ends, and errors that name a file.

Copies are the same as without TLS. An end without a certificate of the authority is
refused.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from moe_ckpt.config import NO_TLS, TlsConfig
from moe_ckpt.errors import CheckpointSaveError, ConfigError
from moe_ckpt.replication.admission import open_connection
from moe_ckpt.replication.connection import CHUNK_BYTES, Connection, RefusedError
from moe_ckpt.replication.fetch import fetch_blobs
from moe_ckpt.replication.messages import Hello, Ticket
from moe_ckpt.replication.tls import open_tls
from tests.harness.gloo.workers import wait_until
from tests.replication.blobs import content_of, publish
from tests.replication.certificates import Authority
from tests.replication.peers import TICKET, Ranks, copy
from tests.waits import WAIT_S

CONTENT = bytes(range(250)) * (3 * CHUNK_BYTES // 250)
KEYS = ("certificate", "key", "authority")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "stranger")


@pytest.fixture
def node0(authority: Authority) -> Ticket:
    return replace(TICKET, tls=authority.ends_of("node0"))


@pytest.fixture
def node1(authority: Authority) -> Ticket:
    return replace(TICKET, tls=authority.ends_of("node1"))


def test_copies_between_nodes_of_one_authority_are_the_same(
    ranks: Ranks, node0: Ticket, node1: Ticket
) -> None:
    publish(ranks.own(0), "a", CONTENT)
    server = ranks.serve(1, ticket=node1)
    copy(ranks.replicate(0, server.address, ticket=node0), "a")
    lost = ranks.again()
    fetch_blobs(server.address, node0, 0, lost, timeout_s=WAIT_S)
    assert (
        content_of(lost, "a")
        == content_of(ranks.held(1, 0), "a")
        == (b"header", CONTENT)
    )


@pytest.mark.parametrize("is_on", [True, False], ids=["TLS", "clear"])
def test_no_word_of_a_copy_can_be_overheard(
    ranks: Ranks, node0: Ticket, node1: Ticket, is_on: bool
) -> None:
    client, server = (node0, node1) if is_on else (TICKET, TICKET)
    publish(ranks.own(0), "a", b"a secret of the model" * 100)
    proxy = ranks.proxy(ranks.serve(1, ticket=server).address)
    copy(ranks.replicate(0, proxy.address, ticket=client), "a")
    assert len(proxy.passed) > 2100
    words = (b"a secret of the model", b"header", b"Hello", TICKET.run_id.encode())
    assert [word in proxy.passed for word in words] == [not is_on] * 4


REFUSED = (
    "TLS failed ({}): wanted ckpt.tls on all nodes, with certificates of one"
    " ckpt.tls.authority"
)


def refusal(server: Ticket, client: Ticket, ranks: Ranks) -> str:
    """Return the reason for which a client stops copying to a server."""
    address = ranks.serve(1, ticket=server).address
    publish(ranks.own(0), "a", b"a")
    with pytest.raises(CheckpointSaveError) as refused:
        copy(ranks.replicate(0, address, ticket=client), "a")
    assert ranks.held(1, 0).keys() == []
    found = re.fullmatch(rf"copy of a, refused by {address}: (.*)", str(refused.value))
    assert found, str(refused.value)
    return found[1]


def test_a_server_of_another_authority_is_refused(
    ranks: Ranks, node0: Ticket, stranger: Authority
) -> None:
    server = replace(TICKET, tls=stranger.ends_of("node1"))
    # a server also sends the certificate of its authority
    reason = "self-signed certificate in certificate chain"
    assert refusal(server, node0, ranks) == REFUSED.format(reason)


def test_a_client_of_another_authority_is_refused(
    ranks: Ranks,
    node1: Ticket,
    authority: Authority,
    stranger: Authority,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client trusts the server, which does not trust the client's certificate."""
    client = replace(TICKET, tls=stranger.ends_of("node0", authority))
    assert refusal(node1, client, ranks) == REFUSED.format("TLSV1_ALERT_UNKNOWN_CA")
    reason = REFUSED.format("unable to get local issuer certificate")
    wanted = f"rank 1's daemon refused a connection: {reason}"
    assert wait_until(lambda: wanted in [record.message for record in caplog.records])


def test_a_server_without_tls_is_refused(ranks: Ranks, node0: Ticket) -> None:
    assert refusal(TICKET, node0, ranks).startswith("TLS failed (")


def test_a_client_without_tls_is_not_admitted(ranks: Ranks, node1: Ticket) -> None:
    address = ranks.serve(1, ticket=node1).address
    link = Connection(socket.create_connection(astuple(address), WAIT_S))
    link.allow(WAIT_S)
    link.send(Hello(run_id=TICKET.run_id, nonce="00", proof="00"))
    with pytest.raises(OSError, match=r"got no message|closed by the other side|reset"):
        link.receive()
    link.close()


def test_a_certificate_does_not_stand_for_the_token(
    ranks: Ranks, node0: Ticket, node1: Ticket
) -> None:
    address = ranks.serve(1, ticket=node1).address
    with pytest.raises(RefusedError, match="got another token than that of run run-1"):
        open_connection(address, replace(node0, token="guess"), WAIT_S)


def test_a_connection_without_a_handshake_ends_in_time(
    ranks: Ranks, node1: Ticket
) -> None:
    address = ranks.serve(1, 0.2, ticket=node1).address
    with socket.create_connection(astuple(address), WAIT_S) as silent:
        assert silent.recv(1) == b""


def test_bytes_that_are_decrypted_already_are_readable(authority: Authority) -> None:
    """TLS reads a whole record, even if the caller wants only a part of the record.

    The kernel then has no more bytes.
    """
    near, far = socket.socketpair()
    ends = authority.ends_of("node0")
    client = ends.client.wrap_socket(near, do_handshake_on_connect=False)
    server = ends.server.wrap_socket(
        far, server_side=True, do_handshake_on_connect=False
    )
    shake_hands([client, server])
    with client, server:
        client.sendall(b"two")
        assert server.recv(1) == b"t"
        link = Connection(server)
        assert link.is_readable(0.0)
        assert server.recv(2) == b"wo"
        assert not link.is_readable(0.0)


def shake_hands(ends: Sequence[ssl.SSLSocket]) -> None:
    """Carry out the TLS handshake of both ends, in one thread."""
    waiting = list(ends)
    for end in ends:
        end.setblocking(False)
    while waiting:
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                pass  # the other end's turn
    for end in ends:
        end.setblocking(True)


def test_without_paths_there_is_no_tls() -> None:
    assert open_tls(NO_TLS) is None


@pytest.mark.parametrize("missing", KEYS)
def test_a_path_that_is_missing_is_one_clear_error(missing: str) -> None:
    paths: dict[str, str | None] = dict.fromkeys(KEYS, "/there")
    wanted = (
        f"ckpt.tls.{missing}: got None, wanted a path, as the other keys of ckpt.tls"
        " have, or null for all"
    )
    with pytest.raises(ConfigError, match=wanted):
        TlsConfig(**{**paths, missing: None})


@pytest.mark.parametrize("name", KEYS)
def test_a_file_that_is_not_there_is_one_clear_error(
    name: str, authority: Authority
) -> None:
    config = replace(authority.config_of("node0"), **{name: "/nowhere/node.pem"})
    wanted = (
        rf"^ckpt.tls.{name}: got '/nowhere/node.pem', wanted a file that can be read"
        r" \(No such file"
    )
    with pytest.raises(ConfigError, match=wanted):
        open_tls(config)


def test_files_that_do_not_fit_are_one_clear_error(
    authority: Authority, tmp_path: Path
) -> None:
    config, another = authority.config_of("node0"), authority.config_of("node1")
    with pytest.raises(
        ConfigError,
        match=r"^ckpt.tls.key: got .*node1.key', wanted the private key.*MISMATCH",
    ):
        open_tls(replace(config, key=another.key))
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(
        ConfigError,
        match=r"^ckpt.tls.authority: got .*text', wanted certificates in PEM format",
    ):
        open_tls(replace(config, authority=str(tmp_path / "text")))
