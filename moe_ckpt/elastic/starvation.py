"""The silence of a process, without the time in which other processes had the CPUs.

A thread is starved while the thread is runnable and waits for a CPU.
/proc/PID/task/TID/schedstat has the sum of these waits, to which the kernel adds a wait
once the wait is over. Until then the thread is runnable, and its CPU time stands still.
A process is starved while any of its threads is starved: the heartbeat waits for the
lock of the interpreter, whose holder may wait for a CPU.

The process that looks may be starved, too. Time in which that process did not look does
not count either. Owns: the account of one silence. Must not: judge the silence.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_FIRST_LOOK = 0.25  # of the limit: a process that is not silent costs no look
_LOOKS = 40  # looks within the limit


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadReading:
    """A reading of one thread."""

    ran_s: float
    """Seconds on a CPU so far."""

    waited_s: float
    """Seconds in the run queue so far."""

    is_runnable: bool
    """Whether the thread is runnable."""


Readings = Mapping[int, ThreadReading]
"""The readings of a process, by thread."""


class Silence:
    """The time since the last sign of life that counts against a process."""

    def __init__(self, limit_s: float, read: Callable[[], Readings]) -> None:
        """Begin without a silence.

        Args:
            limit_s: The limit of a silence, in seconds.
            read: Returns the readings of the process's threads.
        """
        self._limit_s = limit_s
        self._read = read
        self._since_s = 0.0
        self._looked_s = 0.0
        self._asked_s = -math.inf
        self._before: Readings | None = None
        self._starved_s = 0.0

    def exceeds_limit(self, since_s: float, now_s: float) -> bool:
        """Return whether the silence has lasted longer than the limit.

        Starved time does not count.

        Args:
            since_s: The time of the last sign of life, in seconds on the clock of
                `now_s`.
            now_s: The present time, in seconds.
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
        # both times may lie partly before the silence
        self._starved_s = min(self._starved_s, now_s - self._since_s)
        self._before, self._looked_s = readings, now_s


def starved_s(before: Readings, after: Readings, passed_s: float) -> float:
    """Return for how long a process was starved between two readings.

    Args:
        before: The first readings.
        after: The second readings.
        passed_s: Seconds between the readings.

    Returns:
        Seconds.
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
    """Return the readings of a process's threads.

    Args:
        pid: The process.

    Returns:
        No readings if the kernel keeps no account, or the process has ended.
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
