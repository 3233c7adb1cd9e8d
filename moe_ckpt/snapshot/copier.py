"""Copies tensors to host memory while training goes on: a thread, with a side stream if
there is CUDA.

Owns: the thread, the stream, and the order of copies. Must not: allocate buffers, or
know the contents of copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from moe_ckpt.snapshot.token_bucket import Throttle

T = TypeVar("T")

Copy = tuple[torch.Tensor, torch.Tensor]
"""(host target, source): flat, of the same type and number of elements."""

# of a chunk under a cap: large enough to cost nothing, small enough for even waits
_CHUNK_BYTES = 1 << 20


class HostCopier:
    """One queue of work per rank, executed in order. Copies wait for tokens of
    `throttle`.
    """

    def __init__(self, throttle: Throttle | None = None) -> None:
        self.throttle = throttle or Throttle()
        has_device = torch.cuda.is_available()
        self._stream = torch.cuda.Stream() if has_device else None
        # a new thread starts on device 0, another rank's: its CUDA calls, pinning among
        # them, would use that device
        use_device = (
            partial(torch.cuda.set_device, torch.cuda.current_device())
            if has_device
            else None
        )
        # one thread: `then` relies on the order of the queue
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="host-copier", initializer=use_device
        )

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Run `work`, which may call `copy_now`, in the thread, after the device work
        that the caller has queued.
        """
        if self._stream is None:
            return self._thread.submit(work)
        # the side stream would otherwise read values that the training stream has yet
        # to compute
        computed = torch.cuda.Event()
        computed.record()
        return self._thread.submit(self._run_on_stream, work, computed)

    def then(self, work: Callable[[], T]) -> Future[T]:
        """Run `work`, which copies nothing from a device, after all earlier work."""
        return self._thread.submit(work)

    def copy_now(self, copies: Iterable[Copy]) -> float:
        """Copy, within `run`; return the seconds it took. Afterwards targets are
        complete and sources may change.

        On a device the seconds are its own: the host may be iterations ahead, and would
        count the wait for the computations before the copies as well.
        """
        if self._stream is None:
            started_s = time.monotonic()
            self._copy(copies)
            return time.monotonic() - started_s
        began, ended = (
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(enable_timing=True),
        )
        began.record()
        self._copy(copies)
        ended.record()
        self._stream.synchronize()
        return began.elapsed_time(ended) / 1e3  # milliseconds

    def close(self) -> None:
        """Finish the queue, without a cap, and end the thread."""
        self.throttle.lift()
        self._thread.shutdown()

    def _copy(self, copies: Iterable[Copy]) -> None:
        """Copy as tokens admit it, in chunks if there is a cap."""
        for target, source in copies:
            # asked for each tensor: a recovery lifts the cap in the middle of a
            # snapshot
            if not self.throttle.has_cap:
                target.copy_(source, non_blocking=True)
                continue
            length = max(1, _CHUNK_BYTES // target.element_size())
            for start in range(0, target.numel(), length):
                chunk = target[start : start + length]
                self.throttle.wait(chunk.nbytes)
                chunk.copy_(source[start : start + length], non_blocking=True)

    def _run_on_stream(self, work: Callable[[], T], computed: torch.cuda.Event) -> T:
        with torch.cuda.stream(self._stream):
            computed.wait()
            return work()
