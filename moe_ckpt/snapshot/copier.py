"""Copies tensors to host memory in a separate thread while training continues.

With CUDA the copies run on a side stream. Owns: the thread, the stream, and the order
of copies. Must not: allocate buffers, or interpret the contents of copies.
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
"""(host target, source): flat, with the same dtype and number of elements."""

# size of a chunk under a cap: large enough to cost nothing, small enough for even waits
_CHUNK_BYTES = 1 << 20


class HostCopier:
    """One queue of work per rank, executed in order.

    Attributes:
        throttle: Cap on copies, which wait for tokens of this cap.
    """

    def __init__(self, throttle: Throttle | None = None) -> None:
        self.throttle = throttle or Throttle()
        has_device = torch.cuda.is_available()
        self._stream = torch.cuda.Stream() if has_device else None
        # a new thread starts on device 0, which may belong to another rank: CUDA calls
        # of the thread, such as pinning, would use that device
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
        """Run `work` in the thread, after the device work that the caller has queued.

        `work` may call `copy_now`.
        """
        if self._stream is None:
            return self._thread.submit(work)
        # the side stream would otherwise read values that the training stream has yet
        # to compute
        computed = torch.cuda.Event()
        computed.record()
        return self._thread.submit(self._run_on_stream, work, computed)

    def then(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in the thread after all earlier work.

        `work` must not copy from a device.
        """
        return self._thread.submit(work)

    def copy_now(self, copies: Iterable[Copy]) -> float:
        """Copy, within `run`. Afterwards targets are complete, and sources may change.

        Returns:
            Seconds that the copies took. On a device these are seconds of the device:
            the host may be iterations ahead, and would also count the wait for
            computations queued before the copies.
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
        """Finish the queue without a cap, and end the thread."""
        self.throttle.lift()
        self._thread.shutdown()

    def _copy(self, copies: Iterable[Copy]) -> None:
        """Copy as tokens admit bytes, in chunks if there is a cap."""
        for target, source in copies:
            # checked for each tensor: a recovery lifts the cap in the middle of a
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
