"""From the state in which each rank comes into a generation to one state of all: who is where, what is left, recover.

Owns: taking stock with all ranks, finishing or undoing a step that was cut off, getting lost memory back from peers.
Must not: decide who rolls back (`recovery` does), or replay (`runtime.recover` does).

    standings -> target -> finish or undo -> inventories -> plan -> fetch -> carry out
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.recovery.inventory import WindowRef
from moe_ckpt.recovery.plan import RecoveryPlan, plan_recovery
from moe_ckpt.recovery.target import Standing, Target, plan_target
from moe_ckpt.runtime.elastic import Elastic
from moe_ckpt.runtime.recover import Recovery, verified_window
from moe_ckpt.runtime.sparse import SparseStores
from moe_ckpt.runtime.stage import Place, Stage
from moe_ckpt.store.agree import on_all_ranks
from moe_ckpt.store.blobs import BlobFolder, held_path
from moe_ckpt.store.codec import Snapshot
from moe_ckpt.store.fetch import fetch_blobs
from moe_ckpt.store.journal import read_kept
from moe_ckpt.store.steps import StepLog
from moe_ckpt.types import ReadyGradients


class StepState:
    """How far this rank's training state has come: written by the hooks of the loop, read when ranks are lost."""

    def __init__(self) -> None:
        self.reached: int | None = None
        self.whole = False
        self.gradients: ReadyGradients | None = None

    def standing(self, stage: int) -> Standing:
        """Return it as others need to know it."""
        return Standing(stage=stage, reached=self.reached, prepared=self.gradients is not None, whole=self.whole)

    def be_at(self, iteration: int) -> None:
        """The whole state is that after `iteration` steps."""
        self.reached, self.whole, self.gradients = iteration, True, None

    def prepare(self, gradients: ReadyGradients) -> None:
        """The gradients of the next iteration are complete."""
        self.gradients = gradients

    def withdraw(self) -> None:
        """They are not needed, or not right, any more."""
        self.gradients = None

    def apply(self, iteration: int) -> None:
        """The step is taken, on this rank alone."""
        self.reached, self.whole, self.gradients = iteration, False, None

    def lose(self) -> None:
        """There is no state that could be named."""
        self.reached, self.whole, self.gradients = None, False, None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejoined:
    """What it took to get to the state after `iteration`, on this rank; None: everybody starts from the beginning."""

    iteration: int | None
    plan: RecoveryPlan | None = None
    fetch_s: float = 0.0
    fetched_bytes: int = 0
    executed_iters: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Report:
    """What a rank tells first. `kept_for`: the owners of the copies that it holds."""

    standing: Standing
    has_windows: bool
    kept_for: frozenset[int]
    gradients: Mapping[int, ReadyGradients]


