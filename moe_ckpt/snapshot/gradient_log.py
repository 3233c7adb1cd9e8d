"""The gradients with which one rank took its steps, by iteration, in host memory.

With these gradients a rank takes its steps again from the state of a snapshot, without
a pass over a batch. Owns: the copy of each iteration's gradients, its checksum, and the
memory of the copies. Must not: depend on Megatron, or decide which iterations are
needed.

    gradients complete ---> copy, checksum, publish ---> vote, clip, step
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.snapshot.capture import COPY_ERRORS, Piece, lay_out, seal
from moe_ckpt.snapshot.codec import (
    PartKey,
    ShardIdentity,
    Snapshot,
    SnapshotHeader,
    verify,
)
from moe_ckpt.snapshot.copier import HostCopier
from moe_ckpt.snapshot.step_log import Reach, StepLog
from moe_ckpt.snapshot.windows import HostBuffers
from moe_ckpt.types import RunIdentity

_log = logging.getLogger(__name__)

_NOT_LOGGED = "gradients of iteration %d are not logged, training goes on: %s"


class GradientPublisher(Protocol):
    """Stores the entries of a gradient log elsewhere as well."""

    def add_gradients(self, entry: Snapshot) -> None:
        """Store an entry, in place of an earlier one of the same iteration.

        Raises:
            CheckpointSaveError: The entry cannot be stored.
        """
        ...

    def drop_gradients(self, iterations: Iterable[int]) -> None:
        """Drop the entries of these iterations.

        The caller reuses the memory of the payloads only after this method returns.
        """
        ...


class GradientLog:
    """Gradient log of one rank, for one thread.

    An entry has the form of a snapshot of one slot, whose parts are gradients. An
    iteration whose gradients overflowed takes no step and has no entry.
    """

    def __init__(
        self,
        copier: HostCopier,
        buffers: HostBuffers,
        publisher: GradientPublisher | None,
        identity: RunIdentity,
        shard: ShardIdentity,
    ) -> None:
        """Begin with an empty log.

        Args:
            copier: Copies in another thread.
            buffers: Host memory of the payloads.
            publisher: Stores the entries elsewhere as well; None: nothing does.
            identity: The run.
            shard: The rank.
        """
        self._copier = copier
        self._buffers = buffers
        self._publisher = publisher
        self._identity = identity
        self._shard = shard
        self._entries: dict[int, Snapshot] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of all logged gradients."""
        return sum(entry.header.payload_bytes for entry in self._entries.values())

    @property
    def checksums(self) -> Mapping[int, int]:
        """The checksum of each entry, by iteration."""
        return _checksums(self._entries.values())

    def add(self, iteration: int, pieces: Sequence[Piece]) -> int | None:
        """Copy and publish the gradients of an iteration.

        An earlier entry of the same iteration is dropped. If the copy fails, the log
        has a gap, and training continues: a recovery then leads to an iteration before
        the gap.

        Args:
            iteration: The iteration.
            pieces: The gradients, which may change once this method returns.

        Returns:
            The checksum of the entry; None if the copy has failed.
        """
        self.drop(lambda logged: logged == iteration)
        header = SnapshotHeader(
            identity=self._identity,
            shard=self._shard,
            iteration=iteration,
            window_start=iteration,
            slot=0,
            num_slots=1,
            full=(),
            compute=(),
            adam_steps=(),
            parts=(),
            payload_bytes=0,
            checksum=0,
        )
        try:
            entry = self._copier.run(lambda: self._copy(header, pieces)).result()
        except COPY_ERRORS as error:
            _log.warning(_NOT_LOGGED, iteration, error)
            return None
        try:
            if self._publisher:
                self._publisher.add_gradients(entry)
        except CheckpointSaveError as error:
            self._buffers.release(entry.payload)
            _log.warning(_NOT_LOGGED, iteration, error)
            return None
        self._entries[iteration] = entry
        return entry.header.checksum

    def adopt(self, entries: Iterable[Snapshot]) -> None:
        """Take over the entries of an earlier process.

        The buffers of the entries count as acquired from the pool.
        """
        assert not self._entries, "adopts into an empty log only"
        for entry in entries:
            self._buffers.adopt(entry.payload)
            self._entries[entry.header.iteration] = entry

    def gradients(self, iteration: int) -> Mapping[PartKey, torch.Tensor]:
        """Return the gradients of an iteration, by the keys of their pieces.

        Returns:
            Tensors in host memory, which stay valid until the entry is dropped.

        Raises:
            CheckpointLoadError: The iteration has no entry.
        """
        if iteration not in self._entries:
            raise CheckpointLoadError(
                f"gradient log: no iteration {iteration}, got {sorted(self._entries)}"
            )
        return self._entries[iteration].tensors()

    def drop_damaged(self, first: int, last: int) -> list[int]:
        """Drop the entries of a range that are damaged, or of another run or rank.

        Args:
            first: First iteration of the range.
            last: Last iteration of the range.

        Returns:
            The iterations of the dropped entries.
        """
        wanted = {
            iteration: entry
            for iteration, entry in self._entries.items()
            if first <= iteration <= last
        }
        intact = intact_checksums(wanted.values(), self._identity, self._shard)
        damaged = sorted(wanted.keys() - intact.keys())
        self.drop(lambda logged: logged in damaged)
        return damaged

    def drop(self, is_dropped: Callable[[int], bool]) -> None:
        """Drop the entries of some iterations.

        Args:
            is_dropped: Returns whether the entry of an iteration is dropped.
        """
        dropped = [logged for logged in self._entries if is_dropped(logged)]
        if self._publisher and dropped:
            self._publisher.drop_gradients(dropped)
        for iteration in dropped:
            self._buffers.release(self._entries.pop(iteration).payload)

    def _copy(self, header: SnapshotHeader, pieces: Sequence[Piece]) -> Snapshot:
        entry, copies = lay_out(header, pieces, self._buffers)
        try:
            self._copier.copy_now(copies)
        except COPY_ERRORS:
            self._buffers.release(entry.payload)
            raise
        return seal(entry)


