"""Requests to one server, over a connection that is reopened after a failure.

Owns: the connection, and the number and time of attempts. Must not: interpret
requests.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from threading import Event
from typing import TypeVar

from moe_ckpt.errors import MoeCkptError
from moe_ckpt.replication.admission import open_connection
from moe_ckpt.replication.connection import Connection, RefusedError
from moe_ckpt.replication.messages import Address, Ticket

# pauses before the attempts; short, as the successor of a daemon is ready after a fork
_DELAYS_S = (0.0, 0.05, 0.1, 0.2, 0.4)

T = TypeVar("T")


class RetryingClient:
    """Client of one server, for one thread."""

    def __init__(
        self, address: Address, ticket: Ticket, failure: type[MoeCkptError]
    ) -> None:
        """Create a client that connects on the first call.

        Args:
            address: The server's address.
            ticket: The run, and the run's secret.
            failure: Class of the error after the last attempt. The message names the
                server and the last reason.
        """
        self.address = address
        self._ticket = ticket
        self._failure = failure
        self._link: Connection | None = None
        self._closing = Event()

    def call(self, what: str, act: Callable[[Connection], T], until_s: float) -> T:
        """Return the result of `act` over a connection.

        The client repeats `act` if the connection breaks or garbles bytes. There are at
        most 5 attempts.

        Args:
            what: Description of the request, for errors.
            act: Exchanges messages over an admitted connection.
            until_s: Time after which no attempt begins, on `time.monotonic`.

        Returns:
            The result of `act`.

        Raises:
            MoeCkptError: Of class `failure`: the server refuses, `act` fails on this
                end, or no attempt is left.
        """
        reason: Exception | None = None
        num_attempts = 0
        for delay_s in _DELAYS_S:
            if reason and (self._closing.wait(delay_s) or time.monotonic() >= until_s):
                break
            num_attempts += 1
            try:
                return self._attempt(act, until_s)
            # an error on this end, such as a withdrawn blob or a full disk: another
            # attempt would fail as well
            except MoeCkptError as error:
                raise self._failure(f"{what}, {self.address}: {error}") from error
            except RefusedError as error:
                if not error.garbled:
                    raise self._failure(
                        f"{what}, refused by {self.address}: {error}"
                    ) from error
                reason = error
            except OSError as error:
                reason = error
        raise self._failure(
            f"{what}, {self.address}: {reason}, after {num_attempts} attempts"
        ) from reason

    def shut_down(self) -> None:
        """End the operation in progress and make later calls fail, from any thread."""
        self._closing.set()
        if link := self._link:
            link.shut_down()

    def close(self) -> None:
        """Close the connection, from the thread that uses this client."""
        if self._link:
            self._link.close()
            self._link = None

    def pause(self, timeout_s: float) -> None:
        """Wait, or raise as soon as the client is shut down.

        Args:
            timeout_s: Time to wait, in seconds.

        Raises:
            OSError: The client is shut down.
        """
        if self._closing.wait(timeout_s):
            raise ConnectionAbortedError("closed on this side")

    def _attempt(self, act: Callable[[Connection], T], until_s: float) -> T:
        with contextlib.ExitStack() as on_failure:
            # so that the server ends its operation, too
            on_failure.callback(self.close)
            link = self._connected(until_s)
            link.allow(until_s - time.monotonic())
            done = act(link)
            on_failure.pop_all()
            return done

    def _connected(self, until_s: float) -> Connection:
        self.pause(0)
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no time is left")
        if self._link is None:
            self._link = open_connection(self.address, self._ticket, left_s, self.pause)
        # a `shut_down` before this connection existed has not ended this connection
        self.pause(0)
        return self._link
