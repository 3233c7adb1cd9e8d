"""Admission: both ends prove that they have the token, and an eavesdropper learns nothing that admits it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, replace

import pytest

from moe_ckpt.replication import copy_server
from moe_ckpt.replication.admission import admit, open_connection
from moe_ckpt.replication.connection import Connection, RefusedError
from moe_ckpt.replication.messages import Address, Challenge, Hello, Message, Ticket, Welcome, message_to_json
from tests.elastic.workers import wait_until
from tests.replication.peers import TICKET, Ranks
from tests.waits import WAIT_S


class Server:
    """One connection's server end, in a thread."""

    def __init__(self, listening: socket.socket) -> None:
        host, port = listening.getsockname()
        self.address = Address(host=host, port=port)
        self._listening = listening

    def admit(self, ticket: Ticket) -> str | None:
        with self._accepted() as link:
            return admit(link, ticket)

    def pretend(self, proof: str) -> Message:
        with self._accepted() as link:
            link.send(Challenge(nonce="00"))
            got = link.receive()
            link.send(Welcome(proof=proof))
        return got

    @contextmanager
    def _accepted(self) -> Iterator[Connection]:
        link = Connection(self._listening.accept()[0])
        link.allow(WAIT_S)
        yield link
        link.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield Server(listening)


def outcome_of(server: Server, client: Ticket, wanted: Ticket) -> str | None:
    """Let a client ask a server for admission; return the reason of the server's refusal."""
    with ThreadPoolExecutor() as threads:
        admitted = threads.submit(server.admit, wanted)
        with suppress(RefusedError):
            open_connection(server.address, client, WAIT_S).close()
        return admitted.result(WAIT_S)


def heard_by(server: Server) -> Message:
    """Let a client meet a server that guesses the token, and refuse it; return what the server was sent."""
    with ThreadPoolExecutor() as threads:
        pretending = threads.submit(server.pretend, "guess")
        with pytest.raises(RefusedError, match="the server has another token than that of run run-1"):
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
def test_only_a_client_with_the_token_is_admitted(server: Server, changes: dict[str, str], reason: str | None) -> None:
    assert outcome_of(server, replace(TICKET, **changes), TICKET) == reason


def test_a_server_without_the_token_is_refused_and_does_not_learn_it(server: Server) -> None:
    assert TICKET.token.encode() not in message_to_json(heard_by(server))
    assert TICKET.token not in repr(TICKET)


def test_a_hello_that_was_heard_admits_no_second_connection(server: Server, ranks: Ranks) -> None:
    heard = heard_by(server)
    assert isinstance(heard, Hello)
    link = Connection(socket.create_connection(astuple(ranks.serve(1).address), WAIT_S))
    link.allow(WAIT_S)
    link.expect(Challenge)
    link.send(heard)
    with pytest.raises(RefusedError, match="got another token"):
        link.expect(Welcome)
    link.close()


def test_connections_that_are_not_admitted_are_few(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_server, "_MOST_STRANGERS", 2)
    address = astuple(ranks.serve(1).address)

    def is_challenged() -> bool:
        with socket.create_connection(address, WAIT_S) as another:
            return another.recv(1) != b""

    with ExitStack() as stack:
        for _ in range(2):
            silent = stack.enter_context(socket.create_connection(address, WAIT_S))
            assert silent.recv(1), "its challenge has come, so it is counted"
        assert not is_challenged()
    assert wait_until(is_challenged), "the server has noticed that they are gone"
