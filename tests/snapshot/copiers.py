"""A snapshot engine with its parts, and copying threads that wait for a test."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from moe_ckpt.snapshot.bubbles import PipelineBubbles
from moe_ckpt.snapshot.capture import SnapshotEngine, SnapshotRequest
from moe_ckpt.snapshot.codec import Snapshot, verify
from moe_ckpt.snapshot.copier import HostCopier
from moe_ckpt.snapshot.token_bucket import Throttle
from moe_ckpt.snapshot.windows import HostBuffers, SnapshotPublisher
from tests.snapshot.samples import HEADER, IDENTITY, SHARD, Piece, pool
from tests.waits import WAIT_S


@contextmanager
def held(copier: HostCopier) -> Iterator[None]:
    """Keep a copier's thread from work submitted in this context until the end."""
    go = threading.Event()
    holding = copier.run(lambda: go.wait(WAIT_S))
    try:
        yield
    finally:
        go.set()
    assert holding.result()


@contextmanager
def held_until_waited_for(copier: HostCopier) -> Iterator[threading.Event]:
    """Keep a copier's thread busy until this thread waits for a future.

    Yields:
        An event, which is set once this thread waits.
    """
    go, left, waiting_thread = (
        threading.Event(),
        threading.Event(),
        threading.get_ident(),
    )

    def watch() -> None:
        while not left.is_set():
            if _waits_for_a_future(waiting_thread):
                go.set()
                return

    holding = copier.run(lambda: go.wait(WAIT_S) or left.is_set())
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield go
    finally:
        left.set()
        watcher.join()
        go.set()
    assert holding.result()


def finish(copier: HostCopier) -> None:
    """Wait until all submitted work is done, without collecting the results."""
    copier.then(lambda: None).result(WAIT_S)


def _waits_for_a_future(thread_id: int) -> bool:
    frame = sys._current_frames().get(thread_id)
    waits = (Future.result.__code__, Future.exception.__code__)
    while frame is not None and frame.f_code not in waits:
        frame = frame.f_back
    return frame is not None


class Asked(Throttle):
    """A cap that lets all bytes pass at once, and keeps the requested sizes."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.asked: list[int] = []

    def wait(self, nbytes: int, sleep: object = None) -> None:
        self.asked.append(nbytes)


class Engine:
    """A snapshot engine with its copier and its buffers."""

    def __init__(
        self,
        limit_bytes: int | None = None,
        daemon: SnapshotPublisher | None = None,
        bubbles: PipelineBubbles | None = None,
        buffers: HostBuffers | None = None,
    ) -> None:
        self.copier = HostCopier()
        self.buffers = buffers or pool(limit_bytes)
        self.engine = SnapshotEngine(self.copier, self.buffers, daemon, bubbles=bubbles)

    def capture(self, *pieces: Piece, changing: Sequence[Piece] = ()) -> None:
        self.engine.capture([SnapshotRequest(HEADER, lambda: pieces, changing)])

    def collected(self) -> Snapshot:
        taken = self.engine.collect(wait=True)
        assert taken
        (snapshot,) = taken.snapshots
        verify(snapshot, identity=IDENTITY, shard=SHARD)
        return snapshot
