"""The janitor of a node's folder in shared memory.

The janitor is a process that removes the folder once the agent has ended.

Owns: the end of the folder, and SIGCONT for supervisors that a signal has stopped. Must
not: know the contents of the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import NoReturn

from moe_ckpt.elastic.node_process import (
    node_process,
    node_processes,
    start_node_process,
)
from moe_ckpt.elastic.stopped import StoppedProcesses
from moe_ckpt.linux import is_stopped

JANITOR = "janitor"
"""The janitor's name among the node's processes."""

SUPERVISORS = "rank*"
"""The pattern of the names of the node's supervisors."""

_LOOKS = 4  # in the time for which a supervisor may be stopped
_END_S = 60.0  # more than a supervisor takes to end its processes
_LOOK_S = 0.1


def start_janitor(root: Path, agent_pid: int, patience_s: float) -> None:
    """Start a janitor for a folder unless the folder has one.

    Args:
        root: The node's folder.
        agent_pid: The process whose end ends the folder.
        patience_s: Seconds after which the janitor sends SIGCONT to a stopped
            supervisor.
    """
    start_node_process(
        root,
        JANITOR,
        agent_pid,
        lambda: contextlib.nullcontext(
            lambda agent: _wait_and_remove(root, agent_pid, agent, patience_s)
        ),
    )


def janitor_of(root: Path) -> int | None:
    """Return the pid of a folder's janitor; None if the folder has none."""
    return node_process(root, JANITOR)


def janitor_of_node(root: Path) -> dict[int, str]:
    """Return the janitor of a folder by pid, with a name for messages."""
    pid = janitor_of(root)
    return {pid: "janitor of the node's memory"} if pid else {}


def _wait_and_remove(
    root: Path, agent_pid: int, agent: int, patience_s: float
) -> NoReturn:
    """Be the janitor of a folder until its agent has ended; then remove the folder.

    `agent` is the pidfd of the agent.
    """
    try:
        null = os.open(os.devnull, os.O_RDWR)
        # a reader of the job's output must not wait for this process
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.chdir("/")
        users = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        _watch_supervisors(root, agent_pid, agent, patience_s)
        supervisors = _opened(node_processes(root, SUPERVISORS))
        shutil.rmtree(root, ignore_errors=True)
        # daemons may outlive the agent for a while, and create their folders again
        _await_unlocked(users, supervisors)
        shutil.rmtree(root, ignore_errors=True)
    finally:
        os._exit(0)


def _watch_supervisors(
    root: Path, agent_pid: int, agent: int, patience_s: float
) -> None:
    """Send SIGCONT to stopped supervisors until the agent has ended.

    If the agent is stopped as well, its supervisors stay stopped.
    """
    poll = select.poll()
    poll.register(agent, select.POLLIN)
    stopped = StoppedProcesses(patience_s)
    while not poll.poll(1000 * patience_s / _LOOKS):
        # a user who stops the agent as well, by Ctrl-Z for example, has suspended the
        # job
        stopped.look([] if is_stopped(agent_pid) else node_processes(root, SUPERVISORS))


def _await_unlocked(users: int, supervisors: list[int]) -> None:
    """Wait until no process has a folder locked.

    Supervisors that have not ended `_END_S` seconds after the agent are killed.

    Args:
        users: A descriptor of the folder, which each process that uses the folder has
            locked.
        supervisors: The pidfds of the supervisors that use the folder.
    """
    until_s = time.monotonic() + _END_S
    while supervisors and time.monotonic() < until_s:
        # a stopped supervisor has not yet received the signal of its parent's death
        _send_all(supervisors, signal.SIGCONT)
        poll = select.poll()
        for fd in supervisors:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(1000 * _LOOK_S):
            supervisors.remove(fd)
    _send_all(supervisors, signal.SIGKILL)
    fcntl.flock(users, fcntl.LOCK_EX)


def _opened(pids: list[int]) -> list[int]:
    """Return the pidfds of the processes that have not ended."""
    pidfds: list[int] = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfds.append(os.pidfd_open(pid))
    return pidfds


def _send_all(pidfds: list[int], number: signal.Signals) -> None:
    for fd in pidfds:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, number)
