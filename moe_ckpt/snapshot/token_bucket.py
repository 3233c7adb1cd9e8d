"""Caps on checkpoint traffic, set by `ckpt.max_bytes_per_s`.

The caps apply to host copies, copies to peers, and writes to the local disk. Owns: the
times at which bytes may pass (`TokenBucket`, pure logic over a clock), and waits that
another thread can end (`Throttle`). Must not: move bytes.

A bucket never delays training longer than a link of the same rate would. The training
thread takes no tokens, but waits for the copying thread. The copying thread waits at
most `nbytes / bytes_per_s` while no other thread takes tokens. An abandoned copy
returns its unused tokens, so the next copy does not wait for these tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Lock

BURST_S = 0.05
"""Seconds of unused tokens that a bucket keeps. A thread that wakes up late catches up,
and a pause earns no more.
"""


class TokenBucket:
    """Admits `bytes_per_s`, for any number of threads, first come first served.

    The bucket admits at most `bytes_per_s` times the seconds since its start. In any
    period of T seconds the bucket admits at most `bytes_per_s * (T + BURST_S)` bytes,
    and one chunk of each thread.
    """

    def __init__(
        self, bytes_per_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        assert bytes_per_s > 0, bytes_per_s
        self._bytes_per_s = bytes_per_s
        self._now = now
        self._lock = Lock()
        # time at which all tokens taken so far have come in: 3 s ahead for 6 bytes at 2
        # B/s
        self._free_s = now()

    def take(self, nbytes: int) -> float:
        """Take tokens for bytes; return the seconds after which the bytes may pass."""
        with self._lock:
            now_s = self._now()
            self._free_s = (
                max(self._free_s, now_s - BURST_S) + nbytes / self._bytes_per_s
            )
            return max(0.0, self._free_s - now_s)

    def give_back(self, nbytes: int) -> None:
        """Return the tokens of bytes that do not pass."""
        with self._lock:
            self._free_s -= nbytes / self._bytes_per_s


class Throttle:
    """Waits of copies for tokens, which another thread can end by `lift`.

    Without a cap there are no waits.
    """

    def __init__(
        self,
        bytes_per_s: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to apply the cap.

        Args:
            bytes_per_s: The cap; None for no cap.
            now: Clock, in seconds.
        """
        self._bucket = None if bytes_per_s is None else TokenBucket(bytes_per_s, now)
        self._lifted = Event()

    @property
    def has_cap(self) -> bool:
        """Whether `wait` may wait."""
        return self._bucket is not None and not self._lifted.is_set()

    def wait(self, nbytes: int, sleep: Callable[[float], bool] | None = None) -> None:
        """Return once so many bytes may pass.

        Args:
            nbytes: Number of bytes.
            sleep: Waits the given seconds. To end the wait early, `sleep` returns True
                or raises. By default only `lift` ends a wait early.
        """
        if self._bucket is None or self._lifted.is_set():
            return
        # also if `sleep` raises: the tokens of an abandoned copy must not delay the
        # next copy
        is_over = True
        try:
            is_over = (sleep or self._lifted.wait)(self._bucket.take(nbytes))
        finally:
            if is_over:
                self._bucket.give_back(nbytes)

    def lift(self) -> None:
        """Let bytes pass at once until `apply` is called.

        A recovery or the end of the job lifts the cap while waiting for these bytes.
        """
        self._lifted.set()

    def apply(self) -> None:
        """Apply the cap again."""
        self._lifted.clear()
