"""A client of the job's store whose failures are one clear error, and whose calls count
as waits.

A cut network shows in the store first: torch's client then blocks in any request, as
long as TCP does, and raises an error of its own that names neither the store nor a
setting. Owns: that error, and the limit on TCP's patience. Must not: retry, as some
requests count.
"""

from __future__ import annotations

import contextlib
import operator
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partialmethod
from typing import Any

import torch.distributed as dist

from moe_ckpt.errors import StoreLostError
from moe_ckpt.linux import duplicate_socket, own_files, signals_held

_PROBES = 4  # in the time that a connection may be silent
_LONGEST_PAUSE_S = 32767  # Linux allows no more


class CheckedStore(dist.Store):
    """A client of the job's store, for a worker or a supervisor.

    A request raises StoreLostError where the connection is broken. A wait that no other
    process ends in time raises torch's DistStoreError.

    Args:
        client: torch's client.
        waits: Returns a context in which each request runs.
        heeds_signals: Whether Python's signal handlers run during a request in the main
            thread. torch's client alone begins its system call again after a signal,
            and no handler runs before the answer is there.
    """

    def __init__(
        self,
        client: dist.Store,
        waits: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        *,
        heeds_signals: bool = False,
    ) -> None:
        super().__init__()
        self._client = client
        self._waits = waits
        self._call = _call_in_thread if heeds_signals else operator.call

    @property
    def inside(self) -> dist.Store:
        """The client, whose errors are torch's own."""
        return self._client

    def ask(self, request: str, /, *arguments: Any) -> Any:
        """Send one request. Raises StoreLostError, or torch's DistStoreError."""
        with self._waits():
            try:
                return self._call(getattr(self._client, request), *arguments)
            except dist.DistStoreError:
                raise  # the store has answered: a wait took too long
            except (RuntimeError, OSError) as error:
                # DistNetworkError, and that of a socket that is closed
                first_line = str(error).partition("\n")[0]
                raise StoreLostError(
                    "the store of the job at"
                    f" {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                    f" does not answer ({first_line}): its node has failed, or the"
                    " network to it is cut"
                ) from error


for _name in ("set", "get", "add", "compare_set", "check", "delete_key", "wait"):
    setattr(CheckedStore, _name, partialmethod(CheckedStore.ask, _name))


def _call_in_thread(request: Callable[..., Any], *arguments: Any) -> Any:
    # a pool for one request: a supervisor forks afterwards, and is to have one thread
    # then
    with ThreadPoolExecutor(max_workers=1) as pool:
        # a handler that forks, as a supervisor's does, would wait for ever for a lock
        # that `submit` has: forks take it
        with signals_held():
            answer = pool.submit(request, *arguments)
        return answer.result()


def end_silent_connections(port: int, after_s: float) -> None:
    """Let the kernel end this process's connections to a port once the other end has
    confirmed nothing for so long.

    TCP alone is patient for a quarter of an hour, and without limit where nothing was
    sent. The other end's kernel confirms, so a server may be slow, or stopped.
    """
    for fd, _ in own_files():
        with contextlib.suppress(OSError), duplicate_socket(fd) as connection:
            if connection.type == socket.SOCK_STREAM and _peer_port(connection) == port:
                _limit_silence(connection, after_s)


def _peer_port(connection: socket.socket) -> int | None:
    """Return the port of the other end; None where there is none."""
    return (
        connection.getpeername()[1]
        if connection.family in (socket.AF_INET, socket.AF_INET6)
        else None
    )


def _limit_silence(connection: socket.socket, after_s: float) -> None:
    # probes for connections that send nothing, the user timeout for bytes that are not
    # confirmed; with both set, the user timeout also decides when probes are given up
    # (tcp(7)), so there is no TCP_KEEPCNT
    pause_s = min(max(1, round(after_s / _PROBES)), _LONGEST_PAUSE_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
    connection.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * after_s)
    )
