"""Compares the live state of each rank with the state that the rank's memory leads to.

An audit rebuilds the state from the oldest kept window and the gradients logged since.
A difference means that memory has changed in between, or that a device has computed
wrongly. The oldest window stays until an audit has passed, so an audit covers all steps
since the audit before. Owns: one audit, and the way back to the last audited state.
Must not: decide what follows from a difference (`engine.session` does).

    digests -> rebuild -> gather -> digests: equal, or back to the audit before
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from moe_ckpt.collectives import gather_results
from moe_ckpt.engine.gradient_recovery import GradientRecovery
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.events import StateAudited
from moe_ckpt.recovery.gradient_plan import GradientPlan
from moe_ckpt.recovery.target import Target

_log = logging.getLogger(__name__)


class Audits:
    """The audits of one rank. All methods are collective over all ranks.

    Args:
        parts: The rank's parts.
        recovery: Takes steps again.
        every_iters: Iterations between audits.
    """

    def __init__(
        self, parts: RankParts, recovery: GradientRecovery, every_iters: int
    ) -> None:
        self._position = parts.adapter.position
        self._operators = parts.adapter.operators
        self._memory = parts.memory
        self._events = parts.events
        self._recovery = recovery
        self._every_iters = every_iters

    def is_due(self, iteration: int) -> bool:
        """Return whether the state after this iteration is audited."""
        return iteration % self._every_iters == 0

    def before(self, iteration: int) -> int:
        """Return the iteration of the audit before this one."""
        return iteration - self._every_iters

    def compare(self, iteration: int, branch: int) -> Mapping[int, Sequence[str]]:
        """Rebuild the state of all ranks in place, and compare.

        Ranks without an intact window that leads to the iteration keep their state.
        If nothing differs, windows that only this audit needed are dropped.

        Args:
            iteration: The iteration of the present state.
            branch: The branch of the run in which that iteration was trained.

        Returns:
            For each rank whose state differed, the names of the operators. The state of
            these ranks is now the rebuilt one, and must not be trained on: gradients
            since the difference began are wrong on all ranks.

        Raises:
            CheckpointLoadError: The state could not be rebuilt. Raised on all ranks.
        """
        started_s = time.monotonic()
        before = self._operators.digests()
        # on all ranks: no rank may wait in the gather for a rank that has failed
        starts = gather_results(
            self._position.ranks,
            lambda: self._rebuild(iteration, branch),
            CheckpointLoadError,
        )
        self._recovery.gather()
        after = self._operators.digests()
        differing = [name for name in before if after[name] != before[name]]
        start = starts[self._position.ranks.rank]
        if start is None:
            _log.warning(
                "the state after iteration %d is not audited on this rank: no intact"
                " window and gradients lead to it",
                iteration,
            )
        self._events.append(
            StateAudited(
                iteration=iteration,
                window_start=start,
                differing=differing,
                seconds=time.monotonic() - started_s,
            )
        )
        of_each = gather_results(
            self._position.ranks, lambda: differing, CheckpointLoadError
        )
        found = {rank: names for rank, names in enumerate(of_each) if names}
        if not found:
            self._memory.snapshots.drop_superseded()
        return found

    def go_back(self, iteration: int) -> GradientPlan:
        """Bring all ranks to the newest state that is known to be good.

        That is the state of the audit before, or the oldest state that is kept. All
        that memory has of later iterations is dropped.

        Args:
            iteration: The iteration of the audit that has found a difference.

        Returns:
            The plan that was carried out.

        Raises:
            NothingLeftError: Memory leads to no such state. Raised on all ranks.
        """
        oldest = gather_results(
            self._position.ranks, self._oldest_end, CheckpointLoadError
        )
        last = max(self.before(iteration), *oldest)
        everything = Target(
            iteration=last,
            lost_stages=frozenset(range(self._position.num_stages)),
            lost_ranks=frozenset(range(self._position.ranks.size)),
            # no branch: a state of any branch that is old enough is good
            branch=-1,
            finishing_stages=frozenset(),
        )
        plan = self._recovery.intact_plan(everything)
        self._recovery.carry_out(plan, live=False)
        self._memory.snapshots.keep_only(
            [
                window.start
                for window in self._memory.snapshots.windows()
                if window.snapshots[-1].header.iteration <= plan.target_iteration
            ]
        )
        self._memory.drop_logs_after(plan.target_iteration)
        return plan

    def _rebuild(self, iteration: int, branch: int) -> int | None:
        """Rebuild this rank's own part of the state from its oldest intact window.

        Returns:
            The start of the window; None if no intact window leads to the iteration.
        """
        while True:
            leading = [
                window.start
                for window in self._recovery.inventory(iteration).windows
                if window.leads_to(iteration) == branch
            ]
            if not leading:
                return None
            start = min(leading)
            if self._recovery.leads(start, iteration):
                self._recovery.take_steps(start, iteration)
                return start

    def _oldest_end(self) -> int:
        """Return the iteration of the last snapshot of the oldest window, or 0."""
        windows = self._memory.snapshots.windows()
        return windows[-1].snapshots[-1].header.iteration if windows else 0
