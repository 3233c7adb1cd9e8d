"""The connections to a server that are not admitted yet.

Owns: the limit on the number of such connections, the choice of the connection that
makes room for a new one, and warnings whose number does not grow with that of the
connections. Must not: admit a connection (`admission`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from threading import Lock

from moe_ckpt.replication.connection import Connection

WARN_EVERY_S = 60.0


class Strangers:
    """At most `limit` connections that wait for their admission, for any thread.

    A further connection displaces one that waits: the oldest of the address that has
    most. A member sends its greeting within milliseconds, and so is admitted beside any
    number of silent connections; connections from one address displace each other
    before they displace those of other addresses.
    """

    def __init__(self, limit: int, warning: RareWarning) -> None:
        """Begin without connections.

        Args:
            limit: The most connections that wait at one time.
            warning: Is given a text for each connection that is displaced.
        """
        self._limit = limit
        self._warning = warning
        self._lock = Lock()
        self._waiting: dict[Connection, str] = {}  # the address of each, oldest first

    @contextlib.contextmanager
    def waiting(self, link: Connection) -> Iterator[None]:
        """Count a connection as waiting inside the block.

        The block's operations on `link` raise OSError once the connection is displaced.

        Args:
            link: The connection.

        Raises:
            OSError: The connection has ended already.
        """
        address = link.peer_host()
        with self._lock:
            displaced = self._make_room()
            self._waiting[link] = address
        if displaced:
            displaced.shut_down()
            self._warning.give(
                f"a connection was closed: {self._limit} others wait for admission"
            )
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(link, None)

    def _make_room(self) -> Connection | None:
        """Take out the connection that makes room for another one, if there is no room."""
        if len(self._waiting) < self._limit:
            return None
        ((most, _),) = Counter(self._waiting.values()).most_common(1)
        oldest = next(
            link for link, address in self._waiting.items() if address == most
        )
        del self._waiting[oldest]
        return oldest


class RareWarning:
    """A warning of one kind, logged once in WARN_EVERY_S seconds at most, from any
    thread.
    """

    def __init__(
        self,
        log: logging.Logger,
        subject: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without a warning.

        Args:
            log: Receives the warnings.
            subject: The first words of each.
            now: The clock, in seconds.
        """
        self._log = log
        self._subject = subject
        self._now = now
        self._lock = Lock()
        self._due_s = now()
        self._num_untold = 0

    def give(self, text: str) -> None:
        """Log a text, or count it: the next text that is logged has the number of those
        before.

        Args:
            text: What has happened.
        """
        with self._lock:
            if self._now() < self._due_s:
                self._num_untold += 1
                return
            self._due_s = self._now() + WARN_EVERY_S
            untold, self._num_untold = self._num_untold, 0
        more = f" (and {untold} more since the last such line)" if untold else ""
        self._log.warning("%s: %s%s", self._subject, text, more)
