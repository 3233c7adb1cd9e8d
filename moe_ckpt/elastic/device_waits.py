"""Whether the device waits for other ranks: the host cannot tell while it blocks in an
event or in `.item()`.

Owns: the points behind operations that the device has not reached yet, the thread that
polls them, and the number of operations that a host may be ahead of its device. A rank
whose oldest point is late waits for other ranks; a wedged rank has begun no operation,
so it has no such point. Must not: touch a device from the heartbeat's thread: a driver
that blocks there would look like a dead process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from moe_ckpt.elastic.backends import Mark

LATE_S = 1.0
MOST_AHEAD = 32
"""Operations that a host may be ahead. A queue of a device that is full blocks its host
inside a call of CUDA, in which no cut reaches it, and keeps the interpreter's other
threads from running.
"""

_LOOK_EVERY_S = 0.1
_LOOK_AGAIN_S = 0.0001


class DeviceWaits:
    """Calls `on_wait` when the device begins to wait for other ranks, and when it ends.

    A device that has not reached a point within `limit_s` seconds hangs itself: it does
    not wait any more. That, or a `failure` while a point is open, is told once a
    generation.
    """

    def __init__(
        self,
        on_wait: Callable[[bool], None],
        failure: Callable[[], str | None] = lambda: None,
        *,
        limit_s: float,
        late_s: float = LATE_S,
    ) -> None:
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
        """A generation begins: call `on_failure` once with the reason why the device
        will not reach a point of it.
        """
        with self._lock:
            self._on_failure = on_failure

    def add(
        self, mark: Mark | None, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Watch a point until the device has reached it; None is no point. Any thread
        may call.

        Waits while the host is too far ahead, unless `is_over` returns True.
        """
        if mark is None:
            return
        marks = self._marks
        marks.append((time.monotonic(), mark))  # without the lock: one step, at the end
        # at the first point: gloo has none, and needs no thread
        if self._thread is None:
            self._start()
        # an operation asks nothing of its device unless the host is too far ahead: the
        # thread drops points, too
        while len(marks) > MOST_AHEAD and not is_over():
            with self._lock:
                self._drop_reached()
            if len(marks) > MOST_AHEAD:
                time.sleep(_LOOK_AGAIN_S)

    def clear(self) -> None:
        """Drop all points: their generation is over."""
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
        """Return why the device will not reach its oldest point."""
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
