"""What the ranks of a simulated job have measured: recent iterations, costs of windows, replays. Pure.

Lengths are in mean iterations. A real job's measurements are those of moe_ckpt.engine.measurements.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from moe_ckpt.sim.pace import Pace
from moe_ckpt.types import ENOUGH_WINDOWS, RECENT_ITERS, WARM_UP_ITERS

MOST_BEGUN = ENOUGH_WINDOWS + 2  # windows of a generation: more make no difference


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What ranks know at an iteration: the `length` of recent iterations, and what a `Beginning` says.

    `kept_since`: the start of the newest kept window, in iterations after the generation's.
    """

    length: float
    num_costs: int
    replayed: float | None
    kept_since: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """A generation's begin: what its ranks know then, and the iterations that follow.

    `measured`: the lengths of the iterations that ranks have measured last, oldest first; `coming`: those of the ones
    that follow, as far as they are known, and 1 after that. The first `unmeasured` of them are not measured.
    `num_costs`: the windows, or whole snapshots, whose cost is known. `replayed`: the length of an iteration that a
    stage has replayed; None before the first one. The newest kept window began `age_iters` before, and has `num_slots`:
    None without one.
    """

    measured: tuple[float, ...] = ()
    coming: tuple[float, ...] = ()
    unmeasured: int = 0
    num_costs: int = 0
    replayed: float | None = None
    age_iters: int | None = None
    num_slots: int = 0

    def length(self, offset: int) -> float:
        """Return the length of the iteration that follows `offset` others."""
        return self.coming[offset] if offset < len(self.coming) else 1.0

    def known(self, offset: int, num_begun: int) -> Known | None:
        """Return what ranks know once `offset` iterations are done and `num_begun` windows begun; None: nothing."""
        since = max(self.unmeasured, offset - RECENT_ITERS)
        recent = (*self.measured, *map(self.length, range(since, offset)))[-RECENT_ITERS:]
        if not recent:
            return None
        return Known(
            length=statistics.median(recent),
            num_costs=costs_after(self.num_costs, num_begun),
            replayed=self.replayed,
            kept_since=None if self.age_iters is None else -self.age_iters,
        )

    def is_settled(self, offset: int, num_begun: int) -> bool:
        """Return whether all iterations from an offset on are alike, and what ranks know of them and of snapshots."""
        is_even = not self.coming and set(self.measured) <= {1.0}
        are_alike = is_even or offset >= len(self.coming) + RECENT_ITERS
        return are_alike and costs_after(self.num_costs, num_begun) == ENOUGH_WINDOWS


def costs_after(num_costs: int, num_begun: int) -> int:
    """Return the number of windows with a known cost once a generation has begun so many; more make no difference.

    Of its windows the first one, for which training waits, and the last one do not count.
    """
    return min(ENOUGH_WINDOWS, num_costs + max(0, num_begun - 2))


class Measurements:
    """What ranks that live on have measured since the job began."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._unmeasured = WARM_UP_ITERS
        self._lengths: deque[float] = deque(maxlen=RECENT_ITERS)
        self._num_costs = 0
        self._replayed: deque[float] = deque(maxlen=RECENT_ITERS)

    def trained(self, start: int, reached: int, num_begun: int) -> None:
        """A generation has trained the iterations `start` + 1 to `reached`, and begun so many windows."""
        skipped = min(self._unmeasured, reached - start)
        self._unmeasured -= skipped
        for done in range(max(start + skipped, reached - RECENT_ITERS), reached):
            self._lengths.append(self._pace.between(done, done + 1))
        self._num_costs = costs_after(self._num_costs, num_begun)

    def replayed(self, start: int, reached: int) -> None:
        """A stage has replayed the iterations `start` + 1 to `reached`."""
        if start < reached:
            self._replayed.append(self._pace.between(start, reached) / (reached - start))

    def beginning(self, start: int, kept_since: int | None, num_slots: int) -> Beginning:
        """Return the begin of a generation after iteration `start`; its newest kept window is that one."""
        lengths, coming = tuple(self._lengths), self._pace.after(start)
        if not coming and set(lengths) == {1.0}:
            lengths = (1.0,)  # one is as good as many, and patterns by it are known
        return Beginning(
            measured=lengths,
            coming=coming,
            unmeasured=self._unmeasured,
            num_costs=self._num_costs,
            replayed=statistics.median(self._replayed) if self._replayed else None,
            age_iters=None if kept_since is None else start - kept_since,
            num_slots=num_slots,
        )


SETTLED = Beginning(measured=(1.0,), num_costs=ENOUGH_WINDOWS, replayed=1.0)
