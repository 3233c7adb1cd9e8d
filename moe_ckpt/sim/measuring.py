"""The measurements of a simulated job's ranks: recent iterations, costs of windows,
replays. Pure.

Lengths are in mean iterations. The measurements of a real job are those of
moe_ckpt.engine.measurements. Simpler here: a snapshot costs as much as one in a recent
iteration would, all ranks have seen all replays, and the cost of a window is measured
once the next one begins, as that of a whole snapshot is; a long pause after it tells
that sooner.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from moe_ckpt.sim.pace import Pace
from moe_ckpt.types import ENOUGH_WINDOWS, RECENT_ITERS, WARM_UP_ITERS


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSoFar:
    """The measurements of ranks at an iteration: the `length` of recent ones, and as in
    `GenerationStart`.

    `kept_since`: the start of the newest kept window, in iterations after the
    generation's.
    """

    length: float
    num_costs: int
    replay_length: float | None
    kept_since: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationStart:
    """The start of a generation: measurements of its ranks until then, and the
    iterations that follow.

    `recent`: the lengths of the iterations that were measured last, oldest first;
    `coming`: those of the next ones, as far as they are given, and 1 after that. The
    first `warm_up_iters` of them are not measured. `num_costs`: the windows, or whole
    snapshots, with a measured cost. `replay_length`: that of an iteration that a stage
    has replayed by itself; None before the first one. The newest kept window began
    `kept_age_iters` before, and has `kept_slots`: None without one.
    """

    recent: tuple[float, ...] = ()
    coming: tuple[float, ...] = ()
    warm_up_iters: int = 0
    num_costs: int = 0
    replay_length: float | None = None
    kept_age_iters: int | None = None
    kept_slots: int = 0

    @property
    def is_kept(self) -> bool:
        """Whether all ranks keep a whole snapshot of the state from which the
        generation starts.
        """
        return self.kept_age_iters == 0 and self.kept_slots == 1

    def length(self, offset: int) -> float:
        """Return the length of the iteration that follows `offset` others."""
        return self.coming[offset] if offset < len(self.coming) else 1.0

    def measured(self, offset: int, num_begun: int) -> MeasuredSoFar | None:
        """Return the measurements after `offset` iterations and the begin of
        `num_begun` windows; None: none yet.
        """
        since = max(self.warm_up_iters, offset - RECENT_ITERS)
        recent = (*self.recent, *map(self.length, range(since, offset)))[-RECENT_ITERS:]
        if not recent:
            return None
        return MeasuredSoFar(
            length=statistics.median(recent),
            num_costs=costs_after(
                self.num_costs, num_begun, takes_base=self.kept_age_iters is None
            ),
            replay_length=self.replay_length,
            kept_since=None if self.kept_age_iters is None else -self.kept_age_iters,
        )

    def is_even(self, offset: int) -> bool:
        """Return whether the iterations after an offset, and those measured until then,
        are all of mean length.
        """
        are_alike = not self.coming and set(self.recent) <= {1.0}
        return are_alike or offset >= len(self.coming) + RECENT_ITERS


def costs_after(num_costs: int, num_begun: int, *, takes_base: bool) -> int:
    """Return the number of measured costs once a generation has begun so many windows;
    no more than are enough.

    That of the newest one is not complete. Nor does a base count, the first snapshot of
    ranks that keep none: training waits for all of it.
    """
    return min(ENOUGH_WINDOWS, num_costs + max(0, num_begun - 1 - takes_base))


class MeasurementHistory:
    """The measurements of ranks that live on, since the job began."""

    def __init__(self) -> None:
        self._warm_up_iters = WARM_UP_ITERS
        self._recent: deque[float] = deque(maxlen=RECENT_ITERS)
        self._num_costs = 0
        self._replays: deque[float] = deque(maxlen=RECENT_ITERS)

    def start(
        self, pace: Pace, done: int, kept_since: int | None, kept_slots: int
    ) -> GenerationStart:
        """Return the start of a generation after `done` iterations; its newest kept
        window is that one.
        """
        recent, coming = tuple(self._recent), pace.after(done)
        if not coming and set(recent) == {1.0}:
            recent = (1.0,)  # one is as good as many, and a pattern may be there for it
        return GenerationStart(
            recent=recent,
            coming=coming,
            warm_up_iters=self._warm_up_iters,
            num_costs=self._num_costs,
            replay_length=statistics.median(self._replays) if self._replays else None,
            kept_age_iters=None if kept_since is None else done - kept_since,
            kept_slots=kept_slots,
        )

    def trained(
        self, pace: Pace, done: int, reached: int, num_begun: int, *, takes_base: bool
    ) -> None:
        """A generation has trained the iterations `done` + 1 to `reached`, and begun so
        many windows.
        """
        skipped = min(self._warm_up_iters, reached - done)
        self._warm_up_iters -= skipped
        first = max(done + skipped, reached - RECENT_ITERS)
        self._recent.extend(map(pace.length, range(first + 1, reached + 1)))
        self._num_costs = costs_after(self._num_costs, num_begun, takes_base=takes_base)

    def replayed(self, pace: Pace, done: int, reached: int) -> None:
        """A stage has replayed the iterations `done` + 1 to `reached` by itself."""
        if done < reached:
            self._replays.append(pace.between(done, reached) / (reached - done))


SETTLED = GenerationStart(recent=(1.0,), num_costs=ENOUGH_WINDOWS, replay_length=1.0)
