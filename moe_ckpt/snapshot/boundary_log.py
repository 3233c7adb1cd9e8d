"""The tensors that a stage sent to its neighbours, kept by the sender in host memory
(MoEvement, section 3.4).

Owns: copies of activations sent downstream and gradients sent upstream, by iteration
and, in the order of sending, by micro-batch; dropping entries that no window needs.
Must not: send, or decide which entries are needed.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

import torch

from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.snapshot.codec import checksum
from moe_ckpt.snapshot.copier import HostCopier
from moe_ckpt.snapshot.host_transfers import bytes_of
from moe_ckpt.snapshot.windows import HostBuffers

_log = logging.getLogger(__name__)


class Direction(Enum):
    """The direction in which a tensor crosses a stage boundary."""

    ACTIVATION = "activations sent downstream"
    GRADIENT = "gradients sent upstream"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoggedEnds:
    """The logs of a replayed iteration: bytes by micro-batch from each neighbour, None
    from one that replays.
    """

    from_previous: Sequence[torch.Tensor] | None
    from_next: Sequence[torch.Tensor] | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Entry:
    buffer: torch.Tensor
    size_bytes: int
    copied: Future[int]
    """The checksum of the bytes, once they are copied."""


_Iteration = dict[Direction, list[_Entry]]


class BoundaryLog:
    """One rank's log. It records only between `begin` and `end`, so evaluations are not
    logged.
    """

    def __init__(self, copier: HostCopier, buffers: HostBuffers) -> None:
        self._copier = copier
        self._buffers = buffers
        self._iterations: dict[int, _Iteration] = {}
        self._current: _Iteration | None = None
        self.spent_s = 0.0

    @property
    def size_bytes(self) -> int:
        """The bytes of all logged tensors."""
        return sum(
            entry.size_bytes
            for log in self._iterations.values()
            for entry in _entries(log)
        )

    def begin(self, iteration: int) -> None:
        """Log the tensors sent from now on under `iteration`, in place of those of an
        abandoned pass.
        """
        self._drop(iteration)
        self._current = self._iterations[iteration] = {
            direction: [] for direction in Direction
        }

    def end(self) -> None:
        """Stop logging until the next iteration begins."""
        self._current = None

    def record(self, direction: Direction, tensor: torch.Tensor) -> None:
        """Log a tensor that is being sent: the next micro-batch in this direction."""
        if self._current is None:
            return
        started_s = time.monotonic()
        source = bytes_of(tensor)  # Megatron replaces the storage of sent tensors
        size_bytes = source.numel()
        try:
            buffer = self._buffers.acquire(size_bytes)
        except CheckpointSaveError as error:
            # a recovery sees the gap in the log, and training continues
            (iteration,) = (
                number
                for number, log in self._iterations.items()
                if log is self._current
            )
            self.end()
            self._drop(iteration)
            _log.warning(
                "boundary log: iteration %d is not logged, training goes on: %s",
                iteration,
                error,
            )
            return
        copied = self._copier.run(lambda: self._copy(source, buffer))
        entry = _Entry(buffer=buffer, size_bytes=size_bytes, copied=copied)
        self._current[direction].append(entry)
        self.spent_s += time.monotonic() - started_s

    def sent(self, iteration: int, direction: Direction) -> list[torch.Tensor]:
        """Return the bytes of each micro-batch's tensor, in the order of sending.

        Raises CheckpointLoadError if the iteration is not in the log.
        """
        if iteration not in self._iterations:
            logged = self._iterations
            got = f"{min(logged)} to {max(logged)}" if logged else "an empty log"
            raise CheckpointLoadError(
                f"boundary log: no iteration {iteration}, got {got}"
            )
        entries = self._iterations[iteration][direction]
        for entry in entries:
            # a neighbour may be lost in the iteration whose last copy is still under
            # way
            entry.copied.result()
        return [entry.buffer[: entry.size_bytes] for entry in entries]

    def complete_from(self, last: int) -> int:
        """Return the first iteration from which the log is complete up to `last`; else
        last + 1.

        Whether the tensors are still as they were sent, `drop_damaged` finds out.
        """
        first = last + 1
        while first - 1 in self._iterations and all(
            map(_is_copied, _entries(self._iterations[first - 1]))
        ):
            first -= 1
        return first

    def drop_damaged(self, first: int, last: int) -> bool:
        """Drop those iterations of a range whose tensors are not as they were sent.

        Args:
            first: The first iteration of the range.
            last: The last one.

        Returns:
            Whether there were any.
        """
        logged = [number for number in self._iterations if first <= number <= last]
        damaged = [
            number
            for number in logged
            if not all(map(_is_as_recorded, _entries(self._iterations[number])))
        ]
        for iteration in damaged:
            _log.warning("boundary log: iteration %d is damaged (checksum)", iteration)
            self._drop(iteration)
        return bool(damaged)

    def drop_up_to(self, iteration: int) -> None:
        """Drop `iteration` and all earlier ones."""
        for old in [logged for logged in self._iterations if logged <= iteration]:
            self._drop(old)

    def clear(self) -> None:
        """Drop everything."""
        self._current = None
        self.drop_up_to(max(self._iterations, default=0))

    def _drop(self, iteration: int) -> None:
        log = self._iterations.pop(iteration, None)
        for entry in _entries(log) if log else ():
            # a released buffer is filled anew: the copier must be done with it
            entry.copied.exception()
            self._buffers.release(entry.buffer)

    def _copy(self, source: torch.Tensor, buffer: torch.Tensor) -> int:
        """Copy, in the copier's thread; return the checksum of the copied bytes."""
        size_bytes = source.numel()
        self._copier.copy_now([(buffer[:size_bytes], source)])
        # here: training would stand still for the hash of every transfer
        return checksum(buffer, size_bytes)


def _entries(log: _Iteration) -> Iterable[_Entry]:
    return itertools.chain.from_iterable(log.values())


def _is_copied(entry: _Entry) -> bool:
    return entry.copied.exception() is None


def _is_as_recorded(entry: _Entry) -> bool:
    return (
        _is_copied(entry)
        and checksum(entry.buffer, entry.size_bytes) == entry.copied.result()
    )
