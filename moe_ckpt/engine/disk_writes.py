"""Moves windows to the local disk, one step at a time.

At any time one window is selected, one is being written, and one is complete on disk.
Owns: the role of each window on this rank, and the events about roles. Must not: copy,
or communicate. The triple buffering of MoC, section 5.2, serves windows of any policy
here. A window that waits delays the next window for the disk, and not training:

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
    """The purpose of a window on the way to disk. At most one window has each role."""

    SNAPSHOT = "snapshot"
    """The window is being taken, or is complete and waits. The write begins once all
    ranks have the window.
    """

    PERSIST = "persist"
    """The window is being written."""

    RECOVERY = "recovery"
    """The window is complete on disk, and the newest such window."""


class DiskWindows:
    """The windows of one rank that go to disk in one generation, by their starts.

    A failed write ends training only if `strict`.
    """

    def __init__(
        self, publisher: Publisher | None, events: EventLog, *, strict: bool
    ) -> None:
        self._starts: dict[Role, int] = {}
        # the write in progress, and the time at which the write began
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
        """Note that a window begins.

        A window that was selected, and whose write has not begun, is dropped.

        Args:
            window_start: The iteration at which the window starts.
            to_disk: Whether the window goes to disk.
        """
        # if a dropped window kept its role, each later window would wait for the write
        # in progress
        self._starts.pop(Role.SNAPSHOT, None)
        if to_disk:
            self._starts[Role.SNAPSHOT] = window_start

    def set_out(self, done: Future[None]) -> None:
        """Note that the write of the selected window has begun.

        The write before must have ended or failed.

        Args:
            done: Done when the write has ended.
        """
        assert self._written is None, self._starts
        self._starts[Role.PERSIST] = self._starts.pop(Role.SNAPSHOT)
        self._written = done, time.monotonic()

    def finish(self) -> None:
        """Wait for the write in progress, whose window becomes the one to recover from.

        A failed write changes nothing.

        Raises:
            CheckpointSaveError: The write failed, and `strict` is set.
        """
        # cleared before the wait: a failed write is reported once, and does not hold up
        # the next write
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
        # not earlier: the window of a failed write does not count, and the window
        # before still does
        self._starts[Role.RECOVERY] = window_start
        self._events.append(
            WindowPersisted(
                window_start=window_start, seconds=time.monotonic() - since_s
            )
        )
