"""Brings all ranks back to a partial checkpoint.

Units come from the ranks' own memory if all memory is intact, otherwise also from peers
and local disks. Owns: the inventory of units of all ranks, loading the versions that
the plan names, and the account of lost tokens. Must not: choose versions
(`recovery.units` does). MoC, section 5.1; MoEtion, section 6.

    inventories of memory -> plan, or inventories of all levels -> plan
    -> fetch, verify -> load -> account -> a new epoch begins
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from moe_ckpt.collectives import gather_results
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.engine.computed_snapshots import NoSource
from moe_ckpt.engine.job_recovery import OnDisks, RecoveredState
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.engine.snapshot_stores import ACCOUNT, POLICY, START, SnapshotStore
from moe_ckpt.engine.step_state import StepState
from moe_ckpt.engine.survey import CopySurvey
from moe_ckpt.engine.token_account import LostShares, lost_shares
from moe_ckpt.errors import CheckpointLoadError, NothingLeftError
from moe_ckpt.events import CheckpointSkipped, TokensLost
from moe_ckpt.policies.lost_tokens import IntArray
from moe_ckpt.policies.partial import PartialSnapshots
from moe_ckpt.recovery.units import (
    UnitInventory,
    UnitRecovery,
    newest_epoch,
    plan_units,
)
from moe_ckpt.replication.fetch import fetch_blobs
from moe_ckpt.snapshot.blobs import BlobFolder, held_path, held_paths
from moe_ckpt.snapshot.codec import PartKey, Snapshot, verify
from moe_ckpt.snapshot.folder_contents import read_units
from moe_ckpt.snapshot.units import StorageLevel, without_torn
from moe_ckpt.types import CORE, Version

_log = logging.getLogger(__name__)
_MEMORY, _DISK = "memory", "local disk"
_LEVELS = {_MEMORY: StorageLevel.IN_MEMORY, _DISK: StorageLevel.ON_DISK}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Stock:
    """The units that one rank found."""

    inventory: UnitInventory
    """The rank's own units, by level."""

    held: Mapping[int, Mapping[tuple[str, Version], str]]
    """Keys of other ranks' units in this rank's memory, by owner, then by name and
    version.
    """

    needed: Mapping[int, Mapping[Version, frozenset[str]]]
    """Names of the units that each owner needs, by version of the core that this rank
    holds for the owner.
    """


