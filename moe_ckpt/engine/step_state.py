"""The progress of a rank's training state, shared by hooks and recoveries.

The module has no behaviour of its own.

A *branch* of the run begins whenever all ranks go on from a state. If kernels do not
repeat results, an iteration that runs again leads to another state than before. So a
state is identified by its iteration and the branch in which the iteration was trained.
"""

from __future__ import annotations

from moe_ckpt.recovery.inventory import ReplayedState
from moe_ckpt.types import ReadyGradients


class StepState:
    """The progress of this rank's training state.

    The hooks of the loop write the progress. A recovery reads the progress when ranks
    are lost.

    Attributes:
        reached: Number of optimizer steps in the state. None: the state belongs to no
            iteration, or none is known yet.
        branch: Branch in which the iteration `reached` was trained. None: not known, or
            without state.
        whole: Whether this rank has gathered its weights since the last step.
        torn: Whether the state was lost, and belongs to no iteration.
        gradients: Complete gradients of iteration `reached` + 1. None: the gradients
            are not complete, or not needed any more.
        replayed: The state that an interrupted replay has reached. None: no replay
            can be continued.
    """

    def __init__(self) -> None:
        self.reached: int | None = None
        self.branch: int | None = None
        self.whole = False
        self.torn = False
        self.gradients: ReadyGradients | None = None
        self.replayed: ReplayedState | None = None

    def be_at(self, iteration: int, branch: int | None) -> None:
        """Note that the whole state is the state after `iteration` steps."""
        self.branch = branch
        self.reached, self.whole, self.torn, self.gradients, self.replayed = (
            iteration,
            True,
            False,
            None,
            None,
        )

    def prepare(self, gradients: ReadyGradients) -> None:
        """Note that the gradients of the next iteration are complete."""
        self.gradients = gradients

    def withdraw(self) -> None:
        """Note that the complete gradients are not needed any more, or not correct."""
        self.gradients = None

    def apply(self, iteration: int, branch: int | None) -> None:
        """Note that the step was taken, on this rank alone."""
        self.branch = branch
        # not whole: with a sharded optimizer only this rank's shard of the weights is
        # new
        self.reached, self.whole, self.gradients = iteration, False, None

    def lose(self) -> None:
        """Note that the state belongs to no iteration, nor to the start of a run."""
        self.branch = None
        self.reached, self.whole, self.torn, self.gradients, self.replayed = (
            None,
            False,
            True,
            None,
            None,
        )

    def replay_reached(self, replayed: ReplayedState | None) -> None:
        """Note how far a recovery has replayed the lost state.

        Args:
            replayed: The state that the replay has reached. None: the replay is in the
                middle of an update.
        """
        self.replayed = replayed
