"""Calls of a machine's supervisors by its watcher, over a Unix socket.

    supervisor --connect--> watcher
    supervisor <-- a call -- watcher    now, or once there is one

Owns: the form of a call. A supervisor whose watcher has died sees the end of the
connection.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec

from moe_ckpt.private_files import bind_private

_SOCKET = "calls"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of a machine's supervisors: to be a node, or to end with the job."""

    node: int | None
    """The node; None: the job has ended."""

    status: int = 0
    """Exit status of a job that has ended."""

    why: str = ""
    """Why the machine that was the node before is lost; empty if there was none."""

    last_seen_unix_s: float = 0.0
    """Time of that machine's last sign of life, in seconds of Unix time by this
    machine's clock.
    """

    found_unix_s: float = 0.0
    """Time at which the loss was detected, in seconds of Unix time."""


_CALLS = msgspec.json.Decoder(Call)


def listen_for_supervisors(root: Path) -> socket.socket:
    """Return a socket at which supervisors wait for calls.

    Replaces the socket of an earlier watcher.

    Args:
        root: The machine's folder.
    """
    return bind_private(root / _SOCKET)


def send_call(supervisor: socket.socket, call: Call) -> None:
    """Send a call to a supervisor, and close the connection."""
    # OSError: the supervisor has ended
    with supervisor, contextlib.suppress(OSError):
        supervisor.sendall(msgspec.json.encode(call))


def wait_for_call(root: Path) -> Call | None:
    """Wait, without limit, for a call.

    Args:
        root: The machine's folder.

    Returns:
        The call; None if the machine has no watcher, or the watcher has ended.
    """
    with socket.socket(socket.AF_UNIX) as watcher, contextlib.suppress(OSError):
        watcher.connect(str(root / _SOCKET))
        with watcher.makefile("rb") as text:
            if call := text.read():
                return _CALLS.decode(call)
    return None
