"""How far a rank's training state has come, between the hooks of a loop and a recovery. Does nothing by itself."""

from __future__ import annotations

from moe_ckpt.recovery.target import Standing
from moe_ckpt.types import ReadyGradients


class StepState:
    """How far this rank's training state has come: written by the hooks of the loop, read when ranks are lost."""

    def __init__(self) -> None:
        self.reached: int | None = None
        self.whole = False
        self.torn = False
        self.gradients: ReadyGradients | None = None

    def standing(self, stage: int) -> Standing:
        """Return it as others need to know it."""
        return Standing(stage=stage, reached=self.reached, prepared=self.gradients is not None, whole=self.whole)

    def be_at(self, iteration: int) -> None:
        """The whole state is that after `iteration` steps."""
        self.reached, self.whole, self.torn, self.gradients = iteration, True, False, None

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
        """There is no state that could be named; nor is it that of a run's start."""
        self.reached, self.whole, self.torn, self.gradients = None, False, True, None
