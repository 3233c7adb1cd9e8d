"""A policy's snapshots from the start of a generation: some at first, then a pattern.

A policy is asked, iteration by iteration, until it repeats itself. From there on any
number of iterations is counted at once. Offsets are iterations since the generation
started: the snapshot at offset 3 is of the state after 3 iterations, and is copied
while the fourth iteration runs.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moe_ckpt.ports import Policy
from moe_ckpt.sim.measuring import GenerationStart, MeasuredSoFar
from moe_ckpt.types import (
    ENOUGH_WINDOWS,
    ExpertChoice,
    IntervalChoice,
    Measured,
    SlotPlan,
    WindowChoice,
)


class Where(IntEnum):
    """The destinations of a partial snapshot's experts.

    The members are positions in `ChosenExperts.masks`.
    """

    MEMORY = 0
    PEERS = 1
    DISK = 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChosenExperts:
    """The experts that a partial snapshot takes."""

    choice: ExpertChoice
    """The choice of the policy."""

    masks: npt.NDArray[np.bool_]
    """Which experts go to each destination, bool [where, layers, experts]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSnapshot:
    """A snapshot at an offset, which is a slot of a window.

    The window starts at offset `offset` - `slot`.
    """

    offset: int
    """Offset of the state that the snapshot takes."""

    size_bytes: int
    """Bytes of the rank with the most bytes."""

    stall_s: float
    """Seconds by which the iteration in which the snapshot is copied takes longer."""

    to_disk: bool
    """Whether the snapshot goes to disk."""

    slot: int = 0
    """Number of the slot, from 0."""

    num_slots: int = 1
    """Slots of the window."""

    choice: WindowChoice | IntervalChoice | None = None
    """Choice of the window or of the interval. None: nothing was chosen here."""

    experts: ChosenExperts | None = None
    """Experts of a partial snapshot, set by `sim.partial`. None: another kind of
    snapshot.
    """

    pause_iters: int = 0
    """Iterations without a snapshot after the window."""


class Span(NamedTuple):
    """A window, given by its first and last snapshots."""

    first: PlannedSnapshot
    """First snapshot of the window; `first.to_disk` gives whether the window goes to
    disk.
    """

    last: PlannedSnapshot
    """Last snapshot of the window."""


