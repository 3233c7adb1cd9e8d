r"""Takes one rank's snapshots into host memory while training continues.

Owns: one capture, from its start to its publication. Must not: decide which tensors are
captured, or how long snapshots are kept. MoEvement, sections 3.2 and 4.

    training   capture: copy buffers -- forward, backward -- release -- step -- collect
    copier        \-- lay out, take host buffer, copy ------/
                                                      \-- checksum, to daemon ---/
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.policies.bubble_copies import parts_in_bubbles
from moe_ckpt.snapshot.adam_update import Gradients
from moe_ckpt.snapshot.bubbles import PipelineBubbles
from moe_ckpt.snapshot.codec import (
    PartKey,
    Snapshot,
    SnapshotHeader,
    checksum,
    layout_parts,
)
from moe_ckpt.snapshot.copier import Copy, HostCopier
from moe_ckpt.snapshot.windows import HostBuffers, SnapshotPublisher

COPY_ERRORS = (CheckpointSaveError, RuntimeError, MemoryError)
"""Errors of a copy to host memory.

torch reports exhausted host memory and errors of a device as RuntimeError.
"""

Piece = tuple[PartKey, torch.Tensor, tuple[int, int]]
"""A tensor to capture: the key, the tensor, and the range in the flattened whole
tensor.
"""


class SnapshotRequest(NamedTuple):
    """A snapshot to take."""

    header: SnapshotHeader
    """Header without parts, size and checksum."""

    pieces: Callable[[], Sequence[Piece]]
    """Returns the pieces, which must not change before `SnapshotEngine.release`
    returns. The copier's thread calls this function.
    """

    changing: Sequence[Piece] = ()
    """Pieces that may change as soon as `SnapshotEngine.capture` returns."""

    gradients: Gradients | None = None
    """Gradients of the last step, if peers take that step themselves."""


_Unsealed = tuple[Snapshot, Gradients | None]
"""A snapshot without its checksum, and the gradients that led to it, in host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedBytes:
    """Measurements of one capture's copy."""

    seconds: float
    """Seconds that copying took."""

    bubble_bytes: int
    """Bytes that were copied while training waited for other stages."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Captured:
    """Complete snapshots of one state."""

    snapshots: Sequence[Snapshot]
    """Snapshots with their checksums."""

    copied: CopiedBytes
    """Measurements of the copy."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Capture:
    copied: Future[tuple[list[_Unsealed], CopiedBytes]]
    finished: Future[Captured]


