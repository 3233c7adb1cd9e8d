"""The Protocol between a session and the recovery of its policy.

A policy recovers by windows, or by units of partial checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_ckpt.engine.step_state import StepState
from moe_ckpt.engine.survey import CopySurvey


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveredState:
    """The result of a recovery."""

    iteration: int | None
    """Number of optimizer steps in the state. None: all ranks start where the run
    started.
    """

    went_back: bool = False
    """Whether at least one rank loaded a state."""

    lines: Sequence[str] = ()
    """Lines that describe the recovery, for the log."""

    fetch_s: float = 0.0
    """Seconds that this rank spent on taking stock, planning and fetching."""

    fetched_bytes: int = 0
    """Bytes that the recovery fetched over the network."""

    executed_iters: int = 0
    """Iterations that this rank replayed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnDisks:
    """The iterations to which the snapshots on local disks lead."""

    newest: int | None
    """The newest iteration to which all disks lead. None: no such iteration exists."""

    of_each: tuple[int | None, ...]
    """The newest iteration on each rank's disk. None: the disk holds no snapshot."""

    new_ranks: tuple[int, ...] = ()
    """Ranks whose disk has held no state since all ranks started from nothing. With at
    least one such rank, no state was ever on all disks.
    """


class JobRecovery(Protocol):
    """Brings all ranks to one state. Every method is collective over all ranks."""

    copies: CopySurvey
    """The survey of all ranks' copies, and the switch that stops and resumes copying.
    """

    def run(self, state: StepState) -> RecoveredState:
        """Bring all ranks to one state.

        Copies in the ranks' memory stay as they are until copying resumes.

        Args:
            state: The progress of this rank's training state.

        Raises:
            NothingLeftError: The remaining sources lead to no common state. Raised on
                all ranks.
        """
        ...

    def look_at_disks(self) -> OnDisks:
        """Wait for writes in progress, then look at the local disks of all ranks.

        Returns:
            The iterations to which the disks lead, verified.
        """
        ...

    def begin_on_disks(self) -> None:
        """Empty the local disks, because all ranks start from nothing."""
        ...

    def load_from_disk(self) -> int:
        """Bring all ranks to the newest state to which their local disks lead.

        Peers receive nothing until copying resumes.

        Returns:
            The iteration of the state.

        Raises:
            CheckpointLoadError: No such state exists. Raised on all ranks.
        """
        ...

    def drop_memory(self) -> None:
        """Empty the memory, as `copies.drop_all` does.

        All ranks continue from a state to which the memory does not lead.
        """
        ...
