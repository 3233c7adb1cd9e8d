"""The windows of one rank, and bringing windows into the rank's memory.

Windows are in the rank's memory, in the source of computed snapshots, held for other
ranks, and on the rank's disk. Owns: finding windows, and bringing those that a plan
names into the rank's own memory. All windows outside the memory are verified as they
are found. Must not: choose among windows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.engine.computed_snapshots import SnapshotSource
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.engine.rebuilding import Plan, Rebuilding
from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError, lacks_room
from moe_ckpt.recovery.inventory import Inventory, WindowRef
from moe_ckpt.recovery.plan import Fetch
from moe_ckpt.replication.fetch import fetch_blobs
from moe_ckpt.replication.local_disk import LocalDisk, copy_blobs
from moe_ckpt.replication.publisher import Publisher
from moe_ckpt.snapshot.blob_keys import belongs_to, newest_snapshot
from moe_ckpt.snapshot.blobs import BlobFolder, held_path
from moe_ckpt.snapshot.folder_contents import read_kept
from moe_ckpt.snapshot.gradient_log import intact_checksums
from moe_ckpt.snapshot.step_log import StepLog
from moe_ckpt.snapshot.verified_windows import verified_window
from moe_ckpt.snapshot.windows import Window, group_windows
from moe_ckpt.types import ReadyGradients

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """The outcome of a rank's part in a plan: the fetch, and the check of sources."""

    size_bytes: int | None = 0
    """Bytes that crossed the network. None: the fetch failed."""

    keeps_own: bool = True
    """Whether the rank's own windows may be planned with from here on."""

    is_verified: bool = False
    """Whether the rank now has the plan's window, verified on arrival."""

    is_intact: bool = True
    """Whether all sources that the plan takes from the rank are intact."""


