"""The kills of a fault plan in a simulation: by time, simultaneous ones together, or at
points. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_ckpt.faults.schedule import Kill, TimedFault, plan_faults, victims
from moe_ckpt.sim.costs import Costs


@dataclass(frozen=True, kw_only=True, slots=True)
class LateKill(Kill):
    """A kill of a real run: it strikes `late_s` seconds after the begin of its
    iteration, but within its phase.

    Where that iteration is shorter here, it strikes in the nearest one that lasts, as
    training waits for a copy. One in a recovery strikes so many seconds after the fault
    before it, but within that recovery.
    """

    late_s: float


class FaultQueue:
    """The faults to come: the `timed` ones, the earliest last, and those at points,
    when training gets there.

    `in_order`: a kill at a point waits for those before it, as in a run that goes back
    and meets its points again.
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
        self._at_points = [kill for kill in kills if kill.after_s is None]
        self._in_order = in_order
        self._world_size, self._ranks_per_node = world_size, ranks_per_node

    @property
    def at_points(self) -> Sequence[Kill]:
        """The kills of which any may be next."""
        return self._at_points[:1] if self._in_order else self._at_points

    @property
    def in_recovery(self) -> Kill | None:
        """The next kill in a recovery, if any kill of that kind may be next."""
        return next((kill for kill in self.at_points if kill.phase == "recovery"), None)

    def meet(self, kill: Kill, at_s: float) -> TimedFault:
        """Turn a kill at a point into a strike, now that training is there."""
        self._at_points.remove(kill)
        ranks = victims(kill, self._world_size, self._ranks_per_node)
        return TimedFault(
            after_s=at_s, ranks=ranks, signal=kill.signal, scope=kill.scope
        )


def time_in_iteration(phase: str, costs: Costs, seconds: float, length: float) -> float:
    """Return the seconds from the start of an iteration to a phase.

    `seconds` are those of the iteration with all stalls; `length` is that without
    stalls, in mean iterations.
    """
    match phase:
        case "forward":
            return 0.0
        case "backward":
            # forward is a third of the work: backward computes two gradients for each
            # product of forward
            return length * costs.pipeline_s(range(costs.num_stages)) / 3
        case "reduce":
            # the update waits for copies of the state before it, gradients do not
            return max(0.0, length * costs.iteration_s - costs.update_s - costs.sync_s)
        case "step":
            # not as it begins: rounding decides on which side that is
            return seconds - costs.update_s / 2
        case _:
            return seconds
