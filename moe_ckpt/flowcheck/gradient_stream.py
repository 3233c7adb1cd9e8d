"""One rank's gradients on their way to the rank's checkpoint servers.

The servers take the optimizer's steps themselves. Owns: the iterations that servers
have received and completed, and the limit on the servers' lag. Must not: know
parameters, or agree with other ranks. FlowCheck, sections 4 and 5.

    reduction          tap: gradients into shared memory
    step committed     hand over: header, Adam's numbers, buffers
                       -> replica daemon -> servers: state t - 1 -> state t
    next iterations    progress: newest iteration that all servers of this rank have
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.replication.publisher import Publisher
from moe_ckpt.replication.update_work import UpdateWork
from moe_ckpt.snapshot.adam_update import (
    AdamStep,
    ObservedGradients,
    buffer_parts,
    follows_from_gradients,
    steps_of,
)
from moe_ckpt.snapshot.codec import PartKey, Snapshot, SnapshotHeader

NOTHING = -1
"""Stands for no completed iteration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of a rank's servers."""

    completed: int
    """Newest iteration that all servers of the rank have, or `NOTHING`."""

    lost: str
    """Reason why the stream is cut; empty while the stream is whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HandedOver:
    """Gradients that were sent to servers."""

    size_bytes: int
    """Size of the gradients and buffers, in bytes."""

    tap_s: float
    """Time that copying the gradients into shared memory took, in seconds."""

    lag_iters: int
    """Iterations by which the slowest server was behind when gradients were sent."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Tapped:
    """Gradients in shared memory, followed by space for the buffers."""

    masters: tuple[PartKey, ...]
    """Master weights of the gradients, in order."""

    packed: torch.Tensor
    """Shared memory: uint8, the gradients (float32) and the space."""

    gradient_bytes: int
    """Size of the gradients, in bytes."""

    seconds: float
    """Time that copying the gradients took, in seconds."""