class Rejoin:
    """Collective over all ranks. `logs_tied`: this rank's records hold a gradient that no other rank has."""

    def __init__(
        self,
        place: Place,
        stage: Stage,
        stores: SparseStores,
        recovery: Recovery,
        elastic: Elastic,
        *,
        logs_tied: bool,
    ) -> None:
        self._place = place
        self._stage = stage
        self._stores = stores
        self._recovery = recovery
        self._elastic = elastic
        self._logs_tied = logs_tied

    def run(self, state: StepState) -> Rejoined:
        """Bring all ranks to one state.

        Raises CheckpointLoadError on all ranks if nothing that is left leads to one.
        """
        reports = on_all_ranks(lambda: self._report(state), CheckpointLoadError)
        target = plan_target([report.standing for report in reports])
        self._fill_records(reports)
        if target is None and not any(report.has_windows or report.kept_for for report in reports):
            return Rejoined(iteration=None)
        live = self._settle(state, target) if target else False
        if target and target.iteration == 0:
            return Rejoined(iteration=None)
        plan = self._plan(target, reports)
        started_s = time.monotonic()
        fetched_bytes = sum(on_all_ranks(lambda: self._fetch(plan), CheckpointLoadError))
        fetch_s = time.monotonic() - started_s
        self._copy_what_peers_lack(reports)
        if any(self._place.stage in rollback.segment.stages for rollback in plan.rollbacks):
            state.lose()
        is_there = live and target is not None and plan.target_iteration == target.iteration
        executed_iters = self._recovery.carry_out(plan, live=is_there)
        state.be_at(plan.target_iteration)
        return Rejoined(
            iteration=plan.target_iteration,
            plan=plan,
            fetch_s=fetch_s,
            fetched_bytes=fetched_bytes,
            executed_iters=executed_iters,
        )

    def _report(self, state: StepState) -> _Report:
        held = (self._elastic.memory / "held").glob("rank*")
        return _Report(
            standing=state.standing(self._place.stage),
            has_windows=bool(self._stores.memory.windows()),
            kept_for=frozenset(int(folder.name.removeprefix("rank")) for folder in held if BlobFolder(folder).keys()),
            gradients=self._stores.steps.gradients,
        )

    def _fill_records(self, reports: Sequence[_Report]) -> None:
        """Facts that all ranks share can be had from any: a lost memory may lack the last ones."""
        if not self._logs_tied:
            self._stores.steps.fill({i: facts for report in reports for i, facts in report.gradients.items()})

    def _settle(self, state: StepState, target: Target) -> bool:
        """Finish the step to the target, or undo what was begun after it; return whether the state is the target's."""
        stage, steps = self._place.stage, self._stores.steps
        if stage in target.finishing_stages:
            if state.gradients is not None and state.reached == target.iteration - 1:
                self._stage.update(state.gradients)
                state.apply(target.iteration)
            self._stage.gather()
            state.be_at(target.iteration)
        if state.reached != target.iteration or not state.whole:
            return False
        if steps.has_start(target.iteration + 1):
            self._stage.restore_start(steps.start(target.iteration + 1), with_buffers=True)
        state.withdraw()
        return True

    def _plan(self, target: Target | None, reports: Sequence[_Report]) -> RecoveryPlan:
        goal = target.iteration if target else None
        poor = [rank for rank, report in enumerate(reports) if not report.has_windows]
        inventories = on_all_ranks(lambda: self._recovery.inventory(goal, self._held(poor, goal)), CheckpointLoadError)
        everything = frozenset(range(self._place.num_stages))
        lost = target.lost_stages if target else everything
        has_log = self._stores.boundary is not None
        return plan_recovery(lost, inventories, target_iteration=goal, boundary_log=has_log)

    def _held(self, owners: Sequence[int], goal: int | None) -> dict[int, tuple[WindowRef, ...]]:
        """Return the usable windows that this rank's memory holds for others."""
        mine = self._place.shard.global_rank
        held = {owner: self._windows_of(owner, goal) for owner in owners if owner != mine}
        return {owner: windows for owner, windows in held.items() if windows}

    def _windows_of(self, owner: int, goal: int | None) -> tuple[WindowRef, ...]:
        kept = read_kept(BlobFolder(held_path(self._elastic.memory, owner)))
        steps = StepLog()
        steps.adopt(kept.starts, kept.records)
        if not self._logs_tied:
            steps.fill(self._stores.steps.gradients)
        by_start: dict[int, list[Snapshot]] = {}
        for snapshot in kept.snapshots:
            by_start.setdefault(snapshot.header.window_start, []).append(snapshot)
        found = (self._window(snapshots, owner, steps) for snapshots in by_start.values())
        return tuple(window for window in found if window and (goal is None or window.end <= goal))

    def _window(self, snapshots: Sequence[Snapshot], owner: int, steps: StepLog) -> WindowRef | None:
        header = snapshots[0].header
        if header.shard.global_rank != owner:
            return None
        try:
            steps_to = steps.reaches(header.window_start + 1)
            return verified_window(snapshots, self._place.identity, header.shard, steps_to)
        except CheckpointLoadError:  # incomplete as a rule: copies of a window that was being taken
            return None

    def _fetch(self, plan: RecoveryPlan) -> int:
        """Get this rank's memory back, if the plan says so; return its bytes."""
        mine, journal, elastic = self._place.shard.global_rank, self._stores.journal, self._elastic
        source = next((fetch.source_rank for fetch in plan.fetches if fetch.global_rank == mine), None)
        if source is None or journal is None:
            return 0
        facts = dict(self._stores.steps.gradients)
        self._stores.memory.clear()
        self._stores.steps.clear()
        address = elastic.address_of(source)
        size_bytes = fetch_blobs(address, elastic.ticket, mine, journal.folder, timeout_s=elastic.copy_s)
        adopt_kept(self._stores)
        if not self._logs_tied:
            self._stores.steps.fill(facts)
        return size_bytes

    def _copy_what_peers_lack(self, reports: Sequence[_Report]) -> None:
        mine, journal = self._place.shard.global_rank, self._stores.journal
        if journal and any(mine not in reports[holder].kept_for for holder in self._elastic.holders):
            journal.copy_again()


def adopt_kept(stores: SparseStores) -> None:
    """Take over what the journal's folder holds: an earlier process's, or what was fetched into it."""
    if stores.journal:
        kept = stores.journal.adopt()
        stores.memory.adopt(kept.snapshots)
        stores.steps.adopt(kept.starts, kept.records)
