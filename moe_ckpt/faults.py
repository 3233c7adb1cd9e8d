"""Faults that are scheduled for a run: what is lost, where and when. Decides only; whoever asks inflicts the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_ckpt.config import require, require_at_least, require_choice

PHASES = ("forward", "backward", "step", "between")


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLoss:
    """The state of a pipeline stage is lost at an iteration (from 1), in one of PHASES.

    `dp_rank` is the data-parallel rank that loses it; None stands for all ranks of the stage. Raises ConfigError.
    """

    iteration: int
    stage: int
    phase: str
    dp_rank: int | None = None

    def __post_init__(self) -> None:
        require_at_least("fault.at: iteration", self.iteration, 1)
        require_at_least("fault.at: stage", self.stage, 0)
        require_choice("fault.at: phase", self.phase, PHASES)
        if self.dp_rank is not None:
            require_at_least("fault.at: dp_rank", self.dp_rank, 0)


class FaultSchedule:
    """The losses of a run. Each fires once: an iteration that runs again after a recovery is spared."""

    def __init__(self, losses: Sequence[StateLoss]) -> None:
        self._losses = tuple(losses)
        self._pending = list(losses)

    def due(self, iteration: int, phase: str) -> tuple[StateLoss, ...]:
        """Return the losses of this iteration and phase that have not fired yet, in the given order, and fire them."""
        assert phase in PHASES, phase
        due = tuple(loss for loss in self._pending if (loss.iteration, loss.phase) == (iteration, phase))
        self._pending = [loss for loss in self._pending if loss not in due]
        return due

    def check_fit(self, num_stages: int, dp: int) -> None:
        """Raise ConfigError where a loss, fired or not, names a stage or a data-parallel rank that the job lacks."""
        for loss in self._losses:
            wanted = f"between 0 and {num_stages - 1}, the stages of the job"
            require(loss.stage < num_stages, "fault.at: stage", loss.stage, wanted)
            wanted = f"between 0 and {dp - 1}, the data-parallel ranks of the job"
            require(loss.dp_rank is None or loss.dp_rank < dp, "fault.at: dp_rank", loss.dp_rank, wanted)
