"""Takes one rank's sparse snapshots into host memory while training goes on (MoEvement, sections 3.2 and 4).

Owns: one capture from start to checksum. Must not: decide what is taken, or keep what was taken.

    capture   lay out, take a buffer, start the copy
    release   wait until the state may change: the copy is done           (the wait is the snapshot's stall)
    collect   the finished snapshot, with its checksum, once it is there
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.store.codec import BUFFER, PartKey, Snapshot, SnapshotHeader, checksum, layout_parts
from moe_ckpt.store.copier import HostCopier
from moe_ckpt.store.memory import HostBuffers

Piece = tuple[PartKey, torch.Tensor, tuple[int, int]]
"""Something to take: what it is, the tensor, and its range in the flattened whole."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Taken:
    """A finished snapshot, the bytes of it and the seconds that the copy took."""

    snapshot: Snapshot
    copy_s: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Capture:
    header: SnapshotHeader
    buffer: torch.Tensor
    copied: Future[float]
    crc32: Future[int]


class SnapshotEngine:
    """At most one capture at a time."""

    def __init__(self, copier: HostCopier, buffers: HostBuffers) -> None:
        self._copier = copier
        self._buffers = buffers
        self._capture: _Capture | None = None

    def capture(self, header: SnapshotHeader, pieces: Sequence[Piece]) -> None:
        """Start taking `pieces`; `header` needs no parts, size and checksum yet. What was taken before is collected.

        The pieces must not change until `release` returns, but buffers, which forward changes, may at once.
        Raises CheckpointSaveError if the memory budget does not allow it.
        """
        assert self._capture is None, self._capture
        parts, payload_bytes = layout_parts(pieces)
        tensors = {key: tensor for key, tensor, _ in pieces}
        buffer = self._buffers.acquire(payload_bytes)
        header = replace(header, parts=parts, payload_bytes=payload_bytes)
        draft = Snapshot(header=header, payload=buffer)
        copied = self._copier.copy(
            [(draft.part(part).view(-1), _source(part.key, tensors[part.key])) for part in parts]
        )
        crc32 = self._copier.then(lambda: checksum(buffer, payload_bytes))
        self._capture = _Capture(header=header, buffer=buffer, copied=copied, crc32=crc32)

    def release(self) -> None:
        """Wait until the state that is being taken may change. Raises CheckpointSaveError if the copy failed."""
        capture = self._capture
        if capture is None:
            return
        try:
            capture.copied.result()
        except (RuntimeError, MemoryError) as error:
            self._drop(capture)
            raise CheckpointSaveError(f"{capture.header}: the copy failed: {error}") from error

    def collect(self, *, wait: bool) -> Taken | None:
        """Return what has been taken, once; None while there is nothing, or, without `wait`, while it is unfinished."""
        capture = self._capture
        if capture is None or not (wait or capture.crc32.done()):
            return None
        self._capture = None
        header = replace(capture.header, crc32=capture.crc32.result())
        return Taken(snapshot=Snapshot(header=header, payload=capture.buffer), copy_s=capture.copied.result())

    def discard_torn(self) -> None:
        """Drop the capture in flight if its copy is not done yet: the state under it has changed."""
        capture = self._capture
        if capture is None or capture.copied.done():
            return
        self._drop(capture)

    def _drop(self, capture: _Capture) -> None:
        self._capture = None
        capture.crc32.result()
        self._buffers.release(capture.buffer)


def _source(key: PartKey, tensor: torch.Tensor) -> torch.Tensor:
    source = tensor.detach().reshape(-1)
    return source.clone() if key.role == BUFFER else source
