"""One rank's log, reduced to what reports need of it, in the process that has read it.
Pure.

A large run has gigabytes of events: each rank is digested where it is read, and only
this goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher.report.account import Tiling, account
from launcher.report.columns import Columns
from launcher.report.parts import NOT_IN_ETTR, OF_FAULTS, PagePart
from launcher.report.rank_log import Noted, read_rank
from launcher.report.thin import MOST_POINTS, evenly, in_steps
from moe_ckpt.events import ExpertPopularity, ExpertsOrdered

Numbers = NDArray[np.float64]
_MOST_RECORDS = 512
# rows of (start, end, part, iteration, rank), in microseconds
Stretches = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PerIteration:
    """For each iteration, in order: the rank's numbers of the last time that it
    committed it.
    """

    iteration: NDArray[np.int64]
    loss: Numbers
    seconds: NDArray[np.float32]
    stall_s: NDArray[np.float32]
    sent_bytes: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankDigest:
    """A rank's time until its last event, at `end_us`.

    `stretches`: its recoveries and its lost work. `gained`: columns (time, computed
    until then, counted until then). `committed`: columns (time, iteration) in the order
    of time, thinned. `snapshots`: columns (iteration, bytes). `replicated`: columns
    (start of a window, bytes to all peers).
    """

    rank: int
    num_events: int
    has_finished: bool
    end_us: int
    totals_us: Mapping[PagePart, int]
    stretches: Stretches
    gained: Numbers
    iterations: PerIteration
    committed: NDArray[np.int64]
    num_commits: int
    snapshots: Numbers
    replicated: Numbers
    memory: Columns
    peak_bytes: float | None
    window_iters: float | None
    interval_iters: float | None
    events: tuple[Noted, ...]
    unknown: Mapping[str, int]
    problems: tuple[str, ...]


def digest_file(rank: int, path: Path) -> RankDigest:
    """Return what reports need of one rank's events."""
    log = read_rank(rank, path)
    tiling = account(log, log.end_us)
    of_faults = np.isin(tiling.parts, OF_FAULTS)
    columns = (
        tiling.starts_us,
        tiling.ends_us,
        tiling.parts,
        tiling.iterations,
        np.full(len(of_faults), rank),
    )
    snapshots, replicated, memory = (
        log.tables[kind]
        for kind in ("SnapshotTaken", "WindowReplicated", "HostMemoryUsed")
    )
    peaks = memory["allocated_bytes"][np.isfinite(memory["allocated_bytes"])]
    return RankDigest(
        rank=log.rank,
        num_events=log.num_events,
        has_finished=log.has_finished,
        end_us=log.end_us,
        totals_us=tiling.totals_us(),
        stretches=np.stack([column[of_faults] for column in columns], axis=1),
        gained=_gained(tiling),
        iterations=_last_times(log.commits),
        committed=_way(log.commits),
        num_commits=len(log.commits),
        snapshots=_by_iteration(snapshots.iteration, snapshots["size_bytes"]),
        replicated=_by_iteration(
            replicated["window_start"],
            replicated["size_bytes"] * replicated["num_peers"],
        ),
        memory=Columns(
            names=memory.names, rows=memory.rows[evenly(len(memory), MOST_POINTS)]
        ),
        peak_bytes=float(peaks.max()) if len(peaks) else None,
        window_iters=_last(log.tables["WindowChosen"], "num_slots"),
        interval_iters=_last(log.tables["IntervalChosen"], "every_iters"),
        events=_without_most_records(log.events),
        unknown=log.unknown,
        problems=log.problems,
    )


def _without_most_records(events: Sequence[Noted]) -> tuple[Noted, ...]:
    """Return the events, with as many records of experts as a heat map has columns:
    each is of hundreds of numbers.
    """
    left_out: set[int] = set()
    for kind in (ExpertPopularity, ExpertsOrdered):
        found = {
            place: noted.event
            for place, noted in enumerate(events)
            if isinstance(noted.event, kind)
        }
        iterations, places = (
            np.array([event.iteration for event in found.values()], np.int64),
            list(found),
        )
        left_out |= set(places) - {
            places[number] for number in in_steps(iterations, _MOST_RECORDS)
        }
    return tuple(noted for place, noted in enumerate(events) if place not in left_out)


def _gained(tiling: Tiling) -> Numbers:
    """Return, at some moments, how much of the time until then was computing, and how
    much counts at all.
    """
    computing = tiling.parts == PagePart.COMPUTE
    counting = ~np.isin(tiling.parts, NOT_IN_ETTR)
    ends_us = np.append(0, tiling.ends_us)
    sums = [
        np.append(0, np.cumsum(np.where(which, tiling.lengths_us, 0)))
        for which in (computing, counting)
    ]
    # thinned after the sums: no time is lost with the points that are left out
    keep = evenly(len(ends_us), MOST_POINTS)
    return np.stack([ends_us[keep], *(each[keep] for each in sums)]).astype(float)


def _last_times(commits: Columns) -> PerIteration:
    order = np.argsort(commits.iteration, kind="stable")
    iteration = commits.iteration[order]
    is_last = np.append(np.diff(iteration) > 0, True)[: len(order)]
    rows = order[is_last]
    sent = np.nan_to_num(commits["sent_activation_bytes"][rows]) + np.nan_to_num(
        commits["sent_gradient_bytes"][rows]
    )
    return PerIteration(
        iteration=iteration[is_last],
        loss=commits["loss"][rows],
        # half of the memory: plots show six digits, and a run has millions of
        # iterations
        seconds=np.nan_to_num(commits["seconds"][rows]).astype(np.float32),
        stall_s=np.nan_to_num(commits["stall_s"][rows]).astype(np.float32),
        sent_bytes=sent.astype(np.float32),
    )


def _way(commits: Columns) -> NDArray[np.int64]:
    """Return the times and iterations of some commits, with all from which the rank
    went back.
    """
    iteration = commits.iteration
    back = np.flatnonzero(np.diff(iteration) <= 0)[:MOST_POINTS]
    # steps down show that work was given up: both ends of each are kept, whatever is
    # thinned
    keep = np.unique(
        np.concatenate([evenly(len(iteration), MOST_POINTS), back, back + 1])
    )
    return np.stack([commits.at_us[keep], iteration[keep]])


def _by_iteration(iteration: NDArray[Any], sizes: Numbers) -> Numbers:
    """Return the bytes of all that is of each iteration."""
    order = np.argsort(iteration, kind="stable")
    iteration, sizes = iteration[order], np.nan_to_num(sizes[order])
    first = np.flatnonzero(np.diff(iteration, prepend=iteration[:1] - 1))
    return np.stack(
        [
            iteration[first].astype(float),
            np.add.reduceat(sizes, first) if len(first) else sizes,
        ]
    )


def _last(table: Columns, column: str) -> float | None:
    return float(table[column][-1]) if len(table) else None
