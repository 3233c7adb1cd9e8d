"""Caps on checkpoint traffic: `ckpt.max_bytes_per_s` for host copies, copies to peers
and writes to the local disk.

Owns: the times at which bytes may pass (`TokenBucket`, pure logic over a clock), and
waits that another thread can end (`Throttle`). Must not: move bytes.

A bucket never delays training longer than a link of that rate would. The training
thread takes no tokens itself: it waits for the copying thread, which waits at most
`nbytes / bytes_per_s` while no other thread takes tokens. An abandoned copy returns its
unused tokens, so the next copy does not wait for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Lock

BURST_S = 0.05
"""Seconds of unused tokens that a bucket keeps: a thread that wakes up late catches up,
and a pause earns no more.
"""


class TokenBucket:
    """Admits `bytes_per_s`, for any number of threads, first come first served.

    From its start on, at most `bytes_per_s` times the seconds since then; in any period
    of T seconds at most `bytes_per_s * (T + BURST_S)` and one chunk of each thread.
    """

    def __init__(
        self, bytes_per_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        assert bytes_per_s > 0, bytes_per_s
        self._bytes_per_s = bytes_per_s
        self._now = now
        self._lock = Lock()
        # all tokens taken so far have come in by then: 3 s ahead for 6 bytes at 2 B/s
        self._free_s = now()

    def take(self, nbytes: int) -> float:
        """Take tokens for bytes; return the seconds after which these bytes may pass."""
        with self._lock:
            now_s = self._now()
            self._free_s = (
                max(self._free_s, now_s - BURST_S) + nbytes / self._bytes_per_s
            )
            return max(0.0, self._free_s - now_s)

    def give_back(self, nbytes: int) -> None:
        """Return tokens of bytes that do not pass."""
        with self._lock:
            self._free_s -= nbytes / self._bytes_per_s


class Throttle:
    """The waits of copies for tokens, which `lift` ends from another thread; without a
    cap there are none.
    """

    def __init__(
        self,
        bytes_per_s: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = None if bytes_per_s is None else TokenBucket(bytes_per_s, now)
        self._lifted = Event()

    @property
    def has_cap(self) -> bool:
        """Whether `wait` may wait."""
        return self._bucket is not None and not self._lifted.is_set()

    def wait(self, nbytes: int, sleep: Callable[[float], bool] | None = None) -> None:
        """Return once so many bytes may pass.

        `sleep` waits the given seconds; it returns True, or raises, to end the wait.
        """
        if self._bucket is None or self._lifted.is_set():
            return
        # also where `sleep` raises: tokens of a copy that is given up must not delay
        # the next one
        is_over = True
        try:
            is_over = (sleep or self._lifted.wait)(self._bucket.take(nbytes))
        finally:
            if is_over:
                self._bucket.give_back(nbytes)

    def lift(self) -> None:
        """Let bytes pass at once until `apply`: a recovery or the end of the job waits
        for them.
        """
        self._lifted.set()

    def apply(self) -> None:
        """Apply the cap again."""
        self._lifted.clear()