class SnapshotPattern:
    """The snapshots of a generation.

    Args:
        lead: The snapshots at the start. Offsets ascend.
        repeat: The snapshots that repeat every `period` iterations. Offsets ascend.
        period: The iterations after which `repeat` comes again.
    """

    def __init__(
        self,
        lead: tuple[PlannedSnapshot, ...],
        repeat: tuple[PlannedSnapshot, ...],
        period: int,
    ) -> None:
        assert period >= 1 or not repeat, (period, repeat)
        self.lead, self.repeat, self.period = lead, repeat, period
        self._offsets = [
            [snapshot.offset for snapshot in snapshots] for snapshots in (lead, repeat)
        ]
        self._begins = [
            [each.offset for each in snapshots if each.slot == 0]
            for snapshots in (lead, repeat)
        ]
        self._sums_s = [
            [0.0, *accumulate(snapshot.stall_s for snapshot in snapshots)]
            for snapshots in (lead, repeat)
        ]
        self._spans = [_spans(lead), _spans(repeat)]

    def stalls_s(self, iterations: int) -> float:
        """Return the seconds that snapshots add to the first iterations."""
        # bisect_left: the snapshot at this offset is copied in the next iteration
        total_s = self._sums_s[0][bisect.bisect_left(self._offsets[0], iterations)]
        if not self.repeat or iterations <= self.repeat[0].offset:
            return total_s
        rounds, rest = divmod(iterations - self.repeat[0].offset, self.period)
        count = bisect.bisect_left(self._offsets[1], self.repeat[0].offset + rest)
        return total_s + rounds * self._sums_s[1][-1] + self._sums_s[1][count]

    def snapshots(self, first: int, last: int) -> Iterator[PlannedSnapshot]:
        """Yield the snapshots at offsets `first` to `last`, inclusive, in order."""
        yield from (
            snapshot for snapshot in self.lead if first <= snapshot.offset <= last
        )
        if not self.repeat:
            return
        shift = max(0, (first - self.repeat[0].offset) // self.period) * self.period
        while shift + self.repeat[0].offset <= last:
            for snapshot in self.repeat:
                if first <= snapshot.offset + shift <= last:
                    yield replace(snapshot, offset=snapshot.offset + shift)
            shift += self.period

    def spans_back(self, last: int) -> Iterator[Span]:
        """Yield the windows that end at an offset of at most `last`, newest first."""
        if self.repeat:
            shift = max(0, (last - self.repeat[0].offset) // self.period) * self.period
            while shift >= 0:
                for span in reversed(self._spans[1]):
                    if span.last.offset + shift <= last:
                        yield Span(
                            *(
                                replace(snapshot, offset=snapshot.offset + shift)
                                for snapshot in span
                            )
                        )
                shift -= self.period
        yield from (
            span for span in reversed(self._spans[0]) if span.last.offset <= last
        )

    def num_begun(self, iterations: int) -> int:
        """Return the number of windows that begin until some iterations are done."""
        num = bisect.bisect_right(self._begins[0], iterations)
        if not self.repeat or iterations < self.repeat[0].offset:
            return num
        rounds, rest = divmod(iterations - self.repeat[0].offset, self.period)
        return (
            num
            + rounds * len(self._begins[1])
            + bisect.bisect_right(self._begins[1], self.repeat[0].offset + rest)
        )

    @property
    def interval_iters(self) -> float:
        """Iterations from one window or whole snapshot to the next; 0 without any."""
        begins = sum(snapshot.slot == 0 for snapshot in self.repeat)
        return self.period / begins if begins else 0.0

    @property
    def reaches_disk(self) -> bool:
        return any(snapshot.to_disk for snapshot in (*self.lead, *self.repeat))


def probe_policy(
    policy: Policy,
    start: GenerationStart,
    measure: Callable[[MeasuredSoFar | None], Measured],
    describe: Callable[[SlotPlan, float], tuple[int, float]],
    *,
    disk_every: bool,
    is_fixed: bool,
) -> SnapshotPattern:
    """Query a fresh policy until it repeats itself.

    A policy can repeat itself only once measurements and stalls no longer change. The
    repeating part reaches from the first window that the policy chose after the start
    to the next one. With `disk_every`, the repeating part reaches from a window that
    goes to disk to the next such window. A state of which all ranks keep a whole
    snapshot is taken again only for disks.

    Args:
        policy: The policy.
        start: The start of the generation.
        measure: Returns the measurements of the policy.
        describe: Returns the bytes of a snapshot, and its stall in seconds in an
            iteration of a given length (in mean iterations).
        disk_every: Whether some snapshots go to disk.
        is_fixed: Whether the policy chooses nothing.
    """
    snapshots: list[PlannedSnapshot] = []
    cycle_starts: list[int] = []  # positions in snapshots
    offset = num_begun = 0
    # a policy is pure: from the same point on, with the same measurements, it gives the
    # same answers
    while len(cycle_starts) < 2:
        plan = policy.plan(offset, lambda: measure(start.measured(offset, num_begun)))  # noqa: B023
        if plan.sparse and (offset > 0 or plan.to_disk or not start.is_kept):
            choice, so_far = (
                plan.window or plan.interval,
                start.measured(offset, num_begun),
            )
            is_chosen = (
                offset > 0
                and choice is not None
                and so_far
                and so_far.num_costs == ENOUGH_WINDOWS
            )
            may_start = start.is_even(offset) and (is_fixed or is_chosen)
            repeats = cycle_starts or may_start
            if plan.sparse.slot == 0 and repeats and (plan.to_disk or not disk_every):
                cycle_starts.append(len(snapshots))
            num_begun += plan.sparse.slot == 0
            size_bytes, stall_s = describe(plan.sparse, start.length(offset))
            snapshots.append(
                PlannedSnapshot(
                    offset=offset,
                    slot=plan.sparse.slot,
                    num_slots=plan.sparse.num_slots,
                    size_bytes=size_bytes,
                    stall_s=stall_s,
                    to_disk=plan.to_disk,
                    choice=choice,
                    pause_iters=plan.sparse.pause_iters,
                )
            )
        offset += 1
    first, second = cycle_starts
    return SnapshotPattern(
        tuple(snapshots[:first]),
        tuple(snapshots[first:second]),
        snapshots[second].offset - snapshots[first].offset,
    )


def _spans(snapshots: tuple[PlannedSnapshot, ...]) -> list[Span]:
    at = {snapshot.offset: snapshot for snapshot in snapshots}
    pairs = [
        (snapshot, at.get(snapshot.offset + snapshot.num_slots - 1))
        for snapshot in snapshots
        if snapshot.slot == 0
    ]
    return [Span(first, last) for first, last in pairs if last]


NOTHING = SnapshotPattern((), (), 0)
