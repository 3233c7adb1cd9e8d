"""The kills of a fault plan in a simulation. Pure.

A kill strikes at a time, or at a point of training. Simultaneous kills are one fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_ckpt.faults.schedule import Kill, TimedFault, plan_faults, victims
from moe_ckpt.sim.costs import Costs


@dataclass(frozen=True, kw_only=True, slots=True)
class LateKill(Kill):
    """A kill of a real run, which strikes some time after the start of its iteration.

    The kill strikes within its phase. Where that iteration is shorter in the
    simulation, the kill strikes in the nearest iteration that is long enough because
    training waits for a copy. A kill in a recovery strikes that many seconds after the
    previous fault, but within that recovery.
    """

    late_s: float
    """Seconds from the start of the iteration, or from the previous fault, to the
    strike.
    """


class FaultQueue:
    """The faults that have not struck yet.

    Args:
        kills: The kills of the fault plan.
        world_size: The number of ranks of the job.
        ranks_per_node: The number of ranks of a node.
        in_order: Whether a kill at a point waits for the kills at points before it, as
            in a run that goes back and reaches its points again.
    """

    def __init__(
        self,
        kills: Sequence[Kill],
        *,
        world_size: int,
        ranks_per_node: int,
        in_order: bool,
    ) -> None:
        self.timed = [*reversed(plan_faults(kills, world_size, ranks_per_node))]
        """The faults at a time, the earliest last."""
        self._at_points = [kill for kill in kills if kill.after_s is None]
        self._in_order = in_order
        self._world_size, self._ranks_per_node = world_size, ranks_per_node

    @property
    def at_points(self) -> Sequence[Kill]:
        """The kills at points of which any may be next."""
        return self._at_points[:1] if self._in_order else self._at_points

    @property
    def in_recovery(self) -> Kill | None:
        """The next kill in a recovery, if such a kill may be next."""
        return next((kill for kill in self.at_points if kill.phase == "recovery"), None)

    def meet(self, kill: Kill, at_s: float) -> TimedFault:
        """Turn a kill at a point into a strike, and remove the kill from the queue.

        Args:
            kill: The kill whose point training has reached.
            at_s: The time at which training reached the point.
        """
        self._at_points.remove(kill)
        ranks = victims(kill, self._world_size, self._ranks_per_node)
        return TimedFault(
            after_s=at_s, ranks=ranks, signal=kill.signal, scope=kill.scope
        )


def time_in_iteration(phase: str, costs: Costs, seconds: float, length: float) -> float:
    """Return the seconds from the start of an iteration to a phase.

    Args:
        phase: The phase of a kill.
        costs: The costs of the job.
        seconds: Seconds of the iteration with all stalls.
        length: The length of the iteration without stalls, in mean iterations.
    """
    match phase:
        case "forward":
            return 0.0
        case "backward":
            # forward is a third of the work: backward computes two gradients for each
            # product of forward
            return length * costs.pipeline_s(range(costs.num_stages)) / 3
        case "reduce":
            # the update waits for copies of the state before it, reductions of
            # gradients do not
            return max(0.0, length * costs.iteration_s - costs.update_s - costs.sync_s)
        case "step":
            # in the middle of the update: at its start, rounding would decide whether
            # the update has begun
            return seconds - costs.update_s / 2
        case _:
            return seconds