class PartialRecovery:
    """Implements `JobRecovery` with units of partial checkpoints."""

    def __init__(
        self,
        parts: RankParts,
        store: SnapshotStore,
        policy: PartialSnapshots,
        elastic: ElasticContext,
    ) -> None:
        assert parts.account is not None, "units go with an account of lost tokens"
        self.copies = CopySurvey(parts, elastic, NoSource())
        self._position = parts.adapter.position
        self._stage = parts.adapter.stage
        self._operators = parts.adapter.operators
        self._boost = parts.adapter.boost
        self._memory = parts.memory
        self._store = store
        self._account = parts.account
        self._meter = parts.meter
        self._policy = policy
        self._elastic = elastic
        self._events = parts.events
        self._rate = parts.adapter.tokens

    def run(self, state: StepState) -> RecoveredState:
        progress = self.copies.stop_copying(state)
        target = progress.target
        begins_anew = target.iteration == 0 if target else not progress.has_left_start
        if begins_anew:
            self._begin_anew(state, has_begun=target is not None)
            return RecoveredState(iteration=None)
        # all ranks go back: a fault during the load must find no rank's state live
        state.lose()
        started_s = time.monotonic()
        # memory alone first: if all ranks are alive, no disk is flushed and no copy is
        # hashed
        stocks = self._take_stock(_MEMORY)
        if plan_units(_with_held(stocks)) is None:
            stocks = self._take_stock(_MEMORY, _DISK, held=True)
        with self._units(stocks) as (plan, units):
            fetch_s, levels = (
                time.monotonic() - started_s,
                plan.sources[self._position.shard.global_rank],
            )
            fetched = [
                unit.header
                for name, unit in units.items()
                if levels[name] not in (_MEMORY, _DISK)
            ]
            fetched_bytes = sum(header.payload_bytes for header in fetched)
            shares = self._load(plan, units)
        self._begin_epoch(stocks)
        state.be_at(plan.version.iteration, None)
        return RecoveredState(
            iteration=plan.version.iteration,
            went_back=True,
            lines=[
                *plan.lines(),
                f"lost tokens so far: PLT {shares.plt:.4%}, MLT {shares.mlt:.4%}",
            ],
            fetch_s=fetch_s,
            fetched_bytes=fetched_bytes,
        )

    def _begin_anew(self, state: StepState, *, has_begun: bool) -> None:
        """Undo the first iteration if it has begun, and reset the account of tokens."""
        steps = self._memory.steps
        # a surviving rank has drawn random numbers in the first iteration, a
        # replacement has not
        if state.reached == 0 and steps.has_start(1):
            self._stage.restore_start(steps.start(1), undo=1)
            state.withdraw()
        if has_begun:
            # peers and disks may have units of this epoch, which must not be mistaken
            # for later units
            self.drop_memory()
            return
        self._memory.clear()
        self._reset_tokens()

    def _reset_tokens(self) -> None:
        self._account.begin()
        self._count_anew()

    def _count_anew(self) -> None:
        """Count anew, because the account is that of another state.

        Counts of iterations that happen again are dropped. Experts are boosted by the
        deficit of the account.
        """
        self._meter.drop_counts()
        if self._boost:
            self._boost.recover(self._account.deficit)

    def look_at_disks(self) -> OnDisks:
        stocks = self._take_stock(_DISK)
        plan = plan_units([stock.inventory for stock in stocks])
        newest = tuple(
            max(
                (version.iteration for version in stock.inventory.versions(CORE)),
                default=None,
            )
            for stock in stocks
        )
        return OnDisks(newest=plan.version.iteration if plan else None, of_each=newest)

    def begin_on_disks(self) -> None:
        """Do nothing.

        Units on disks belong to no window: a start without a common state is an error
        for any contents of the disks.
        """

    def load_from_disk(self) -> int:
        self.copies.drop_all()
        stocks = self._take_stock(_DISK)
        with self._units(stocks) as (plan, units):
            self._load(plan, units)
        self._begin_epoch(stocks)
        return plan.version.iteration

    def drop_memory(self) -> None:
        # before the units are dropped: the next epoch's number has to exceed all of
        # their epochs
        stocks = self._take_stock(_MEMORY, _DISK, held=True)
        self.copies.drop_all()
        # a checkpoint has no account, and the accounts of a replacement and of a
        # surviving rank would differ
        self._reset_tokens()
        self._begin_epoch(stocks)

    def _take_stock(self, *levels: str, held: bool = False) -> list[_Stock]:
        """Return every rank's intact units on these levels. Collective.

        Args:
            levels: Some of `_LEVELS`.
            held: Whether to include units in peers' memory.
        """
        owners = sorted(held_paths(self._elastic.memory)) if held else []
        return gather_results(
            self._position.ranks,
            lambda: self._my_stock(levels, owners),
            CheckpointLoadError,
        )

    def _my_stock(self, levels: Sequence[str], owners: Sequence[int]) -> _Stock:
        mine = self._position.shard.global_rank
        # a death during publication leaves only some units of a snapshot: the core
        # contains the complete number
        whole = {
            level: without_torn(self._found_in(level), _LEVELS[level])
            for level in levels
        }
        found = {
            level: list(self._intact(units, mine)) for level, units in whole.items()
        }
        held = {owner: dict(self._held_for(owner)) for owner in owners}
        return _Stock(
            inventory=UnitInventory(
                global_rank=mine,
                levels={
                    level: _by_name(map(_id, units)) for level, units in found.items()
                },
                needed=_needed(unit for units in found.values() for unit in units),
            ),
            held={
                owner: {_id(unit): key for key, unit in units.items()}
                for owner, units in held.items()
            },
            needed={owner: _needed(units.values()) for owner, units in held.items()},
        )

    def _found_in(self, level: str) -> list[Snapshot]:
        if level == _MEMORY:
            return self._memory.snapshots.snapshots()
        disk = self._memory.disk
        if disk is None:
            return []
        # wait first: a write under way adds units and drops others
        disk.flush(self._elastic.copy_s)
        return list(read_units(BlobFolder(disk.path)).values())

    def _held_for(self, owner: int) -> Iterator[tuple[str, Snapshot]]:
        units = read_units(BlobFolder(held_path(self._elastic.memory, owner)))
        whole = without_torn(list(units.values()), StorageLevel.ON_PEERS)
        intact = set(self._intact(whole, owner))
        return ((key, unit) for key, unit in units.items() if unit in intact)

    def _intact(self, units: Iterable[Snapshot], owner: int) -> Iterator[Snapshot]:
        for unit in units:
            try:
                # of another rank only the number is known here: that rank compares the
                # shard after the fetch
                shard = (
                    self._position.shard
                    if owner == self._position.shard.global_rank
                    else unit.header.shard
                )
                if shard.global_rank == owner:
                    verify(unit, identity=self._position.identity, shard=shard)
                    yield unit
            except CheckpointLoadError as error:
                # passed over, not raised: another level may have the same version
                # intact
                self._events.append(
                    CheckpointSkipped(source=str(unit.header), reason=str(error))
                )
                _log.warning("%s", error)

    @contextlib.contextmanager
    def _units(
        self, stocks: Sequence[_Stock]
    ) -> Iterator[tuple[UnitRecovery, Mapping[str, Snapshot]]]:
        """Yield the plan and this rank's units of the plan, by name. Collective.

        Units that came from peers are deleted at the end. If a peer cannot deliver a
        unit to a rank, all ranks plan again, and that rank does not use that peer any
        more.

        Raises:
            NothingLeftError: There is no plan. Raised on all ranks.
        """
        folder = BlobFolder(self._elastic.memory / "fetched")
        inventories = _with_held(stocks)
        try:
            while True:
                plan = plan_units(inventories)
                if plan is None:
                    raise NothingLeftError(_nothing_common(inventories))
                fetch = functools.partial(self._fetch, plan, stocks, folder)
                found = gather_results(self._position.ranks, fetch, CheckpointLoadError)
                if not any(found):
                    yield plan, self._get(plan, folder)
                    return
                # a level that failed one rank may still serve the others
                inventories = [
                    replace(
                        each,
                        levels={
                            level: units
                            for level, units in each.levels.items()
                            if level != failed
                        },
                    )
                    for each, failed in zip(inventories, found, strict=True)
                ]
        finally:
            folder.clear()

    def _fetch(
        self, plan: UnitRecovery, stocks: Sequence[_Stock], folder: BlobFolder
    ) -> str | None:
        """Copy this rank's units of the plan from peers into `folder`.

        Returns:
            The first level that failed, or None.
        """
        # drop the units of a level that failed, or of a worker that died in a recovery:
        # damaged leftovers must not fail another level
        folder.clear()
        mine = self._position.shard.global_rank
        sources = plan.sources[mine]
        for holder, stock in enumerate(stocks):
            level = _memory_of(holder)
            wanted = [
                (name, plan.units[name])
                for name, where in sources.items()
                if where == level
            ]
            if not wanted:
                continue
            keys = [stock.held[mine][each] for each in wanted]
            address, timeout_s = (
                self._elastic.holders.address(holder),
                self._elastic.copy_s,
            )
            try:
                fetch_blobs(
                    address,
                    self._elastic.ticket,
                    mine,
                    folder,
                    keys,
                    timeout_s=timeout_s,
                )
                # verify here, while another plan is still possible: `_load` overwrites
                # the state
                for unit in read_units(folder).values():
                    verify(
                        unit,
                        identity=self._position.identity,
                        shard=self._position.shard,
                    )
            except CheckpointLoadError as error:
                _log.warning(
                    "rank %d cannot have its units in the %s: %s", mine, level, error
                )
                return level
        return None

    def _get(self, plan: UnitRecovery, folder: BlobFolder) -> dict[str, Snapshot]:
        """Return this rank's units of the plan, all of them local and verified."""
        sources = plan.sources[self._position.shard.global_rank]
        levels = {
            level: self._found_in(level)
            for level in _LEVELS
            if level in sources.values()
        }
        fetched = list(read_units(folder).values())
        return {
            name: next(
                unit
                for unit in levels.get(where, fetched)
                if _id(unit) == (name, plan.units[name])
            )
            for name, where in sources.items()
        }

    def _load(self, plan: UnitRecovery, units: Mapping[str, Snapshot]) -> LostShares:
        """Load all units, and account for the tokens that are lost. Collective."""
        parts = {
            part.key: unit.part(part)
            for unit in units.values()
            for part in unit.header.parts
        }
        names = {str(operator) for operator in self._operators.table.operators}
        core = units[CORE].header
        # step counts are those of the core, also for older experts: a step count
        # belongs to an optimizer, not to an expert
        self._operators.load(parts, names, set(), core.adam_steps)
        self._stage.restore_start(_facts(parts, START))
        # a rank loads only the experts of which the rank has a piece; the account
        # covers all experts of the stage
        mine = {
            name: unit.header.unit.seen_tokens
            for name, unit in units.items()
            if unit.header.unit and name != CORE
        }
        gathered = gather_results(
            self._position.ranks,
            lambda: (self._position.stage, mine),
            CheckpointLoadError,
        )
        of_stage = [
            of_rank for stage, of_rank in gathered if stage == self._position.stage
        ]
        seen = {
            name: tokens for of_rank in of_stage for name, tokens in of_rank.items()
        }
        loss = self._account.restore(_facts(parts, ACCOUNT), seen)
        self._count_anew()
        lost = gather_results(
            self._position.ranks,
            lambda: (self._position.stage, self._account.lost),
            CheckpointLoadError,
        )
        of_stages: dict[int, IntArray] = dict(lost)
        shares = lost_shares(
            [of_stages[stage] for stage in sorted(of_stages)],
            plan.version.iteration,
            self._rate,
        )
        iteration = plan.version.iteration
        # Dynamic-K follows the loss of all faults so far, which is known only now (MoC,
        # section 5.3)
        self._policy.went_back(
            _facts(parts, POLICY)["facts"].tolist(), plt=shares.plt, iteration=iteration
        )
        self._log_lost(iteration, loss.lost, shares)
        return shares

    def _begin_epoch(self, stocks: Sequence[_Stock]) -> None:
        """Begin a new epoch for later snapshots.

        No earlier snapshot belongs to the new epoch.
        """
        # above the epochs of all units on any rank: a unit of an abandoned epoch could
        # pass for a new unit
        self._store.epoch = newest_epoch(_with_held(stocks)) + 1

    def _log_lost(self, iteration: int, lost: IntArray, shares: LostShares) -> None:
        self._events.append(
            TokensLost(
                iteration=iteration,
                layers=[layer for _, layer in self._account.layers],
                lost_by_layer=lost.sum(axis=1).tolist(),
                lost_by_expert=lost.tolist(),
                plt=shares.plt,
                mlt=shares.mlt,
            )
        )


