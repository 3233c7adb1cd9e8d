"""Both ends prove that they have the token, and overheard bytes admit no process."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, replace

import pytest

from moe_ckpt.replication import copy_server
from moe_ckpt.replication.admission import admit, open_connection
from moe_ckpt.replication.connection import Connection, RefusedError
from moe_ckpt.replication.messages import (
    Address,
    Challenge,
    Hello,
    Message,
    Ticket,
    Welcome,
    message_to_bytes,
    parse_address,
)
from moe_ckpt.replication.strangers import RareWarning
from tests.replication.blobs import publish
from tests.replication.peers import TICKET, Ranks
from tests.waits import WAIT_S


class Server:
    """The server end of one connection, for a thread of its own."""

    def __init__(self, listening: socket.socket) -> None:
        host, port = listening.getsockname()
        self.address = Address(host=host, port=port)
        self._listening = listening

    def admit(self, ticket: Ticket) -> str | None:
        """Return the reason of a refusal; None if the client is admitted."""
        with self.accepted() as link:
            return admit(link, self.address, ticket)

    def pretend(self, proof: str) -> Message:
        """Send a guessed proof, and return the client's greeting."""
        with self.accepted() as link:
            link.send(Challenge(nonce="00"))
            got = link.receive()
            link.send(Welcome(proof=proof))
        return got

    def end(self) -> None:
        """Make the thread that accepts connections continue with an error."""
        self._listening.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def accepted(self) -> Iterator[Connection]:
        """Accept a connection, and close the connection after the block."""
        link = Connection(self._listening.accept()[0])
        link.allow(WAIT_S)
        yield link
        link.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield Server(listening)


def outcome_of(server: Server, client: Ticket, wanted: Ticket) -> str | None:
    """Let a client ask a server for admission.

    Args:
        server: The server.
        client: Ticket of the client.
        wanted: Ticket of the server.

    Returns:
        The reason of the server's refusal; None if the client is admitted.
    """
    with ThreadPoolExecutor() as threads:
        admitted = threads.submit(server.admit, wanted)
        with suppress(RefusedError):
            open_connection(server.address, client, WAIT_S).close()
        return admitted.result(WAIT_S)


def heard_by(server: Server) -> Message:
    """Let a client refuse a server that guesses the token.

    Returns:
        The message that the client has sent to the server.
    """
    with ThreadPoolExecutor() as threads:
        pretending = threads.submit(server.pretend, "guess")
        with pytest.raises(
            RefusedError, match="the server has another token than that of run run-1"
        ):
            open_connection(server.address, TICKET, WAIT_S)
        return pretending.result(WAIT_S)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"token": "guess"}, "got another token than that of run run-1"),
        ({"run_id": "run-2"}, "got run run-2, wanted run-1"),
    ],
)
def test_only_a_client_with_the_token_is_admitted(
    server: Server, changes: dict[str, str], reason: str | None
) -> None:
    assert outcome_of(server, replace(TICKET, **changes), TICKET) == reason


def test_a_server_without_the_token_is_refused_and_does_not_learn_it(
    server: Server,
) -> None:
    assert TICKET.token.encode() not in message_to_bytes(heard_by(server))
    assert TICKET.token not in repr(TICKET)


def test_a_process_that_passes_a_greeting_on_is_admitted_by_neither_end(
    ranks: Ranks,
) -> None:
    """Such a process needs no place in the network.

    The address of a daemon is in torchrun's store, to which any process can write.
    """
    publish(ranks.own(1), "a")
    relay = ranks.proxy(ranks.serve(1).address)
    planted = parse_address(f"127.0.0.1:{relay.port}")
    with pytest.raises(RefusedError, match="got another token"):
        open_connection(planted, TICKET, WAIT_S)
    assert b"header" not in bytes(relay.passed)
    open_connection(relay.address, TICKET, WAIT_S).close()


