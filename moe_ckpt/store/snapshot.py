r"""Takes one rank's sparse snapshots into host memory while training goes on (MoEvement, sections 3.2 and 4).

Owns: one capture from start to where it is kept. Must not: decide what is taken, or how long it is kept.

    training   capture: copy buffers ---- forward, backward ---- release ---- optimizer step ---- collect
    copier        \--- lay out, take a host buffer, copy --- checksum, hand to the keeper -------/
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.store.codec import PartKey, Snapshot, SnapshotHeader, checksum, layout_parts
from moe_ckpt.store.copier import HostCopier
from moe_ckpt.store.memory import HostBuffers, SnapshotKeeper

_COPY_ERRORS = (CheckpointSaveError, RuntimeError, MemoryError)

Piece = tuple[PartKey, torch.Tensor, tuple[int, int]]
"""Something to take: what it is, the tensor, and its range in the flattened whole."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Taken:
    """A snapshot, and the seconds that copying it took."""

    snapshot: Snapshot
    copy_s: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Capture:
    copied: Future[Taken]
    finished: Future[Snapshot]


class SnapshotEngine:
    """At most one capture at a time. The keeper, if there is one, hears of each as soon as it is finished."""

    def __init__(self, copier: HostCopier, buffers: HostBuffers, keeper: SnapshotKeeper | None = None) -> None:
        self._copier = copier
        self._buffers = buffers
        self._keeper = keeper
        self._capture: _Capture | None = None

    def capture(self, header: SnapshotHeader, pieces: Callable[[], Sequence[Piece]], changing: Sequence[Piece]) -> None:
        """Start taking pieces; `header` needs no parts, size and checksum yet. What was taken before is collected.

        `pieces` is called from another thread; they must not change until `release` returns. Those in `changing` may
        change as soon as this returns.
        """
        assert self._capture is None, self._capture
        kept = [(key, tensor.detach().clone(), whole) for key, tensor, whole in changing]
        copied = self._copier.run(lambda: self._take(header, [*pieces(), *kept]))
        self._capture = _Capture(copied=copied, finished=self._copier.then(lambda: self._finish(copied.result())))

    def release(self) -> None:
        """Wait until the state that is being taken may change.

        Raises CheckpointSaveError if it could not be taken; then there is nothing to collect.
        """
        capture = self._capture
        if capture is None:
            return
        try:
            capture.copied.result()
        except _COPY_ERRORS as error:
            self._capture = None
            raise CheckpointSaveError(f"the snapshot could not be copied: {error}") from error

    def collect(self, *, wait: bool) -> Taken | None:
        """Return what has been taken, once; None while there is nothing, or, without `wait`, while it is unfinished.

        Raises CheckpointSaveError if it could not be taken or kept; then there is nothing to collect any more.
        """
        capture = self._capture
        if capture is None or not (wait or capture.finished.done()):
            return None
        self.release()
        self._capture = None
        return Taken(snapshot=capture.finished.result(), copy_s=capture.copied.result().copy_s)

    def discard_torn(self) -> None:
        """Drop the capture in flight if it is not copied yet: the state under it has changed."""
        capture = self._capture
        if capture is None or capture.copied.done():
            return
        self._capture = None
        with contextlib.suppress(*_COPY_ERRORS):  # then there is nothing to give back
            snapshot = capture.finished.result()
            if self._keeper:
                self._keeper.drop_snapshot(snapshot)
            self._buffers.release(snapshot.payload)

    def _take(self, header: SnapshotHeader, pieces: Sequence[Piece]) -> Taken:
        parts, payload_bytes = layout_parts(pieces)
        buffer = self._buffers.acquire(payload_bytes)
        snapshot = Snapshot(header=replace(header, parts=parts, payload_bytes=payload_bytes), payload=buffer)
        tensors = {key: tensor for key, tensor, _ in pieces}
        targets = ((snapshot.part(part).view(-1), tensors[part.key].detach().reshape(-1)) for part in parts)
        try:
            return Taken(snapshot=snapshot, copy_s=self._copier.copy_now(targets))
        except (RuntimeError, MemoryError):
            self._buffers.release(buffer)
            raise

    def _finish(self, taken: Taken) -> Snapshot:
        header, payload = taken.snapshot.header, taken.snapshot.payload
        found = checksum(payload, header.payload_bytes)
        snapshot = Snapshot(header=replace(header, checksum=found), payload=payload)
        try:
            if self._keeper:
                self._keeper.add_snapshot(snapshot)
        except CheckpointSaveError:
            self._buffers.release(snapshot.payload)
            raise
        return snapshot