class SnapshotEngine:
    """Takes snapshots of one rank, at most one capture at a time."""

    def __init__(
        self,
        copier: HostCopier,
        buffers: HostBuffers,
        daemon: SnapshotPublisher | None = None,
        bubbles: PipelineBubbles | None = None,
    ) -> None:
        """Prepare captures.

        Args:
            copier: Copies in another thread.
            buffers: Host memory of the payloads.
            daemon: Receives each snapshot as soon as that snapshot is finished; None
                without a daemon.
            bubbles: Bubbles of this rank. Copies that fit into bubbles wait for
                bubbles. None: no copy waits.
        """
        self._copier = copier
        self._buffers = buffers
        self._daemon = daemon
        self._bubbles = bubbles
        self._capture: _Capture | None = None

    def capture(
        self, wanted: Sequence[SnapshotRequest], *, bubble_bytes: float = 0.0
    ) -> None:
        """Start taking snapshots of one state, all or none of them.

        The snapshots of an earlier capture must be collected first. Another thread
        reads the pieces, which must not change until `release` returns. Pieces in
        `changing` may change as soon as this method returns.

        Args:
            wanted: Snapshots to take.
            bubble_bytes: Bytes for which bubbles have room until `release`.
        """
        assert self._capture is None, self._capture
        if self._bubbles:
            self._bubbles.unhurry()
        ready = [
            each._replace(
                changing=_kept(each.changing), gradients=_copied(each.gradients)
            )
            for each in wanted
        ]
        # two futures: `release` lets the update begin after the copy, and the hash runs
        # beside the update
        copied = self._copier.run(lambda: self._take_all(ready, bubble_bytes))
        self._capture = _Capture(
            copied=copied,
            finished=self._copier.then(lambda: self._finish_all(*copied.result())),
        )

    def release(self) -> None:
        """Wait until the captured state may change.

        Raises:
            CheckpointSaveError: The capture failed. There is nothing to collect then.
        """
        capture = self._capture
        if capture is None:
            return
        self._hurry()
        try:
            capture.copied.result()
        except COPY_ERRORS as error:
            self._capture = None
            raise CheckpointSaveError(
                f"the snapshot could not be copied: {error}"
            ) from error

    def collect(self, *, wait: bool) -> Captured | None:
        """Return the captured snapshots, once.

        Args:
            wait: Whether to wait for unfinished snapshots.

        Returns:
            The snapshots; None if there is no capture or, without `wait`, if the
            capture is unfinished.

        Raises:
            CheckpointSaveError: The capture or its publication failed. There is nothing
                to collect then.
        """
        capture = self._capture
        if capture is None or not (wait or capture.finished.done()):
            return None
        self.release()
        self._capture = None
        return capture.finished.result()

    def discard_torn(self) -> None:
        """Drop the capture in progress if its copy is unfinished.

        The caller's state has changed under the capture.
        """
        capture = self._capture
        if capture is None or capture.copied.done():
            return
        self._capture = None
        self._hurry()
        # after such an error there is nothing to give back
        with self.uncapped(), contextlib.suppress(*COPY_ERRORS):
            self.drop(capture.finished.result().snapshots)

    def drop(self, finished: Sequence[Snapshot]) -> None:
        """Withdraw and release captured snapshots that no window keeps."""
        # withdrawn before the release: no peer may read a payload whose memory is
        # filled anew
        if self._daemon and finished:
            self._daemon.drop_snapshots(finished)
        for snapshot in finished:
            self._buffers.release(snapshot.payload)

    @contextlib.contextmanager
    def uncapped(self) -> Iterator[None]:
        """Lift the cap on copies within this context.

        A recovery lifts the cap while waiting for the copy, or for memory that is no
        longer needed.
        """
        self._copier.throttle.lift()
        try:
            yield
        finally:
            self._copier.throttle.apply()

    def apply_cap(self) -> None:
        """Apply the cap on copies from now on, if there is a cap."""
        self._copier.throttle.apply()

    def _hurry(self) -> None:
        if self._bubbles:
            self._bubbles.hurry()

    def _take_all(
        self, wanted: Sequence[SnapshotRequest], bubble_bytes: float
    ) -> tuple[list[_Unsealed], CopiedBytes]:
        snapshots: list[Snapshot] = []
        copies: list[Copy] = []
        try:
            for each in wanted:
                # on the copier's thread: 300 pieces take 24 ms, for which training
                # would wait
                snapshot, of_snapshot = lay_out(
                    each.header, [*each.pieces(), *each.changing], self._buffers
                )
                snapshots.append(snapshot)
                copies += of_snapshot
            copied = self._copy(copies, bubble_bytes)
            on_host = [
                each.gradients
                and {
                    key: (gradient.cpu(), step)
                    for key, (gradient, step) in each.gradients.items()
                }
                for each in wanted
            ]
            return list(zip(snapshots, on_host, strict=True)), copied
        except COPY_ERRORS:
            for snapshot in snapshots:
                self._buffers.release(snapshot.payload)
            raise

    def _copy(self, copies: Sequence[Copy], bubble_bytes: float) -> CopiedBytes:
        """Copy bytes that fit into bubbles when bubbles open, and all others at once.

        MoEtion, Algorithm 4.
        """
        bubbles = self._bubbles
        if bubbles is None:
            return CopiedBytes(seconds=self._copier.copy_now(copies), bubble_bytes=0)
        first_beside = parts_in_bubbles(
            [target.nbytes for target, _ in copies], bubble_bytes
        )
        waiting, beside = deque(copies[:first_beside]), deque(copies[first_beside:])
        seconds, bubble_bytes_used = 0.0, 0
        while beside or (waiting and bubbles.wait()):
            # computation hides the other copies at any time, but an unused bubble does
            # not come again
            in_bubble = bool(waiting) and (not beside or bubbles.is_open)
            copy = (waiting if in_bubble else beside).popleft()
            seconds += self._copier.copy_now([copy])
            bubble_bytes_used += copy[0].nbytes if in_bubble else 0
        return CopiedBytes(
            seconds=seconds + self._copier.copy_now(waiting),
            bubble_bytes=bubble_bytes_used,
        )

    def _finish_all(
        self, unsealed: Sequence[_Unsealed], copied: CopiedBytes
    ) -> Captured:
        finished: list[Snapshot] = []
        try:
            for snapshot, gradients in unsealed:
                sealed = seal(snapshot)
                if self._daemon:
                    # published at once, from this thread: peers must receive the
                    # snapshot by the end of the next iteration
                    self._daemon.add_snapshot(sealed, gradients)
                finished.append(sealed)
        except CheckpointSaveError:
            self.drop(finished)
            for snapshot, _ in unsealed[len(finished) :]:
                self._buffers.release(snapshot.payload)
            raise
        return Captured(snapshots=finished, copied=copied)


def lay_out(
    header: SnapshotHeader, pieces: Sequence[Piece], buffers: HostBuffers
) -> tuple[Snapshot, list[Copy]]:
    """Acquire the memory of a snapshot, and return the copies that fill the memory.

    Args:
        header: Header without parts, size and checksum.
        pieces: Contents of the snapshot.
        buffers: Host memory of the payload.

    Returns:
        The snapshot, without its checksum, and the copies.

    Raises:
        CheckpointSaveError: There is no such memory, or a piece has a dtype that
            snapshots do not have.
    """
    parts, payload_bytes = layout_parts(pieces)
    buffer = buffers.acquire(payload_bytes)
    snapshot = Snapshot(
        header=replace(header, parts=parts, payload_bytes=payload_bytes), payload=buffer
    )
    tensors = {key: tensor for key, tensor, _ in pieces}
    # parts lie one after another, without gaps. Each view counts: the copier's thread
    # shares the interpreter with training
    targets = buffer[:payload_bytes].split([part.nbytes for part in parts])
    copies = [
        (target.view(part.dtype), tensors[part.key].detach().reshape(-1))
        for part, target in zip(parts, targets, strict=True)
    ]
    return snapshot, copies


def seal(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot whose payload is complete with the payload's checksum."""
    found = checksum(snapshot.payload, snapshot.header.payload_bytes)
    return replace(snapshot, header=replace(snapshot.header, checksum=found))


def _kept(pieces: Sequence[Piece]) -> list[Piece]:
    # forward changes buffers, and may begin before the copier has read the buffers
    return [(key, tensor.detach().clone(), whole) for key, tensor, whole in pieces]


def _copied(gradients: Gradients | None) -> Gradients | None:
    # the next iteration zeroes Megatron's gradient buffers while the copier may still
    # read them
    return gradients and {
        key: (gradient.detach().clone(), step)
        for key, (gradient, step) in gradients.items()
    }
