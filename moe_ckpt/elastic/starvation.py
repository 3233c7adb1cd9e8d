"""The silence of a process, without the time in which it could not have run because
other processes had the CPUs.

A thread is starved while it is runnable and waits for a CPU:
/proc/PID/task/TID/schedstat has the sum of these waits, which the kernel adds once a
wait is over; until then the thread is runnable and its CPU time stands still. A process
is starved while any of its threads is: the heartbeat waits for the lock of the
interpreter, whose holder may wait for a CPU. So may the process that looks: it has seen
nothing of a time in which it did not look, and that does not count either. Owns: the
account of one silence. Must not: judge it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_FIRST_LOOK = 0.25  # of the limit: a process that is not silent costs no look
_LOOKS = 40  # a limit


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadReading:
    """A thread's seconds on a CPU and in the run queue so far, and whether it is
    runnable.
    """

    ran_s: float
    waited_s: float
    is_runnable: bool


Readings = Mapping[int, ThreadReading]
"""The readings of a process, by thread."""


class Silence:
    """The time since the last sign of life that counts against a process. `read`
    returns its threads' readings.
    """

    def __init__(self, limit_s: float, read: Callable[[], Readings]) -> None:
        self._limit_s = limit_s
        self._read = read
        self._since_s = 0.0
        self._looked_s = 0.0
        self._asked_s = -math.inf
        self._before: Readings | None = None
        self._starved_s = 0.0

    def exceeds_limit(self, since_s: float, now_s: float) -> bool:
        """Return whether the silence since `since_s` has lasted longer than the limit,
        starved time not counted.
        """
        first_look_s = _FIRST_LOOK * self._limit_s
        unseen_s, self._asked_s = now_s - self._asked_s, now_s
        if since_s != self._since_s or now_s - since_s < first_look_s:
            self._since_s, self._before, self._starved_s = since_s, None, 0.0
        if now_s - since_s >= first_look_s:
            self._look(now_s, unseen_s if unseen_s >= first_look_s else 0.0)
        return now_s - since_s - self._starved_s > self._limit_s

    def _look(self, now_s: float, unseen_s: float) -> None:
        if self._before is not None and now_s - self._looked_s < self._limit_s / _LOOKS:
            return
        readings, passed_s = self._read(), now_s - self._looked_s
        known_s = (
            0.0 if self._before is None else starved_s(self._before, readings, passed_s)
        )
        self._starved_s += max(known_s, unseen_s)
        # either may be of the time before
        self._starved_s = min(self._starved_s, now_s - self._since_s)
        self._before, self._looked_s = readings, now_s


def starved_s(before: Readings, after: Readings, passed_s: float) -> float:
    """Return the seconds for which a process was starved between two readings that are
    `passed_s` apart.
    """
    # the longest wait and not the sum: threads that wait at the same time starve the
    # process once
    longest_s = 0.0
    for thread, now in after.items():
        if (then := before.get(thread)) is None:
            continue
        stands_still = now.is_runnable and then.is_runnable and now.ran_s == then.ran_s
        waited_s = now.waited_s - then.waited_s
        longest_s = max(longest_s, waited_s, passed_s if stands_still else 0.0)
    return longest_s


def read_threads(pid: int) -> Readings:
    """Return the readings of a process's threads; none where the kernel keeps no
    account, or the process has ended.
    """
    readings: dict[int, ThreadReading] = {}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended
                ran_ns, waited_ns, _ = (task / "schedstat").read_text().split()
                # from the last bracket on: a thread's name may contain brackets and
                # spaces
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                reading = ThreadReading(
                    ran_s=int(ran_ns) / 1e9,
                    waited_s=int(waited_ns) / 1e9,
                    is_runnable=state == "R",
                )
                readings[int(task.name)] = reading
    return readings