def _checksums(entries: Iterable[Snapshot]) -> dict[int, int]:
    headers = (entry.header for entry in entries)
    return {header.iteration: header.checksum for header in headers}


def intact_checksums(
    entries: Iterable[Snapshot], identity: RunIdentity, shard: ShardIdentity
) -> dict[int, int]:
    """Return the checksums of the entries that are intact, and of this run and rank.

    All payloads are read and hashed. Damaged entries are logged.

    Args:
        entries: Entries of a gradient log.
        identity: The run.
        shard: The rank.

    Returns:
        Checksums by iteration.
    """
    intact: list[Snapshot] = []
    for entry in entries:
        try:
            verify(entry, identity=identity, shard=shard)
        except CheckpointLoadError as error:
            _log.warning("logged gradients cannot be used: %s", error)
        else:
            intact.append(entry)
    return _checksums(intact)


def reach_by_gradients(
    steps: StepLog, checksums: Mapping[int, int], snapshots: Sequence[Snapshot]
) -> Reach | None:
    """Return how far logged gradients lead from a window.

    Kernels need not repeat results. So an iteration that has run again has other
    gradients than before, and only entries of one branch of the run go together.

    Args:
        steps: The rank's step log.
        checksums: The checksum of each entry of the rank's gradient log.
        snapshots: Snapshots of the window, by slot.

    Returns:
        The last iteration up to which all steps after the window's first snapshot can
        be taken again. None if the steps do not lead to the window's last snapshot.
    """
    headers = [snapshot.header for snapshot in snapshots]
    start, end = headers[0].iteration, headers[-1].iteration
    last = steps.reaches(start + 1)
    if last is None:
        return None
    taken_in = {header.iteration: header.branch for header in headers}
    branches = [headers[0].branch]
    for iteration in range(start + 1, last + 1):
        record = steps.record(iteration)
        fits = record.follows == branches[-1] and record.branch == taken_in.get(
            iteration, record.branch
        )
        has_gradients = record.gradients.overflow or (
            record.gradients_checksum is not None
            and record.gradients_checksum == checksums.get(iteration)
        )
        if record.after_pass is None or not (fits and has_gradients):
            break
        branches.append(record.branch)
    reached = start + len(branches) - 1
    if reached < end:
        return None
    return Reach(last=reached, branches=tuple(branches[end - start :]))
