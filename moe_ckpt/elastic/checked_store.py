"""A client of the job's store with one clear error, whose calls count as waits.

A cut network shows in the store first. torch's client then blocks in any request for as
long as TCP does, and raises an error that names neither the store nor a setting.

Owns: the error StoreLostError, and the limit on TCP's patience. Must not: retry, as
some requests count.
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

_PROBES = 4  # keepalive probes within the permitted silence
_LONGEST_PAUSE_S = 32767  # Linux's limit, in seconds


class CheckedStore(dist.Store):
    """A client of the job's store, for a worker or a supervisor.

    A request raises StoreLostError if the connection is broken. A wait that no other
    process ends in time raises torch's DistStoreError.
    """

    def __init__(
        self,
        client: dist.Store,
        waits: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        *,
        heeds_signals: bool = False,
    ) -> None:
        """Wrap a client.

        Args:
            client: torch's client.
            waits: Returns a context in which each request runs.
            heeds_signals: Whether Python's signal handlers run during a request in the
                main thread. torch's client alone restarts its system call after a
                signal, and no handler runs before the answer arrives.
        """
        super().__init__()
        self._client = client
        self._waits = waits
        self._call = _call_in_thread if heeds_signals else operator.call

    @property
    def inside(self) -> dist.Store:
        """The wrapped client, which raises torch's own errors."""
        return self._client

    def ask(self, request: str, /, *arguments: Any) -> Any:
        """Send one request to the store.

        Args:
            request: The name of the client's method.
            arguments: The arguments of the method.

        Raises:
            StoreLostError: The store does not answer.
            torch.distributed.DistStoreError: A wait took too long.
        """
        with self._waits():
            try:
                return self._call(getattr(self._client, request), *arguments)
            except dist.DistStoreError:
                raise  # the store works: a wait took too long
            except (RuntimeError, OSError) as error:
                # DistNetworkError, and the error of a closed socket
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
    # a pool for one request only: a supervisor forks afterwards, and must have one
    # thread then
    with ThreadPoolExecutor(max_workers=1) as pool:
        # without held signals, a handler that forks (a supervisor's does) would wait
        # for ever for a lock that `submit` holds, as forks take that lock
        with signals_held():
            answer = pool.submit(request, *arguments)
        return answer.result()


def end_silent_connections(port: int, after_s: float) -> None:
    """Let the kernel end connections of this process that have been silent too long.

    By default TCP waits about 15 minutes for a confirmation, and without limit if
    nothing was sent. Confirmations come from the kernel at the other end, so a server
    may be slow or stopped.

    Args:
        port: The remote port of the connections.
        after_s: Seconds for which the other end may confirm nothing.
    """
    for fd, _ in own_files():
        with contextlib.suppress(OSError), duplicate_socket(fd) as connection:
            if connection.type == socket.SOCK_STREAM and _peer_port(connection) == port:
                _limit_silence(connection, after_s)


def _peer_port(connection: socket.socket) -> int | None:
    """Return the port of the other end; None for a connection without ports."""
    return (
        connection.getpeername()[1]
        if connection.family in (socket.AF_INET, socket.AF_INET6)
        else None
    )


def _limit_silence(connection: socket.socket, after_s: float) -> None:
    # Keepalive probes find silent connections that send nothing, and the user timeout
    # those with unconfirmed bytes. With both set, the user timeout also decides when
    # the kernel gives up probing (tcp(7)), so TCP_KEEPCNT is not set
    pause_s = min(max(1, round(after_s / _PROBES)), _LONGEST_PAUSE_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
    connection.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * after_s)
    )
