"""Accepts connections and serves each in a thread of its own.

Owns: the listening socket, the threads and their connections. Must not: interpret the
messages on a connection.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from threading import Event, Lock, Thread

from moe_ckpt.replication.connection import Connection
from moe_ckpt.replication.strangers import RareWarning

_RETRY_S = 0.1

_log = logging.getLogger(__name__)


class ConnectionServer:
    """Accepts connections at a listening socket until `close`."""

    def __init__(
        self, listening: socket.socket, serve: Callable[[Connection], None]
    ) -> None:
        """Begin to accept connections.

        Args:
            listening: The socket, which the server owns from now on.
            serve: Serves one connection, on a thread of its own. The connection ends
                when this function returns or raises.
        """
        self._listening = listening
        self._serve = serve
        self._lock = Lock()
        self._closed = Event()
        self._failures = RareWarning(_log, "a connection was not accepted")
        self._links: dict[Connection, Thread] = {}
        self._thread = Thread(target=self._accept_all, name="listener", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End all connections.

        Args:
            timeout_s: Longest wait for the end of each thread, in seconds.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join(timeout_s)
        self._listening.close()
        with self._lock:
            open_links = list(self._links.items())
        for link, thread in open_links:
            link.shut_down()
            thread.join(timeout_s)

    def _accept_all(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listening.accept()
                self._start(Connection(connection))
            except (OSError, RuntimeError) as error:
                # no descriptor or thread is left, or the client has gone
                if not self._closed.wait(_RETRY_S):
                    self._failures.give(str(error))

    def _start(self, link: Connection) -> None:
        thread = Thread(target=self._run, args=(link,), name="served-link", daemon=True)
        with self._lock:
            # under the lock: a connection that ends at once removes its entry, which
            # must exist by then
            thread.start()
            self._links[link] = thread

    def _run(self, link: Connection) -> None:
        try:
            self._serve(link)
        except OSError as error:
            _log.info("a connection ended: %s", error)
        except Exception:
            # top of the thread: the failure of one connection must not affect another
            # one
            _log.exception("a connection ended")
        finally:
            with self._lock:
                del self._links[link]
            link.close()
