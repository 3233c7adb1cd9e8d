"""Brings the ranks of a new generation from their different states to one state.

Owns: the inventory of all ranks, finishing or undoing a step that was cut off, and fetching lost memory from peers.
Must not: decide which stages roll back (`recovery` does), or replay (`engine.stage_recovery` does).

    standings -> target -> finish or undo -> inventories -> plan -> fetch -> carry out
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from moe_ckpt.collectives import gather_results
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.engine.job_recovery import OnDisks, RecoveredState
from moe_ckpt.engine.rank_parts import RankParts, TierStores
from moe_ckpt.engine.stage_recovery import StageRecovery, verified_window
from moe_ckpt.engine.step_state import StepState
from moe_ckpt.engine.survey import CopySurvey, Report
from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.recovery.inventory import Inventory, ReplayedState, WindowRef
from moe_ckpt.recovery.plan import RecoveryPlan, plan_recovery
from moe_ckpt.recovery.target import Target, plan_target
from moe_ckpt.replication.fetch import fetch_blobs, list_held
from moe_ckpt.replication.local_disk import LocalDisk, copy_blobs
from moe_ckpt.replication.publisher import Publisher, belongs_to, newest_snapshot, read_kept
from moe_ckpt.snapshot.blobs import BlobFolder, held_path
from moe_ckpt.snapshot.step_log import StepLog
from moe_ckpt.snapshot.windows import SnapshotMemory, Window, group_windows

_log = logging.getLogger(__name__)


class WindowRecovery:
    """Implements `JobRecovery` with windows. `logs_tied`: this rank's records hold a gradient that no other rank has.

    Without `recovers_locally` no live state counts: all ranks go back to the newest snapshots that all have. With
    `servers_lead` these snapshots are on checkpoint servers, one of them on the rank's own node, and not in its memory.
    """

    def __init__(
        self,
        parts: RankParts,
        recovery: StageRecovery,
        copies: CopySurvey,
        elastic: ElasticContext,
        *,
        logs_tied: bool,
        recovers_locally: bool,
        servers_lead: bool = False,
    ) -> None:
        assert isinstance(parts.stores.memory, SnapshotMemory), parts.stores.memory
        self._place = parts.place
        self._stage = parts.training.stage
        self._stores = parts.stores
        self._memory = parts.stores.memory
        self._recovery = recovery
        self.copies = copies
        self._elastic = elastic
        self._logs_tied = logs_tied
        self._recovers_locally = recovers_locally
        self._servers_lead = servers_lead

    def run(self, state: StepState) -> RecoveredState:
        """Bring all ranks to one state. Copies in the ranks' memory stay as they are until copying resumes.

        Raises NothingLeftError on all ranks if the remaining sources lead to no common state.
        """
        reports = self.copies.stop_copying(state)
        target = plan_target([report.standing for report in reports])
        begins_anew = target is not None and target.iteration == 0
        all_go_back = target is not None and not begins_anew and not self._recovers_locally
        if all_go_back:
            target = None
        self._fill_records(reports)
        live = self._settle(state, target) if target else False
        if begins_anew or not (all_go_back or any(report.has_progress for report in reports)):
            self._begin_anew()
            return RecoveredState(iteration=None)
        inventories = self._take_stock(target, state.replayed)
        started_s = time.monotonic()
        plan, fetched_bytes = self._plan_and_fetch(target, inventories)
        fetch_s = time.monotonic() - started_s
        if any(self._place.stage in rollback.segment.stages for rollback in plan.rollbacks):
            state.lose()
        is_there = live and target is not None and plan.target_iteration == target.iteration
        executed_iters = self._recovery.carry_out(plan, live=is_there, progress=state.replay_reached)
        self._keep_safest()
        self._stores.steps.drop_after(plan.target_iteration)
        state.be_at(plan.target_iteration)
        return RecoveredState(
            iteration=plan.target_iteration,
            went_back=bool(plan.rollbacks),
            lines=plan.lines(),
            fetch_s=fetch_s,
            fetched_bytes=fetched_bytes,
            executed_iters=executed_iters,
        )

    def _begin_anew(self) -> None:
        if self._servers_lead:
            self.copies.drop_all()
        else:
            self._stores.clear()

    def look_at_disks(self) -> OnDisks:
        """Wait for writes in progress; then return the iterations that all ranks' local disks lead to, verified."""
        looked = gather_results(self._place.ranks, self._look_at_disk, CheckpointLoadError)
        common = frozenset[int].intersection(*(usable for _, usable, _ in looked))
        return OnDisks(
            newest=max(common, default=None),
            of_each=tuple(newest for newest, _, _ in looked),
            new_ranks=tuple(rank for rank, (_, usable, is_new) in enumerate(looked) if is_new and not usable),
        )

    def begin_on_disks(self) -> None:
        if self._stores.disk is not None:
            self._stores.disk.begin()

    def load_from_disk(self) -> int:
        """Bring all ranks to the state that the newest windows on their local disks lead to; return its iteration.

        Peers receive nothing until copying resumes. Raises CheckpointLoadError on all ranks if no such state exists.
        """
        disk, publisher = self._stores.disk, self._stores.publisher
        assert disk is not None
        assert publisher is not None
        self.copies.drop_all()
        gather_results(self._place.ranks, lambda: self._restore(publisher, disk), CheckpointLoadError)
        inventories = gather_results(self._place.ranks, lambda: self._recovery.inventory(None), CheckpointLoadError)
        plan = self._plan(None, inventories)
        self._recovery.carry_out(plan, live=False)
        self._keep_safest()
        starts = {rollback.window_start for rollback in plan.rollbacks}
        # other windows were not on all disks, and older ones are not needed any more
        disk.drop(lambda key: not any(belongs_to(key, start) for start in starts))
        self._stores.steps.drop_after(plan.target_iteration)
        return plan.target_iteration

    def forget(self) -> None:
        self.copies.drop_all()

    def _restore(self, publisher: Publisher, disk: LocalDisk) -> None:
        publisher.replace(disk.restore)
        adopt_kept(self._stores)

    def _fill_records(self, reports: Sequence[Report]) -> None:
        """Take the facts that all ranks share from any rank: a lost memory may lack the last ones."""
        if not self._logs_tied:
            self._stores.steps.fill({i: facts for report in reports for i, facts in report.gradients.items()})

    def _settle(self, state: StepState, target: Target) -> bool:
        """Finish the step to the target, or undo a later iteration; return whether the state is then the target's."""
        stage, steps = self._place.stage, self._stores.steps
        if stage in target.finishing_stages:
            if state.gradients is not None and state.reached == target.iteration - 1:
                self._stage.update(state.gradients)
                state.apply(target.iteration)
            self._stage.gather()
            self._elastic.settle()
            state.be_at(target.iteration)
        if state.reached != target.iteration or not state.whole:
            return False
        if steps.has_start(target.iteration + 1):
            self._stage.restore_start(steps.start(target.iteration + 1), undo=target.iteration + 1)
        state.withdraw()
        return True

    def _take_stock(self, target: Target | None, replayed: ReplayedState | None) -> list[Inventory]:
        """Return every rank's sources; copies only for ranks whose own memory does not lead to the target."""
        goal = target.iteration if target else None
        own = gather_results(
            self._place.ranks, lambda: replace(self._own(goal), replayed=replayed), CheckpointLoadError
        )
        poor = [each.global_rank for each in own if self._servers_lead or not each.leads_to(goal)]
        held = gather_results(self._place.ranks, lambda: self._held(poor, goal), CheckpointLoadError)
        return [replace(inventory, held=copies) for inventory, copies in zip(own, held, strict=True)]

    def _own(self, goal: int | None) -> Inventory:
        """Return the windows in this rank's memory and, if its node has a checkpoint server, on that server."""
        inventory, mine = self._recovery.inventory(goal), self._place.shard.global_rank
        if not self._servers_lead:
            return inventory
        windows = {window.start: window for window in (*self._windows_of(mine, goal), *inventory.windows)}
        return replace(inventory, windows=tuple(windows.values()))

    def _plan_and_fetch(self, target: Target | None, inventories: list[Inventory]) -> tuple[RecoveryPlan, int]:
        """Return the plan and the bytes fetched from peers; this rank then has what it needs for the plan.

        A copy whose fetch fails is left out, and all ranks plan again.
        """
        while True:
            plan = self._plan(target, inventories)
            fetched = gather_results(self._place.ranks, lambda plan=plan: self._fetch(plan), CheckpointLoadError)
            failed = {rank for rank, size_bytes in enumerate(fetched) if size_bytes is None}
            if not failed:
                return plan, sum(nbytes or 0 for nbytes in fetched)
            for rank in failed:
                inventories[rank] = replace(inventories[rank], windows=())
            for fetch in plan.fetches:
                if fetch.global_rank in failed:
                    source = inventories[fetch.source_rank]
                    held = {owner: windows for owner, windows in source.held.items() if owner != fetch.global_rank}
                    inventories[fetch.source_rank] = replace(source, held=held)

    def _plan(self, target: Target | None, inventories: Sequence[Inventory]) -> RecoveryPlan:
        lost = target.lost_stages if target else frozenset(range(self._place.num_stages))
        goal = target.iteration if target else None
        has_log = self._stores.boundary is not None
        return plan_recovery(lost, inventories, target_iteration=goal, boundary_log=has_log)

    def _held(self, owners: Sequence[int], goal: int | None) -> dict[int, tuple[WindowRef, ...]]:
        """Return the usable windows that this rank's memory holds for other ranks."""
        mine = self._place.shard.global_rank
        held = {owner: self._windows_of(owner, goal) for owner in owners if owner != mine}
        return {owner: windows for owner, windows in held.items() if windows}

    def _windows_of(self, owner: int, goal: int | None) -> tuple[WindowRef, ...]:
        return self._usable(BlobFolder(held_path(self._elastic.memory, owner)), owner, goal)

    def _usable(self, folder: BlobFolder, owner: int, goal: int | None) -> tuple[WindowRef, ...]:
        kept = read_kept(folder)
        steps = StepLog()
        steps.adopt(kept.starts, kept.records)
        if not self._logs_tied:
            steps.fill(self._stores.steps.gradients)
        found = (self._window(window, owner, steps) for window in group_windows(kept.snapshots) if window.complete)
        by_start = {window.start: window for window in found if window and (goal is None or window.end <= goal)}
        return tuple(by_start.values())

    def _look_at_disk(self) -> tuple[int | None, frozenset[int], bool]:
        """Return the newest iteration of any blob on this rank's disk, the iterations that the disk leads to, and
        whether it never held a state."""
        disk, mine = self._stores.disk, self._place.shard.global_rank
        if disk is None:
            return None, frozenset(), False
        disk.flush(self._elastic.copy_s)
        refs = self._usable(BlobFolder(disk.path), mine, None)
        newest = newest_snapshot(BlobFolder(disk.path).keys())
        return newest, frozenset(ref.end for ref in refs), disk.never_held

    def _window(self, window: Window, owner: int, steps: StepLog) -> WindowRef | None:
        shard = window.snapshots[0].header.shard
        if shard.global_rank != owner:
            return None
        try:
            return verified_window(window.snapshots, self._place.identity, shard, steps.reaches(window.start + 1))
        except CheckpointLoadError as error:
            _log.warning("a copy of rank %d's memory cannot be used: %s", owner, error)
            return None

    def _fetch(self, plan: RecoveryPlan) -> int | None:
        """Fetch this rank's memory if the plan says so; return its bytes, or None if that failed."""
        mine, publisher = self._place.shard.global_rank, self._stores.publisher
        source = next((fetch.source_rank for fetch in plan.fetches if fetch.global_rank == mine), None)
        start = self._start_on_own_server(plan) if source is None else None
        if publisher is None or (source is None and start is None):
            return 0
        facts = dict(self._stores.steps.gradients)
        self._memory.clear()
        self._stores.steps.clear()
        try:
            if source is None:
                publisher.replace(lambda folder: self._read_own_server(start, folder))
                size_bytes = 0
            else:
                size_bytes = publisher.replace(lambda folder: self._fetch_from(source, folder, plan))
            adopt_kept(self._stores)
            if not self._logs_tied:
                self._stores.steps.fill(facts)
            self._recovery.require(plan)
        except CheckpointLoadError as error:
            holder = mine if source is None else source
            _log.warning("rank %d cannot have its copy in rank %d's memory: %s", mine, holder, error)
            return None
        return size_bytes

    def _fetch_from(self, source: int, folder: BlobFolder, plan: RecoveryPlan) -> int:
        """Fetch a peer's copies of this rank's blobs; of a server's states only the one that the plan needs."""
        elastic, mine = self._elastic, self._place.shard.global_rank
        address, timeout_s, keys = elastic.address_of(source), elastic.copy_s, None
        if self._servers_lead:
            start = next(fetch.window_start for fetch in plan.fetches if fetch.global_rank == mine)
            there = list_held(address, elastic.ticket, mine, timeout_s=timeout_s)
            keys = [key for key in there if belongs_to(key, start)]
        return fetch_blobs(address, elastic.ticket, mine, folder, keys, timeout_s=timeout_s)

    def _start_on_own_server(self, plan: RecoveryPlan) -> int | None:
        """Return the start of the window that this rank rolls back to if only its own node's server has it."""
        starts = [each.window_start for each in plan.rollbacks if self._place.stage in each.segment.stages]
        kept = {window.start for window in self._memory.windows()}
        missing = [start for start in starts if self._servers_lead and start not in kept]
        return missing[0] if missing else None

    def _read_own_server(self, start: int | None, folder: BlobFolder) -> int:
        """Copy the window with this start from the server of this rank's own node; return its bytes."""
        assert start is not None
        held = BlobFolder(held_path(self._elastic.memory, self._place.shard.global_rank))
        try:
            return copy_blobs(held, folder, [key for key in held.keys() if belongs_to(key, start)])  # noqa: SIM118
        except CheckpointSaveError as error:
            raise CheckpointLoadError(str(error)) from error

    def _keep_safest(self) -> None:
        """Of the windows that all ranks have, keep those with the most copies, and the newer of two with equally many.

        The newest window may be complete on every rank before it is copied: the loss of a node would destroy it.
        """
        of_each = gather_results(self._place.ranks, self._copies_by_start, CheckpointLoadError)
        common = set(of_each[0]).intersection(*of_each)
        safest = sorted(common, key=lambda start: (min(copies[start] for copies in of_each), start), reverse=True)
        if safest:
            self._memory.keep_only(safest)

    def _copies_by_start(self) -> dict[int, int]:
        """Return the number of peers that hold a copy of each of this rank's windows."""
        publisher, held = self._stores.publisher, self.copies.held_for_me()
        return {
            window.start: publisher.num_copies(window.snapshots, held) if publisher else 0
            for window in self._memory.windows()
        }


def adopt_kept(stores: TierStores) -> None:
    """Register the contents of the publisher's folder: those of an earlier process, or those fetched into it."""
    if stores.publisher:
        kept = stores.publisher.adopt()
        stores.memory.adopt(kept.snapshots)
        stores.steps.adopt(kept.starts, kept.records)
