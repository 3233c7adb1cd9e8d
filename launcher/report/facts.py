"""The facts of a report, computed once for all formats. Pure.

Facts are totals by rank and part, recoveries, and series of numbers.
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
    """One number for each iteration, over all ranks.

    A number is of the last commit of the iteration. If no event has the number, the
    loss and the bytes of snapshots and peers are NaN, the other numbers 0.
    """

    iteration: NDArray[np.int64]
    """Committed iterations, ascending."""

    loss: Numbers
    """Mean loss of the iteration's batch."""

    seconds: Numbers
    """Time of the iteration, stall included, in seconds; mean over ranks."""

    stall_mean_s: Numbers
    """Time that checkpointing took from the iteration, in seconds; mean over ranks."""

    stall_max_s: Numbers
    """Time that checkpointing took from the iteration, in seconds, on the worst rank.
    """

    sent_bytes: Numbers
    """Bytes of activations and gradients sent to other stages, all ranks together."""

    snapshot_bytes: Numbers
    """Bytes of snapshots of the iteration, all ranks together."""

    peer_bytes: Numbers
    """Bytes sent to peers of windows that start at the iteration, all ranks and all
    copies together.
    """


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OverTime:
    """Commits and ETTR of a run over time, in seconds since the run's origin."""

    committed_s: Numbers
    """Times of commits, thinned."""

    iteration: NDArray[np.int64]
    """Iteration of each of these commits."""

    num_commits: int
    """Number of commits before thinning."""

    grid_s: Numbers
    """Moments at equal distances, from the start to the end of the run."""

    ettr: Numbers
    """ETTR from the start to each moment, over all ranks, from 0 to 1; NaN if no time
    counts.
    """


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Facts:
    """The facts of one run."""

    run: RunLog
    """The run folder's content."""

    end_us: int
    """Time of the run's last event, in microseconds since the run's origin."""

    totals_us: Mapping[int, Mapping[PagePart, int]]
    """Length of each part, by rank, in microseconds. The parts of a rank sum to
    `end_us`.
    """

    episodes: tuple[Episode, ...]
    """Recoveries, in the order of time."""

    faults: Mapping[str, int]
    """Number of faults, by class."""

    series: Series
    """Numbers of each iteration."""

    over_time: OverTime
    """Commits and ETTR over time."""

    evaluated: tuple[Evaluated, ...]
    """Evaluations, by iteration."""

    popularity: tuple[ExpertPopularity, ...]
    """Popularity of experts of all stages, by iteration."""

    orders: tuple[ExpertsOrdered, ...]
    """Orders in which windows take experts of all stages, by iteration."""

    lost: tuple[TokensLost, ...]
    """Lost tokens of each recovery, in the layers of all stages, in order."""

    deficits: Mapping[str, Sequence[tuple[int, int]]]
    """For each layer, pairs of an iteration and the lost tokens left after that
    iteration.

    The tokens are still to be made up, over all ranks.
    """

    saved: tuple[CheckpointSaved, ...]
    """Checkpoints that were committed, by iteration."""

    failed: tuple[CheckpointFailed, ...]
    """Checkpoints that could not be saved, by iteration."""

    def mean_us(self, *parts: PagePart) -> float:
        """Return the time of these parts together, in microseconds; mean over ranks."""
        return sum(of[part] for of in self.totals_us.values() for part in parts) / max(
            len(self.totals_us), 1
        )

    @property
    def ettr(self) -> float | None:
        """The share of counted time that made progress (ETTR), from 0 to 1.

        None if no time counts.
        """
        counted_us = self.mean_us(
            *(part for part in PagePart if part not in NOT_IN_ETTR)
        )
        return self.mean_us(PagePart.COMPUTE) / counted_us if counted_us > 0 else None


def gather(run: RunLog) -> Facts:
    """Return the facts of a run."""
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
    """Return a rank's parts until the end of the run.

    The run may end after the rank's last event.
    """
    after = PagePart.OTHER if rank.has_finished else PagePart.UNKNOWN
    return {**rank.totals_us, after: rank.totals_us[after] + end_us - rank.end_us}


def _over_time(ranks: Sequence[RankDigest], end_us: int) -> OverTime:
    grid_us = np.linspace(0, end_us, _GRID)
    gained = np.zeros((2, _GRID))
    for rank in ranks:
        time_us, *sums = rank.gained
        gained += np.stack([np.interp(grid_us, time_us, each) for each in sums])
    # one rank is enough: all ranks commit the same iterations
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
        # ranks mostly have the same iterations, and a comparison is cheaper than a
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
        # any rank will do: all ranks have the same loss
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
    """Add a rank's bytes to the totals of the iterations that were committed.

    Args:
        total_bytes: The total of each committed iteration; NaN until a rank has bytes.
        iteration: The committed iterations.
        moved: The iterations, each once, and the bytes of each iteration.
    """
    taken, size_bytes = moved
    there = np.searchsorted(iteration, taken)
    known = there < len(iteration)
    known[known] = iteration[there[known]] == taken[known]
    there = there[known]
    total_bytes[there] = np.nan_to_num(total_bytes[there]) + size_bytes[known]


def _once(run: RunLog, kind: type[T]) -> tuple[T, ...]:
    """Return the events of a kind that all ranks log alike, one for each iteration.

    Of several events of an iteration the newest is kept.
    """
    newest = {event.iteration: event for event in _events(run, kind)}
    return tuple(event for _, event in sorted(newest.items()))


def _lost(run: RunLog) -> tuple[TokensLost, ...]:
    """Return the lost tokens of each recovery, in order, in the layers of all stages.

    Ranks of a stage log the same losses. A rank that was replaced may have logged only
    the last recoveries.
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
    """Return the orders by iteration, each with the layers of all stages.

    Of an iteration that ran again the last order is kept.
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
    """Return the values that stages log, by iteration and layer, both in order.

    Of several values the newest is kept.
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
    """Return the sort key of a layer; layers of multi-token prediction come last."""
    return layer[0].startswith("mtp"), list(map(int, re.findall(r"\d+", layer[0])))


def _events(run: RunLog, kind: type[K]) -> list[K]:
    """Return the events of a kind of all ranks, by time."""
    found = [
        (noted.at_us, noted.event)
        for rank in run.ranks
        for noted in rank.events
        if isinstance(noted.event, kind)
    ]
    return [event for _, event in sorted(found, key=lambda each: each[0])]
