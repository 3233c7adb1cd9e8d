"""The processes that a worker leaves behind: a supervisor adopts them, and ends them
before the next worker starts.

Owns: descendants of this process that another process has started: loader processes,
writers of checkpoints and their resource trackers, also in sessions of their own. Must
not: end a process that this one has started itself.
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
"""The time between SIGTERM and SIGKILL. Resource trackers of multiprocessing ignore the
first, and unlink semaphores and shared memory once the processes that use these have
ended.
"""


def adopt_orphans() -> None:
    """Let the kernel make this process the parent of each descendant that loses its
    own.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_ended(but: Collection[int]) -> set[int]:
    """Collect the exit statuses of children that have ended, up to one of `but`; return
    their pids.
    """
    reaped: set[int] = set()
    # the status of a child in `but` is left for its own caller
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):  # there is none
        while (ended := os.waitid(os.P_ALL, 0, look)) and ended.si_pid not in but:
            os.waitpid(ended.si_pid, 0)
            reaped.add(ended.si_pid)
    return reaped


def end_orphans(own: Collection[int]) -> None:
    """End all descendants of this process but its `own` children, and those of these.

    Call when the worker has ended: its children are this process's then, and the
    children of each follow once that has ended. A process that the kernel cannot end
    within another GRACE_S is left to end as soon as it can.
    """
    gently_until_s = time.monotonic() + GRACE_S
    until_s = gently_until_s + GRACE_S
    while (now_s := time.monotonic()) < until_s:
        orphans = [pid for pid in children_of(os.getpid()) if pid not in own]
        if not orphans:
            return
        is_gentle = now_s < gently_until_s
        for pid in orphans:
            # one that has ended takes it, too
            os.kill(pid, signal.SIGTERM if is_gentle else signal.SIGKILL)
        with watching(orphans) as ended:
            for pid in ended((gently_until_s if is_gentle else until_s) - now_s):
                os.waitpid(pid, 0)


@contextlib.contextmanager
def watching(pids: Collection[int]) -> Iterator[Callable[[float], list[int]]]:
    """Give a function that waits up to some seconds until any of these children has
    ended, and returns those that have.

    Their exit statuses are still to be collected.
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
