"""Caps on checkpoint traffic: `ckpt.max_bytes_per_s` for host copies, copies to peers and writes to the local disk.

Owns: when bytes may pass (`TokenBucket`, pure logic over a clock), and waits for that which another thread can end
(`Throttle`). Must not: move bytes.

A bucket never holds training longer than a link of that rate would. The training thread takes no tokens itself: it
waits for the thread that copies, and that thread waits `nbytes / bytes_per_s` at most where no other thread takes
tokens. A copy that is given up returns the tokens that it has not used, so the next copy does not wait for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Lock

BURST_S = 0.05
"""Seconds of unused tokens that a bucket keeps: a thread that wakes up late catches up, and a pause earns no more."""


class TokenBucket:
    """Admits `bytes_per_s`, for any number of threads, first come first served.

    From its start on, at most `bytes_per_s` times the seconds since then; in any period of T seconds at most
    `bytes_per_s * (T + BURST_S)` and one chunk of each thread.
    """

    def __init__(self, bytes_per_s: float, now: Callable[[], float] = time.monotonic) -> None:
        assert bytes_per_s > 0, bytes_per_s
        self._bytes_per_s = bytes_per_s
        self._now = now
        self._lock = Lock()
        self._free_s = now()  # when all tokens taken so far have come in: 3 s from now on, with 6 bytes taken at 2 B/s

    def take(self, nbytes: int) -> float:
        """Take tokens for bytes that are about to pass; return after how many seconds they may."""
        with self._lock:
            now_s = self._now()
            self._free_s = max(self._free_s, now_s - BURST_S) + nbytes / self._bytes_per_s
            return max(0.0, self._free_s - now_s)

    def give_back(self, nbytes: int) -> None:
        """Return tokens of bytes that do not pass."""
        with self._lock:
            self._free_s -= nbytes / self._bytes_per_s


class Throttle:
    """The waits of copies for tokens, which `lift` ends from another thread; without a cap there are none."""

    def __init__(self, bytes_per_s: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._bucket = None if bytes_per_s is None else TokenBucket(bytes_per_s, now)
        self._lifted = Event()

    @property
    def has_cap(self) -> bool:
        """Whether `wait` may wait."""
        return self._bucket is not None and not self._lifted.is_set()

    def wait(self, nbytes: int, sleep: Callable[[float], bool] | None = None) -> None:
        """Return once so many bytes may pass. `sleep` waits so many seconds, and returns True, or raises, to end it."""
        if self._bucket is None or self._lifted.is_set():
            return
        is_over = True
        try:
            is_over = (sleep or self._lifted.wait)(self._bucket.take(nbytes))
        finally:
            if is_over:
                self._bucket.give_back(nbytes)

    def lift(self) -> None:
        """Let bytes pass at once, now and until `apply`: a recovery or the end of the job waits for them."""
        self._lifted.set()

    def apply(self) -> None:
        """The cap counts again."""
        self._lifted.clear()


def unlimited() -> Throttle:
    """Return a throttle without a cap."""
    return Throttle(None)