class GradientStream:
    """Stream of a rank's gradients to the rank's checkpoint servers, for one thread.

    If servers lag by too many iterations, the stream is cut, and begins again with a
    whole snapshot.
    """

    def __init__(self, publisher: Publisher, max_lag_iters: int) -> None:
        """Create a stream that has not begun.

        Args:
            publisher: Publishes the gradients.
            max_lag_iters: Most iterations by which servers may lag. 0: training waits
                for the servers in every iteration.
        """
        self._publisher = publisher
        self._max_lag_iters = max_lag_iters
        # keys of states that servers may have, by iteration
        self._keys: dict[int, str] = {}
        self._tapped: _Tapped | None = None
        self._base: int | None = None
        self._completed = NOTHING
        self._lost = ""
        self._works: list[tuple[int, UpdateWork]] = []

    @property
    def has_begun(self) -> bool:
        """Whether servers have a state to which gradients can be applied."""
        return self._base is not None

    @property
    def lag_iters(self) -> int:
        """The number of iterations by which the slowest server is behind."""
        return (
            0
            if self._base is None
            else max(self._keys) - max(self._completed, self._base - 1)
        )

    @property
    def num_states(self) -> int:
        """The most states that a server of this rank may hold."""
        return len(self._keys)

    @property
    def packed_bytes(self) -> int:
        """Bytes of gradients on their way to servers, including memory for reuse."""
        return self._publisher.updates.total_bytes

    def begin(self, base: Snapshot) -> None:
        """Begin with a snapshot that servers have, or will receive.

        Gradients of the next iteration follow.
        """
        self._base = base.header.iteration
        self._keys[self._base] = self._publisher.begin_states(base)

    def cut(self, reason: str) -> None:
        """Cut the stream because an iteration is missing.

        Nothing follows until the stream begins again.

        Args:
            reason: Why the iteration is missing.
        """
        # keep the first reason, from which later reasons follow
        self._lost = self._lost or reason
        self._release()

    def reset(self) -> None:
        """Prepare to begin with the whole snapshot that is being taken.

        Older states stay until servers have the snapshot.
        """
        self._release()
        self._base, self._completed, self._lost = None, NOTHING, ""

    def clear(self) -> None:
        """Forget the servers' states after other ranks were lost.

        A survey finds the servers' states again.
        """
        self.reset()
        self._keys.clear()

    def tap(self, gradients: Mapping[PartKey, torch.Tensor], buffer_bytes: int) -> None:
        """Copy an iteration's reduced gradients into shared memory.

        If servers lag too far, the stream waits for the servers or is cut.

        Args:
            gradients: Gradients as they leave the reduction, by master weight: float32,
                flat.
            buffer_bytes: Bytes of the buffers that `hand_over` appends.

        Raises:
            PeersLostError: Ranks were lost during a wait for servers.
        """
        self._release()
        self._keep_up()
        if self._lost:
            return
        began_s = time.monotonic()
        gradient_bytes = 4 * sum(gradient.numel() for gradient in gradients.values())
        try:
            packed = self._publisher.updates.acquire(gradient_bytes + buffer_bytes)
        except CheckpointSaveError as error:
            self.cut(str(error))
            return
        _copy_all([*gradients.values()], packed[:gradient_bytes].view(torch.float32))
        seconds = time.monotonic() - began_s
        masters = tuple(gradients)
        self._tapped = _Tapped(
            masters=masters,
            packed=packed,
            gradient_bytes=gradient_bytes,
            seconds=seconds,
        )

    def hand_over(
        self,
        header: SnapshotHeader,
        steps: Mapping[PartKey, AdamStep],
        buffers: Mapping[PartKey, torch.Tensor],
        observed: ObservedGradients | None = None,
    ) -> HandedOver | None:
        """Let servers compute a state from the tapped gradients.

        A failure cuts the stream.

        Args:
            header: Header of the state, without a checksum.
            steps: Adam's step of each master weight that takes one.
            buffers: The buffers of the state.
            observed: Gradients that servers capture, and that were not tapped.

        Returns:
            The sent gradients. None after a failure.
        """
        tapped, self._tapped = self._tapped, None
        if tapped is None or self._base is None:
            self.cut(
                f"iteration {header.iteration}: no gradients, or nothing that they"
                " follow"
            )
            return None
        try:
            self._keys[header.iteration] = self._send(
                tapped, header, steps, buffers, observed
            )
        except CheckpointSaveError as error:
            self.cut(str(error))
            return None
        size_bytes = tapped.gradient_bytes + sum(
            buffer.nbytes for buffer in buffers.values()
        )
        return HandedOver(
            size_bytes=size_bytes, tap_s=tapped.seconds, lag_iters=self.lag_iters
        )

    def progress(self) -> Progress:
        """Return the newest iteration that all servers have, without a wait."""
        if self._base is not None:
            try:
                self._look(wait=False)
            except CheckpointSaveError as error:
                self.cut(str(error))
        return Progress(completed=self._completed, lost=self._lost)

    def take_works(self) -> list[tuple[int, UpdateWork]]:
        """Return the work of servers since the last call.

        Returns:
            Iteration and the slowest server's work, for each state that all servers
            have completed.
        """
        works, self._works = self._works, []
        return works

    def drop_before(self, iteration: int) -> None:
        """Make servers delete states older than `iteration`.

        The servers of all ranks must have the state of `iteration`.
        """
        old = [each for each in self._keys if each < iteration]
        self._publisher.drop([self._keys.pop(each) for each in old])

    def _keep_up(self) -> None:
        """Wait for servers that lag too far, or cut the stream."""
        if self._base is None or self._lost:
            return
        try:
            # training waits while servers lack the whole snapshot with which a cut
            # stream begins again: otherwise the stream would be cut again and again
            has_base = self._completed != NOTHING
            self._look(
                wait=not self._max_lag_iters
                or (not has_base and self.lag_iters > self._max_lag_iters)
            )
        except CheckpointSaveError as error:
            self.cut(str(error))
            return
        if self.lag_iters > self._max_lag_iters:
            self.cut(
                f"a server lags by {self.lag_iters} iterations, wanted at most"
                " ckpt.max_lag_iters"
            )

    def _look(self, *, wait: bool) -> None:
        """Count the states that all servers have, in order.

        Raises:
            CheckpointSaveError: Servers cannot compute a state.
            PeersLostError: Ranks were lost during a wait.
        """
        assert self._base is not None
        while (following := max(self._completed + 1, self._base)) in self._keys:
            if not self._publisher.has_state(
                self._keys[following], following, wait=wait
            ):
                return
            self._completed = following
            if following != self._base:
                self._works.append(
                    (following, self._publisher.work_for(self._keys[following]))
                )

    def _send(
        self,
        tapped: _Tapped,
        header: SnapshotHeader,
        steps: Mapping[PartKey, AdamStep],
        buffers: Mapping[PartKey, torch.Tensor],
        observed: ObservedGradients | None,
    ) -> str:
        """Publish tapped gradients, and return the key of the resulting state.

        Raises:
            CheckpointSaveError: Servers cannot compute the state.
        """
        try:
            _require_complete(tapped, header, steps, buffers, observed)
            offset = tapped.gradient_bytes
            for part in buffer_parts(header):
                flat = (
                    buffers[part.key].detach().contiguous().view(-1).view(torch.uint8)
                )
                tapped.packed[offset : offset + part.nbytes].copy_(flat)
                offset += part.nbytes
        except BaseException:
            self._publisher.updates.release(tapped.packed)
            raise
        return self._publisher.hand_over(
            header, steps_of(header, steps), tapped.packed, offset, observed
        )

    def _release(self) -> None:
        tapped, self._tapped = self._tapped, None
        if tapped:
            self._publisher.updates.release(tapped.packed)


def _copy_all(gradients: Sequence[torch.Tensor], packed: torch.Tensor) -> None:
    """Copy gradients one after another into host memory.

    Returns when all copies are complete.
    """
    targets = packed.split([gradient.numel() for gradient in gradients])
    for gradient, target in zip(gradients, targets, strict=True):
        target.copy_(gradient, non_blocking=True)
    if any(gradient.is_cuda for gradient in gradients):
        # the optimizer's step scales gradients in place
        torch.cuda.current_stream().synchronize()


def _require_complete(
    tapped: _Tapped,
    header: SnapshotHeader,
    steps: Mapping[PartKey, AdamStep],
    buffers: Mapping[PartKey, torch.Tensor],
    observed: ObservedGradients | None,
) -> None:
    """Check that a header's state follows from tapped gradients and buffers.

    Raises:
        CheckpointSaveError: The state does not follow.
    """
    stepping = [part.key for part in header.parts if part.key in steps]
    if observed:
        weights = zip(stepping, observed.weights, strict=True)
        stepping = [key for key, is_observed in weights if not is_observed]
    room_bytes = tapped.packed.numel() - tapped.gradient_bytes
    buffer_bytes = sum(part.nbytes for part in buffer_parts(header))
    if not follows_from_gradients(header):
        raise CheckpointSaveError(
            f"{header}: got a state that is not all FP32 masters and moments"
        )
    if stepping != list(tapped.masters):
        raise CheckpointSaveError(
            f"{header}: got gradients of {len(tapped.masters)} tensors, wanted"
            f" {len(stepping)}"
        )
    if buffer_bytes > room_bytes or len(buffers) != len(buffer_parts(header)):
        raise CheckpointSaveError(
            f"{header}: got {buffer_bytes} bytes of buffers, wanted at most"
            f" {room_bytes}"
        )
