"""Requests the snapshots of a plan, and keeps, drops or writes them to disk.

The bytes are elsewhere: `snapshot.capture` copies them, `snapshot.windows` has them in
host memory, and `replication.local_disk` on disk. Owns: headers and pieces of the
snapshots that a plan asks for, the versions that stay, and the list of snapshots on
disk. Must not: decide which operators a snapshot takes, or when a window is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.engine.token_account import TokenAccount
from moe_ckpt.snapshot.blobs import BlobFolder
from moe_ckpt.snapshot.capture import Piece, SnapshotRequest
from moe_ckpt.snapshot.codec import (
    BUFFER,
    COMPUTE,
    MASTER,
    MOMENTS,
    PartKey,
    Snapshot,
    SnapshotHeader,
    UnitTag,
    scaled_role,
)
from moe_ckpt.snapshot.folder_contents import read_kept
from moe_ckpt.snapshot.units import compose
from moe_ckpt.snapshot.windows import Window, group_windows
from moe_ckpt.types import CORE, SLOT, SlotPlan, UnitPlan, Version

START, ACCOUNT, POLICY = "start", "account", "policy"
"""The parts of a core beside operators: the start of the next iteration, the token
account, and the facts of the policy.
"""


class SnapshotStore:
    """The snapshots of one rank and generation. All calls are local.

    Attributes:
        epoch: The current epoch of the run, in the version of every snapshot.
    """

    def __init__(self, parts: RankParts) -> None:
        self._position = parts.adapter.position
        self._stage = parts.adapter.stage
        self._operators = parts.adapter.operators
        self._account = parts.account
        self._snapshots = parts.memory.snapshots
        self._publisher = parts.memory.publisher
        self._disk = parts.memory.disk
        # a generation has one table, gathered when the generation begins
        table = self._operators.table
        self._names = [str(operator) for operator in table.operators]
        mine = table.full_bytes[parts.adapter.position.stage_ranks.rank]
        self._owned = frozenset(
            position for position, nbytes in enumerate(mine.tolist()) if nbytes
        )
        self._last_for_disk: int | None = None
        self.epoch = 0

    def begin(self, plan: SlotPlan) -> None:
        """Begin a window. A window that is still in flight is dropped."""
        self._snapshots.begin(
            self._version(plan.window_start),
            plan.num_slots * len(self._mine(plan.units)),
        )

    def wanted(self, plan: SlotPlan, branch: int) -> list[SnapshotRequest]:
        """Return the requests for the snapshots of the current state.

        Args:
            plan: The snapshot to take.
            branch: The branch of the run in which the state was trained.
        """
        # kept with each unit, because experts go back to different iterations: the loss
        # is a difference to these counts
        seen = self._account.seen() if self._account else {}
        return [
            self._request(plan, unit, branch, seen.get(unit.name, 0))
            for unit in self._mine(plan.units)
        ]

    def keep_in_flight(
        self,
        on_all_disks: int | None,
        being_written: int | None = None,
        *,
        lacks_units: bool = False,
    ) -> None:
        """Keep the window in flight, which is complete on all ranks.

        Args:
            on_all_disks: Start of the window that all disks have. None: no such window.
            being_written: Start of the window that is being written to this disk. None:
                no write.
            lacks_units: Whether older units of the window in flight are missing on any
                rank.
        """
        # a sparse window on disk is whole by itself, but a checkpoint on disk shares
        # units with later checkpoints
        on_disk = (on_all_disks, self._last_for_disk) if self._account else ()
        # the daemon reads a window for the disk from this memory; on a slow disk
        # reading outlasts later windows
        starts = {window.start for window in self._snapshots.windows()}
        iterations = [
            iteration
            for iteration in (*on_disk, *starts & {being_written})
            if iteration is not None
        ]
        self._snapshots.keep_in_flight(
            [self._version(iteration) for iteration in iterations],
            lacks_units=lacks_units,
        )

    def persist(self, window: Window, keep: int | None) -> Future[None] | None:
        """Start copying a window to the local disk.

        The copy includes the window's logs or, for partial checkpoints, the units that
        go to disk.

        Args:
            window: The window to copy.
            keep: Start of the older window that stays on disk. For partial checkpoints:
                the checkpoint that stays, with all later units. None: everything on
                disk stays.

        Returns:
            A future that is done when the copy has ended. None: the rank has no local
            disk.
        """
        if self._publisher is None or self._disk is None:
            return None
        if self._account is None:
            return self._publisher.persist(self._disk, window.snapshots, keep=keep)
        self._last_for_disk = window.start
        for_disk = [unit for unit in self._snapshots.snapshots() if _is_for_disk(unit)]
        # includes units of earlier snapshots, whose write may have failed; units that
        # are on disk are not written again
        units = compose(for_disk, window.version) or [
            unit for unit in for_disk if unit.header.version == window.version
        ]
        there = None
        # keep the units on disk of that checkpoint, if memory shows which, and all
        # units that were written later
        if keep is not None and (kept := compose(for_disk, self._version(keep))):
            there = [
                *kept,
                *(
                    unit
                    for unit in for_disk
                    if self._version(keep) < unit.header.version
                ),
            ]
        return self._publisher.persist_units(self._disk, units, also=there)

    def on_disk(self) -> frozenset[int]:
        """Return the starts of the windows that are complete on this rank's disk.

        The windows are not verified.
        """
        if self._disk is None or self._account is not None:
            return frozenset()  # units on disk belong to the epoch before
        windows = group_windows(read_kept(BlobFolder(self._disk.path)).snapshots)
        return frozenset(window.start for window in windows if window.complete)

    def _request(
        self, plan: SlotPlan, unit: UnitPlan, branch: int, seen_tokens: int
    ) -> SnapshotRequest:
        header = SnapshotHeader(
            identity=self._position.identity,
            shard=self._position.shard,
            iteration=plan.iteration,
            window_start=plan.window_start,
            slot=plan.slot,
            num_slots=plan.num_slots,
            full=tuple(self._names[position] for position in unit.trained),
            compute=tuple(self._names[position] for position in unit.compute),
            adam_steps=self._operators.adam_steps(),
            parts=(),
            payload_bytes=0,
            checksum=0,
            branch=branch,
            unit=self._tag(plan, unit, seen_tokens) if self._account else None,
        )
        # also of operators with compute weights only: the forward pass of a replay
        # reads and changes their buffers
        changing = self._operators.buffer_pieces((*unit.full, *unit.compute))
        if self._account and unit.name == CORE:
            changing = [*changing, *self._facts(plan, self._account)]
        gradients = (
            self._operators.gradients(unit.full, plan.iteration)
            if unit.by_gradient
            else None
        )
        # called on the copier's thread: training would stand still while hundreds of
        # pieces are laid out
        return SnapshotRequest(header, lambda: self._pieces(unit), changing, gradients)

    def _tag(self, plan: SlotPlan, unit: UnitPlan, seen_tokens: int) -> UnitTag:
        taken, whole = (
            (self._mine(plan.units), self._mine(plan.checkpoint))
            if unit.name == CORE
            else ([], [])
        )
        return UnitTag(
            name=unit.name,
            epoch=self.epoch,
            on_peers=unit.on_peers,
            on_disk=unit.on_disk,
            seen_tokens=seen_tokens,
            complete_with=tuple(each.name for each in whole),
            # a recovery uses these counts to find a snapshot that a death tore during
            # publication
            taken_with=(
                len(taken),
                sum(each.on_peers for each in taken),
                sum(each.on_disk for each in taken),
            ),
        )

    def _pieces(self, unit: UnitPlan) -> list[Piece]:
        pieces = self._operators.pieces(
            frozenset(unit.trained), frozenset(unit.compute)
        )
        if not unit.weights and not unit.moments:
            return pieces
        names, weights = self._names, (MASTER, COMPUTE)
        left_out = {names[position]: MOMENTS for position in unit.weights}
        left_out |= {names[position]: weights for position in unit.moments}
        return [
            piece
            for piece in pieces
            if scaled_role(piece[0].role) not in left_out.get(piece[0].operator, ())
        ]

    def _facts(self, plan: SlotPlan, account: TokenAccount) -> list[Piece]:
        """Return the parts of the core beside operators."""
        facts = {
            # part of the core: otherwise a partial checkpoint would need a step log on
            # the same levels
            START: self._stage.begin(plan.iteration + 1),
            ACCOUNT: account.as_tensors(),
            # a replacement's policy has no history: Dynamic-K goes on from these facts,
            # alike on all ranks
            POLICY: {"facts": torch.tensor(plan.facts, dtype=torch.float64)},
        }
        return [
            (
                PartKey(operator=kind, tensor=name, role=BUFFER),
                tensor,
                (0, tensor.numel()),
            )
            for kind, tensors in facts.items()
            for name, tensor in tensors.items()
        ]

    def _mine(self, units: Sequence[UnitPlan]) -> list[UnitPlan]:
        """Return the units of which this rank has a piece.

        Every rank has a piece of the core, and takes every slot.
        """
        return [
            unit
            for unit in units
            if unit.name in (CORE, SLOT) or not self._owned.isdisjoint(unit.trained)
        ]

    def _version(self, iteration: int) -> Version:
        return Version(epoch=self.epoch, iteration=iteration)


def _is_for_disk(snapshot: Snapshot) -> bool:
    return snapshot.header.unit is not None and snapshot.header.unit.on_disk
