"""The way of windows to the local disk: one window is selected, one is being written,
one is complete there.

Owns: the role of each window on this rank, and the events about it. Must not: copy, or
communicate. MoC, section 5.2 (triple buffering), for windows of any policy. A window
that waits delays the next window for the disk, and not training:

    w0  snapshot | persist ........ | recovery ........... |
    w1             snapshot | waits | persist ........ | recovery
    w2                                snapshot | waits | persist
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from enum import Enum

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.events import CheckpointFailed, EventLog, WindowPersisted
from moe_ckpt.replication.publisher import Publisher

_log = logging.getLogger(__name__)


class Role(Enum):
    """The purpose of a window on its way to disk; at most one window has each role."""

    # being taken, or complete and waiting; its write begins once all ranks have it
    SNAPSHOT = "snapshot"
    PERSIST = "persist"  # being written
    RECOVERY = "recovery"  # complete on disk, the newest such window


class DiskWindows:
    """The windows of one rank that go to its disk in one generation, by their starts.

    A failed write ends training only if `strict`.
    """

    def __init__(
        self, publisher: Publisher | None, events: EventLog, *, strict: bool
    ) -> None:
        self._starts: dict[Role, int] = {}
        # with the time at which the write began
        self._written: tuple[Future[None], float] | None = None
        self._publisher = publisher
        self._events = events
        self._strict = strict

    def start_of(self, role: Role) -> int | None:
        """Return the start of the window with a role, or None."""
        return self._starts.get(role)

    @property
    def is_under_way(self) -> bool:
        """Whether a window is being written, or is written but not yet registered."""
        return self._written is not None

    @property
    def is_writing(self) -> bool:
        """Whether a window is being written."""
        return self._written is not None and not self._written[0].done()

    def begin(self, window_start: int, *, to_disk: bool) -> None:
        """A window begins, which goes to disk or not. A selected window whose write has
        not begun is dropped.
        """
        # a dropped window that kept its role would let each later one wait for the
        # write in progress
        self._starts.pop(Role.SNAPSHOT, None)
        if to_disk:
            self._starts[Role.SNAPSHOT] = window_start

    def set_out(self, done: Future[None]) -> None:
        """The write of the selected window has begun and ends with `done`. The write
        before it has ended or failed.
        """
        assert self._written is None, self._starts
        self._starts[Role.PERSIST] = self._starts.pop(Role.SNAPSHOT)
        self._written = done, time.monotonic()

    def finish(self) -> None:
        """Wait for the write in progress; its window is then the one to recover from. A
        failed write changes nothing.

        Raises CheckpointSaveError for a failed write if `strict`.
        """
        # cleared before the wait: a failed write is reported once, and does not hold up
        # the next one
        written, self._written = self._written, None
        if written is None or self._publisher is None:
            return
        done, since_s = written
        window_start = self._starts.pop(Role.PERSIST)
        try:
            self._publisher.wait_for(done)
        except CheckpointSaveError as error:
            self._events.append(
                CheckpointFailed(iteration=window_start, reason=str(error))
            )
            _log.warning(
                "not on disk, training goes on (ckpt.strict=%s): %s",
                self._strict,
                error,
            )
            if self._strict:
                raise
            return
        # not before: the window of a failed write does not count, and the one before it
        # still does
        self._starts[Role.RECOVERY] = window_start
        self._events.append(
            WindowPersisted(
                window_start=window_start, seconds=time.monotonic() - since_s
            )
        )
