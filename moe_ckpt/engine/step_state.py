"""The progress of a rank's training state, between the hooks of a loop and a recovery.
No behaviour of its own.
"""

from __future__ import annotations

from moe_ckpt.recovery.inventory import ReplayedState
from moe_ckpt.types import ReadyGradients


class StepState:
    """The progress of this rank's training state: written by the hooks of the loop,
    read when ranks are lost.
    """

    def __init__(self) -> None:
        self.reached: int | None = None
        self.whole = False
        self.torn = False
        self.gradients: ReadyGradients | None = None
        self.replayed: ReplayedState | None = None

    def be_at(self, iteration: int) -> None:
        """The whole state is that after `iteration` steps."""
        self.reached, self.whole, self.torn, self.gradients, self.replayed = (
            iteration,
            True,
            False,
            None,
            None,
        )

    def prepare(self, gradients: ReadyGradients) -> None:
        """The gradients of the next iteration are complete."""
        self.gradients = gradients

    def withdraw(self) -> None:
        """The complete gradients are not needed any more, or not correct."""
        self.gradients = None

    def apply(self, iteration: int) -> None:
        """The step has been taken, on this rank alone."""
        # not whole: of a sharded optimizer's weights only this rank's shard is new
        self.reached, self.whole, self.gradients = iteration, False, None

    def lose(self) -> None:
        """The state belongs to no iteration, nor to the start of a run."""
        self.reached, self.whole, self.torn, self.gradients, self.replayed = (
            None,
            False,
            True,
            None,
            None,
        )

    def replay_reached(self, replayed: ReplayedState | None) -> None:
        """A recovery has replayed the lost state up to an iteration; None: it is in the
        middle of an update.
        """
        self.replayed = replayed
