"""Target iteration of all ranks after a fault, and stages that need help to reach it.

Pure.

    gradients complete on all ranks -> all vote -> local update -> parameter all-gather
              prepared                               reached             whole

A rank steps only after all ranks have voted. So if one rank took a step, every live
rank was prepared for that step. All ranks that have state can therefore reach the
highest iteration that any rank has reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Position of one rank as a generation starts."""

    stage: int
    """Pipeline stage of the rank."""

    reached: int | None
    """Number of optimizer steps in the rank's state. None without state: in a fresh
    process, or after a rollback that was cut off.
    """

    prepared: bool
    """Whether the rank holds the complete gradients of iteration `reached` + 1, and has
    voted for the step of that iteration.
    """

    whole: bool
    """Whether the rank has gathered its weights from its peers since its last step."""

    branch: int = 0
    """Branch of the run in which the iteration `reached` was trained."""

    def gets_to(self, iteration: int) -> bool:
        """Return whether the rank can reach `iteration` without other ranks.

        True at `iteration`, and one step before `iteration` if the rank is prepared.
        """
        return self.reached == iteration or (
            self.reached == iteration - 1 and self.prepared
        )

    def is_done_with(self, iteration: int) -> bool:
        """Return whether the rank is at `iteration` with gathered weights."""
        return self.reached == iteration and self.whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Target iteration of all ranks, and the stages that have work to do."""

    iteration: int
    """Iteration that all ranks are to reach."""

    lost_stages: frozenset[int]
    """Stages in which a rank must be rebuilt."""

    lost_ranks: frozenset[int]
    """Ranks that cannot reach the iteration without being rebuilt."""

    branch: int
    """Branch of the run in which the iteration was trained."""

    finishing_stages: frozenset[int]
    """Stages that have all they need: the ranks that are behind take the step, then the
    whole stage gathers its weights.
    """


def plan_target(standings: Sequence[Standing]) -> Target | None:
    """Return the target of a recovery, or None if no rank has state.

    For example, the ranks of stage 0 are at 7 and 8, those of stage 1 at 8 and dead,
    those of stage 2 at 8 and 8. If the rank at 7 is prepared for 8, the target is 8,
    stage 1 is lost, and stage 0 is finishing. If the rank at 7 is not prepared, stage 0
    is lost as well.

    Args:
        standings: Positions of all ranks, by rank.
    """
    reached = [
        standing.reached for standing in standings if standing.reached is not None
    ]
    if not reached:
        return None
    iteration = max(reached)
    lost_ranks = frozenset(
        rank
        for rank, standing in enumerate(standings)
        if not standing.gets_to(iteration)
    )
    lost = frozenset(standings[rank].stage for rank in lost_ranks)
    unfinished = frozenset(
        standing.stage for standing in standings if not standing.is_done_with(iteration)
    )
    return Target(
        iteration=iteration,
        lost_stages=lost,
        lost_ranks=lost_ranks,
        # equal on all ranks that have reached the iteration
        branch=max(
            standing.branch for standing in standings if standing.reached == iteration
        ),
        finishing_stages=unfinished - lost,
    )
