"""Waits that another thread can end.

Python cannot interrupt a wait inside torch's C++ code, and gloo never completes an
operation whose connection dies during a transfer. So a thread waits in slices.

Some operations do not survive the timeout of a slice. For such an operation a helper
thread waits. The thread that needs the result waits for the helper, or until another
thread abandons the operation. An abandoned operation keeps its helper until the
operation's own timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Protocol

from moe_ckpt.errors import PeersLostError

_SLICE = timedelta(milliseconds=50)  # delay of an abandoned wait; 20 checks a second
_ABANDONED = "abandoned: other ranks were lost"


class Waitable(Protocol):
    """An operation that continues after a wait for it has timed out."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Wait until the operation has ended.

        Raises:
            RuntimeError: The operation has failed, or the wait has timed out.
        """
        ...

    def is_completed(self) -> bool:
        """Return whether the operation has ended, with or without an error."""
        ...


class WaitResult:
    """The outcome of an operation. The first thread to set the outcome decides."""

    def __init__(self) -> None:
        self._claim = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()
        self._error: BaseException | None = None
        self.abandoned = False

    def set(self, error: BaseException | None) -> None:
        """Record that the operation ended by itself.

        Args:
            error: The error that ended the operation; None: the operation succeeded.
        """
        if self._claim.acquire(blocking=False):
            # before the release: the waiting thread reads the error at once
            self._error = error
            self._done.release()

    def abandon(self) -> None:
        """Stop waiting for the operation; `wait` raises PeersLostError."""
        if self._claim.acquire(blocking=False):
            self.abandoned = True
            self._error = PeersLostError(_ABANDONED)
            self._done.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the outcome.

        Args:
            timeout_s: The time limit, in seconds; None: no limit.

        Returns:
            Whether the operation ended in time.

        Raises:
            BaseException: The error that ended the operation.
            PeersLostError: The operation was abandoned.
        """
        if not self._done.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return False
        self._done.release()  # so that a second wait finds the result as well
        if self._error is not None:
            raise self._error
        return True


class Helper:
    """A thread that makes blocking calls, one after another, for one other thread."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], object], WaitResult] | None] = (
            SimpleQueue()
        )
        # a daemon thread: a call that gloo never completes must not keep the process
        # alive
        self._thread = threading.Thread(
            target=self._run, name="comm-helper", daemon=True
        )
        self._thread.start()

    def start(self, call: Callable[[], object], outcome: WaitResult) -> None:
        """Queue a call for the thread.

        Args:
            call: The blocking call.
            outcome: Set to the outcome of the call.
        """
        self._jobs.put((call, outcome))

    def close(self) -> None:
        """End the thread after the calls that are queued."""
        self._jobs.put(None)

    def join(self) -> None:
        """Wait until the thread of a closed helper has ended."""
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, outcome = job
            try:
                call()
            except BaseException as error:
                # this is the top of a thread: the thread that awaits the outcome raises
                # the error
                outcome.set(error)
            else:
                outcome.set(None)
            del job, call, outcome  # which hold the operation's tensors and group


class HostWaits:
    """Waits of this process's threads for other ranks; any thread may abandon them."""

    def __init__(self) -> None:
        self._helpers = threading.local()
        self._lock = threading.Lock()
        self._awaited: set[WaitResult] = set()
        self._abandoned = threading.Event()

    def wait_in_slices(self, work: Waitable) -> None:
        """Wait for an operation in the calling thread.

        Args:
            work: An operation that survives timeouts of waits.

        Raises:
            PeersLostError: The wait was abandoned; the operation may not have ended.
            RuntimeError: The operation has failed.
        """
        abandoned = self._abandoned
        while True:
            try:
                work.wait(_SLICE)
            except RuntimeError:
                # an operation that has ended raises its own error, even if the end
                # coincides with the end of the slice
                if work.is_completed():
                    work.wait()
                    return
            else:
                return
            # not the end of the generation, which comes sooner: gloo's thread may still
            # write the results of an operation whose bytes have all arrived
            if abandoned.is_set():
                raise PeersLostError(_ABANDONED)

    def wait_with_helper(
        self, call: Callable[[], object], keep: Callable[[Helper], object]
    ) -> None:
        """Let the calling thread's helper make a call, and wait for the helper.

        Args:
            call: Blocks until the operation has ended.
            keep: Receives the helper if the wait is abandoned. The helper stays inside
                `call` until the operation's own timeout.

        Raises:
            PeersLostError: The wait was abandoned; the operation may not have ended.
            BaseException: The error of `call`.
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
        """Let a helper make a call.

        Returns:
            The outcome of the call. Pass the outcome to `wait_for`.
        """
        outcome = WaitResult()
        with self._lock:
            # before the call starts: an `abandon` that comes now must find the outcome
            self._awaited.add(outcome)
        helper.start(call, outcome)
        return outcome

    def wait_for(self, outcome: WaitResult, timeout_s: float | None) -> bool:
        """Wait for the outcome of a call.

        Args:
            outcome: The outcome, as `start` returns it.
            timeout_s: The time limit, in seconds; None: no limit.

        Returns:
            Whether the call ended in time.

        Raises:
            BaseException: The error that ended the call.
            PeersLostError: The call was abandoned.
        """
        try:
            return outcome.wait(timeout_s)
        finally:
            with self._lock:
                self._awaited.discard(outcome)

    def abandon(self) -> None:
        """Wake all waiting threads, at once or at the end of a slice."""
        # a new event for later waits
        abandoned, self._abandoned = self._abandoned, threading.Event()
        abandoned.set()
        with self._lock:
            awaited = list(self._awaited)
        for outcome in awaited:
            outcome.abandon()
