"""What a report says of a run, computed once, for all formats: totals by rank and part, recoveries, series. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from launcher.report.digest import Numbers, RankDigest
from launcher.report.episodes import Episode, find_episodes
from launcher.report.parts import NOT_IN_ETTR, Part
from launcher.report.rank_log import ExpertPopularity
from launcher.report.read import RunLog
from moe_ckpt.events import CheckpointFailed, CheckpointSaved, Evaluated, TokensLost

_GRID = 400
T = TypeVar("T", Evaluated, CheckpointSaved, CheckpointFailed)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Series:
    """One number for each iteration, over all ranks: of the last time that it was committed. NaN: nobody says."""

    iteration: NDArray[np.int64]
    loss: Numbers
    seconds: Numbers
    stall_mean_s: Numbers
    stall_max_s: Numbers
    sent_bytes: Numbers
    snapshot_bytes: Numbers


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OverTime:
    """Against seconds since the run's origin: which iteration was just committed, and the ETTR so far."""

    committed_s: Numbers
    iteration: NDArray[np.int64]
    num_commits: int
    grid_s: Numbers
    ettr: Numbers


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Facts:
    """A run. `totals_us` has each rank's parts, which sum to `end_us`."""

    run: RunLog
    end_us: int
    totals_us: Mapping[int, Mapping[Part, int]]
    episodes: tuple[Episode, ...]
    series: Series
    over_time: OverTime
    evaluated: tuple[Evaluated, ...]
    popularity: tuple[ExpertPopularity, ...]
    lost: tuple[TokensLost, ...]
    saved: tuple[CheckpointSaved, ...]
    failed: tuple[CheckpointFailed, ...]

    def mean_us(self, *parts: Part) -> float:
        """Return how long these parts took on average over ranks."""
        return sum(of[part] for of in self.totals_us.values() for part in parts) / max(len(self.totals_us), 1)

    @property
    def ettr(self) -> float | None:
        """The share of the time that made progress; None where there was no time that could have."""
        counted_us = self.mean_us(*(part for part in Part if part not in NOT_IN_ETTR))
        return self.mean_us(Part.COMPUTE) / counted_us if counted_us > 0 else None


def gather(run: RunLog) -> Facts:
    """Return what there is to say of a run."""
    end_us = max((rank.end_us for rank in run.ranks), default=0)
    return Facts(
        run=run,
        end_us=end_us,
        totals_us={rank.rank: _until(rank, end_us) for rank in run.ranks},
        episodes=find_episodes(run),
        series=_series(run.ranks),
        over_time=_over_time(run.ranks, end_us),
        evaluated=_once(run, Evaluated),
        popularity=_popularity(run),
        lost=_lost(run),
        saved=_once(run, CheckpointSaved),
        failed=_once(run, CheckpointFailed),
    )


def _until(rank: RankDigest, end_us: int) -> dict[Part, int]:
    """Return a rank's parts until the end of the run, some of which may come after the rank's last event."""
    after = Part.OTHER if rank.has_finished else Part.UNKNOWN
    return {**rank.totals_us, after: rank.totals_us[after] + end_us - rank.end_us}


def _over_time(ranks: Sequence[RankDigest], end_us: int) -> OverTime:
    grid_us = np.linspace(0, end_us, _GRID)
    gained = np.zeros((2, _GRID))
    for rank in ranks:
        time_us, *sums = rank.gained
        gained += np.stack([np.interp(grid_us, time_us, each) for each in sums])
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
        iteration = iteration if np.array_equal(own, iteration) else np.union1d(iteration, own)
    size = len(iteration)
    loss, snapshot_bytes, stall_max_s = np.full(size, np.nan), np.full(size, np.nan), np.zeros(size)
    seconds, stall_s, sent_bytes, count = (np.zeros(size) for _ in range(4))
    for rank in ranks:
        own = rank.iterations
        there = np.searchsorted(iteration, own.iteration)
        loss[there] = np.where(np.isnan(loss[there]), own.loss, loss[there])
        stall_max_s[there] = np.maximum(stall_max_s[there], own.stall_s)
        for total, values in ((seconds, own.seconds), (stall_s, own.stall_s), (sent_bytes, own.sent_bytes), (count, 1)):
            total[there] += values
        _add_snapshots(snapshot_bytes, iteration, rank.snapshots)
    return Series(
        iteration=iteration,
        loss=loss,
        seconds=seconds / np.maximum(count, 1),
        stall_mean_s=stall_s / np.maximum(count, 1),
        stall_max_s=stall_max_s,
        sent_bytes=sent_bytes,
        snapshot_bytes=snapshot_bytes,
    )


def _add_snapshots(total_bytes: Numbers, iteration: NDArray[np.int64], snapshots: Numbers) -> None:
    """Add a rank's snapshots to the iterations that were committed; each iteration comes once."""
    taken, size_bytes = snapshots
    there = np.searchsorted(iteration, taken)
    known = there < len(iteration)
    known[known] = iteration[there[known]] == taken[known]
    there = there[known]
    total_bytes[there] = np.nan_to_num(total_bytes[there]) + size_bytes[known]


def _once(run: RunLog, kind: type[T]) -> tuple[T, ...]:
    """Return the events of a kind that all ranks write alike: one for each iteration, the newest, of any rank."""
    found = [(noted.at_us, noted.event) for rank in run.ranks for noted in rank.events if isinstance(noted.event, kind)]
    newest = {event.iteration: event for _, event in sorted(found, key=lambda each: each[0])}
    return tuple(event for _, event in sorted(newest.items()))


def _lost(run: RunLog) -> tuple[TokensLost, ...]:
    """Return what each recovery has lost, in the order in which they came, in the layers of all stages.

    Ranks of a stage tell the same; one that was replaced since may tell of the last recoveries only.
    """
    of_ranks = [[noted.event for noted in rank.events if isinstance(noted.event, TokensLost)] for rank in run.ranks]
    merged = []
    for back in range(max(map(len, of_ranks), default=0), 0, -1):
        events = [of_rank[-back] for of_rank in of_ranks if len(of_rank) >= back]
        by_layer = {
            layer: (lost, experts)
            for event in events
            for layer, lost, experts in zip(event.layers, event.lost_by_layer, event.lost_by_expert, strict=False)
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


def _popularity(run: RunLog) -> tuple[ExpertPopularity, ...]:
    """Return the tokens by iteration, of all layers that any rank tells of, summed over ranks."""
    sums: dict[int, dict[int, Numbers]] = {}
    for rank in run.ranks:
        for event in (noted.event for noted in rank.events if isinstance(noted.event, ExpertPopularity)):
            layers = sums.setdefault(event.iteration, {})
            for layer, tokens in zip(event.layers, event.tokens, strict=False):
                own = np.array(tokens, float)
                before = layers.get(layer)
                layers[layer] = own if before is None or len(before) != len(own) else before + own
    return tuple(
        ExpertPopularity(iteration=each, layers=sorted(of), tokens=[of[layer].tolist() for layer in sorted(of)])
        for each, of in sorted(sums.items())
    )
