"""Requests to one server, over a connection that is opened again after a failure.

Owns: the connection, and the number and time of attempts. Must not: know the requests.
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

# before each attempt; the successor of a daemon is ready after a fork
_DELAYS_S = (0.0, 0.05, 0.1, 0.2, 0.4)

T = TypeVar("T")


class RetryingClient:
    """Calls one server, from one thread. A final failure raises `failure`, naming the
    server and the last reason.
    """

    def __init__(
        self, address: Address, ticket: Ticket, failure: type[MoeCkptError]
    ) -> None:
        self.address = address
        self._ticket = ticket
        self._failure = failure
        self._link: Connection | None = None
        self._closing = Event()

    def call(self, what: str, act: Callable[[Connection], T], until_s: float) -> T:
        """Return the result of `act` over a connection. It is repeated if the
        connection breaks or garbles bytes.

        There are at most 5 attempts, and none after `until_s` (of `time.monotonic`).
        Raises `failure`.
        """
        reason: Exception | None = None
        num_attempts = 0
        for delay_s in _DELAYS_S:
            if reason and (self._closing.wait(delay_s) or time.monotonic() >= until_s):
                break
            num_attempts += 1
            try:
                return self._attempt(act, until_s)
            # of this end (a blob that was withdrawn, a full disk): another attempt
            # would fail as well
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
        """End the operation in progress, from any thread; later calls fail."""
        self._closing.set()
        if link := self._link:
            link.shut_down()

    def close(self) -> None:
        """Close the connection, from the calling thread."""
        if self._link:
            self._link.close()
            self._link = None

    def pause(self, timeout_s: float) -> None:
        """Wait, or raise OSError as soon as this is shut down."""
        if self._closing.wait(timeout_s):
            raise ConnectionAbortedError("closed on this side")

    def _attempt(self, act: Callable[[Connection], T], until_s: float) -> T:
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)  # the other end ends its operation, too
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
        # a thread that called `shut_down` before this connection existed has not ended
        # it
        self.pause(0)
        return self._link
