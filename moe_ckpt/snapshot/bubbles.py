"""Pipeline bubbles: the times in which this rank waits for neighbour stages.

Owns: whether a bubble is open now, for the copying thread, and the measured total
length of an iteration's bubbles. Must not: copy, or decide which copies wait for
bubbles (`moe_ckpt.policies.bubble_copies` does). MoEtion, section 5.3.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch


class _Mark(Protocol):
    """A point in the device's work, such as a recorded `torch.cuda.Event`."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class _HostMark:
    """Implements `_Mark` on the host, which has reached the point already."""

    def __init__(self) -> None:
        self.at_s = time.monotonic()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: _HostMark) -> float:
        return (end_event.at_s - self.at_s) * 1000.0


class PipelineBubbles:
    """Bubbles of one rank: the training thread opens them, another may wait for them.

    A bubble is open while the training thread waits for a neighbour's result. With CUDA
    a bubble begins when the device has finished the queued work, and ends when the
    neighbour's tensor has arrived.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._began: _Mark | None = None
        self._ended: _Mark | None = None
        self._spans: list[tuple[_Mark, _Mark]] = []
        self._is_hurried = False

    @property
    def is_open(self) -> bool:
        """Whether training waits for a neighbour now."""
        began = self._began
        return began is not None and began.query() and self._is_opening()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Open a bubble for the duration of the context, in which training waits."""
        began = _mark()
        with self._changed:
            self._began, self._ended = began, None
            self._changed.notify_all()
        try:
            yield
        finally:
            ended = _mark()
            # not notified: threads wait only for bubbles that open, and a copy that has
            # begun runs to the end
            self._ended = ended
            self._spans.append((began, ended))

    def take_seconds(self) -> float:
        """Return the total length of the bubbles since the last call, in seconds.

        Waits for bubbles that are still open on a device.
        """
        spans, self._spans = self._spans, []
        for _, ended in spans:
            ended.synchronize()
        return sum(began.elapsed_time(ended) / 1000.0 for began, ended in spans)

    def hurry(self) -> None:
        """End all waits for a bubble, also later waits until `unhurry` is called."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()

    def unhurry(self) -> None:
        """Let the copying thread wait for bubbles again."""
        self._is_hurried = False

    def wait(self) -> bool:
        """Wait for the next bubble, unless a bubble is open.

        Returns:
            True in a bubble; False as soon as `hurry` is called.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_hurried or self._is_opening())
            began = self._began
        if self._is_hurried or began is None:
            return False
        began.synchronize()
        return True

    def _is_opening(self) -> bool:
        return self._began is not None and (
            self._ended is None or not self._ended.query()
        )


def _mark() -> _Mark:
    if not torch.cuda.is_available():
        return _HostMark()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
