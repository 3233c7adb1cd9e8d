r"""Takes one rank's snapshots into host memory while training goes on (MoEvement,
sections 3.2 and 4).

Owns: one capture, from its start to its publication. Must not: decide what is captured,
or how long it is kept.

    training   capture: copy buffers ---- forward, backward ---- release ---- optimizer step ---- collect
    copier        \--- lay out, take a host buffer, copy --- checksum, hand to the daemon -------/
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

# torch reports exhausted host memory and errors of a device as RuntimeError
_COPY_ERRORS = (CheckpointSaveError, RuntimeError, MemoryError)

Piece = tuple[PartKey, torch.Tensor, tuple[int, int]]
"""A tensor to capture: its key, the tensor, and its range in the flattened whole
tensor.
"""


class SnapshotRequest(NamedTuple):
    """A snapshot to take: its header without parts, size and checksum, its pieces, and
    the pieces that change at once.

    `gradients` are those of the last step, if peers take that step themselves.
    """

    header: SnapshotHeader
    pieces: Callable[[], Sequence[Piece]]
    changing: Sequence[Piece] = ()
    gradients: Gradients | None = None


_Unsealed = tuple[Snapshot, Gradients | None]
"""A snapshot without its checksum, and the gradients that led to it, in host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedBytes:
    """The seconds that copying took, and the bytes that were copied while training
    waited for other stages.
    """

    seconds: float
    bubble_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Captured:
    """Complete snapshots of one state."""

    snapshots: Sequence[Snapshot]
    copied: CopiedBytes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Capture:
    copied: Future[tuple[list[_Unsealed], CopiedBytes]]
    finished: Future[Captured]


class SnapshotEngine:
    """Takes at most one capture at a time. The daemon, if there is one, receives each
    finished snapshot at once.

    With `bubbles`, copies that fit into them wait for them.
    """

    def __init__(
        self,
        copier: HostCopier,
        buffers: HostBuffers,
        daemon: SnapshotPublisher | None = None,
        bubbles: PipelineBubbles | None = None,
    ) -> None:
        self._copier = copier
        self._buffers = buffers
        self._daemon = daemon
        self._bubbles = bubbles
        self._capture: _Capture | None = None

    def capture(
        self, wanted: Sequence[SnapshotRequest], *, bubble_bytes: float = 0.0
    ) -> None:
        """Start taking snapshots of one state, all or none of them. Earlier snapshots
        must be collected first.

        Another thread reads the pieces, which must not change until `release` returns;
        pieces that change at once may change as soon as this method returns. Bubbles
        have room for `bubble_bytes` until then.
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
        # in two parts: `release` lets the update begin after the copy, and the hash
        # runs beside it
        copied = self._copier.run(lambda: self._take_all(ready, bubble_bytes))
        self._capture = _Capture(
            copied=copied,
            finished=self._copier.then(lambda: self._finish_all(*copied.result())),
        )

    def release(self) -> None:
        """Wait until the captured state may change.

        Raises CheckpointSaveError if the capture failed; there is nothing to collect
        then.
        """
        capture = self._capture
        if capture is None:
            return
        self._hurry()
        try:
            capture.copied.result()
        except _COPY_ERRORS as error:
            self._capture = None
            raise CheckpointSaveError(
                f"the snapshot could not be copied: {error}"
            ) from error

    def collect(self, *, wait: bool) -> Captured | None:
        """Return the captured snapshots, once; None if there are none or, without
        `wait`, if they are unfinished.

        Raises CheckpointSaveError if the capture or its publication failed; there is
        nothing to collect then.
        """
        capture = self._capture
        if capture is None or not (wait or capture.finished.done()):
            return None
        self.release()
        self._capture = None
        return capture.finished.result()

    def discard_torn(self) -> None:
        """Drop the capture in flight if its copy is unfinished: the state under it has
        changed.
        """
        capture = self._capture
        if capture is None or capture.copied.done():
            return
        self._capture = None
        self._hurry()
        # then there is nothing to give back
        with self.uncapped(), contextlib.suppress(*_COPY_ERRORS):
            self.drop(capture.finished.result().snapshots)

    def drop(self, finished: Sequence[Snapshot]) -> None:
        """Withdraw snapshots that were captured, and are kept nowhere."""
        # withdrawn before it is released: no peer may read a payload whose memory is
        # filled anew
        if self._daemon and finished:
            self._daemon.drop_snapshots(finished)
        for snapshot in finished:
            self._buffers.release(snapshot.payload)

    @contextlib.contextmanager
    def uncapped(self) -> Iterator[None]:
        """Lift the cap within this context: a recovery waits for the copy, or for
        memory that is no longer needed.
        """
        self._copier.throttle.lift()
        try:
            yield
        finally:
            self._copier.throttle.apply()

    def apply_cap(self) -> None:
        """Apply the cap from now on, if there is one."""
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
                snapshot, of_snapshot = self._lay_out(
                    each.header, [*each.pieces(), *each.changing]
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
        except _COPY_ERRORS:
            for snapshot in snapshots:
                self._buffers.release(snapshot.payload)
            raise

    def _lay_out(
        self, header: SnapshotHeader, pieces: Sequence[Piece]
    ) -> tuple[Snapshot, list[Copy]]:
        # here, on the copier's thread: 300 pieces take 24 ms, which training would
        # stand still. Each view counts: the thread shares the interpreter with training
        parts, payload_bytes = layout_parts(pieces)
        buffer = self._buffers.acquire(payload_bytes)
        snapshot = Snapshot(
            header=replace(header, parts=parts, payload_bytes=payload_bytes),
            payload=buffer,
        )
        tensors = {key: tensor for key, tensor, _ in pieces}
        # parts lie one after another, without gaps
        places = buffer[:payload_bytes].split([part.nbytes for part in parts])
        copies = [
            (place.view(part.dtype), tensors[part.key].detach().reshape(-1))
            for part, place in zip(parts, places, strict=True)
        ]
        return snapshot, copies

    def _copy(self, copies: Sequence[Copy], bubble_bytes: float) -> CopiedBytes:
        """Copy as many bytes as fit into bubbles when they open, and all others at once
        (Algorithm 4).
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
            # computation hides the others at any time, a bubble that passes unused does
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
                found = checksum(snapshot.payload, snapshot.header.payload_bytes)
                sealed = replace(
                    snapshot, header=replace(snapshot.header, checksum=found)
                )
                if self._daemon:
                    # at once, from this thread: peers have until the end of the next
                    # iteration to receive it
                    self._daemon.add_snapshot(sealed, gradients)
                finished.append(sealed)
        except CheckpointSaveError:
            self.drop(finished)
            for snapshot, _ in unsealed[len(finished) :]:
                self._buffers.release(snapshot.payload)
            raise
        return Captured(snapshots=finished, copied=copied)


def _kept(pieces: Sequence[Piece]) -> list[Piece]:
    # forward changes buffers, and it may begin before the copier has come to them
    return [(key, tensor.detach().clone(), whole) for key, tensor, whole in pieces]


def _copied(gradients: Gradients | None) -> Gradients | None:
    # the next iteration zeroes Megatron's gradient buffers while the copier may still
    # read them
    return gradients and {
        key: (gradient.detach().clone(), step)
        for key, (gradient, step) in gradients.items()
    }