class WindowSources:
    """The windows of one generation. All calls are local."""

    def __init__(
        self,
        parts: RankParts,
        rebuilding: Rebuilding[Any],
        elastic: ElasticContext,
        computed: SnapshotSource,
    ) -> None:
        self._position = parts.adapter.position
        self._memory = parts.memory
        self._rebuilding = rebuilding
        self._elastic = elastic
        # if so, this rank's records hold a gradient that no other rank has
        self._logs_tied = parts.adapter.tied_gradient_bytes > 0
        self._computed = computed

    @property
    def copies_may_lead(self) -> bool:
        """Whether copies on peers may be newer than windows in the owners' memory."""
        return self._computed.near is not None

    def fill_records(self, facts: Mapping[int, ReadyGradients]) -> None:
        """Add facts that all ranks share to this rank's step log.

        A lost memory may lack the last facts.

        Args:
            facts: Facts of other ranks, by iteration.
        """
        if not self._logs_tied:
            self._memory.steps.fill(facts)

    def restore(self, publisher: Publisher, disk: LocalDisk) -> None:
        """Replace this rank's memory by the windows on the rank's disk."""
        publisher.replace(disk.restore, self._memory.drop_published)
        self._memory.adopt_kept()

    def own(self, goal: int | None) -> Inventory:
        """Return this rank's own windows.

        These are the windows in the rank's memory, and the computed snapshots on this
        machine.

        Args:
            goal: The iteration to which windows have to lead. None: any iteration.
        """
        inventory, mine = (
            self._rebuilding.inventory(goal),
            self._position.shard.global_rank,
        )
        if self._computed.near is None:
            return inventory
        states = self._usable(self._computed.near, mine, goal)
        windows = {window.start: window for window in (*states, *inventory.windows)}
        return replace(inventory, windows=tuple(windows.values()))

    def held(
        self, owners: Sequence[int], goal: int | None
    ) -> dict[int, tuple[WindowRef, ...]]:
        """Return the usable windows that this rank's memory holds for other ranks.

        Args:
            owners: The other ranks.
            goal: The iteration to which windows have to lead. None: any iteration.
        """
        mine = self._position.shard.global_rank
        folders = {
            owner: BlobFolder(held_path(self._elastic.memory, owner))
            for owner in owners
            if owner != mine
        }
        held = {
            owner: self._usable(folder, owner, goal)
            for owner, folder in folders.items()
        }
        return {owner: windows for owner, windows in held.items() if windows}

    def _usable(
        self, folder: BlobFolder, owner: int, goal: int | None
    ) -> tuple[WindowRef, ...]:
        kept = read_kept(folder)
        steps = StepLog()
        steps.adopt(kept.starts, kept.records)
        is_mine = owner == self._position.shard.global_rank
        holds_tied = any(
            record.tied_gradient is not None for record in kept.records.values()
        )
        if not (self._logs_tied if is_mine else holds_tied):
            # as the owner does after a fetch: the owner's copies may lack the last
            # records, which all ranks share
            steps.fill(self._memory.steps.gradients)
        complete = [
            window for window in group_windows(kept.snapshots) if window.complete
        ]
        checksums = None
        if self._rebuilding.by_gradients and complete:
            # once for all windows: all logged gradients are read and hashed
            shard = complete[0].snapshots[0].header.shard
            checksums = intact_checksums(kept.gradients, self._position.identity, shard)
        found = (self._window(window, owner, steps, checksums) for window in complete)
        # one window for each start, as an inventory requires: a folder may hold two, of
        # before and after a rollback
        by_start = {
            window.start: window
            for window in found
            if window and (goal is None or window.end <= goal)
        }
        return tuple(by_start.values())

    def look_at_disk(self) -> tuple[int | None, frozenset[int], bool]:
        """Look at this rank's local disk.

        Returns:
            The newest iteration of any blob on the disk, the iterations to which the
            disk leads, and whether the disk never held a state.
        """
        disk, mine = self._memory.disk, self._position.shard.global_rank
        if disk is None:
            return None, frozenset(), False
        # wait first: a write under way adds a window and drops an older one
        disk.flush(self._elastic.copy_s)
        refs = self._usable(BlobFolder(disk.path), mine, None)
        newest = newest_snapshot(BlobFolder(disk.path).keys())
        return newest, frozenset(ref.end for ref in refs), disk.never_held

    def _window(
        self,
        window: Window,
        owner: int,
        steps: StepLog,
        checksums: Mapping[int, int] | None,
    ) -> WindowRef | None:
        """Verify a window with its logs.

        Args:
            window: The window.
            owner: The rank that must have taken the window.
            steps: The owner's step log.
            checksums: The checksums of the owner's logged gradients, by iteration.
                None: replays lead on.
        """
        shard = window.snapshots[0].header.shard
        if shard.global_rank != owner:
            return None
        try:
            return verified_window(
                window.snapshots, self._position.identity, shard, steps, checksums
            )
        except CheckpointLoadError as error:
            _log.warning("a copy of rank %d's memory cannot be used: %s", owner, error)
            return None

    def fetch(self, plan: Plan) -> Fetched:
        """Fetch this rank's memory if the plan says so.

        Args:
            plan: The plan of all ranks.

        Returns:
            The outcome. A failed fetch raises no error.
        """
        mine, publisher = self._position.shard.global_rank, self._memory.publisher
        fetch = next(
            (fetch for fetch in plan.fetches if fetch.global_rank == mine), None
        )
        start = self._start_of_computed(plan) if fetch is None else None
        if publisher is None or (fetch is None and start is None):
            return Fetched()
        # the fetched log may lack the last records
        facts = dict(self._memory.steps.gradients)

        def bring(folder: BlobFolder) -> int:
            if fetch is not None:
                size_bytes = self._fetch_from(fetch, folder)
            else:
                self._read_computed(start, folder)
                size_bytes = 0  # nothing crosses the network
            # verify here: a copy may be damaged, and all ranks can still plan again
            self._require(plan, folder)
            return size_bytes

        has_own = bool(self._memory.snapshots.snapshots())
        try:
            size_bytes = self._replace(publisher, bring)
        except CheckpointLoadError as error:
            # the next holder's copy may lack these records, too
            self.fill_records(facts)
            holder = mine if fetch is None else fetch.source_rank
            _log.warning(
                "rank %d cannot have its copy in rank %d's memory: %s",
                mine,
                holder,
                error,
            )
            # otherwise all ranks would plan again with a computed snapshot, and fail
            # again
            keeps_own = fetch is not None and has_own == bool(
                self._memory.snapshots.snapshots()
            )
            return Fetched(size_bytes=None, keeps_own=keeps_own)
        self._memory.adopt_kept()
        self.fill_records(facts)
        return Fetched(size_bytes=size_bytes, is_verified=True)

    def _replace(self, publisher: Publisher, bring: Callable[[BlobFolder], int]) -> int:
        """Replace this rank's memory by the windows that `bring` brings.

        The new windows are whole before the present windows are dropped, unless shared
        memory lacks room for both.
        """
        drop = self._memory.drop_published
        try:
            return publisher.replace(bring, drop)
        except CheckpointLoadError as error:
            if not lacks_room(error):
                raise
            # the plan leads to the state of the new windows, and not to that of the
            # present ones
            _log.warning(
                "runtime.shared_memory has no room for the windows that rank %d needs"
                " beside those that it has, which are dropped first: %s",
                self._position.shard.global_rank,
                error,
            )
        publisher.replace(lambda _: 0, drop)
        return publisher.replace(bring, drop)

    def _require(self, plan: Plan, folder: BlobFolder) -> None:
        """Require the intact window to which the plan rolls this rank back.

        Raises:
            CheckpointLoadError: The folder does not have that window.
        """
        span, target = self._rebuilding.span_for_me(plan), plan.target_iteration
        if span is None:
            return
        usable = self._usable(folder, self._position.shard.global_rank, target)
        found = [window for window in usable if window.span == span]
        branch = plan.branch or 0
        if not any(window.leads_to(target) == branch for window in found):
            raise CheckpointLoadError(
                f"no window of {span} that leads to iteration {target}"
            )

    def _fetch_from(self, fetch: Fetch, folder: BlobFolder) -> int:
        """Fetch a peer's copies of the blobs that the plan needs."""
        return fetch_blobs(
            self._elastic.holders.address(fetch.source_rank),
            self._elastic.ticket,
            self._position.shard.global_rank,
            folder,
            is_needed=lambda key: belongs_to(key, fetch.window_start),
            timeout_s=self._elastic.copy_s,
        )

    def starts(self, listed: Mapping[int, frozenset[str]]) -> frozenset[int]:
        """Return the starts of all windows of this rank.

        These are the windows in memory and, judged by their keys, the computed
        snapshots on other machines.

        Args:
            listed: Keys of the computed snapshots, by holder.
        """
        keys = frozenset[str]().union(*listed.values())
        there = {start for key in keys if (start := newest_snapshot([key])) is not None}
        return frozenset(
            there | {window.start for window in self._memory.snapshots.windows()}
        )

    def bring(self, start: int, listed: Mapping[int, frozenset[str]]) -> int | None:
        """Fetch a computed snapshot to this machine, unless memory has the window.

        Args:
            start: The start of the window.
            listed: Keys of the computed snapshots, by holder.

        Returns:
            The bytes of the window, 0 if memory has the window. None: no holder has an
            intact copy.
        """
        if any(window.start == start for window in self._memory.snapshots.windows()):
            return 0
        mine = self._position.shard.global_rank
        for holder, there in listed.items():
            keys = sorted(key for key in there if belongs_to(key, start))
            try:
                size_bytes = self._computed.fetch(holder, keys)
            except CheckpointLoadError as error:
                _log.warning(
                    "rank %d cannot have its state of iteration %d: %s",
                    mine,
                    start,
                    error,
                )
                continue
            assert self._computed.near is not None
            usable = self._usable(self._computed.near, mine, None)
            if any(window.start == start for window in usable):
                return size_bytes
        return None

    def _start_of_computed(self, plan: Plan) -> int | None:
        """Return the start of this rank's window if only a computed snapshot has it.

        The window is the one to which the plan rolls this rank back.
        """
        span = self._rebuilding.span_for_me(plan)
        if span is None or self._computed.near is None:
            return None
        kept = {window.start for window in self._memory.snapshots.windows()}
        return None if span.start in kept else span.start

    def _read_computed(self, start: int | None, folder: BlobFolder) -> int:
        """Copy the computed snapshot of the window with this start.

        Returns:
            The bytes of the window.
        """
        near = self._computed.near
        assert start is not None
        assert near is not None
        keys = [key for key in near.keys() if belongs_to(key, start)]  # noqa: SIM118
        try:
            return copy_blobs(near, folder, keys)
        except CheckpointSaveError as error:
            raise CheckpointLoadError(str(error)) from error
