"""Admission to a server: both ends prove that they have the run's token.

No end sends the token.

    server -> client   Challenge: a random nonce
    client -> server   Hello: the run, a nonce of the client, and a proof: HMAC of
                       "client", the run, the server's address and both nonces,
                       under the token
    server -> client   Welcome: HMAC of "server", the run, the address and both
                       nonces; or Refused

The address is the one to which the client has connected and which the server has
announced. If a process puts its own address into the job's store and passes on all
bytes between a client and a server, both ends therefore refuse the connection.

Messages before admission have at most MOST_GREETING_BYTES bytes. With `Ticket.tls` all
messages are inside TLS. A server with too many connections that wait for admission
closes one without an answer (`strangers`). The client then connects again.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator

from moe_ckpt.replication.connection import Connection, RefusedError
from moe_ckpt.replication.messages import (
    Address,
    Challenge,
    Hello,
    Refused,
    Ticket,
    Welcome,
)
from moe_ckpt.replication.tls import describe_refusal

MOST_GREETING_BYTES = 4096
_NONCE_BYTES = 16
# pauses before a client that was not admitted connects again
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_LEAST_S = 0.001  # a timeout of 0 would be no wait at all
_CLOSED = (
    ConnectionResetError,
    ConnectionAbortedError,
    BrokenPipeError,
    ssl.SSLEOFError,
    ssl.SSLZeroReturnError,
)


def open_connection(
    address: Address,
    ticket: Ticket,
    timeout_s: float,
    pause: Callable[[float], object] = time.sleep,
) -> Connection:
    """Connect to a server and be admitted.

    If the server accepts and then closes the connection, the client tries again.

    Args:
        address: The server's address.
        ticket: The run, and the run's secret.
        timeout_s: Time for all attempts, in seconds. Later messages may use the time
            that is left.
        pause: Waits for some seconds between attempts, or raises OSError to end the
            attempts.

    Returns:
        The connection.

    Raises:
        OSError: Nothing listens at the address, or the time is over.
        RefusedError: One end does not have the other end's token, run, or authority of
            certificates.
    """
    until_s = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        left_s = max(_LEAST_S, until_s - time.monotonic())
        link = Connection(
            socket.create_connection((address.host, address.port), left_s)
        )
        try:
            return _admitted(link, address, ticket, until_s)
        except _CLOSED:
            if time.monotonic() + pause_s >= until_s:
                raise
        pause(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _admitted(
    link: Connection, address: Address, ticket: Ticket, until_s: float
) -> Connection:
    """Return a new connection once admitted. Close the connection after a failure."""
    try:
        link.allow(until_s - time.monotonic())
        with _naming_refusals():
            if ticket.tls:
                link.secure(ticket.tls.client, server_side=False)
            _be_admitted(link, address, ticket)
    except BaseException:
        link.close()
        raise
    return link


@contextlib.contextmanager
def _naming_refusals() -> Iterator[None]:
    """Raise RefusedError for a refusal of TLS: another attempt would fail as well."""
    try:
        yield
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        raise  # the connection ended
    except ssl.SSLError as error:
        raise RefusedError(describe_refusal(error), garbled=False) from error


def _be_admitted(link: Connection, address: Address, ticket: Ticket) -> None:
    theirs, own = (
        link.expect(Challenge, MOST_GREETING_BYTES).nonce,
        secrets.token_hex(_NONCE_BYTES),
    )
    link.send(
        Hello(
            run_id=ticket.run_id,
            nonce=own,
            proof=_proof(ticket, "client", address, theirs, own),
        )
    )
    proof = link.expect(Welcome, MOST_GREETING_BYTES).proof
    if not _equal(proof, _proof(ticket, "server", address, theirs, own)):
        raise RefusedError(
            f"the server has another token than that of run {ticket.run_id}",
            garbled=False,
        )


def admit(link: Connection, address: Address, ticket: Ticket) -> str | None:
    """Admit the client of a new connection.

    Args:
        link: The connection.
        address: The address that this server has announced.
        ticket: The run, and the run's secret.

    Returns:
        None if the client is admitted; otherwise the reason of the refusal. The client
        gets the refusal, too.

    Raises:
        OSError: The connection has ended, or the connection's time is over.
    """
    if ticket.tls:
        try:
            link.secure(ticket.tls.server, server_side=True)
        except ssl.SSLError as error:
            return describe_refusal(error)
    own = secrets.token_hex(_NONCE_BYTES)
    link.send(Challenge(nonce=own))
    hello = link.receive(MOST_GREETING_BYTES)
    if not isinstance(hello, Hello):
        reason = f"got {type(hello).__name__} first, wanted Hello"
    elif hello.run_id != ticket.run_id:
        reason = f"got run {hello.run_id}, wanted {ticket.run_id}"
    elif not _equal(hello.proof, _proof(ticket, "client", address, own, hello.nonce)):
        reason = f"got another token than that of run {ticket.run_id}"
    else:
        link.send(Welcome(proof=_proof(ticket, "server", address, own, hello.nonce)))
        return None
    link.send(Refused(reason=reason, garbled=False))
    return reason


def _proof(
    ticket: Ticket, role: str, address: Address, server_nonce: str, client_nonce: str
) -> str:
    """Return an HMAC-SHA-256, in hex.

    `role` keeps one end's proof from serving as the other end's proof.
    """
    content = f"{role}|{ticket.run_id}|{address}|{server_nonce}|{client_nonce}"
    return hmac.new(ticket.token.encode(), content.encode(), hashlib.sha256).hexdigest()


def _equal(one: str, other: str) -> bool:
    # in constant time: the duration of `==` would reveal how much of a proof is right
    return hmac.compare_digest(one.encode(), other.encode())
