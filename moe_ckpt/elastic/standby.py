"""The process that waits beside a rank's worker, to replace the worker.

Owns: when such a process is started (`runtime.standby`), and whether another one
follows a process that has ended. Must not: replace workers (the supervisor does).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.elastic.waiting_worker import WaitingWorker
from moe_ckpt.linux import signal_name
from moe_ckpt.types import Phase

# by then a worker has the memory that it needs in every iteration
_AFTER_ITERS = 2
# a process beside a worker in these phases would compete with it for the device
_BUSY = (Phase.BUILD, Phase.JOIN, Phase.RECOVERY, Phase.DONE)


class Standby:
    """Keeps a process that waits to replace one rank's worker.

    Args:
        start: Starts a process that waits; None: no process waits.
        max_deaths: How many such processes may be killed, one after another, before
            there are no more.
        complain: Reports that a process has ended.
    """

    def __init__(
        self,
        start: Callable[[], WaitingWorker] | None,
        max_deaths: int,
        complain: Callable[[str], None],
    ) -> None:
        self._start = start
        self._max_deaths = max_deaths
        self._complain = complain
        self._waiting: WaitingWorker | None = None
        self._deaths = 0  # since one became the worker
        self._trains_since: int | None = None  # an iteration

    @property
    def pid(self) -> int | None:
        """The process that waits; None if there is none."""
        return self._waiting.pid if self._waiting else None

    def keep(self, page: StatusPage, reaped: Mapping[int, int]) -> None:
        """Start the process once the worker trains, and again after a kill.

        Args:
            page: The status page of the worker.
            reaped: The wait statuses of processes that have ended, by pid.
        """
        if self._waiting and self._waiting.pid in reaped:
            self._lose(reaped[self._waiting.pid])
        if self._waiting or not self._start:
            return
        if page.phase in _BUSY:
            self._trains_since = None
            return
        if self._trains_since is None:
            self._trains_since = page.iteration
        if page.iteration - self._trains_since >= _AFTER_ITERS:
            self._waiting = self._start()

    def begin(self, incarnation: int) -> int | None:
        """Let the process become the worker.

        Returns:
            The pid of the process; None if no process waits.
        """
        waiting, self._waiting, self._trains_since = self._waiting, None, None
        if not waiting:
            return None
        pid = waiting.begin(str(incarnation))
        if pid is None:
            _, status = os.waitpid(waiting.pid, 0)
            self._lose(status)
        else:
            self._deaths = 0
        return pid

    def end(self) -> None:
        """End the process."""
        waiting, self._waiting = self._waiting, None
        if waiting:
            waiting.end()

    def _lose(self, status: int) -> None:
        """Decide whether another process follows one that has ended.

        Args:
            status: The wait status of the process.
        """
        self._waiting = self._trains_since = None
        self._deaths += 1
        was_killed = os.WIFSIGNALED(status)
        # after a failure, or a decision not to wait, another one would do the same;
        # kills that go on may be those of a machine without memory
        if not was_killed or self._deaths >= self._max_deaths:
            self._start = None
        if status:
            how = "failed"
            if was_killed:
                how = f"died of {signal_name(os.WTERMSIG(status))}"
            if not self._start:
                how += ": workers are replaced without one"
            self._complain(how)
