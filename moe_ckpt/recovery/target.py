"""The target iteration of all ranks after a fault, and the stages that cannot reach it alone. Pure.

    gradients complete everywhere -> everyone says so -> local update -> parameter all-gather
          prepared                      the vote           reached            whole

Once a rank took the step, every live rank was prepared for it: the highest iteration that a rank reached is
within reach of all ranks that have state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where one rank is as a generation starts.

    `reached`: the optimizer steps that its state has taken; None without state (a fresh process, or half rolled back).
    `prepared`: it holds the complete gradients of iteration `reached` + 1 and has said so in the vote. `whole`: its
    weights have been gathered from its peers since its last step.
    """

    stage: int
    reached: int | None
    prepared: bool
    whole: bool

    def gets_to(self, iteration: int) -> bool:
        """Whether it is at `iteration`, or can take the last step to it by itself."""
        return self.reached == iteration or (self.reached == iteration - 1 and self.prepared)

    def is_done_with(self, iteration: int) -> bool:
        """Whether it is at `iteration` and has nothing left to do for it."""
        return self.reached == iteration and self.whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The target iteration of all ranks, and the stages that have work to do to reach it.

    `lost_stages` have to be rebuilt. `finishing_stages` have all that they need: ranks that are behind take the step,
    then all of the stage gather their weights.
    """

    iteration: int
    lost_stages: frozenset[int]
    finishing_stages: frozenset[int]


def plan_target(standings: Sequence[Standing]) -> Target | None:
    """Return the target of a recovery, or None where no rank has state. `standings` are those of all ranks.

    Stage 0 at 7 and 8, stage 1 at 8 and dead, stage 2 at 8 and 8: with the first rank prepared for 8 the target is 8,
    stage 1 is lost and stage 0 finishing; had it not been prepared, stage 0 would be lost, too.
    """
    reached = [standing.reached for standing in standings if standing.reached is not None]
    if not reached:
        return None
    iteration = max(reached)
    lost = frozenset(standing.stage for standing in standings if not standing.gets_to(iteration))
    unfinished = frozenset(standing.stage for standing in standings if not standing.is_done_with(iteration))
    return Target(iteration=iteration, lost_stages=lost, finishing_stages=unfinished - lost)
