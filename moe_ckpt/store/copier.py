"""Copies tensors to host memory while training goes on: a side stream where there is CUDA, a thread elsewhere.

Owns: the stream, the thread, and the order of copies. Must not: allocate buffers, or know what is copied.

    training   capture ------ forward, backward of the next iteration ------ wait ---- optimizer step
    copier            \\---- copy ---- whatever follows a copy (checksums) ---/
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

Copy = tuple[torch.Tensor, torch.Tensor]
"""(host target, source): flat, of the same type and number of elements."""


class HostCopier:
    """One queue of copies a rank; what is submitted first is done first."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="host-copier")
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def copy(self, copies: Sequence[Copy]) -> Future[float]:
        """Start copying; the result is the seconds it took. Until then sources must not change, but may be let go."""
        if self._stream is None:
            return self._thread.submit(_copy_all, copies)
        return self._thread.submit(_wait_for, *self._start_on_stream(self._stream, copies))

    def then(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` once everything submitted so far is done."""
        return self._thread.submit(work)

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._thread.shutdown()

    def _start_on_stream(
        self, stream: torch.cuda.Stream, copies: Sequence[Copy]
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        started, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            started.record(stream)
            for target, source in copies:
                target.copy_(source, non_blocking=True)
                source.record_stream(stream)
            done.record(stream)
        return started, done


def _copy_all(copies: Sequence[Copy]) -> float:
    started_s = time.monotonic()
    for target, source in copies:
        target.copy_(source)
    return time.monotonic() - started_s


def _wait_for(started: torch.cuda.Event, done: torch.cuda.Event) -> float:
    done.synchronize()
    return started.elapsed_time(done) / 1000.0
