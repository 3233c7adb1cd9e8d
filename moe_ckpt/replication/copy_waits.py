"""Waits of the training thread for copies to peers and to a disk.

Owns: the longest time of a wait, and the end of all waits when ranks are lost. Must
not: start copies, or judge their results.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError
from concurrent.futures import wait as wait_for_futures
from typing import Any

from moe_ckpt.errors import PeersLostError


class CopyWaits:
    """Waits that end early if ranks are lost. One thread waits, any may interrupt.

    Attributes:
        copy_s: Longest time of a wait, in seconds.
    """

    def __init__(self, copy_s: float, on_wait: Callable[[bool], None]) -> None:
        """Allow waits.

        Args:
            copy_s: Longest time of a wait, in seconds.
            on_wait: Called with True when a wait begins, and with False when the wait
                ends.
        """
        self.copy_s = copy_s
        self._on_wait = on_wait
        # a future, not an event: a wait ends with the copy or with this future,
        # whichever comes first
        self._interrupted: Future[None] = Future()

    def wait_for(self, copies: Sequence[Future[Any]]) -> None:
        """Wait until these copies are done, one has failed, or `copy_s` is over.

        Args:
            copies: The copies. The caller reads their results.

        Raises:
            PeersLostError: Ranks were lost during the wait, or before the wait and
                since the last `allow`. The other ranks would otherwise wait for this
                rank.
        """
        until_s = time.monotonic() + self.copy_s
        with self.waiting():
            for copy in copies:
                rest_s = max(0.0, until_s - time.monotonic())
                wait_for_futures([copy, self._interrupted], rest_s, FIRST_COMPLETED)
                if self._interrupted.done() and not copy.done():
                    raise PeersLostError("ranks were lost during a wait for copies")
                if copy.done() and copy.exception():
                    return

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Report the block as a wait, which `interrupt` does not end."""
        self._on_wait(True)
        try:
            yield
        finally:
            self._on_wait(False)

    def interrupt(self) -> None:
        """End all waits until `allow`.

        For another thread, after a loss of ranks.
        """
        # a second loss before waits were allowed again
        with contextlib.suppress(InvalidStateError):
            self._interrupted.set_result(None)

    def allow(self) -> None:
        """Let later waits last until their copies are done, after an interruption."""
        self._interrupted = Future()
