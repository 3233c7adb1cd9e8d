"""A free port for a server in another process, which binds the port later."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def held_port(stack: ExitStack) -> int:
    """Return a port of 127.0.0.1 that Linux gives to no process before `stack` closes.

    Nothing listens on the port yet. A port that is only looked up and released may be
    the source port of another test's connection when the server starts. A server that
    sets SO_REUSEADDR, as servers of etcd, torch and asyncio do, can bind a held port.
    """
    holder = stack.enter_context(socket.socket())
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # this socket never listens, so Linux lets another socket with SO_REUSEADDR bind the
    # port, too
    holder.bind(("127.0.0.1", 0))
    return int(holder.getsockname()[1])
