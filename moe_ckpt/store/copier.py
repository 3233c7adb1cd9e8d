"""Copies tensors to host memory while training goes on: a thread, with a side stream where there is CUDA.

Owns: the thread, the stream, and the order of copies. Must not: allocate buffers, or know what is copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

Copy = tuple[torch.Tensor, torch.Tensor]
"""(host target, source): flat, of the same type and number of elements."""


class HostCopier:
    """One queue of work a rank; what is submitted first is done first."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="host-copier")
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._stream = None if self._device is None else torch.cuda.Stream()

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Run `work`, which may call `copy_now`, in the thread; it sees what the calling thread has computed so far."""
        if self._stream is None:
            return self._thread.submit(work)
        computed = torch.cuda.Event()
        computed.record()
        return self._thread.submit(self._run_on_stream, work, computed)

    def then(self, work: Callable[[], T]) -> Future[T]:
        """Run `work`, which copies nothing from a device, once everything submitted so far is done."""
        return self._thread.submit(work)

    def copy_now(self, copies: Iterable[Copy]) -> float:
        """Copy, within `run`; return the seconds it took. Targets are complete and sources free to change then."""
        started_s = time.monotonic()
        for target, source in copies:
            target.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return time.monotonic() - started_s

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._thread.shutdown()

    def _run_on_stream(self, work: Callable[[], T], computed: torch.cuda.Event) -> T:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            computed.wait()
            return work()
