"""Which of three buffers a snapshot is written into, persisted from, and recovered from.

Owns who may touch which buffer when; it holds no bytes and moves none. One per node or rank, calls in one thread at a
time. MoC, section 5.2 and Figure 9, of a run in which persisting takes longer than the time between two snapshots:

    b0  snapshot | persist ..................... | recovery .......
    b1             snapshot | waits .. | snapshot  (written over)
    b2                        snapshot | waits .. | persist ........
"""

from __future__ import annotations

from enum import Enum


class BufferStatus(Enum):
    """What a buffer is for; all begin as SNAPSHOT."""

    SNAPSHOT = "snapshot"  # free, being written, or complete and waiting to be persisted
    PERSIST = "persist"  # complete, on its way to storage
    RECOVERY = "recovery"  # complete, and in storage, too: the latest that is


class TripleBuffer:
    """Three buffers, of which at most one is being written, one persisted, and one kept for recovery.

    So there is always one to write into, and nobody waits. A snapshot that is complete while another is persisted waits
    its turn; the paper does not say what becomes of it: here a newer one takes its place, so that storage always gets
    the newest complete one next, as soon as it is free. It is written over early only if no other buffer is left.
    """

    def __init__(self) -> None:
        self._statuses = [BufferStatus.SNAPSHOT] * 3
        self._writing: int | None = None
        self._waiting: int | None = None

    @property
    def statuses(self) -> tuple[BufferStatus, ...]:
        return tuple(self._statuses)

    @property
    def recovery(self) -> int | None:
        """The buffer to recover from; None until the first one is persisted, never again after that."""
        return self._only(BufferStatus.RECOVERY)

    def start_snapshot(self) -> int:
        """Return the buffer to write the next snapshot into."""
        assert self._writing is None, self._writing
        usable = [buffer for buffer, status in enumerate(self._statuses) if status is BufferStatus.SNAPSHOT]
        self._writing = min(usable, key=lambda buffer: (buffer == self._waiting, buffer))
        if self._writing == self._waiting:
            self._waiting = None
        return self._writing

    def finish_snapshot(self) -> int | None:
        """The snapshot is complete. Return the buffer to persist now, or None while another is persisted."""
        assert self._writing is not None
        self._writing, self._waiting = None, self._writing
        return self._persist_next()

    def abandon_snapshot(self) -> None:
        """The snapshot failed: what was written of it is worth nothing."""
        assert self._writing is not None
        self._writing = None

    def finish_persist(self) -> int | None:
        """Storage has all of it: it is the one to recover from. Return the buffer to persist now, if one waits."""
        persisted, former = self._only(BufferStatus.PERSIST), self.recovery
        assert persisted is not None
        if former is not None:
            self._statuses[former] = BufferStatus.SNAPSHOT
        self._statuses[persisted] = BufferStatus.RECOVERY
        return self._persist_next()

    def abandon_persist(self) -> int | None:
        """Storage has not taken it: recovery stays as it was. Return the buffer to persist now, if one waits."""
        persisted = self._only(BufferStatus.PERSIST)
        assert persisted is not None
        self._statuses[persisted] = BufferStatus.SNAPSHOT
        return self._persist_next()

    def _persist_next(self) -> int | None:
        if self._waiting is None or BufferStatus.PERSIST in self._statuses:
            return None
        chosen, self._waiting = self._waiting, None
        self._statuses[chosen] = BufferStatus.PERSIST
        return chosen

    def _only(self, status: BufferStatus) -> int | None:
        return self._statuses.index(status) if status in self._statuses else None
