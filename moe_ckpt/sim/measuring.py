"""The measurements of a simulated job's ranks: iterations, costs of windows, replays.

Pure. Lengths are in mean iterations. The measurements of a real job are those of
`moe_ckpt.engine.measurements`. The simulation is simpler. A snapshot costs as much as a
snapshot in a recent iteration would. All ranks have seen all replays. The cost of a
window, or of a whole snapshot, is measured once the next window begins; in a real job,
a long pause ends the measurement sooner.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from moe_ckpt.sim.pace import Pace
from moe_ckpt.types import ENOUGH_WINDOWS, RECENT_ITERS, WARM_UP_ITERS


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSoFar:
    """The measurements of ranks at an iteration."""

    length: float
    """Median length of recent iterations, in mean iterations."""

    num_costs: int
    """Windows, or whole snapshots, whose cost has been measured."""

    replay_length: float | None
    """Length of an iteration that one stage has replayed by itself, in mean iterations.
    None: no stage has replayed by itself.
    """

    kept_since: int | None
    """Start of the newest kept window, in iterations after the start of the generation.
    None: no window is kept.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationStart:
    """The start of a generation: past measurements and coming iterations."""

    recent: tuple[float, ...] = ()
    """Lengths of the iterations that were measured last, oldest first."""

    coming: tuple[float, ...] = ()
    """Lengths of the next iterations as far as they are given; all later lengths are 1.
    """

    warm_up_iters: int = 0
    """Number of the next iterations that are not measured."""

    num_costs: int = 0
    """Windows, or whole snapshots, whose cost has been measured."""

    replay_length: float | None = None
    """Length of an iteration that one stage has replayed by itself. None: no stage has
    replayed by itself.
    """

    kept_age_iters: int | None = None
    """Iterations from the start of the newest kept window to the start of the
    generation. None: no window is kept.
    """

    kept_slots: int = 0
    """Slots of the newest kept window. 0: no window is kept."""

    @property
    def is_kept(self) -> bool:
        """Whether all ranks keep a whole snapshot of the state at the start."""
        return self.kept_age_iters == 0 and self.kept_slots == 1

    def length(self, offset: int) -> float:
        """Return the length of the iteration that follows `offset` others."""
        return self.coming[offset] if offset < len(self.coming) else 1.0

    def measured(self, offset: int, num_begun: int) -> MeasuredSoFar | None:
        """Return the measurements after some iterations, or None if there are none yet.

        Args:
            offset: The iterations since the start of the generation.
            num_begun: The windows that have begun since then.
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
        """Return whether all present and later lengths are those of mean iterations.

        The lengths are those of iterations after the offset and those measured until
        then.
        """
        are_alike = not self.coming and set(self.recent) <= {1.0}
        return are_alike or offset >= len(self.coming) + RECENT_ITERS


def costs_after(num_costs: int, num_begun: int, *, takes_base: bool) -> int:
    """Return the number of measured costs after a generation has begun some windows.

    The number is at most ENOUGH_WINDOWS. The cost of the newest window is not complete.
    A base, the first snapshot of ranks that keep no window, does not count, because
    training waits for all of it.

    Args:
        num_costs: The number of measured costs at the start of the generation.
        num_begun: The windows that the generation has begun.
        takes_base: Whether the first of these windows is a base.
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
        """Return the start of a generation after `done` iterations.

        Args:
            pace: The lengths of iterations.
            done: The iterations before the generation.
            kept_since: The start of the newest kept window. None: no window is kept.
            kept_slots: The slots of the newest kept window.
        """
        recent, coming = tuple(self._recent), pace.after(done)
        if not coming and set(recent) == {1.0}:
            # one length gives the same median as many equal lengths, and the pattern of
            # this shorter key may already be cached
            recent = (1.0,)
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
        """Record that a generation has trained the iterations `done` + 1 to `reached`.

        Args:
            pace: The lengths of iterations.
            done: The iterations before the generation.
            reached: The last iteration of the generation.
            num_begun: The windows that the generation has begun.
            takes_base: Whether the first of these windows is a base.
        """
        skipped = min(self._warm_up_iters, reached - done)
        self._warm_up_iters -= skipped
        first = max(done + skipped, reached - RECENT_ITERS)
        self._recent.extend(map(pace.length, range(first + 1, reached + 1)))
        self._num_costs = costs_after(self._num_costs, num_begun, takes_base=takes_base)

    def replayed(self, pace: Pace, done: int, reached: int) -> None:
        """Record that one stage alone has replayed `done` + 1 to `reached`."""
        if done < reached:
            self._replays.append(pace.between(done, reached) / (reached - done))


SETTLED = GenerationStart(recent=(1.0,), num_costs=ENOUGH_WINDOWS, replay_length=1.0)