def test_a_hello_that_was_heard_admits_no_second_connection(
    server: Server, ranks: Ranks
) -> None:
    heard = heard_by(server)
    assert isinstance(heard, Hello)
    link = Connection(socket.create_connection(astuple(ranks.serve(1).address), WAIT_S))
    link.allow(WAIT_S)
    link.expect(Challenge)
    link.send(heard)
    with pytest.raises(RefusedError, match="got another token"):
        link.expect(Welcome)
    link.close()


class Silent:
    """Opens connections that send nothing, from addresses of this machine."""

    def __init__(self, address: Address, stack: ExitStack) -> None:
        self.address = address
        self._stack = stack

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        link = self._stack.enter_context(
            socket.create_connection(astuple(self.address), WAIT_S, (source, 0))
        )
        assert read_challenge(link), "its challenge has come, so it is counted"
        return link


def read_challenge(link: socket.socket) -> bytes:
    return link.recv(4096)


@pytest.fixture
def silent(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Iterator[Silent]:
    """Connections to a server at which at most three wait for admission."""
    monkeypatch.setattr(copy_server, "_MOST_STRANGERS", 3)
    with ExitStack() as stack:
        yield Silent(ranks.serve(1).address, stack)


def test_a_member_is_admitted_beside_silent_connections_the_oldest_of_which_ends(
    ranks: Ranks, silent: Silent
) -> None:
    first, *others = [silent.connect() for _ in range(3)]
    ranks.link(silent.address)
    assert first.recv(1) == b"", "it made room"
    for other in others:
        other.settimeout(0)
        with pytest.raises(BlockingIOError):
            other.recv(1)


def test_connections_of_one_address_displace_their_own(silent: Silent) -> None:
    quiet = silent.connect("127.0.0.2")
    flood = [silent.connect("127.0.0.3") for _ in range(10)]
    for displaced in flood[:-2]:
        assert displaced.recv(1) == b""
    for waiting in (quiet, *flood[-2:]):
        waiting.settimeout(0)
        with pytest.raises(BlockingIOError):
            waiting.recv(1)


def test_a_member_that_is_displaced_connects_until_its_time_is_over(
    server: Server,
) -> None:
    num_closed = 8  # more than the attempts of a client over a bad network

    def serve() -> str | None:
        for _ in range(num_closed):
            with server.accepted():
                pass
        return server.admit(TICKET)

    with ThreadPoolExecutor() as threads:
        served = threads.submit(serve)
        open_connection(server.address, TICKET, WAIT_S).close()
        assert served.result(WAIT_S) is None


def test_a_client_whose_time_is_over_says_how_its_last_connection_ended(
    server: Server,
) -> None:
    def close_all() -> None:
        with suppress(OSError):
            while True:
                with server.accepted():
                    pass

    with ThreadPoolExecutor() as threads:
        threads.submit(close_all)
        with pytest.raises(OSError, match=r"reset|closed|Broken pipe"):
            open_connection(server.address, TICKET, 0.3)
        server.end()


def test_a_pause_between_two_connections_can_be_ended(server: Server) -> None:
    def pause(_: float) -> None:
        raise ConnectionAbortedError("closed on this side")

    def serve() -> None:
        with server.accepted():
            pass

    with ThreadPoolExecutor() as threads:
        threads.submit(serve)
        with pytest.raises(ConnectionAbortedError, match="closed on this side"):
            open_connection(server.address, TICKET, WAIT_S, pause)


def test_a_warning_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    seconds = iter([0.0, 0.0, 0.0, 1.0, 59.9, 60.0, 60.0, 61.0, 120.0, 120.0])
    warning = RareWarning(logging.getLogger("any"), "a daemon", lambda: next(seconds))
    for number in range(6):
        warning.give(f"text {number}")
    assert [record.getMessage() for record in caplog.records] == [
        "a daemon: text 0",
        "a daemon: text 3 (and 2 more since the last such line)",
        "a daemon: text 5 (and 1 more since the last such line)",
    ]
