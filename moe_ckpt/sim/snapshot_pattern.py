"""A policy's snapshots from the start of a generation on: some at first, then a
repeating pattern.

A policy is asked, iteration by iteration, until it repeats itself; from there on any
number of iterations is counted at once. Offsets are iterations since the generation
started: the snapshot at offset 3 is of the state after 3 of them, and is copied while
the fourth one runs.
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
    """The destinations of a partial snapshot's experts, in the order of
    `ChosenExperts.masks`.
    """

    MEMORY = 0
    PEERS = 1
    DISK = 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChosenExperts:
    """The experts that a partial snapshot takes; `masks` is bool [where, layers,
    experts].
    """

    choice: ExpertChoice
    masks: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSnapshot:
    """A snapshot: slot `slot` of a window of `num_slots` that starts at offset `offset`
    - `slot`.

    After the window there are `pause_iters` iterations without a snapshot. `size_bytes`
    are those of the rank with the most; the iteration in which it is copied takes
    `stall_s` longer.
    """

    offset: int
    size_bytes: int
    stall_s: float
    to_disk: bool
    slot: int = 0
    num_slots: int = 1
    choice: WindowChoice | IntervalChoice | None = None
    experts: ChosenExperts | None = None
    pause_iters: int = 0


class Span(NamedTuple):
    """A window by its first and its last snapshot; the first one tells whether it goes
    to disk.
    """

    first: PlannedSnapshot
    last: PlannedSnapshot


class SnapshotPattern:
    """The snapshots of a generation: `lead`, then `repeat` every `period` iterations.
    Offsets ascend.
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
        """Return the seconds that snapshots add to the first iterations of the
        generation.
        """
        # to the left: the snapshot at this offset is copied in the next iteration
        total_s = self._sums_s[0][bisect.bisect_left(self._offsets[0], iterations)]
        if not self.repeat or iterations <= self.repeat[0].offset:
            return total_s
        rounds, rest = divmod(iterations - self.repeat[0].offset, self.period)
        count = bisect.bisect_left(self._offsets[1], self.repeat[0].offset + rest)
        return total_s + rounds * self._sums_s[1][-1] + self._sums_s[1][count]

    def snapshots(self, first: int, last: int) -> Iterator[PlannedSnapshot]:
        """Yield the snapshots at offsets `first` to `last`, both inclusive, in order."""
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
        """Yield the windows whose last snapshot is at an offset of at most `last`, the
        newest first.
        """
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
        """Return the number of windows that begin until so many iterations are done."""
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
    begin: GenerationStart,
    measure: Callable[[MeasuredSoFar | None], Measured],
    describe: Callable[[SlotPlan, float], tuple[int, float]],
    *,
    disk_every: bool,
    is_fixed: bool,
) -> SnapshotPattern:
    """Query a fresh policy, in a generation that starts so, until it repeats itself.

    `measure` gives the policy's measurements; `describe` the bytes of a request, and
    its stall in an iteration of such a length. A policy repeats itself once both are
    always alike: from the first window that it chose after the start to the next one;
    with `disk_every`, from one that goes to disk to the next such one. A policy that
    `is_fixed` chooses nothing. A state of which all ranks keep a whole snapshot is not
    taken again, but for disks.
    """
    snapshots: list[PlannedSnapshot] = []
    begins: list[int] = []  # positions in snapshots
    offset = num_begun = 0
    # a policy is pure: from the same point on, with the same measurements, it repeats
    # its answers
    while len(begins) < 2:
        plan = policy.plan(offset, lambda: measure(begin.measured(offset, num_begun)))  # noqa: B023
        if plan.sparse and (offset > 0 or plan.to_disk or not begin.is_kept):
            choice, so_far = (
                plan.window or plan.interval,
                begin.measured(offset, num_begun),
            )
            is_chosen = (
                offset > 0
                and choice is not None
                and so_far
                and so_far.num_costs == ENOUGH_WINDOWS
            )
            repeats = begins or (begin.is_even(offset) and (is_fixed or is_chosen))
            if plan.sparse.slot == 0 and repeats and (plan.to_disk or not disk_every):
                begins.append(len(snapshots))
            num_begun += plan.sparse.slot == 0
            size_bytes, stall_s = describe(plan.sparse, begin.length(offset))
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
    first, second = begins
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
