"""Whether the device waits for other ranks: the host cannot tell while it blocks in an event or in `.item()`.

Owns: the points behind operations that the device has not reached yet, and the thread that polls them. A rank whose
oldest point is late waits for other ranks; a wedged rank has begun no operation, so it has no such point. Must not:
touch a device from the heartbeat's thread: a driver that blocks there would look like a dead process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from moe_ckpt.elastic.backends import Mark

LATE_S = 1.0
_LOOK_EVERY_S = 0.1


class DeviceWaits:
    """Calls `on_wait` when the device begins to wait for other ranks, and when it ends.

    A point that is not reached within `limit_s` seconds is dropped: then the device itself hangs.
    """

    def __init__(self, on_wait: Callable[[bool], None], *, limit_s: float, late_s: float = LATE_S) -> None:
        self._on_wait = on_wait
        self._limit_s = limit_s
        self._late_s = late_s
        self._lock = threading.Lock()
        self._marks: deque[tuple[float, Mark]] = deque()
        self._thread: threading.Thread | None = None
        self._waits = False

    def add(self, mark: Mark | None) -> None:
        """Watch a point until the device has reached it; None is no point. Any thread may call."""
        if mark is None:
            return
        with self._lock:
            self._drop_reached()  # also here: an unsupervised job would keep all points between two looks
            self._marks.append((time.monotonic(), mark))
            if self._thread is None:  # at the first point: gloo has none, and needs no thread
                self._thread = threading.Thread(target=self._look, name="device-waits", daemon=True)
                self._thread.start()

    def clear(self) -> None:
        """Drop all points: their generation is over."""
        with self._lock:
            self._marks.clear()
            self._report()

    def _look(self) -> None:
        never = threading.Event()
        while not never.wait(_LOOK_EVERY_S):
            with self._lock:
                self._drop_reached()
                self._report()

    def _drop_reached(self) -> None:
        while self._marks and self._marks[0][1].query():
            self._marks.popleft()

    def _report(self) -> None:
        age_s = time.monotonic() - self._marks[0][0] if self._marks else 0.0
        waits = self._late_s <= age_s < self._limit_s
        if waits != self._waits:
            self._waits = waits
            self._on_wait(waits)
