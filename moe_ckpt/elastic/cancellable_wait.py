"""Waits that another thread can end.

A wait inside torch's C++ cannot be interrupted from Python, and gloo never completes operations whose connection dies
during a transfer. So a helper thread waits in C++, and the thread that needs the result waits for the helper, or for
the thread that abandons the operation. An abandoned operation keeps its helper until its own timeout ends it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from moe_ckpt.errors import PeersLostError


class WaitResult:
    """The outcome of an operation: set once, by the first thread."""

    def __init__(self) -> None:
        self._claim = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()
        self._error: BaseException | None = None
        self.abandoned = False

    def set(self, error: BaseException | None) -> None:
        """Record that the operation ended by itself."""
        if self._claim.acquire(blocking=False):
            self._error = error  # before the release: the waiting thread reads it at once
            self._done.release()

    def abandon(self) -> None:
        """Stop waiting for the operation."""
        if self._claim.acquire(blocking=False):
            self.abandoned = True
            self._error = PeersLostError("abandoned: other ranks were lost")
            self._done.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether it ended in time; raises the error that ended it."""
        if not self._done.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return False
        self._done.release()  # a second wait finds the result as well
        if self._error is not None:
            raise self._error
        return True


class Helper:
    """A thread that makes blocking calls, one after another, for one other thread."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], object], WaitResult] | None] = SimpleQueue()
        # daemon: a call that gloo never completes does not keep the process from ending
        self._thread = threading.Thread(target=self._run, name="comm-helper", daemon=True)
        self._thread.start()

    def start(self, call: Callable[[], object], outcome: WaitResult) -> None:
        """Call, and set the outcome."""
        self._jobs.put((call, outcome))

    def close(self) -> None:
        """End the thread after its current call."""
        self._jobs.put(None)

    def join(self) -> None:
        """Wait for the end of a closed helper."""
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, outcome = job
            try:
                call()
            except BaseException as error:  # the top of a thread: the error is raised where the outcome is awaited
                outcome.set(error)
            else:
                outcome.set(None)
            del job, call, outcome  # they hold the operation's tensors and its group
