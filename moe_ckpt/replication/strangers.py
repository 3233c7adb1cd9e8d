"""Connections to a server that are not admitted yet.

Owns: the limit on the number of such connections, the choice of the connection that
makes room for a new one, and warnings whose number does not grow with the number of
connections. Must not: admit a connection (`admission` does).
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
    """The connections that wait for admission, for any thread.

    A connection beyond the limit displaces a waiting one: the oldest connection of the
    address with the most connections. A member of the run sends a greeting within
    milliseconds, and so the server admits a member beside any number of silent
    connections. Connections from one address displace each other before they displace
    connections from other addresses.
    """

    def __init__(self, limit: int, warning: RareWarning) -> None:
        """Begin without connections.

        Args:
            limit: Most connections that wait at one time.
            warning: Receives a text for each displaced connection.
        """
        self._limit = limit
        self._warning = warning
        self._lock = Lock()
        # addresses by connection, oldest first
        self._waiting: dict[Connection, str] = {}

    @contextlib.contextmanager
    def waiting(self, link: Connection) -> Iterator[None]:
        """Count a connection as waiting while the block runs.

        Operations of the block on `link` raise OSError once the connection is
        displaced.

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
        """Remove and return the connection that makes room; None if there is room."""
        if len(self._waiting) < self._limit:
            return None
        ((most, _),) = Counter(self._waiting.values()).most_common(1)
        oldest = next(
            link for link, address in self._waiting.items() if address == most
        )
        del self._waiting[oldest]
        return oldest


class RareWarning:
    """A warning of one kind, for any thread.

    The log gets at most one line in WARN_EVERY_S seconds.
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
            subject: First words of each warning.
            now: The clock, in seconds.
        """
        self._log = log
        self._subject = subject
        self._now = now
        self._lock = Lock()
        self._due_s = now()
        self._num_untold = 0

    def give(self, text: str) -> None:
        """Log a text, or only count the text if the last log line is too recent.

        The next logged text states the number of counted texts.

        Args:
            text: Description of the event.
        """
        with self._lock:
            if self._now() < self._due_s:
                self._num_untold += 1
                return
            self._due_s = self._now() + WARN_EVERY_S
            untold, self._num_untold = self._num_untold, 0
        more = f" (and {untold} more since the last such line)" if untold else ""
        self._log.warning("%s: %s%s", self._subject, text, more)
