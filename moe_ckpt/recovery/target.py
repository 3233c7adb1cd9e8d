"""The target iteration of all ranks after a fault, and the stages that cannot reach it
by themselves. Pure.

    gradients complete on all ranks -> vote of all ranks -> local update -> parameter all-gather
          prepared                                             reached            whole

A rank steps only after all ranks have voted, so if one rank took a step, every live
rank was prepared for it: the highest iteration that a rank has reached is within reach
of all ranks that have state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """The position of one rank as a generation starts.

    `reached`: the number of optimizer steps in its state; None without state (a fresh
    process, or a rollback that was cut off). `prepared`: the rank holds the complete
    gradients of iteration `reached` + 1 and has voted for its step. `whole`: the rank
    has gathered its weights from its peers since its last step.
    """

    stage: int
    reached: int | None
    prepared: bool
    whole: bool

    def gets_to(self, iteration: int) -> bool:
        """Whether the rank is at `iteration`, or can take the last step to it without
        other ranks.
        """
        return self.reached == iteration or (
            self.reached == iteration - 1 and self.prepared
        )

    def is_done_with(self, iteration: int) -> bool:
        """Whether the rank is at `iteration` and its weights are gathered."""
        return self.reached == iteration and self.whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The target iteration of all ranks, and the stages that have work to do to reach
    it.

    `lost_stages` must be rebuilt. `finishing_stages` have all that they need: the ranks
    that are behind take the step, then the whole stage gathers its weights.
    """

    iteration: int
    lost_stages: frozenset[int]
    finishing_stages: frozenset[int]


def plan_target(standings: Sequence[Standing]) -> Target | None:
    """Return the target of a recovery, or None if no rank has state. `standings` are
    those of all ranks.

    Example: stage 0 is at 7 and 8, stage 1 at 8 and dead, stage 2 at 8 and 8. If the
    first rank is prepared for 8, the target is 8, stage 1 is lost and stage 0 is
    finishing; if it is not, stage 0 is lost as well.
    """
    reached = [
        standing.reached for standing in standings if standing.reached is not None
    ]
    if not reached:
        return None
    iteration = max(reached)
    lost = frozenset(
        standing.stage for standing in standings if not standing.gets_to(iteration)
    )
    unfinished = frozenset(
        standing.stage for standing in standings if not standing.is_done_with(iteration)
    )
    return Target(
        iteration=iteration, lost_stages=lost, finishing_stages=unfinished - lost
    )
