"""Brings the ranks of a new generation from different states to one state.

Owns: the inventory of all ranks, finishing or undoing an interrupted step, and fetching
lost memory from peers. Must not: decide which stages roll back (`recovery` does), or
rebuild state (`engine.rebuilding` does).

    standings -> target -> finish or undo -> inventories -> plan -> fetch -> verify
    -> carry out
"""

from __future__ import annotations

import functools
import logging
import time
from dataclasses import replace
from typing import Any

from moe_ckpt.collectives import gather_results
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.engine.computed_snapshots import SnapshotSource
from moe_ckpt.engine.job_recovery import OnDisks, RecoveredState
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.engine.rebuilding import Plan, Rebuilding
from moe_ckpt.engine.step_state import StepState
from moe_ckpt.engine.survey import CopySurvey
from moe_ckpt.engine.window_sources import Fetched, WindowSources
from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.recovery.inventory import Inventory, ReplayedState
from moe_ckpt.recovery.plan import after_fetches
from moe_ckpt.recovery.target import Target
from moe_ckpt.snapshot.blob_keys import belongs_to

_log = logging.getLogger(__name__)


class WindowRecovery:
    """Implements `JobRecovery` with windows.

    Without `recovers_locally` no live state counts: all ranks go back to the newest
    snapshots that all ranks have.
    """

    def __init__(
        self,
        parts: RankParts,
        sources: WindowSources,
        rebuilding: Rebuilding[Any],
        elastic: ElasticContext,
        computed: SnapshotSource,
        *,
        recovers_locally: bool,
    ) -> None:
        self._position = parts.adapter.position
        self._stage = parts.adapter.stage
        self._memory = parts.memory
        self._sources = sources
        self._rebuilding = rebuilding
        self.copies = CopySurvey(parts, elastic, computed)
        self._computed = computed
        self._recovers_locally = recovers_locally

    def run(self, state: StepState) -> RecoveredState:
        progress = self.copies.stop_copying(state)
        target = progress.target
        begins_anew = target is not None and target.iteration == 0
        all_go_back = (
            target is not None and not begins_anew and not self._recovers_locally
        )
        if all_go_back:
            target = None
        # before the inventories: a lost memory without the last record would not lead
        # to the target
        self._sources.fill_records(progress.gradients)
        live = self._finish_or_undo(state, target) if target else False
        if begins_anew or not (all_go_back or progress.has_left_start):
            # holders drop their copies, too: the next survey would mistake the copies
            # for the newest states
            self.copies.drop_all()
            return RecoveredState(iteration=None)
        started_s = time.monotonic()
        brought_bytes = self._bring_computed()
        plan, fetched_bytes = self._plan_and_fetch(target, state.replayed)
        fetch_s = time.monotonic() - started_s
        if self._rebuilding.span_for_me(plan) is not None:
            # during the replay the state belongs to no iteration: a fault must not find
            # this state live
            state.lose()
        elif (
            self._rebuilding.by_gradients
            and target is not None
            and self._position.stage in target.lost_stages
        ):
            # the gather with the rebuilt ranks overwrites this rank's weights, too, and
            # may be cut off
            state.apply(target.iteration, target.branch)
        is_there = (
            live and target is not None and plan.target_iteration == target.iteration
        )
        executed_iters = self._rebuilding.carry_out(
            plan, live=is_there, progress=state.replay_reached
        )
        self._computed.free_fetched()
        # drop later records, too: with these records a window would claim to lead to
        # iterations that no rank has reached
        self._keep_safest(plan.target_iteration)
        self._memory.drop_logs_after(plan.target_iteration)
        state.be_at(plan.target_iteration, plan.branch)
        return RecoveredState(
            iteration=plan.target_iteration,
            went_back=plan.goes_back,
            lines=plan.lines(),
            fetch_s=fetch_s,
            fetched_bytes=fetched_bytes + brought_bytes,
            executed_iters=executed_iters,
        )

    def look_at_disks(self) -> OnDisks:
        looked = gather_results(
            self._position.ranks, self._sources.look_at_disk, CheckpointLoadError
        )
        common = frozenset[int].intersection(*(usable for _, usable, _ in looked))
        return OnDisks(
            newest=max(common, default=None),
            of_each=tuple(newest for newest, _, _ in looked),
            new_ranks=tuple(
                rank
                for rank, (_, usable, is_new) in enumerate(looked)
                if is_new and not usable
            ),
        )

    def begin_on_disks(self) -> None:
        if self._memory.disk is not None:
            try:
                self._memory.disk.begin()
            except OSError as error:  # training needs no disk
                _log.warning(
                    "no mark on %s that the job begins: %s",
                    self._memory.disk.path,
                    error,
                )

    def load_from_disk(self) -> int:
        """Bring all ranks to the state to which the newest common windows on disk lead.

        Peers receive nothing until copying resumes.

        Returns:
            The iteration of the state.

        Raises:
            CheckpointLoadError: No such state exists. Raised on all ranks.
        """
        disk, publisher = self._memory.disk, self._memory.publisher
        assert disk is not None
        assert publisher is not None
        self.copies.drop_all()
        # through memory, as after a fetch: the checks are the same, and a rank that
        # dies meanwhile leaves the disk as it is
        gather_results(
            self._position.ranks,
            lambda: self._sources.restore(publisher, disk),
            CheckpointLoadError,
        )
        plan = self._rebuilding.intact_plan(None)
        self._rebuilding.carry_out(plan, live=False)
        self._keep_safest(plan.target_iteration)
        span = self._rebuilding.span_for_me(plan)
        assert span is not None, plan
        # other windows were not on all disks, and older windows are not needed any more
        try:
            disk.drop(lambda key: not belongs_to(key, span.start))
        except OSError as error:  # a disk that has become read-only was read already
            _log.warning("older windows stay on %s: %s", disk.path, error)
        self._memory.drop_logs_after(plan.target_iteration)
        return plan.target_iteration

    def drop_memory(self) -> None:
        self.copies.drop_all()

    def _finish_or_undo(self, state: StepState, target: Target) -> bool:
        """Finish the step to the target, or undo a later iteration.

        Returns:
            Whether the state is then the state of the target.
        """
        stage, steps = self._position.stage, self._memory.steps
        finishes, alone = (
            stage in target.finishing_stages,
            self._rebuilding.by_gradients,
        )
        if (
            (finishes or alone)
            and state.gradients is not None
            and state.reached == target.iteration - 1
        ):
            # the gradients are still in their buffers, which only the next iteration
            # clears
            self._stage.update(state.gradients)
            state.apply(target.iteration, target.branch)
        if finishes:
            # on all ranks of the stage, including ranks that had gathered: the gather
            # is collective, and may be repeated
            self._stage.gather()
            # before the state counts as whole: NCCL has only queued the gather
            self._position.stage_ranks.confirm()
            state.be_at(target.iteration, target.branch)
        if state.reached != target.iteration or not state.whole:
            return False
        # the iteration after the target may have drawn random numbers and changed
        # buffers before the interruption
        if steps.has_start(target.iteration + 1):
            self._stage.restore_start(
                steps.start(target.iteration + 1), undo=target.iteration + 1
            )
        state.withdraw()  # gradients of an iteration that is trained again
        return True

    def _take_stock(
        self, target: Target | None, replayed: ReplayedState | None
    ) -> list[Inventory]:
        """Return every rank's sources.

        Copies are listed only for ranks whose own memory does not lead to the target,
        or for all ranks if copies may be newer. Own windows are not verified here: see
        `Rebuilding.is_intact`.
        """
        goal = target.iteration if target else None
        own = gather_results(
            self._position.ranks,
            lambda: replace(self._sources.own(goal), replayed=replayed),
            CheckpointLoadError,
        )
        # copies for all other ranks are left alone: each listed copy is hashed as a
        # whole
        poor = [
            each.global_rank
            for each in own
            if self._sources.copies_may_lead or not each.leads_to(goal)
        ]
        held = gather_results(
            self._position.ranks,
            lambda: self._sources.held(poor, goal),
            CheckpointLoadError,
        )
        return [
            replace(inventory, held=copies)
            for inventory, copies in zip(own, held, strict=True)
        ]

    def _bring_computed(self) -> int:
        """Fetch this rank's part of the newest common state that others computed.

        The newest common state is of the newest iteration that all ranks have, in
        memory or as a computed snapshot on other machines. Afterwards the recovery
        continues as if the snapshot had been computed on this machine.

        Returns:
            The fetched bytes.
        """
        if not self._computed.is_remote:
            return 0
        ranks, listed = self._position.ranks, self.copies.listed
        # keys first, then one state: each state that crosses the network may be a whole
        # model
        of_each = gather_results(
            ranks, lambda: self._sources.starts(listed), CheckpointLoadError
        )
        for start in sorted(frozenset.intersection(*of_each), reverse=True):
            bring = functools.partial(self._sources.bring, start, listed)
            brought = gather_results(ranks, bring, CheckpointLoadError)
            if None not in brought:
                return brought[ranks.rank] or 0
        return 0

    def _plan_and_fetch(
        self, target: Target | None, replayed: ReplayedState | None
    ) -> tuple[Plan, int]:
        """Plan and fetch until all ranks have the sources of the plan, verified.

        A copy whose fetch fails is left out, and so is a source that a rank finds
        damaged: all ranks then plan again.

        Returns:
            The plan, and the bytes fetched from peers by all ranks.
        """
        inventories, fetched_bytes = self._take_stock(target, replayed), 0
        while True:
            plan = self._rebuilding.plan(target, inventories)
            fetch_own = functools.partial(self._fetch_and_verify, plan)
            fetched = gather_results(
                self._position.ranks, fetch_own, CheckpointLoadError
            )
            fetched_bytes += sum(each.size_bytes or 0 for each in fetched)
            failed = {
                rank for rank, each in enumerate(fetched) if each.size_bytes is None
            }
            if failed:
                emptied = {rank for rank in failed if not fetched[rank].keeps_own}
                inventories = after_fetches(inventories, plan.fetches, failed, emptied)
            elif all(each.is_intact for each in fetched):
                return plan, fetched_bytes
            else:
                inventories = self._take_stock(target, replayed)

    def _fetch_and_verify(self, plan: Plan) -> Fetched:
        """Fetch this rank's part of the plan, and verify the sources on this rank."""
        fetched = self._sources.fetch(plan)
        if fetched.size_bytes is None:  # all ranks plan again
            return fetched
        is_intact = self._rebuilding.is_intact(plan, has_fetched=fetched.is_verified)
        return replace(fetched, is_intact=is_intact)

    def _keep_safest(self, target: int) -> None:
        """Keep the common windows with the most copies; of equals, the newer ones.

        Common windows are those that all ranks have. Windows that end after the target
        are dropped: iterations that run again may have other results.

        Args:
            target: The iteration of the present state.
        """
        of_each = gather_results(
            self._position.ranks,
            functools.partial(self._copies_by_start, target),
            CheckpointLoadError,
        )
        common = set(of_each[0]).intersection(*of_each)
        # the newest window may be complete on all ranks before the window is copied:
        # the next lost node would take the only copy along
        safest = sorted(
            common,
            key=lambda start: (min(copies[start] for copies in of_each), start),
            reverse=True,
        )
        if safest:
            self._memory.snapshots.keep_only(safest)

    def _copies_by_start(self, last: int) -> dict[int, int]:
        """Return the number of peers with a copy of each of this rank's windows.

        Windows that end after the iteration `last` are left out.
        """
        publisher, held = self._memory.publisher, self.copies.held_for_me()
        return {
            window.start: publisher.num_copies(window.snapshots, held)
            if publisher
            else 0
            for window in self._memory.snapshots.windows()
            if window.snapshots[-1].header.iteration <= last
        }
