"""The facts of a report, computed once, for all formats: totals by rank and part,
recoveries, series. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from launcher.fault_classes import count_faults
from launcher.report.digest import Numbers, RankDigest
from launcher.report.episodes import Episode, find_episodes
from launcher.report.parts import NOT_IN_ETTR, PagePart
from launcher.report.read import RunLog
from moe_ckpt.events import (
    CapacityBoosted,
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    ExpertPopularity,
    ExpertsOrdered,
    TokensLost,
)

_GRID = 400
T = TypeVar("T", Evaluated, CheckpointSaved, CheckpointFailed)
E = TypeVar("E", CapacityBoosted, ExpertPopularity, ExpertsOrdered)
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Series:
    """One number for each iteration, over all ranks: of the last time that it was
    committed. NaN: no event has it.
    """

    iteration: NDArray[np.int64]
    loss: Numbers
    seconds: Numbers
    stall_mean_s: Numbers
    stall_max_s: Numbers
    sent_bytes: Numbers
    snapshot_bytes: Numbers
    peer_bytes: Numbers


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OverTime:
    """Against seconds since the run's origin: which iteration was just committed, and
    the ETTR so far.
    """

    committed_s: Numbers
    iteration: NDArray[np.int64]
    num_commits: int
    grid_s: Numbers
    ettr: Numbers


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Facts:
    """A run. `totals_us` has each rank's parts, which sum to `end_us`.

    `faults`: their number by class.

    `deficits`: by layer, after which iterations how many lost tokens were left to be
    made up, over all ranks.
    """

    run: RunLog
    end_us: int
    totals_us: Mapping[int, Mapping[PagePart, int]]
    episodes: tuple[Episode, ...]
    faults: Mapping[str, int]
    series: Series
    over_time: OverTime
    evaluated: tuple[Evaluated, ...]
    popularity: tuple[ExpertPopularity, ...]
    orders: tuple[ExpertsOrdered, ...]
    lost: tuple[TokensLost, ...]
    deficits: Mapping[str, Sequence[tuple[int, int]]]
    saved: tuple[CheckpointSaved, ...]
    failed: tuple[CheckpointFailed, ...]

    def mean_us(self, *parts: PagePart) -> float:
        """Return how long these parts took on average over ranks."""
        return sum(of[part] for of in self.totals_us.values() for part in parts) / max(
            len(self.totals_us), 1
        )

    @property
    def ettr(self) -> float | None:
        """The share of the time that made progress; None where there was no time that
        could have.
        """
        counted_us = self.mean_us(
            *(part for part in PagePart if part not in NOT_IN_ETTR)
        )
        return self.mean_us(PagePart.COMPUTE) / counted_us if counted_us > 0 else None


def gather(run: RunLog) -> Facts:
    """Return what there is to say of a run."""
    end_us = max((rank.end_us for rank in run.ranks), default=0)
    return Facts(
        run=run,
        end_us=end_us,
        totals_us={rank.rank: _until(rank, end_us) for rank in run.ranks},
        episodes=find_episodes(run),
        faults=count_faults(
            [noted.event for noted in rank.events] for rank in run.ranks
        ),
        series=_series(run.ranks),
        over_time=_over_time(run.ranks, end_us),
        evaluated=_once(run, Evaluated),
        popularity=tuple(
            ExpertPopularity(
                iteration=iteration, layers=list(of), tokens=list(of.values())
            )
            for iteration, of in _by_iteration(
                run, ExpertPopularity, lambda event: event.tokens
            )
        ),
        orders=_orders(run),
        lost=_lost(run),
        deficits=_deficits(run),
        saved=_once(run, CheckpointSaved),
        failed=_once(run, CheckpointFailed),
    )


def _until(rank: RankDigest, end_us: int) -> dict[PagePart, int]:
    """Return a rank's parts until the end of the run, some of which may come after the
    rank's last event.
    """
    after = PagePart.OTHER if rank.has_finished else PagePart.UNKNOWN
    return {**rank.totals_us, after: rank.totals_us[after] + end_us - rank.end_us}


def _over_time(ranks: Sequence[RankDigest], end_us: int) -> OverTime:
    grid_us = np.linspace(0, end_us, _GRID)
    gained = np.zeros((2, _GRID))
    for rank in ranks:
        time_us, *sums = rank.gained
        gained += np.stack([np.interp(grid_us, time_us, each) for each in sums])
    # of one rank: all commit the same iterations
    at_us, iteration = ranks[0].committed if ranks else np.empty((2, 0), np.int64)
    return OverTime(
        committed_s=at_us / 1e6,
        iteration=iteration,
        num_commits=ranks[0].num_commits if ranks else 0,
        grid_s=grid_us / 1e6,
        ettr=gained[0] / np.where(gained[1] > 0, gained[1], np.nan),
    )


def _series(ranks: Sequence[RankDigest]) -> Series:
    iteration = np.empty(0, np.int64)
    for rank in ranks:
        own = rank.iterations.iteration
        # ranks mostly have the same iterations, and comparing them is cheaper than a
        # union, which sorts
        iteration = (
            iteration if np.array_equal(own, iteration) else np.union1d(iteration, own)
        )
    size = len(iteration)
    loss, snapshot_bytes, peer_bytes = (np.full(size, np.nan) for _ in range(3))
    stall_max_s = np.zeros(size)
    seconds, stall_s, sent_bytes, count = (np.zeros(size) for _ in range(4))
    for rank in ranks:
        own = rank.iterations
        there = np.searchsorted(iteration, own.iteration)
        # of any rank: all have the same loss
        loss[there] = np.where(np.isnan(loss[there]), own.loss, loss[there])
        stall_max_s[there] = np.maximum(stall_max_s[there], own.stall_s)
        for total, values in (
            (seconds, own.seconds),
            (stall_s, own.stall_s),
            (sent_bytes, own.sent_bytes),
            (count, 1),
        ):
            total[there] += values
        _add_bytes(snapshot_bytes, iteration, rank.snapshots)
        _add_bytes(peer_bytes, iteration, rank.replicated)
    return Series(
        iteration=iteration,
        loss=loss,
        seconds=seconds / np.maximum(count, 1),
        stall_mean_s=stall_s / np.maximum(count, 1),
        stall_max_s=stall_max_s,
        sent_bytes=sent_bytes,
        snapshot_bytes=snapshot_bytes,
        peer_bytes=peer_bytes,
    )


def _add_bytes(
    total_bytes: Numbers, iteration: NDArray[np.int64], moved: Numbers
) -> None:
    """Add a rank's columns (iteration, bytes) to the iterations that were committed;
    each iteration comes once.
    """
    taken, size_bytes = moved
    there = np.searchsorted(iteration, taken)
    known = there < len(iteration)
    known[known] = iteration[there[known]] == taken[known]
    there = there[known]
    total_bytes[there] = np.nan_to_num(total_bytes[there]) + size_bytes[known]


def _once(run: RunLog, kind: type[T]) -> tuple[T, ...]:
    """Return the events of a kind that all ranks write alike: one for each iteration,
    the newest, of any rank.
    """
    newest = {event.iteration: event for event in _events(run, kind)}
    return tuple(event for _, event in sorted(newest.items()))


def _lost(run: RunLog) -> tuple[TokensLost, ...]:
    """Return what each recovery has lost, in the order in which they came, in the
    layers of all stages.

    Ranks of a stage tell the same; one that was replaced since may tell of the last
    recoveries only.
    """
    of_ranks = [
        [noted.event for noted in rank.events if isinstance(noted.event, TokensLost)]
        for rank in run.ranks
    ]
    merged = []
    for back in range(max(map(len, of_ranks), default=0), 0, -1):
        events = [of_rank[-back] for of_rank in of_ranks if len(of_rank) >= back]
        by_layer = {
            layer: (lost, experts)
            for event in events
            for layer, lost, experts in zip(
                event.layers, event.lost_by_layer, event.lost_by_expert, strict=False
            )
        }
        layers = sorted(by_layer)
        merged.append(
            replace(
                events[0],
                layers=layers,
                lost_by_layer=[by_layer[layer][0] for layer in layers],
                lost_by_expert=[by_layer[layer][1] for layer in layers],
            )
        )
    return tuple(merged)


def _deficits(run: RunLog) -> dict[str, list[tuple[int, int]]]:
    by_iteration = _by_iteration(
        run,
        CapacityBoosted,
        lambda event: [sum(of_layer) for of_layer in event.deficit],
    )
    layers = dict(
        sorted(
            {layer: () for _, of in by_iteration for layer in of}.items(),
            key=_front_to_back,
        )
    )
    return {
        layer: [(iteration, of[layer]) for iteration, of in by_iteration if layer in of]
        for layer in layers
    }


def _orders(run: RunLog) -> tuple[ExpertsOrdered, ...]:
    """Return the orders by iteration, each with the layers of all stages; of an
    iteration that came again the last.
    """
    slots = {event.iteration: event.num_slots for event in _events(run, ExpertsOrdered)}
    return tuple(
        ExpertsOrdered(
            iteration=iteration,
            num_slots=slots[iteration],
            layers=list(of),
            slots=list(of.values()),
        )
        for iteration, of in _by_iteration(
            run, ExpertsOrdered, lambda event: event.slots
        )
    )


def _by_iteration(
    run: RunLog, kind: type[E], values: Callable[[E], list[V]]
) -> list[tuple[int, dict[str, V]]]:
    """Return what stages tell of their layers, by iteration and layer, both in order,
    the last that was told.
    """
    found: dict[int, dict[str, V]] = {}
    for event in _events(run, kind):
        found.setdefault(event.iteration, {}).update(
            zip(event.layers, values(event), strict=False)
        )
    return [
        (iteration, dict(sorted(of.items(), key=_front_to_back)))
        for iteration, of in sorted(found.items())
    ]


def _front_to_back(layer: tuple[str, object]) -> tuple[bool, list[int]]:
    """Return where a layer stands: those of multi-token prediction come last."""
    return layer[0].startswith("mtp"), list(map(int, re.findall(r"\d+", layer[0])))


def _events(run: RunLog, kind: type[K]) -> list[K]:
    """Return the events of a kind, of all ranks, by time."""
    found = [
        (noted.at_us, noted.event)
        for rank in run.ranks
        for noted in rank.events
        if isinstance(noted.event, kind)
    ]
    return [event for _, event in sorted(found, key=lambda each: each[0])]
