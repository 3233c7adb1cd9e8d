"""Processes of a job that a signal has stopped (SIGSTOP).

Other processes of the job look for stopped ones: a supervisor watches its daemon and
the janitor of its node's memory, and the janitor watches the supervisors. Owns: how
long such a process stays stopped. Must not: end such a process, which continues where
it was after SIGCONT.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable

from moe_ckpt.linux import is_stopped


class StoppedProcesses:
    """Sends SIGCONT to processes that have been stopped for too long.

    A whole job that is stopped, for example by a batch system that suspends the job,
    stays stopped: time in which the calling process does not look does not count.
    """

    def __init__(
        self, patience_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin without a stopped process.

        Args:
            patience_s: Seconds for which a process may be stopped.
            now: The clock, in seconds.
        """
        self._patience_s = patience_s
        self._now = now
        self._looked_s = now()
        self._since_s: dict[int, float] = {}

    def look(self, pids: Iterable[int]) -> list[int]:
        """Send SIGCONT to each process that was stopped at all looks of `patience_s`.

        Args:
            pids: All processes that are watched, at each look.

        Returns:
            The processes that were sent the signal.
        """
        now_s = self._now()
        if now_s - self._looked_s > self._patience_s / 2:
            self._since_s = {}  # this process may have been stopped, too
        self._looked_s = now_s
        stopped = {pid for pid in pids if is_stopped(pid)}
        self._since_s = {pid: self._since_s.get(pid, now_s) for pid in stopped}
        found = [
            pid
            for pid, since_s in self._since_s.items()
            if now_s - since_s >= self._patience_s
        ]
        for pid in found:
            go_on(pid)
            del self._since_s[pid]
        return found


def go_on(pid: int) -> None:
    """Send SIGCONT to a process, unless the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
