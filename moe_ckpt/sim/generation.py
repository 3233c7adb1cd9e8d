"""One stretch of training, from a state to the next fault.

The module computes the ends of iterations, and the windows that are kept by then.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from moe_ckpt.sim.costs import Costs
from moe_ckpt.sim.pace import EVEN, Pace
from moe_ckpt.sim.partial import Epoch
from moe_ckpt.sim.saving import Recovery, Saving
from moe_ckpt.sim.snapshot_pattern import SnapshotPattern, Span

# the largest ratio of the time of a real iteration to that of a simulated iteration
_NOISE = 1.25
# choices of a real job and of a simulated job differ by fewer iterations
_NEAR_ITERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The progress of a generation at a time."""

    iterations: int
    """Iterations of the generation that are done."""

    into_s: float
    """Seconds of the next iteration that have passed."""

    ready: bool
    """Whether the gradients of the next iteration are complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A window that is complete on all ranks."""

    start: int
    """Iteration of the first state of the window."""

    end: int
    """Iteration of the last state of the window."""

    is_whole: bool = True
    """Whether the window is a whole state, not a partial checkpoint."""

    copied_at_s: float = field(default=-math.inf, compare=False)
    """Time from which peers hold copies of the window, in seconds of the run."""

    epoch: Epoch | None = field(default=None, compare=False)
    """Epoch of a partial checkpoint. None: another policy."""

    @property
    def num_slots(self) -> int:
        return self.end - self.start + 1


