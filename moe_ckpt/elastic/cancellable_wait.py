"""Waits that another thread can end.

A wait inside torch's C++ cannot be interrupted from Python, and gloo never completes
operations whose connection dies during a transfer. So a thread waits in slices. Where
an operation does not survive a slice's timeout, a helper thread waits, and the thread
that needs the result waits for the helper, or for the thread that abandons the
operation. An abandoned operation keeps its helper until its own timeout ends it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Protocol

from moe_ckpt.errors import PeersLostError

_SLICE = timedelta(milliseconds=50)  # an abandoned wait ends as late; 20 looks a second
_ABANDONED = "abandoned: other ranks were lost"


class Waitable(Protocol):
    """An operation that goes on where a wait for it has timed out."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Wait until the end. Raises RuntimeError: the operation's error, or a timeout."""
        ...

    def is_completed(self) -> bool:
        """Return whether the operation has ended, with or without an error."""
        ...


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
            # before the release: the waiting thread reads it at once
            self._error = error
            self._done.release()

    def abandon(self) -> None:
        """Stop waiting for the operation."""
        if self._claim.acquire(blocking=False):
            self.abandoned = True
            self._error = PeersLostError(_ABANDONED)
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
        self._jobs: SimpleQueue[tuple[Callable[[], object], WaitResult] | None] = (
            SimpleQueue()
        )
        # daemon: a call that gloo never completes does not keep the process from ending
        self._thread = threading.Thread(
            target=self._run, name="comm-helper", daemon=True
        )
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
            except BaseException as error:
                # the top of a thread: the error is raised where the outcome is awaited
                outcome.set(error)
            else:
                outcome.set(None)
            del job, call, outcome  # they hold the operation's tensors and its group


class HostWaits:
    """The waits of a process's threads for other ranks, which any thread may abandon."""

    def __init__(self) -> None:
        self._helpers = threading.local()
        self._lock = threading.Lock()
        self._awaited: set[WaitResult] = set()
        self._abandoned = threading.Event()

    def wait_in_slices(self, work: Waitable) -> None:
        """Wait in the calling thread.

        Args:
            work: An operation that survives timeouts.

        Raises:
            PeersLostError: The wait was abandoned; the operation may not have ended.
            RuntimeError: The operation has failed.
        """
        abandoned = self._abandoned
        while True:
            try:
                work.wait(_SLICE)
            except RuntimeError:
                # an operation that has ended raises its own error, also if it ended as
                # the slice did
                if work.is_completed():
                    work.wait()
                    return
            else:
                return
            # not the end of the generation, though it is sooner: gloo's thread may
            # still write results of an operation whose bytes have all arrived
            if abandoned.is_set():
                raise PeersLostError(_ABANDONED)

    def wait_with_helper(
        self, call: Callable[[], object], keep: Callable[[Helper], object]
    ) -> None:
        """Let this thread's helper call, and wait for the helper.

        Args:
            call: Blocks until the operation has ended.
            keep: Receives the helper if the wait is abandoned: the helper stays inside
                the call until the operation's own timeout.

        Raises:
            PeersLostError: The wait was abandoned; the operation may not have ended.
        """
        helper = self._helpers.own = getattr(self._helpers, "own", None) or Helper()
        outcome = self.start(helper, call)
        try:
            self.wait_for(outcome, None)
        finally:
            if outcome.abandoned:
                self._helpers.own = None
                keep(helper)
                helper.close()

    def start(self, helper: Helper, call: Callable[[], object]) -> WaitResult:
        """Let a helper call; return the outcome, to be waited for with `wait_for`."""
        outcome = WaitResult()
        with self._lock:
            # before it starts: an `abandon` that comes now must find it
            self._awaited.add(outcome)
        helper.start(call, outcome)
        return outcome

    def wait_for(self, outcome: WaitResult, timeout_s: float | None) -> bool:
        """Return whether a call ended in time; raises the error that ended it."""
        try:
            return outcome.wait(timeout_s)
        finally:
            with self._lock:
                self._awaited.discard(outcome)

    def abandon(self) -> None:
        """Wake the threads that wait: at once, or at the end of a slice."""
        # later waits have an event of their own
        abandoned, self._abandoned = self._abandoned, threading.Event()
        abandoned.set()
        with self._lock:
            awaited = list(self._awaited)
        for outcome in awaited:
            outcome.abandon()
