"""Rebuilds the state of ranks from windows in memory: what all ways have in common.

Owns: the inventory of this rank's windows, and one recovery of state that living
processes have lost. Must not: plan, or change state; the subclasses do.

    StageRecovery       lost stages replay iterations with logged inputs
    GradientRecovery    lost ranks take their steps again with logged gradients
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

from moe_ckpt.collectives import gather_results
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.engine.state_loss import LostStages
from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.events import CheckpointSkipped
from moe_ckpt.recovery.inventory import Inventory, ReplayedState, WindowRef
from moe_ckpt.recovery.plan import Fetch
from moe_ckpt.recovery.target import Target
from moe_ckpt.snapshot.verified_windows import verified_window
from moe_ckpt.snapshot.windows import Window

_log = logging.getLogger(__name__)

Progress = Callable[[ReplayedState | None], None]
"""Receives each state from which an interrupted replay can go on, and None before that
state changes.
"""


class Plan(Protocol):
    """The part of a plan that is the same for all ways to rebuild state."""

    @property
    def target_iteration(self) -> int:
        """Iteration at which all ranks end."""
        ...

    @property
    def fetches(self) -> tuple[Fetch, ...]:
        """Fetches in the order of ranks."""
        ...

    @property
    def goes_back(self) -> bool:
        """Whether at least one rank loads a state."""
        ...

    @property
    def branch(self) -> int | None:
        """Branch in which the target was trained.

        None where branches make no difference.
        """
        ...

    def window_of(self, global_rank: int, stage: int) -> range | None:
        """Return the iterations of the window that a rank loads, or None."""
        ...

    def lines(self) -> list[str]:
        """Return a readable description of the plan, one fact per line."""
        ...


P = TypeVar("P", bound=Plan)


class Rebuilding(ABC, Generic[P]):
    """Rebuilds state with all ranks of the job present.

    All public methods except `plan`, `inventory`, `is_intact` and `span_for_me` are
    collective over all ranks.

    Args:
        parts: The rank's parts.
    """

    by_gradients: ClassVar[bool] = False
    """Whether logged gradients lead on from windows, and no replay."""

    def __init__(self, parts: RankParts) -> None:
        self._position = parts.adapter.position
        self._meter = parts.meter
        self._stage = parts.adapter.stage
        self._operators = parts.adapter.operators
        self._memory = parts.memory
        self._events = parts.events

    @abstractmethod
    def plan(self, target: Target | None, inventories: Sequence[Inventory]) -> P:
        """Return the plan that all ranks make from the same inventories. Local.

        Args:
            target: The iteration to reach, and what is lost. None: no rank has state.
            inventories: Sources of all ranks.

        Raises:
            NothingLeftError: The sources lead to no common state.
        """

    @abstractmethod
    def is_intact(self, plan: P, *, has_fetched: bool = False) -> bool:
        """Verify this rank's sources for a plan, and drop damaged sources.

        After a drop, all ranks take stock and plan again.

        Args:
            plan: The plan.
            has_fetched: Whether this rank's window was fetched for the plan, and
                verified at that time.

        Returns:
            Whether nothing was damaged.
        """

    @abstractmethod
    def carry_out(
        self, plan: P, *, live: bool, progress: Progress = lambda _: None
    ) -> int:
        """Bring this rank to the plan's target.

        Args:
            plan: The plan.
            live: Whether the rank's state is whole and already at the target.
            progress: Receives the states from which an interrupted replay can go on.

        Returns:
            Number of iterations that this rank ran again.

        Raises:
            CheckpointLoadError: The state could not be rebuilt. Raised on all ranks.
            DataError: A replay has read other samples than before. Raised on all ranks.
        """

    def _checksums(self) -> Mapping[int, int] | None:
        """Return the checksums of this rank's logged gradients, by iteration.

        None: replays lead on from windows, and no gradients.
        """
        return None

    def recover(
        self, lost: LostStages, target: int, branch: int, *, undo: bool
    ) -> None:
        """Bring all ranks to the state after the target iteration.

        All processes live, but some have lost state.

        Args:
            lost: The stages that have lost state.
            target: The iteration to reach.
            branch: The branch of the run in which the target was trained.
            undo: Whether a later iteration had begun and is abandoned. Healthy ranks
                then restore the state that this iteration changed.

        Raises:
            CheckpointLoadError: The remaining sources do not lead to the target, or the
                state could not be rebuilt. Raised on all ranks.
            DataError: A replay has read other samples than before. Raised on all ranks.
        """
        # first: `carry_out` takes digests of healthy ranks, and a replay has to end in
        # the same digests
        if undo and not lost.mine:
            self._stage.restore_start(
                self._memory.steps.start(target + 1), undo=target + 1
            )
        have_lost = gather_results(
            self._position.ranks, lambda: lost.mine, CheckpointLoadError
        )
        aim = Target(
            iteration=target,
            lost_stages=lost.stages,
            lost_ranks=frozenset(rank for rank, has in enumerate(have_lost) if has),
            branch=branch,
            finishing_stages=frozenset(),
        )
        plan = self.intact_plan(aim)
        if plan.target_iteration != target:
            raise CheckpointLoadError(
                f"nothing leads to iteration {target}: {'; '.join(plan.lines())}"
            )
        self.carry_out(plan, live=not lost.mine)
        if self._position.shard.global_rank == 0:
            _log.warning("%s", "; ".join(plan.lines()))

    def inventory(self, target: int | None) -> Inventory:
        """Return this rank's own sources.

        The contents of the sources are not read: `is_intact` verifies the sources that
        a plan takes.

        Args:
            target: The iteration to which windows have to lead. None: any iteration.
        """
        boundary = self._memory.boundary
        refs = [
            ref
            for window in self._memory.snapshots.windows()
            if (ref := self._usable(window, by_headers=True)) is not None
            and (target is None or ref.end <= target)
        ]
        last = 0 if target is None else target
        return Inventory(
            global_rank=self._position.shard.global_rank,
            stage=self._position.stage,
            windows=tuple(refs),
            held={},
            logged_from=boundary.complete_from(last) if boundary else last + 1,
            logged_to=last,
        )

    def intact_plan(self, target: Target | None) -> P:
        """Return a plan for which all ranks' own sources are intact.

        Args:
            target: The iteration to reach, and what is lost. None: no rank has state.

        Raises:
            NothingLeftError: The sources lead to no common state. Raised on all ranks.
        """
        ranks, goal = self._position.ranks, target.iteration if target else None
        while True:
            inventories = gather_results(
                ranks, lambda: self.inventory(goal), CheckpointLoadError
            )
            plan = self.plan(target, inventories)
            if all(
                gather_results(
                    ranks, functools.partial(self.is_intact, plan), CheckpointLoadError
                )
            ):
                return plan

    def span_for_me(self, plan: Plan) -> range | None:
        """Return the iterations of the window that this rank loads, or None."""
        return plan.window_of(self._position.shard.global_rank, self._position.stage)

    def _usable(self, window: Window, *, by_headers: bool) -> WindowRef | None:
        """Check a window of this rank, and drop the window if damaged."""
        try:
            return verified_window(
                window.snapshots,
                self._position.identity,
                self._position.shard,
                self._memory.steps,
                self._checksums(),
                by_headers=by_headers,
            )
        except CheckpointLoadError as error:
            self._events.append(
                CheckpointSkipped(source=str(window), reason=str(error))
            )
            _log.warning("%s cannot be used: %s", window, error)
            self._memory.snapshots.drop(window.start)
            return None

    def _has_intact(self, window_start: int) -> bool:
        """Verify the window of this rank with this start; drop a damaged window."""
        window = self._window_at(window_start)
        # None: the window was dropped while another rank's fetch failed; all ranks then
        # plan with the same inventories
        return window is not None and self._usable(window, by_headers=False) is not None

    def _window_at(self, start: int) -> Window | None:
        return next(
            (
                window
                for window in self._memory.snapshots.windows()
                if window.start == start
            ),
            None,
        )
