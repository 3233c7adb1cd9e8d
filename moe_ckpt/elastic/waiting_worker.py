"""A worker that waits for its rank: forked, warm, and without state.

A supervisor that stands by starts such a process. The process does the generic first
work of a worker, such as the start of the device, and then waits in a read. Owns: this
process until it has a rank. Must not: know ranks, or read variables of a rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from moe_ckpt.elastic.supervisor import start_beside
from moe_ckpt.linux import is_alive

_FAILED = 1


class WaitingWorker:
    """Starts a process that waits to become a worker.

    Args:
        warm_up: The generic first work.
        become: Trains in the process, and returns its exit status. Receives the text
            that the supervisor has passed to `begin`.

    Attributes:
        has_begun: Whether the process was told to become a worker.
    """

    def __init__(
        self, warm_up: Callable[[], None], become: Callable[[str], int]
    ) -> None:
        read_end, write_end = os.pipe()

        def wait() -> int:
            os.close(write_end)
            warm_up()
            with os.fdopen(read_end) as order:
                # a line: other processes may have inherited the writing end
                text = order.readline()
            # empty: the supervisor has ended
            return become(text) if text else _FAILED

        self.has_begun = False
        self._pid = start_beside(wait)
        os.close(read_end)
        self._write_end = write_end

    def begin(self, order: str) -> int | None:
        """Let the process become a worker.

        Args:
            order: What `become` receives, with a newline; a text without one.

        Returns:
            The pid of the process; None if the process has died.
        """
        self.has_begun = True
        with (
            contextlib.suppress(BrokenPipeError),
            os.fdopen(self._write_end, "w") as pipe,
        ):
            pipe.write(order + "\n")
        return self._pid if is_alive(self._pid) else None

    def end(self) -> None:
        """End the process, which has no work yet."""
        os.close(self._write_end)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
