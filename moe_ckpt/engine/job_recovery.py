"""The Protocol between a session and the recovery of its policy: by windows, or by
units of partial checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_ckpt.engine.step_state import StepState
from moe_ckpt.engine.survey import CopySurvey


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveredState:
    """The result of a recovery: the state after `iteration`; None: all ranks start
    where the run started.

    `went_back`: at least one rank loaded a state; `lines` describe the recovery for the
    log.
    """

    iteration: int | None
    went_back: bool = False
    lines: Sequence[str] = ()
    fetch_s: float = 0.0
    fetched_bytes: int = 0
    executed_iters: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OnDisks:
    """Iterations on local disks: the newest that all disks lead to, and the newest on
    each disk.

    `new_ranks`: ranks whose disk has held no state since all ranks started from
    nothing. With one of these, no state was ever on all disks.
    """

    newest: int | None
    of_each: tuple[int | None, ...]
    new_ranks: tuple[int, ...] = ()


class JobRecovery(Protocol):
    """Brings all ranks to one state. Every method is collective over all ranks."""

    copies: CopySurvey

    def run(self, state: StepState) -> RecoveredState:
        """Bring all ranks to one state. Copies in the ranks' memory stay as they are
        until copying resumes.

        Raises NothingLeftError on all ranks if the remaining sources lead to no common
        state.
        """
        ...

    def look_at_disks(self) -> OnDisks:
        """Wait for writes in progress; then return the iterations that all ranks' local
        disks lead to, verified.
        """
        ...

    def begin_on_disks(self) -> None:
        """All ranks start from nothing: empty their local disks."""
        ...

    def load_from_disk(self) -> int:
        """Bring all ranks to the newest state that their local disks lead to; return
        its iteration.

        Peers receive nothing until copying resumes. Raises CheckpointLoadError on all
        ranks if no such state exists.
        """
        ...

    def drop_memory(self) -> None:
        """Empty the memory, as `copies.drop_all` does: all ranks continue from a state
        that it does not lead to.
        """
        ...
