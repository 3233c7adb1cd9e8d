"""The processes that a worker leaves behind.

A supervisor adopts these processes, and ends them before the next worker starts.

Owns: descendants of this process that another process has started: loader processes,
writers of checkpoints and their resource trackers, also in sessions of their own. Must
not: end a process that this process has started itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterator

from moe_ckpt.linux import children_of

_PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL. Resource trackers of multiprocessing ignore
SIGTERM, and unlink semaphores and shared memory once the processes that use these have
ended.
"""


def adopt_orphans() -> None:
    """Make this process the parent of each descendant that loses its own parent."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_ended(but: Collection[int]) -> dict[int, int]:
    """Collect the exit statuses of children that have ended.

    The collection stops at the first child in `but`.

    Args:
        but: Children whose statuses are left for other callers.

    Returns:
        The wait statuses of the collected children, by pid.
    """
    reaped: dict[int, int] = {}
    # WNOWAIT leaves the status of a child in `but` for its own caller
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):  # no children
        while (ended := os.waitid(os.P_ALL, 0, look)) and ended.si_pid not in but:
            _, reaped[ended.si_pid] = os.waitpid(ended.si_pid, 0)
    return reaped


def end_orphans(own: Collection[int]) -> None:
    """End all descendants of this process except `own` children and their descendants.

    Call when the worker has ended: its children are then children of this process. The
    children of each orphan follow once that orphan has ended. SIGTERM comes first, and
    SIGKILL after GRACE_S seconds. A process that the kernel cannot end within another
    GRACE_S seconds is left to end later.

    Args:
        own: The children that must stay.
    """
    gently_until_s = time.monotonic() + GRACE_S
    until_s = gently_until_s + GRACE_S
    while (now_s := time.monotonic()) < until_s:
        orphans = [pid for pid in children_of(os.getpid()) if pid not in own]
        if not orphans:
            return
        is_gentle = now_s < gently_until_s
        for pid in orphans:
            # a child that has ended accepts the signal, too
            os.kill(pid, signal.SIGTERM if is_gentle else signal.SIGKILL)
        with watching(orphans) as ended:
            for pid in ended((gently_until_s if is_gentle else until_s) - now_s):
                os.waitpid(pid, 0)


@contextlib.contextmanager
def watching(pids: Collection[int]) -> Iterator[Callable[[float], list[int]]]:
    """Watch children for their ends.

    Exit statuses are not collected.

    Args:
        pids: The children.

    Yields:
        A function that waits up to the given seconds until any of the children has
        ended, and returns the children that have ended.
    """
    poll, pid_of = select.poll(), dict[int, int]()
    try:
        for pid in pids:
            fd = os.pidfd_open(pid)
            pid_of[fd] = pid
            poll.register(fd, select.POLLIN)
        yield lambda timeout_s: [pid_of[fd] for fd, _ in poll.poll(1000 * timeout_s)]
    finally:
        for fd in pid_of:
            os.close(fd)