def _with_held(stocks: Sequence[_Stock]) -> list[UnitInventory]:
    """Return every rank's inventory, with the units that peers hold for the rank."""
    inventories = []
    for stock in stocks:
        owner = stock.inventory.global_rank
        levels = dict(stock.inventory.levels)
        needed = dict(stock.inventory.needed)
        for holder in stocks:
            if owner in holder.held:
                levels[_memory_of(holder.inventory.global_rank)] = _by_name(
                    holder.held[owner]
                )
                needed = {**holder.needed[owner], **needed}
        inventories.append(
            UnitInventory(global_rank=owner, levels=levels, needed=needed)
        )
    return inventories


def _memory_of(global_rank: int) -> str:
    return f"memory of rank {global_rank}"


def _id(unit: Snapshot) -> tuple[str, Version]:
    return unit.header.name, unit.header.version


def _by_name(ids: Iterable[tuple[str, Version]]) -> dict[str, frozenset[Version]]:
    found: dict[str, set[Version]] = {}
    for name, version in ids:
        found.setdefault(name, set()).add(version)
    return {name: frozenset(versions) for name, versions in found.items()}


def _needed(units: Iterable[Snapshot]) -> dict[Version, frozenset[str]]:
    return {
        unit.header.version: frozenset(unit.header.complete_with)
        for unit in units
        if unit.header.name == CORE
    }


def _facts(parts: Mapping[PartKey, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Return the tensors of one kind in a core."""
    # copies: the state of a generator must be aligned, and a payload aligns parts of
    # bytes to single bytes only
    return {
        key.tensor: tensor.clone()
        for key, tensor in parts.items()
        if key.operator == kind
    }


def _nothing_common(inventories: Sequence[UnitInventory]) -> str:
    found = "; ".join(
        f"rank {inventory.global_rank}:"
        f" {', '.join(map(str, sorted(inventory.versions(CORE)))) or 'none'}"
        for inventory in inventories
    )
    return (
        f"partial checkpoints: got those of iterations ({found}), wanted one with all"
        " experts on all ranks"
    )
