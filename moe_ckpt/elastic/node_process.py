"""Processes that serve all ranks of a node, and live as long as torchrun's agent.

Such a process is no child of a supervisor: supervisors end when torchrun starts their
ranks again, and end the processes that their workers leave behind.

    ROOT/NAME                     locked by the process NAME as long as it lives
    ROOT/process-NAME-PID-TICKS   a process, and when it was started

Owns: these files in the node's folder. Must not: know what the processes do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn

from moe_ckpt.linux import is_alive, own_files, signals_held, start_ticks
from moe_ckpt.private_files import locked

Main = Callable[[int], NoReturn]
"""The work of a process of a node.

Receives a pidfd of the agent, with whose end the work has to end.
"""


def start_node_process(
    root: Path,
    name: str,
    agent_pid: int,
    prepare: Callable[[], AbstractContextManager[Main]],
) -> None:
    """Start a process unless the node has one of this name, or its agent has ended.

    The process holds signals: a scheduler sends signals to all processes of a job. Call
    from a process with one thread.

    Args:
        root: The node's folder.
        name: The name of the process.
        agent_pid: The agent.
        prepare: Called once no other process can start one of this name. Returns the
            work, in a context in which the calling process has what the work inherits.
    """
    try:
        with (
            contextlib.suppress(BlockingIOError),
            locked(root / name, wait=False),
            prepare() as main,
        ):
            _fork(root, name, agent_pid, main)
    except (FileNotFoundError, ProcessLookupError):
        # the folder is deleted once the agent has ended
        if is_alive(agent_pid):
            raise


def node_process(root: Path, name: str) -> int | None:
    """Return the pid of a node's process; None if the node has none of this name."""
    return next(iter(node_processes(root, name)), None)


def node_processes(root: Path, pattern: str) -> list[int]:
    """Return the pids of live processes whose recorded name matches a pattern."""
    found = (path.name.rsplit("-", 2)[1:] for path in root.glob(f"process-{pattern}-*"))
    return [
        int(pid) for pid, started in found if is_alive(int(pid), started=int(started))
    ]


def note_process(root: Path, name: str, pid: int) -> None:
    """Record a process of a node.

    The record replaces the record of an earlier process of the same name.

    Args:
        root: The node's folder.
        name: The name of the process.
        pid: The process, which must be alive.
    """
    for earlier in root.glob(f"process-{name}-*"):
        earlier.unlink(missing_ok=True)
    (root / f"process-{name}-{pid}-{start_ticks(pid)}").touch()


def _fork(root: Path, name: str, agent_pid: int, main: Main) -> None:
    # before the forks: later the pid may belong to another process
    agent = os.pidfd_open(agent_pid)
    with signals_held():
        child = os.fork()
        if child == 0:
            os.setsid()  # out of reach of torchrun's signals to its children's groups
            try:
                # two forks: the process is then no child of a supervisor
                process = os.fork()
                if process == 0:
                    _leave_node(root)
                    main(agent)
                # the supervisor waits for this process: if the other process recorded
                # itself, the record could come while the supervisor removes the folder,
                # and the folder would stay
                note_process(root, name, process)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    os.close(agent)


def _leave_node(root: Path) -> None:
    """Close inherited descriptors of the node's folder, which the process must not use.

    By these descriptors the folder is locked: the janitor would wait for the process.
    """
    for fd, name in own_files():
        if name == str(root):
            os.close(fd)
