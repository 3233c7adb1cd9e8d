"""Keeps the tensors that a stage sent to its neighbours, in the sender's host memory.

Owns: copies of activations sent downstream and of gradients sent upstream, by iteration
and by micro-batch in the order of sending; the removal of entries that no window needs.
Must not: send tensors, or decide which entries are needed. MoEvement, section 3.4.
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
    """Logged tensors that feed the replay of one iteration."""

    from_previous: Sequence[torch.Tensor] | None
    """Bytes of the activations from the previous stage, by micro-batch. None if the
    previous stage replays too, or if there is none.
    """

    from_next: Sequence[torch.Tensor] | None
    """Bytes of the gradients from the next stage, by micro-batch. None if the next
    stage replays too, or if there is none.
    """


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Entry:
    buffer: torch.Tensor
    """Buffer that holds the copy."""

    size_bytes: int
    """Bytes of the tensor, from the beginning of `buffer`."""

    copied: Future[int]
    """Checksum of the bytes, available once the bytes are copied."""


_Iteration = dict[Direction, list[_Entry]]


class BoundaryLog:
    """Boundary log of one rank.

    The log records only between `begin` and `end`, so evaluations are not logged.

    Attributes:
        spent_s: Seconds that the calling thread has spent in `record`.
    """

    def __init__(self, copier: HostCopier, buffers: HostBuffers) -> None:
        self._copier = copier
        self._buffers = buffers
        self._iterations: dict[int, _Iteration] = {}
        self._current: _Iteration | None = None
        self.spent_s = 0.0

    @property
    def size_bytes(self) -> int:
        """Bytes of all logged tensors."""
        return sum(
            entry.size_bytes
            for log in self._iterations.values()
            for entry in _entries(log)
        )

    def begin(self, iteration: int) -> None:
        """Log the tensors sent from now on under `iteration`.

        Entries that an abandoned pass has left under `iteration` are dropped.
        """
        self._drop(iteration)
        self._current = self._iterations[iteration] = {
            direction: [] for direction in Direction
        }

    def end(self) -> None:
        """Stop logging until the next iteration begins."""
        self._current = None

    def record(self, direction: Direction, tensor: torch.Tensor) -> None:
        """Log a tensor that is being sent, as the next micro-batch in this direction.

        If host memory is exhausted, the log drops the iteration, and training
        continues.
        """
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

        Raises:
            CheckpointLoadError: The iteration is not in the log.
        """
        if iteration not in self._iterations:
            logged = self._iterations
            got = f"{min(logged)} to {max(logged)}" if logged else "an empty log"
            raise CheckpointLoadError(
                f"boundary log: no iteration {iteration}, got {got}"
            )
        entries = self._iterations[iteration][direction]
        for entry in entries:
            # waits: a neighbour may be lost in the iteration whose last copy is still
            # in progress
            entry.copied.result()
        return [entry.buffer[: entry.size_bytes] for entry in entries]

    def complete_from(self, last: int) -> int:
        """Return the first iteration from which the log is complete up to `last`.

        An iteration is complete once all of its tensors are copied. `drop_damaged`
        finds copies that have changed since.

        Returns:
            The first iteration; `last` + 1 if `last` itself is not complete.
        """
        first = last + 1
        while first - 1 in self._iterations and all(
            map(_is_copied, _entries(self._iterations[first - 1]))
        ):
            first -= 1
        return first

    def drop_damaged(self, first: int, last: int) -> bool:
        """Drop the iterations of a range whose copies are damaged.

        A copy is damaged if the copying has failed, or if the bytes have changed since.

        Args:
            first: First iteration of the range.
            last: Last iteration of the range.

        Returns:
            Whether an iteration was dropped.
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
        """Stop logging, and drop all entries."""
        self._current = None
        self.drop_up_to(max(self._iterations, default=0))

    def _drop(self, iteration: int) -> None:
        log = self._iterations.pop(iteration, None)
        for entry in _entries(log) if log else ():
            # waits for the copier: a released buffer may be filled anew at once
            entry.copied.exception()
            self._buffers.release(entry.buffer)

    def _copy(self, source: torch.Tensor, buffer: torch.Tensor) -> int:
        """Copy in the copier's thread; return the checksum of the copied bytes."""
        size_bytes = source.numel()
        self._copier.copy_now([(buffer[:size_bytes], source)])
        # hashed in this thread: otherwise training would wait for the hash of each
        # transfer
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
