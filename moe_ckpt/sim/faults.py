"""The kills of a fault plan in a simulation: by time, simultaneous ones together, or at points. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_ckpt.faults.schedule import Kill, plan_strikes, victims
from moe_ckpt.sim.costs import Costs


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """The losses of one moment: workers of `ranks`, with `lost_memory` the host memory of their nodes as well."""

    at_s: float
    ranks: tuple[int, ...]
    lost_memory: bool
    hangs: bool


class FaultQueue:
    """The faults to come. Those at points come when training gets there."""

    def __init__(self, kills: Sequence[Kill], *, world_size: int, ranks_per_node: int) -> None:
        strikes = plan_strikes(kills, world_size, ranks_per_node)
        self._timed = [_fault(each.after_s, each.ranks, each.scope, each.signal) for each in reversed(strikes)]
        self._at_points = [kill for kill in kills if kill.after_s is None]
        self._world_size, self._ranks_per_node = world_size, ranks_per_node

    def next_timed(self) -> Fault | None:
        """Return the fault with the earliest time."""
        return self._timed[-1] if self._timed else None

    def points(self) -> tuple[Kill, ...]:
        """Return the kills at points that are still to come, in the order in which they were planned."""
        return tuple(self._at_points)

    def drop_timed(self) -> None:
        """Remove the earliest one."""
        self._timed.pop()

    def meet(self, kill: Kill, at_s: float) -> Fault:
        """Turn a kill at a point into a fault, now that training is there."""
        self._at_points.remove(kill)
        return _fault(at_s, victims(kill, self._world_size, self._ranks_per_node), kill.scope, kill.signal)


def _fault(at_s: float, ranks: tuple[int, ...], scope: str, signal: str) -> Fault:
    return Fault(at_s=at_s, ranks=ranks, lost_memory=scope == "node", hangs=signal == "STOP")


def time_in_iteration(phase: str, costs: Costs, seconds: float) -> float:
    """Return the seconds from the start of an iteration of this length to a phase."""
    match phase:
        case "forward":
            return 0.0
        case "backward":
            # forward is a third of the work: backward computes two gradients for each product of forward
            return costs.pipeline_s(range(costs.num_stages)) / 3
        case "reduce":
            return seconds - costs.update_s - costs.sync_s
        case "step":
            return seconds - costs.update_s
        case _:
            return seconds
