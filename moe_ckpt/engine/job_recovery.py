"""The seam between a session and how its policy's ranks come to one state: by windows, or by units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_ckpt.engine.step_state import StepState
from moe_ckpt.engine.survey import CopySurvey


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveredState:
    """This rank's way to the state after `iteration`; None: all ranks start where the run started.

    `went_back`: at least one rank loaded a state; `lines` describe the recovery for the log.
    """

    iteration: int | None
    went_back: bool = False
    lines: Sequence[str] = ()
    fetch_s: float = 0.0
    fetched_bytes: int = 0
    executed_iters: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OnDisks:
    """Iterations on local disks: the newest that all disks lead to, and the newest of each disk."""

    newest: int | None
    of_each: tuple[int | None, ...]


class JobRecovery(Protocol):
    """Brings all ranks to one state. Every method is collective over all ranks."""

    copies: CopySurvey

    def run(self, state: StepState) -> RecoveredState:
        """Bring all ranks to one state. Until copying is resumed no copy in any rank's memory changes.

        Raises NothingLeftError on all ranks if nothing that is left leads to one.
        """
        ...

    def look_at_disks(self) -> OnDisks:
        """Return what all ranks' local disks lead to, verified, once nothing is on its way there any more."""
        ...

    def load_from_disk(self) -> int:
        """Bring all ranks to the newest state that their local disks lead to; return the iteration.

        Until copying is resumed peers hear nothing. Raises CheckpointLoadError on all ranks if that cannot be.
        """
        ...

    def forget(self) -> None:
        """All go on from a state that nothing here leads to: keep nothing in memory, as `copies.drop_all` does."""
        ...
