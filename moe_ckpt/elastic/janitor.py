"""The janitor of a node's folder in shared memory.

The janitor is a process that removes the folder once the agent has ended.

    ROOT/janitor                      locked by the janitor as long as it lives
    ROOT/process-janitor-PID-TICKS    the janitor, and when it was started
    ROOT/process-rankNNNN-PID-TICKS   a rank's supervisor

Owns: these files, and SIGCONT for supervisors that a signal has stopped. Must not: know
the contents of the folder.
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

from moe_ckpt.elastic.stopped import StoppedProcesses
from moe_ckpt.linux import is_alive, is_stopped, signals_held, start_ticks
from moe_ckpt.private_files import locked

JANITOR = "janitor"
"""The file that the janitor has locked, and the janitor's name among the processes."""

_SUPERVISORS = "rank*"
_LOOKS = 4  # in the time for which a supervisor may be stopped
_END_S = 60.0  # more than a supervisor takes to end its processes
_LOOK_S = 0.1


def start_janitor(root: Path, users: int, agent_pid: int, patience_s: float) -> None:
    """Start a janitor for a folder unless the folder has one.

    Args:
        root: The node's folder.
        users: The descriptor by which the calling process has the folder locked.
        agent_pid: The process whose end ends the folder.
        patience_s: Seconds after which the janitor sends SIGCONT to a stopped
            supervisor.
    """
    with contextlib.suppress(BlockingIOError), locked(root / JANITOR, wait=False):
        _fork_janitor(root, users, agent_pid, patience_s)


def janitor_of(root: Path) -> int | None:
    """Return the pid of a folder's janitor; None if the folder has none."""
    return next(iter(_processes(root, JANITOR)), None)


def note_process(root: Path, name: str, pid: int) -> None:
    """Record a process as the janitor or as a rank's supervisor.

    The record replaces the record of an earlier process of the same name.

    Args:
        root: The node's folder.
        name: `JANITOR`, or the name of the rank's folder.
        pid: The process, which must be alive.
    """
    for earlier in root.glob(f"process-{name}-*"):
        earlier.unlink(missing_ok=True)
    (root / f"process-{name}-{pid}-{start_ticks(pid)}").touch()


def _processes(root: Path, name: str) -> list[int]:
    """Return the pids of live processes whose recorded name matches a pattern."""
    found = (path.name.rsplit("-", 2)[1:] for path in root.glob(f"process-{name}-*"))
    return [
        int(pid) for pid, started in found if is_alive(int(pid), started=int(started))
    ]


def _fork_janitor(root: Path, users: int, agent_pid: int, patience_s: float) -> None:
    # before the forks: later the pid may belong to another process
    agent = os.pidfd_open(agent_pid)
    # the janitor holds signals for good: a scheduler sends signals to all processes of
    # a job
    with signals_held():
        child = os.fork()
        if child == 0:
            os.setsid()  # out of reach of torchrun's signals to its children's groups
            try:
                # two forks: the janitor is then no child of a supervisor, which ends
                # processes that its workers leave behind
                janitor = os.fork()
                if janitor == 0:
                    os.close(users)  # inherited: the janitor would wait for itself
                    _wait_and_remove(root, agent_pid, agent, patience_s)
                # the supervisor waits for this process: if the janitor recorded itself,
                # the record could come while the supervisor removes the folder, and the
                # folder would stay
                note_process(root, JANITOR, janitor)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    os.close(agent)


def _wait_and_remove(root: Path, agent_pid: int, agent: int, patience_s: float) -> None:
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
        supervisors = _opened(_processes(root, _SUPERVISORS))
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
        stopped.look([] if is_stopped(agent_pid) else _processes(root, _SUPERVISORS))


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
