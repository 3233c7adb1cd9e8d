"""What a report says of a run, computed once, for all formats: totals by rank and part, recoveries, series. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from launcher.report.account import Tiling, account
from launcher.report.columns import Columns
from launcher.report.episodes import Episode, find_episodes, stretches_of
from launcher.report.parts import NOT_IN_ETTR, OF_FAULTS, Part
from launcher.report.rank_log import ExpertPopularity, RankLog, TokensLost
from launcher.report.read import RunLog
from moe_ckpt.events import CheckpointFailed, CheckpointSaved, Evaluated

_GRID = 400
Numbers = NDArray[np.float64]
T = TypeVar("T", Evaluated, TokensLost, CheckpointSaved, CheckpointFailed)


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
    """Against seconds since the run's origin: the iteration just committed, and the ETTR so far."""

    committed_s: Numbers
    iteration: NDArray[np.int64]
    grid_s: Numbers
    ettr: Numbers


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Facts:
    """A run. `totals_us` has each rank's parts, which sum to `end_us`; `memory` each rank's use of host memory."""

    run: RunLog
    end_us: int
    totals_us: Mapping[int, Mapping[Part, int]]
    episodes: tuple[Episode, ...]
    series: Series
    over_time: OverTime
    evaluated: tuple[Evaluated, ...]
    memory: Mapping[int, Columns]
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
        return ettr_of(self.mean_us(Part.COMPUTE), self.mean_us(*(part for part in Part if part not in NOT_IN_ETTR)))


def ettr_of(compute_us: float, counted_us: float) -> float | None:
    return compute_us / counted_us if counted_us > 0 else None


def gather(run: RunLog) -> Facts:
    """Return what there is to say of a run."""
    end_us = max((log.end_us for log in run.ranks), default=0)
    grid_us = np.linspace(0, end_us, _GRID)
    totals_us: dict[int, dict[Part, int]] = {}
    kept: list[NDArray[np.int64]] = []
    progress = np.zeros((2, _GRID))
    for log in run.ranks:
        tiling = account(log, end_us)
        totals_us[log.rank] = tiling.totals_us()
        kept.append(stretches_of({log.rank: tiling}, OF_FAULTS))
        progress += _progress(tiling, grid_us)
    stretches = np.concatenate([stretches_of({}, ()), *kept])
    return Facts(
        run=run,
        end_us=end_us,
        totals_us=totals_us,
        episodes=find_episodes(run, stretches[np.argsort(stretches[:, 0], kind="stable")]),
        series=_series(run.ranks),
        over_time=_over_time(run.ranks, grid_us, progress),
        evaluated=_once(run, Evaluated),
        memory={log.rank: log.memory for log in run.ranks if len(log.memory)},
        popularity=_popularity(run),
        lost=_once(run, TokensLost),
        saved=_once(run, CheckpointSaved),
        failed=_once(run, CheckpointFailed),
    )


def _progress(tiling: Tiling, grid_us: Numbers) -> Numbers:
    """Return how much of a rank's time until each grid point was computing, and how much counts at all."""
    lengths_us = tiling.lengths_us
    computing = tiling.parts == Part.COMPUTE
    counting = ~np.isin(tiling.parts, NOT_IN_ETTR)
    ends_us = np.append(0, tiling.ends_us)
    sums = [np.append(0, np.cumsum(np.where(which, lengths_us, 0))) for which in (computing, counting)]
    return np.stack([np.interp(grid_us, ends_us, each) for each in sums])


def _over_time(ranks: Sequence[RankLog], grid_us: Numbers, progress: Numbers) -> OverTime:
    first = ranks[0].commits if ranks else None
    counted = np.where(progress[1] > 0, progress[1], np.nan)
    return OverTime(
        committed_s=first.at_us / 1e6 if first else np.empty(0),
        iteration=first.iteration if first else np.empty(0, np.int64),
        grid_s=grid_us / 1e6,
        ettr=progress[0] / counted,
    )


def _series(ranks: Sequence[RankLog]) -> Series:
    axes = [np.unique(log.commits.iteration) for log in ranks]
    iteration = np.unique(np.concatenate(axes)) if axes else np.empty(0, np.int64)
    size = len(iteration)
    loss, stall_max_s = np.full(size, np.nan), np.full(size, -np.inf)
    seconds, stall_s, sent_bytes, count = (np.zeros(size) for _ in range(4))
    snapshot_bytes = np.full(size, np.nan)
    for log in ranks:
        last = np.full(size, -1)
        last[np.searchsorted(iteration, log.commits.iteration)] = np.arange(len(log.commits))
        there, rows = np.flatnonzero(last >= 0), last[last >= 0]
        stall = np.nan_to_num(log.commits["stall_s"][rows])
        loss[there] = np.where(np.isnan(loss[there]), log.commits["loss"][rows], loss[there])
        seconds[there] += np.nan_to_num(log.commits["seconds"][rows])
        stall_s[there] += stall
        stall_max_s[there] = np.maximum(stall_max_s[there], stall)
        for name in ("sent_activation_bytes", "sent_gradient_bytes"):
            sent_bytes[there] += np.nan_to_num(log.commits[name][rows])
        count[there] += 1
        _add_snapshots(snapshot_bytes, iteration, log.snapshots)
    return Series(
        iteration=iteration,
        loss=loss,
        seconds=seconds / np.maximum(count, 1),
        stall_mean_s=stall_s / np.maximum(count, 1),
        stall_max_s=stall_max_s,
        sent_bytes=sent_bytes,
        snapshot_bytes=snapshot_bytes,
    )


def _add_snapshots(total_bytes: Numbers, iteration: NDArray[np.int64], snapshots: Columns) -> None:
    where = np.searchsorted(iteration, snapshots.iteration)
    known = where < len(iteration)
    known[known] = iteration[where[known]] == snapshots.iteration[known]
    weights = np.nan_to_num(snapshots["size_bytes"][known])
    found = np.bincount(where[known], minlength=len(iteration)) > 0
    total_bytes[found] = np.nan_to_num(total_bytes[found])
    total_bytes += np.bincount(where[known], weights=weights, minlength=len(iteration))


def _once(run: RunLog, kind: type[T]) -> tuple[T, ...]:
    """Return the events of a kind that all ranks write alike: one for each iteration, the newest, of any rank."""
    found = [(noted.at_us, noted.event) for log in run.ranks for noted in log.events if isinstance(noted.event, kind)]
    newest = {event.iteration: event for _, event in sorted(found, key=lambda each: each[0])}
    return tuple(event for _, event in sorted(newest.items()))


def _popularity(run: RunLog) -> tuple[ExpertPopularity, ...]:
    """Return the tokens by iteration, of all layers that any rank tells of, summed over ranks."""
    sums: dict[int, dict[int, list[float]]] = {}
    for log in run.ranks:
        for event in (noted.event for noted in log.events if isinstance(noted.event, ExpertPopularity)):
            layers = sums.setdefault(event.iteration, {})
            for layer, tokens in zip(event.layers, event.tokens, strict=False):
                before = layers.get(layer, [0.0] * len(tokens))
                layers[layer] = [a + b for a, b in zip(before, tokens, strict=False)]
    return tuple(
        ExpertPopularity(iteration=iteration, layers=sorted(layers), tokens=[layers[each] for each in sorted(layers)])
        for iteration, layers in sorted(sums.items())
    )
