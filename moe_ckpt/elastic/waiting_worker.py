"""A process that waits to become a worker: forked, warm, and without state.

A supervisor on a spare machine starts such a process, which may become a worker of any
rank. With `runtime.standby` a rank's supervisor starts such a process to replace the
rank's worker (`standby.py`). The process does the generic first work of a worker, such
as the start of the device, and then waits in a read. Owns: the process until the
process is a worker. Must not: know ranks, or read variables of a rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from moe_ckpt.elastic.orphans import GRACE_S, watching

_FAILED = 1


class WaitingWorker:
    """Starts a process that waits to become a worker.

    Args:
        warm_up: The generic first work. Returns whether the process then waits; else
            the process ends with status 0.
        become: Trains in the process, and returns its exit status. Receives the text
            that the supervisor has passed to `begin`.
        start: Forks the process for its work, and returns the pid.

    Attributes:
        pid: The process.
        has_begun: Whether the process was told to become a worker.
    """

    def __init__(
        self,
        warm_up: Callable[[], bool],
        become: Callable[[str], int],
        start: Callable[[Callable[[], int]], int],
    ) -> None:
        read_end, write_end = os.pipe()

        def wait() -> int:
            os.close(write_end)
            if not warm_up():
                return 0
            with os.fdopen(read_end) as order:
                # a line: other processes may have inherited the writing end
                text = order.readline()
            # empty: the supervisor has ended
            return become(text) if text else _FAILED

        self.has_begun = False
        self.pid = start(wait)
        os.close(read_end)
        self._write_end = write_end

    def begin(self, order: str) -> int | None:
        """Let the process become a worker.

        Args:
            order: What `become` receives, with a newline; a text without one.

        Returns:
            The pid of the process; None if the process had died before.
        """
        self.has_begun = True
        # not by a look at the process: it may have become a worker, and have ended
        try:
            with os.fdopen(self._write_end, "w") as pipe:
                pipe.write(order + "\n")
        except BrokenPipeError:
            return None
        return self.pid

    def end(self) -> None:
        """End the process, which has no work yet.

        A process that the kernel cannot end within GRACE_S seconds is left to end
        later.
        """
        os.close(self._write_end)
        with (
            contextlib.suppress(ProcessLookupError, ChildProcessError),
            watching([self.pid]) as ended,
        ):
            os.kill(self.pid, signal.SIGKILL)
            if ended(GRACE_S):
                os.waitpid(self.pid, 0)
