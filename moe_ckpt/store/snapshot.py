r"""Takes one rank's snapshots into host memory while training goes on (MoEvement, sections 3.2 and 4).

Owns: one capture from start to where it is kept. Must not: decide what is taken, or how long it is kept.

    training   capture: copy buffers ---- forward, backward ---- release ---- optimizer step ---- collect
    copier        \--- lay out, take a host buffer, copy --- checksum, hand to the keeper -------/
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.store.codec import PartKey, Snapshot, SnapshotHeader, checksum, layout_parts
from moe_ckpt.store.copier import HostCopier
from moe_ckpt.store.memory import HostBuffers, SnapshotKeeper
from moe_ckpt.store.updates import Gradients

_COPY_ERRORS = (CheckpointSaveError, RuntimeError, MemoryError)

Piece = tuple[PartKey, torch.Tensor, tuple[int, int]]
"""Something to take: what it is, the tensor, and its range in the flattened whole."""


class Wanted(NamedTuple):
    """A snapshot to take: its header without parts, size and checksum, its pieces, and those that change at once.

    `gradients` are those of the step to it from the iteration before, where peers are to take that step themselves.
    """

    header: SnapshotHeader
    pieces: Callable[[], Sequence[Piece]]
    changing: Sequence[Piece] = ()
    gradients: Gradients | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Taken:
    """A snapshot, the seconds that copying it took, and the gradients that led to it, in host memory."""

    snapshot: Snapshot
    copy_s: float
    gradients: Gradients | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Capture:
    copied: Future[list[Taken]]
    finished: Future[list[Taken]]


class SnapshotEngine:
    """At most one capture at a time. The keeper, if there is one, hears of each as soon as it is finished."""

    def __init__(self, copier: HostCopier, buffers: HostBuffers, keeper: SnapshotKeeper | None = None) -> None:
        self._copier = copier
        self._buffers = buffers
        self._keeper = keeper
        self._capture: _Capture | None = None

    def capture(self, wanted: Sequence[Wanted]) -> None:
        """Start taking snapshots of one state, all or none of them. What was taken before is collected.

        Their pieces are asked for from another thread, and must not change until `release` returns; those that change
        may do so as soon as this returns.
        """
        assert self._capture is None, self._capture
        ready = [each._replace(changing=_kept(each.changing), gradients=_copied(each.gradients)) for each in wanted]
        copied = self._copier.run(lambda: self._take_all(ready))
        self._capture = _Capture(copied=copied, finished=self._copier.then(lambda: self._finish_all(copied.result())))

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

    def collect(self, *, wait: bool) -> list[Taken]:
        """Return what has been taken, once; nothing while there is none, or, without `wait`, while it is unfinished.

        Raises CheckpointSaveError if it could not be taken or kept; then there is nothing to collect any more.
        """
        capture = self._capture
        if capture is None or not (wait or capture.finished.done()):
            return []
        self.release()
        self._capture = None
        return capture.finished.result()

    def discard_torn(self) -> None:
        """Drop the capture in flight if it is not copied yet: the state under it has changed."""
        capture = self._capture
        if capture is None or capture.copied.done():
            return
        self._capture = None
        with contextlib.suppress(*_COPY_ERRORS):  # then there is nothing to give back
            self._drop(capture.finished.result())

    def _drop(self, finished: Sequence[Taken]) -> None:
        for taken in finished:
            if self._keeper:
                self._keeper.drop_snapshot(taken.snapshot)
            self._buffers.release(taken.snapshot.payload)

    def _take_all(self, wanted: Sequence[Wanted]) -> list[Taken]:
        taken: list[Taken] = []
        try:
            for each in wanted:
                done = self._take(each.header, [*each.pieces(), *each.changing])
                taken.append(replace(done, gradients=_on_host(each.gradients)))
        except _COPY_ERRORS:
            for done in taken:
                self._buffers.release(done.snapshot.payload)
            raise
        return taken

    def _finish_all(self, copied: Sequence[Taken]) -> list[Taken]:
        finished: list[Taken] = []
        try:
            for taken in copied:
                finished.append(replace(taken, snapshot=self._finish(taken)))  # noqa: PERF401 - it may raise
        except CheckpointSaveError:
            self._drop(finished)
            for taken in copied[len(finished) + 1 :]:
                self._buffers.release(taken.snapshot.payload)
            raise
        return finished

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
                self._keeper.add_snapshot(snapshot, taken.gradients)
        except CheckpointSaveError:
            self._buffers.release(snapshot.payload)
            raise
        return snapshot


def _kept(pieces: Sequence[Piece]) -> list[Piece]:
    return [(key, tensor.detach().clone(), whole) for key, tensor, whole in pieces]


def _copied(gradients: Gradients | None) -> Gradients | None:
    return gradients and {key: (gradient.detach().clone(), step) for key, (gradient, step) in gradients.items()}


def _on_host(gradients: Gradients | None) -> Gradients | None:
    return gradients and {key: (gradient.cpu(), step) for key, (gradient, step) in gradients.items()}
