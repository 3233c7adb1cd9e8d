"""The contents of snapshots and their stores: windows of operators, or units one by one.

Owns: headers and pieces of the snapshots that a plan asks for, and the list of snapshots on disk. Must not: decide
which operators a snapshot takes, or when a window is kept. A `SnapshotStore` serves one rank; calls are local.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from moe_ckpt.engine.interfaces import Operators, Stage, StagePlace
from moe_ckpt.engine.token_account import TokenAccount
from moe_ckpt.replication.local_disk import LocalDisk
from moe_ckpt.replication.publisher import Publisher, read_kept
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
from moe_ckpt.snapshot.units import UnitMemory, compose
from moe_ckpt.snapshot.windows import SnapshotMemory, Window, group_windows
from moe_ckpt.types import CORE, PartialPlan, SlotPlan, UnitPlan, Version

NOTHING = -1
"""The start of a window that does not exist."""

START, ACCOUNT, POLICY = "start", "account", "policy"
"""The parts of a core beside operators: the start of the next iteration, the token account, the policy's facts."""


class SnapshotStore(Protocol):
    """Stores the snapshots of one kind of plan."""

    def begin(self, plan: SlotPlan | PartialPlan) -> None:
        """A window begins; a window that is still in flight is dropped."""
        ...

    def wanted(self, plan: SlotPlan | PartialPlan) -> list[SnapshotRequest]:
        """Return the requests for the current state."""
        ...

    def confirm(self, on_all_disks: int) -> None:
        """The window in flight is complete on all ranks. All disks have the window that starts at `on_all_disks`."""
        ...

    def persist(self, window: Window, on_all_disks: int) -> Future[None] | None:
        """Start copying a window and its logs to the local disk, if there is one."""
        ...

    def newest_on_disk(self) -> int:
        """Return the start of the newest usable window that is complete on this rank's disk; it is not verified."""
        ...


class WindowStore:
    """Implements `SnapshotStore` for windows of operators, one slot an iteration."""

    def __init__(
        self,
        place: StagePlace,
        operators: Operators,
        memory: SnapshotMemory,
        publisher: Publisher | None,
        disk: LocalDisk | None,
    ) -> None:
        self._place = place
        self._operators = operators
        self._memory = memory
        self._publisher = publisher
        self._disk = disk

    def begin(self, plan: SlotPlan | PartialPlan) -> None:
        self._memory.begin(plan.window_start, plan.num_slots)

    def wanted(self, plan: SlotPlan | PartialPlan) -> list[SnapshotRequest]:
        assert isinstance(plan, SlotPlan), plan
        full, compute = frozenset(plan.full), frozenset(plan.compute)
        header = _header(self._place, self._operators, plan, full=plan.full, compute=plan.compute)
        changing = self._operators.buffer_pieces(full | compute)
        return [SnapshotRequest(header, lambda: self._operators.pieces(full, compute), changing)]

    def confirm(self, on_all_disks: int) -> None:  # noqa: ARG002 - a window is whole by itself
        self._memory.confirm()

    def persist(self, window: Window, on_all_disks: int) -> Future[None] | None:
        if self._publisher is None or self._disk is None:
            return None
        keep = None if on_all_disks == NOTHING else on_all_disks
        return self._publisher.persist(self._disk, window.snapshots, keep=keep)

    def newest_on_disk(self) -> int:
        windows = group_windows(read_kept(BlobFolder(self._disk.path)).snapshots) if self._disk else []
        return max((window.start for window in windows if window.complete), default=NOTHING)