@dataclass(frozen=True, eq=False)
class Generation:
    """Training from a state on, until the next fault."""

    costs: Costs
    """The costs of the job."""

    saving: Saving
    """The policy's saves and their costs."""

    pattern: SnapshotPattern
    """The snapshots of the generation."""

    start: int
    """The iteration of the state from which the generation trains."""

    since_s: float
    """Time at which training begins, in seconds of the run."""

    carried: tuple[Kept, ...]
    """Windows of earlier generations that ranks still keep, oldest first."""

    epoch: Epoch | None = None
    """Epoch of partial checkpoints. None: another policy."""

    pace: Pace = EVEN
    """The lengths of iterations."""

    def stalls_s(self, iterations: int) -> float:
        """Return the seconds that saving adds to the first `iterations` iterations."""
        snapshots_s, durable = self.pattern.stalls_s(iterations), self.saving.durable
        if durable is None:
            return snapshots_s
        every = durable.every_iters
        return (
            snapshots_s
            + ((self.start + iterations) // every - self.start // every)
            * durable.stall_s
        )

    def elapsed_s(self, iterations: int) -> float:
        """Return the seconds of the first `iterations` iterations."""
        trained = self.pace.between(self.start, self.start + iterations)
        return trained * self.costs.iteration_s + self.stalls_s(iterations)

    def first_commit_after(self, at_s: float) -> int:
        """Return the fewest iterations, at least one, that end at or after a time."""
        # a search instead of a division: stalls give iterations different lengths
        end_s = lambda iterations: self.since_s + self.elapsed_s(iterations)  # noqa: E731
        enough = 1
        while end_s(enough) < at_s:
            enough *= 2
        return 1 + bisect.bisect_left(range(1, enough), at_s, key=end_s)

    def moment(self, at_s: float) -> Moment:
        """Return the progress of training at a time of this generation."""
        done = self.first_commit_after(at_s)
        if self.since_s + self.elapsed_s(done) > at_s:
            done -= 1
        into_s = max(0.0, at_s - self.since_s - self.elapsed_s(done))
        ready = into_s >= self.iteration_s(done + 1) - self.costs.update_s
        return Moment(iterations=done, into_s=into_s, ready=ready)

    def iteration_s(self, number: int) -> float:
        """Return the seconds of the generation's iteration `number`, from 1."""
        return self.length(number) * self.costs.iteration_s + self.added_s(number)

    def nearest_wait(self, seconds: float, number: int) -> int:
        """Return the nearest iteration that lasts `seconds` by waiting for a copy.

        A fault that strikes much later in an iteration than the iteration lasts came in
        such a wait. In the simulation, the wait may be some iterations away. Without a
        wait that long, and for `seconds` that are not much longer than the iteration,
        the result is `number` itself.
        """
        if seconds <= _NOISE * self.iteration_s(number):
            return number
        around = self.pattern.snapshots(
            number - 1 - _NEAR_ITERS, number - 1 + _NEAR_ITERS
        )
        waits = [snapshot.offset + 1 for snapshot in around]
        enough = (each for each in waits if self.iteration_s(each) >= seconds)
        return min(enough, key=lambda each: abs(each - number), default=number)

    def length(self, number: int) -> float:
        """Return the length of iteration `number` without stalls, in mean lengths."""
        return self.pace.length(self.start + number)

    def added_s(self, number: int) -> float:
        """Return the seconds that saving adds to iteration `number` of the generation.

        Iterations of the generation count from 1.
        """
        return max(0.0, self.stalls_s(number) - self.stalls_s(number - 1))

    def kept(self, moment: Moment) -> tuple[Kept, ...]:
        """Return the windows that all ranks have at a moment, oldest first.

        While ranks have not agreed that the newest window is complete everywhere, ranks
        keep one more than `keep_windows`.
        """
        newest = [
            self._at(span, moment)
            for span in islice(self._complete(moment), 1 + self.saving.keep_windows)
        ]
        # with servers, the base of a generation is the carried state
        taken = {each.start for each in newest}
        windows = (
            *(each for each in self.carried if each.start not in taken),
            *reversed(newest),
        )
        has_agreed = not newest or self._has_agreed(newest[0], moment)
        return windows[-self.saving.keep_windows - (not has_agreed) :]

    def _has_agreed(self, newest: Kept, moment: Moment) -> bool:
        """Return whether ranks have agreed that all ranks and peers have a window.

        The agreement takes place at the end of the last pass.
        """
        taken = newest.end - self.start
        if next(self.pattern.snapshots(taken + 1, moment.iterations), None) is not None:
            return True  # ranks agree before the next window begins
        passed_s = (
            self.elapsed_s(moment.iterations + moment.ready) - self.costs.update_s
        )
        return newest.copied_at_s <= self.since_s + passed_s

    def is_replicated(self, moment: Moment) -> bool:
        """Return whether peers hold all copies again.

        The copies are those of a carried window, or of a new window.
        """
        if (
            self.carried
            and self._now_s(moment)
            >= self.saving.kept_bytes / self.saving.kept_bytes_per_s
        ):
            return True
        return next(iter(self._complete(moment)), None) is not None

    def on_disk(self, moment: Moment) -> Kept | None:
        """Return the newest state of this generation on disk, or None.

        The state is a whole checkpoint, or a window.
        """
        candidates = [self._durable(moment)]
        if self.pattern.reaches_disk:
            now_s, on_disk = (
                self._now_s(moment),
                (span for span in self._complete(moment) if span.first.to_disk),
            )
            written = (
                span
                for span in on_disk
                if self.elapsed_s(span.last.offset) + self.saving.disk_s <= now_s
            )
            candidates.append(next((self._at(span, moment) for span in written), None))
        return max(
            (kept for kept in candidates if kept),
            key=lambda kept: kept.end,
            default=None,
        )

    def _at(self, span: Span, moment: Moment) -> Kept:
        first, last = self.start + span.first.offset, self.start + span.last.offset
        copied_at_s = -math.inf
        if not self._is_awaited(span, moment):
            # peers receive a copy from host memory
            saving, size_bytes = self.saving, span.last.size_bytes
            copies_s = (
                size_bytes / saving.host_bytes_per_s
                + size_bytes / saving.peer_bytes_per_s
            )
            copied_at_s = self.since_s + max(
                self._complete_s(span), self.elapsed_s(span.last.offset) + copies_s
            )
        return Kept(
            start=first,
            end=last,
            is_whole=self.epoch is None,
            copied_at_s=copied_at_s,
            epoch=self.epoch,
        )

    def _now_s(self, moment: Moment) -> float:
        return self.elapsed_s(moment.iterations) + moment.into_s

    def _durable(self, moment: Moment) -> Kept | None:
        durable = self.saving.durable
        if durable is None:
            return None
        now_s = self._now_s(moment)
        newest = (
            (self.start + moment.iterations)
            // durable.every_iters
            * durable.every_iters
        )
        # a save starts with its stall, which is part of the previous iteration
        while newest > self.start:
            begun_s = self.elapsed_s(newest - self.start) - durable.stall_s
            if begun_s + durable.done_s <= now_s:
                return Kept(start=newest, end=newest, epoch=self.epoch)
            newest -= durable.every_iters
        return None

    def _complete(self, moment: Moment) -> Iterator[Span]:
        """Yield the windows that are complete at all destinations, newest first.

        Under every policy, training waits for the first window before it changes the
        state. Training also waits if stages recover alone and windows follow each other
        without a pause.
        """
        now_s = self._now_s(moment)
        for span in self.pattern.spans_back(moment.iterations):
            if self._is_awaited(span, moment) or self._complete_s(span) <= now_s:
                yield span

    def _is_awaited(self, span: Span, moment: Moment) -> bool:
        """Return whether training waited until all ranks and peers had a window."""
        last = span.last
        # the base: without it, no state could be recovered
        is_first = last.offset == 0 and not self.carried
        agreed = moment.iterations if moment.ready else moment.iterations - 1
        is_agreed = (
            self.saving.recovery is Recovery.LOCAL
            and not last.pause_iters
            and last.offset <= agreed
        )
        return is_first or is_agreed

    def _complete_s(self, span: Span) -> float:
        """Return the seconds until the last snapshot of a window has arrived.

        Seconds count from the start of the generation.
        """
        copied_s = span.last.size_bytes / self.saving.kept_bytes_per_s
        return self.elapsed_s(span.last.offset) + copied_s + self.saving.served_s
