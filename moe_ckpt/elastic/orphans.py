"""The processes that a worker leaves behind: a supervisor adopts them, and ends them before the next worker starts.

Owns: descendants of this process that another process has started: loader processes, writers of checkpoints and their
resource trackers, also in sessions of their own. Must not: end a process that this one has started itself.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Collection

from moe_ckpt.linux import children_of

_PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 2.0
"""The time between SIGTERM and SIGKILL. Resource trackers of multiprocessing ignore the first, and unlink semaphores
and shared memory once the processes that use these have ended."""


def adopt_orphans() -> None:
    """Let the kernel make this process the parent of each descendant that loses its own."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_ended(but: Collection[int]) -> set[int]:
    """Collect the exit statuses of children that have ended, up to one of `but`; return their pids."""
    reaped: set[int] = set()
    while (ended := _first_ended()) and ended not in but:
        os.waitpid(ended, 0)
        reaped.add(ended)
    return reaped


def end_orphans(own: Collection[int], *, grace_s: float = GRACE_S) -> None:
    """End all descendants of this process but its `own` children, and those of these.

    Call when the worker has ended: its children are this process's then, and the children of each follow once that has
    ended. A process that the kernel cannot end within another `grace_s` is left to end as soon as it can.
    """
    gently_until_s = time.monotonic() + grace_s
    until_s = gently_until_s + grace_s
    while (now_s := time.monotonic()) < until_s:
        orphans = [pid for pid in children_of(os.getpid()) if pid not in own]
        if not orphans:
            return
        is_gentle = now_s < gently_until_s
        for pid in orphans:
            os.kill(pid, signal.SIGTERM if is_gentle else signal.SIGKILL)  # one that has ended takes it, too
        _reap_one(orphans, (gently_until_s if is_gentle else until_s) - now_s)


def _reap_one(pids: list[int], timeout_s: float) -> None:
    """Wait until one of these children has ended, and collect the statuses of all that have."""
    poll, fds = select.poll(), [os.pidfd_open(pid) for pid in pids]
    try:
        for fd in fds:
            poll.register(fd, select.POLLIN)
        ended = {fd for fd, _ in poll.poll(1000 * timeout_s)}
    finally:
        for fd in fds:
            os.close(fd)
    for pid, fd in zip(pids, fds, strict=True):
        if fd in ended:
            os.waitpid(pid, 0)


def _first_ended() -> int:
    """Return the pid of a child that has ended and was not waited for, or 0."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return ended.si_pid if ended else 0