class UnitStore:
    """Implements `SnapshotStore` for partial checkpoints, unit by unit. `lineage` is the epoch of the run."""

    def __init__(
        self,
        place: StagePlace,
        stage: Stage,
        operators: Operators,
        account: TokenAccount,
        memory: UnitMemory,
        publisher: Publisher | None,
        disk: LocalDisk | None,
    ) -> None:
        self._place = place
        self._stage = stage
        self._operators = operators
        self._account = account
        self._memory = memory
        self._publisher = publisher
        self._disk = disk
        mine = operators.table.full_bytes[place.stage_ranks.rank]
        self._owned = frozenset(position for position, nbytes in enumerate(mine.tolist()) if nbytes)
        self._last_for_disk = NOTHING
        self.lineage = 0

    def begin(self, plan: SlotPlan | PartialPlan) -> None:
        assert isinstance(plan, PartialPlan), plan
        self._memory.begin(self._version(plan.iteration), len(self._mine(plan.units)))

    def wanted(self, plan: SlotPlan | PartialPlan) -> list[SnapshotRequest]:
        assert isinstance(plan, PartialPlan), plan
        seen = self._account.seen()
        return [self._wanted(plan, unit, seen.get(unit.name, 0)) for unit in self._mine(plan.units)]

    def confirm(self, on_all_disks: int) -> None:
        iterations = {on_all_disks, self._last_for_disk} - {NOTHING}
        self._memory.confirm([self._version(iteration) for iteration in iterations])

    def persist(self, window: Window, on_all_disks: int) -> Future[None] | None:
        if self._publisher is None or self._disk is None:
            return None
        version, self._last_for_disk = self._version(window.start), window.start
        units = [unit for unit in window.snapshots if unit.header.version == version and _is_for_disk(unit.header)]
        there = None if on_all_disks == NOTHING else self._on_disk_at(on_all_disks)
        return self._publisher.persist_units(self._disk, units, also=there)

    def newest_on_disk(self) -> int:
        return NOTHING  # units on disk belong to the epoch before

    def _on_disk_at(self, iteration: int) -> list[Snapshot]:
        """Return the units on disk of an iteration's checkpoint, and all units that were written after it."""
        version = self._version(iteration)
        for_disk = [unit for unit in self._memory.snapshots() if _is_for_disk(unit.header)]
        newer = [unit for unit in for_disk if version < unit.header.version]
        return [*compose(for_disk, version), *newer]

    def _wanted(self, plan: PartialPlan, unit: UnitPlan, seen_tokens: int) -> SnapshotRequest:
        is_core = unit.name == CORE
        tag = UnitTag(
            name=unit.name,
            lineage=self.lineage,
            on_peers=unit.on_peers,
            on_disk=unit.on_disk,
            seen_tokens=seen_tokens,
            complete_with=tuple(each.name for each in self._mine(plan.checkpoint)) if is_core else (),
            taken_with=self._numbers(plan) if is_core else (0, 0, 0),
        )
        positions = (*unit.full, *unit.weights, *unit.moments)
        header = _header(self._place, self._operators, plan, full=positions, compute=(), unit=tag)
        changing = self._operators.buffer_pieces(unit.full)
        if is_core:
            changing = [*changing, *self._facts(plan)]
        gradients = self._operators.gradients(unit.full, plan.iteration) if unit.by_gradient else None
        return SnapshotRequest(header, lambda: self._pieces(unit), changing, gradients)

    def _pieces(self, unit: UnitPlan) -> list[Piece]:
        weights = (MASTER, COMPUTE)
        groups = ((unit.full, (*weights, *MOMENTS)), (unit.weights, weights), (unit.moments, MOMENTS))
        names = self._operators.table.operators
        roles = {str(names[position]): wanted for positions, wanted in groups for position in positions}
        pieces = self._operators.pieces(frozenset((*unit.full, *unit.weights, *unit.moments)), frozenset())
        return [piece for piece in pieces if scaled_role(piece[0].role) in roles[piece[0].operator]]

    def _facts(self, plan: PartialPlan) -> list[Piece]:
        """Return the parts of the core beside operators."""
        facts = {
            START: self._stage.begin(plan.iteration + 1),
            ACCOUNT: self._account.as_tensors(),
            POLICY: {"facts": torch.tensor(plan.facts, dtype=torch.float64)},
        }
        return [
            (PartKey(operator=kind, tensor=name, role=BUFFER), tensor, (0, tensor.numel()))
            for kind, tensors in facts.items()
            for name, tensor in tensors.items()
        ]

    def _mine(self, units: Sequence[UnitPlan]) -> list[UnitPlan]:
        """Return the units of which this rank has a piece. Every rank has a piece of the core."""
        return [
            unit
            for unit in units
            if unit.name == CORE or not self._owned.isdisjoint((*unit.full, *unit.weights, *unit.moments))
        ]

    def _numbers(self, plan: PartialPlan) -> tuple[int, int, int]:
        units = self._mine(plan.units)
        return len(units), sum(unit.on_peers for unit in units), sum(unit.on_disk for unit in units)

    def _version(self, iteration: int) -> Version:
        return Version(lineage=self.lineage, iteration=iteration)


def _is_for_disk(header: SnapshotHeader) -> bool:
    return header.unit is not None and header.unit.on_disk


def _header(
    place: StagePlace,
    operators: Operators,
    plan: SlotPlan | PartialPlan,
    *,
    full: Sequence[int],
    compute: Sequence[int],
    unit: UnitTag | None = None,
) -> SnapshotHeader:
    names = operators.table.operators
    return SnapshotHeader(
        identity=place.identity,
        shard=place.shard,
        iteration=plan.window_start + plan.slot,
        window_start=plan.window_start,
        slot=plan.slot,
        num_slots=plan.num_slots,
        full=tuple(str(names[position]) for position in full),
        compute=tuple(str(names[position]) for position in compute),
        adam_steps=operators.adam_steps(),
        parts=(),
        payload_bytes=0,
        checksum=0,
        unit=unit,
    )
