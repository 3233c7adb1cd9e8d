"""Time that copies of one rank's snapshots take to reach all peers.

Must not: copy, or choose blobs to copy. Copies may end on any thread.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock

_RECENT = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SentCopy:
    """Sending times of some snapshots."""

    size_bytes: int
    """Size of the snapshots, in bytes."""

    seconds: float
    """Time in which at least one of the copies was in progress, in seconds."""

    span_s: float
    """Time from the first request to the last confirmation, in seconds."""

    ago_s: float
    """Time since the last confirmation, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copy:
    """A copy, or several copies without a pause between them."""

    size_bytes: int
    """Size of all copies, in bytes."""

    since_s: float
    """Time of the first request, in seconds on the clock."""

    until_s: float
    """Time of the last confirmation, in seconds on the clock."""


class CopyTimes:
    """Start and end of each finished copy, by the key of the blob. For any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Begin without copies.

        Args:
            now: The clock, in seconds.
        """
        self._now = now
        # copies end on threads that read answers, while the training thread reads rates
        self._lock = Lock()
        self._copies: dict[str, _Copy] = {}
        self._busy: deque[_Copy] = deque(maxlen=_RECENT)

    def ended(self, key: str, size_bytes: int, *, since_s: float) -> None:
        """Add a copy that has reached all peers now.

        Args:
            key: Key of the blob.
            size_bytes: Size of the copy, in bytes.
            since_s: Time of the request, in seconds on the clock.
        """
        with self._lock:
            copy = _Copy(size_bytes=size_bytes, since_s=since_s, until_s=self._now())
            self._copies[key] = copy
            # the copy shared the link with earlier copies
            if self._busy and since_s < self._busy[-1].until_s:
                before = self._busy.pop()
                since_s, size_bytes = (
                    min(since_s, before.since_s),
                    size_bytes + before.size_bytes,
                )
            self._busy.append(
                _Copy(size_bytes=size_bytes, since_s=since_s, until_s=copy.until_s)
            )

    def drop(self, key: str) -> None:
        """Forget the copy of a blob that is withdrawn."""
        with self._lock:
            self._copies.pop(key, None)

    def bytes_per_s(self) -> float:
        """Return the recent rate of copies, in bytes per second; inf without copies.

        The rate covers the time in which copies were in progress, including their
        waits.
        """
        with self._lock:
            rates = [
                each.size_bytes / max(each.until_s - each.since_s, 1e-9)
                for each in self._busy
            ]
        return statistics.median(rates) if rates else math.inf

    def of(self, keys: Iterable[str]) -> SentCopy | None:
        """Return the total send time of these blobs.

        Unsent blobs count zero.

        Returns:
            The times. None if no blob was sent.
        """
        with self._lock:
            copies = [copy for key in keys if (copy := self._copies.get(key))]
        if not copies:
            return None
        until_s = max(copy.until_s for copy in copies)
        return SentCopy(
            size_bytes=sum(copy.size_bytes for copy in copies),
            seconds=_covered_s(copies),
            span_s=until_s - min(copy.since_s for copy in copies),
            ago_s=self._now() - until_s,
        )


def _covered_s(copies: Iterable[_Copy]) -> float:
    """Return the time in which at least one copy was in progress, in seconds.

    Copies from 1 to 3, from 2 to 4 and from 6 to 7 make 4.
    """
    covered_s, reached_s = 0.0, -math.inf
    for copy in sorted(copies, key=lambda each: each.since_s):
        covered_s += max(0.0, copy.until_s - max(copy.since_s, reached_s))
        reached_s = max(reached_s, copy.until_s)
    return covered_s
