"""A free port for a server of another process, which binds it some time after the test
has chosen it.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack


def held_port(stack: ExitStack) -> int:
    """Return a port of 127.0.0.1 that no process is given before `stack` ends, and
    where nothing listens yet.

    A port that is only looked up and let go may be the source port of another test's
    connection by the time that the server starts. A server that sets SO_REUSEADDR, as
    etcd, torch and asyncio do, may bind a held one.
    """
    holder = stack.enter_context(socket.socket())
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # and never listens: then Linux lets another socket that reuses addresses bind it
    holder.bind(("127.0.0.1", 0))
    return int(holder.getsockname()[1])
