"""Detect that the device waits for other ranks.

While the host blocks in an event or in `.item()`, the host cannot report such a wait.

Owns: the points behind operations that the device has not reached yet, the thread that
polls them, and the limit on how many operations a host may be ahead of its device. A
rank whose oldest point is late waits for other ranks. A wedged rank has begun no
operation, and so has no such point. Must not: touch a device from the heartbeat's
thread, as a driver that blocks there would look like a dead process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from moe_ckpt.elastic.backends import Mark

LATE_S = 1.0
MOST_AHEAD = 32
"""Number of operations that a host may be ahead of its device. If the queue of a device
is full, its host blocks inside a call of CUDA. A cut does not reach the host there, and
the interpreter's other threads cannot run.
"""

_LOOK_EVERY_S = 0.1
_LOOK_AGAIN_S = 0.0001


class DeviceWaits:
    """Reports when the device begins and ends to wait for other ranks.

    A device that has not reached a point within `limit_s` seconds is hung, and no
    longer counts as waiting. `on_failure` of `begin` receives such a hang, or a
    `failure` while a point is open, once in each generation.
    """

    def __init__(
        self,
        on_wait: Callable[[bool], None],
        failure: Callable[[], str | None] = lambda: None,
        *,
        limit_s: float,
        late_s: float = LATE_S,
    ) -> None:
        """Prepare the reports; the thread starts with the first point.

        Args:
            on_wait: Called with True when the device begins to wait, and with False
                when the wait ends.
            failure: Returns why an operation of the device has failed, or None.
            limit_s: Seconds after which a device that has not reached a point is hung.
            late_s: Seconds after which a device that has not reached a point waits.
        """
        self._on_wait = on_wait
        self._failure = failure
        self._on_failure: Callable[[str], object] | None = None
        self._limit_s = limit_s
        self._late_s = late_s
        self._lock = threading.Lock()  # held to remove points, and to report
        self._marks: deque[tuple[float, Mark]] = deque()
        self._thread: threading.Thread | None = None
        self._waits = False

    def begin(self, on_failure: Callable[[str], object]) -> None:
        """Begin a generation.

        Args:
            on_failure: Called at most once, with the reason why the device will not
                reach a point of the generation.
        """
        with self._lock:
            self._on_failure = on_failure

    def add(
        self, mark: Mark | None, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Watch a point until the device has reached the point. Any thread may call.

        Blocks while the host is too far ahead of the device.

        Args:
            mark: The point; None: nothing to watch.
            is_over: Ends the blocking early by returning True.
        """
        if mark is None:
            return
        marks = self._marks
        marks.append((time.monotonic(), mark))  # no lock: one atomic step, at the end
        # only at the first point: gloo has no points, and needs no thread
        if self._thread is None:
            self._start()
        # The caller queries the device only if the host is too far ahead: the thread
        # drops reached points as well
        while len(marks) > MOST_AHEAD and not is_over():
            with self._lock:
                self._drop_reached()
            if len(marks) > MOST_AHEAD:
                time.sleep(_LOOK_AGAIN_S)

    def clear(self) -> None:
        """Drop all points at the end of their generation."""
        with self._lock:
            self._marks.clear()
            self._on_failure = None
            self._report()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                look = threading.Thread(
                    target=self._look, name="device-waits", daemon=True
                )
                self._thread = look
                look.start()

    def _look(self) -> None:
        never = threading.Event()
        while not never.wait(_LOOK_EVERY_S):
            with self._lock:
                self._drop_reached()
                self._report()
                reason = self._hopeless() if self._on_failure else None
                tell = self._on_failure
                if reason:
                    self._on_failure = None
            if reason and tell:
                tell(reason)

    def _hopeless(self) -> str | None:
        """Return why the device will not reach its oldest point; None if it may."""
        if not self._marks:
            return None
        if time.monotonic() - self._marks[0][0] >= self._limit_s:
            return (
                f"an operation was not done in runtime.operation_s={self._limit_s:g}"
                " seconds"
            )
        return self._failure()

    def _drop_reached(self) -> None:
        while self._marks and self._marks[0][1].query():
            self._marks.popleft()

    def _report(self) -> None:
        age_s = time.monotonic() - self._marks[0][0] if self._marks else 0.0
        waits = self._late_s <= age_s < self._limit_s
        if waits != self._waits:
            self._waits = waits
            self._on_wait(waits)
