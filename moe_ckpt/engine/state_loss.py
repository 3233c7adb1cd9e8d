"""Executes the scheduled losses of state in living processes (`fault=state_loss`).

Owns: when this rank loses its state, and which stages have lost their state since the
last recovery. All ranks have the same schedule, so every rank takes every loss into
account. Real deaths are detected elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moe_ckpt.engine.interfaces import FaultInjector, RankPosition
from moe_ckpt.events import EventLog, StateLost
from moe_ckpt.faults.schedule import FaultSchedule, StateLoss


@dataclass(frozen=True, kw_only=True, slots=True)
class LostStages:
    """The stages that have lost state."""

    stages: frozenset[int]
    """Stages whose state is lost, in whole or in part."""

    mine: bool
    """Whether this rank's state is lost."""


class StateLosses:
    """The scheduled losses of a run.

    Args:
        schedule: The losses of all ranks.
        injector: Overwrites this rank's state.
        position: This rank's position in the job.
        drop: Called when this rank loses its state, to drop everything that depends on
            the state.
        events: This rank's log of events.
    """

    def __init__(
        self,
        schedule: FaultSchedule,
        injector: FaultInjector,
        position: RankPosition,
        drop: Callable[[], None],
        events: EventLog,
    ) -> None:
        self._schedule = schedule
        self._injector = injector
        self._position = position
        self._drop = drop
        self._events = events
        self._pending: list[StateLoss] = []

    def arm(self, iteration: int) -> None:
        """Prepare the losses in the middle of the forward or backward pass."""
        for phase in ("forward", "backward"):
            if self._is_due_here(iteration, phase):
                self._injector.arm(
                    phase, lambda phase=phase: self._lose(iteration, phase)
                )

    def inject(self, iteration: int, phase: str) -> None:
        """Execute the losses that fall between passes."""
        if self._is_due_here(iteration, phase):
            self._lose(iteration, phase)

    def take(self) -> LostStages | None:
        """Return the losses since the last call, or None."""
        pending, self._pending = self._pending, []
        if not pending:
            return None
        return LostStages(
            stages=frozenset(loss.stage for loss in pending),
            mine=self._hits_me(pending),
        )

    def _is_due_here(self, iteration: int, phase: str) -> bool:
        """Note the losses that are due in any stage.

        Returns:
            Whether this rank's state is among these losses.
        """
        due = self._schedule.due(iteration, phase)
        self._pending += due
        return self._hits_me(due)

    def _hits_me(self, losses: Iterable[StateLoss]) -> bool:
        shard = self._position.shard
        return any(
            loss.stage == shard.pp_rank and loss.dp_rank in (None, shard.dp_rank)
            for loss in losses
        )

    def _lose(self, iteration: int, phase: str) -> None:
        # first: `drop` detects from the running copy that a snapshot would be torn
        self._drop()
        self._injector.wipe()
        self._events.append(StateLost(iteration=iteration, phase=phase))
