"""One rank's log, reduced to the data that reports need. Pure but for reading the file.

A large run has gigabytes of events. The process that reads a rank also digests the
rank, and only the digest leaves that process.
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
Stretches = NDArray[np.int64]
"""Rows of (start, end, part, iteration, rank); times in microseconds since the run's
origin.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PerIteration:
    """A rank's numbers of each iteration, from the last commit of the iteration."""

    iteration: NDArray[np.int64]
    """Committed iterations, ascending, each once."""

    loss: Numbers
    """Mean loss of the iteration's batch."""

    seconds: NDArray[np.float32]
    """Time of the iteration, stall included, in seconds; 0 if unknown."""

    stall_s: NDArray[np.float32]
    """Part of `seconds` that checkpointing took, in seconds; 0 if unknown."""

    sent_bytes: NDArray[np.float32]
    """Bytes of activations and gradients that the rank sent to other stages; 0 if
    unknown.
    """


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankDigest:
    """A rank's time until the rank's last event, and the data that reports show.

    All times are in microseconds since the run's origin.
    """

    rank: int
    """Global rank."""

    num_events: int
    """Number of readable events."""

    has_finished: bool
    """Whether the rank logged the end of the run."""

    end_us: int
    """Time of the rank's last event."""

    totals_us: Mapping[PagePart, int]
    """Length of each part, until `end_us`."""

    stretches: Stretches
    """The rank's recoveries and lost work."""

    gained: Numbers
    """Moments, computing time until then, and counted time until then, [3][moments].

    Counted time is all time but the parts `NOT_IN_ETTR`.
    """

    iterations: PerIteration
    """Numbers of each iteration."""

    committed: NDArray[np.int64]
    """Times and iterations of commits, [2][commits], in the order of time, thinned."""

    num_commits: int
    """Number of commits before thinning."""

    snapshots: Numbers
    """Iterations and bytes of snapshots, [2][iterations]."""

    replicated: Numbers
    """Starts of windows, and bytes sent to all peers, [2][windows]."""

    memory: Columns
    """Host memory over time (event HostMemoryUsed), thinned."""

    peak_bytes: float | None
    """Most host memory ever allocated; None if no event has the number."""

    window_iters: float | None
    """Number of slots of the last window chosen; None if no window was chosen."""

    interval_iters: float | None
    """Last interval chosen between whole snapshots, in iterations; None if no interval
    was chosen.
    """

    events: tuple[Noted, ...]
    """Events of all kinds that are not in tables; records of experts are thinned."""

    unknown: Mapping[str, int]
    """Number of deviations from this version's events, by description."""

    problems: tuple[str, ...]
    """Other defects of the file, for people."""


def digest_file(rank: int, path: Path) -> RankDigest:
    """Return the digest of one rank's events.

    Args:
        rank: The global rank.
        path: The rank's event file.
    """
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
    """Return the events with at most `_MOST_RECORDS` records of experts of each kind.

    The limit leaves enough columns for a heat map. Each record has hundreds of numbers.
    """
    left_out: set[int] = set()
    for kind in (ExpertPopularity, ExpertsOrdered):
        found = {
            index: noted.event
            for index, noted in enumerate(events)
            if isinstance(noted.event, kind)
        }
        iterations, indices = (
            np.array([event.iteration for event in found.values()], np.int64),
            list(found),
        )
        left_out |= set(indices) - {
            indices[number] for number in in_steps(iterations, _MOST_RECORDS)
        }
    return tuple(noted for index, noted in enumerate(events) if index not in left_out)


def _gained(tiling: Tiling) -> Numbers:
    """Return moments, computing time until then, and counted time until then."""
    computing = tiling.parts == PagePart.COMPUTE
    counting = ~np.isin(tiling.parts, NOT_IN_ETTR)
    ends_us = np.append(0, tiling.ends_us)
    sums = [
        np.append(0, np.cumsum(np.where(which, tiling.lengths_us, 0)))
        for which in (computing, counting)
    ]
    # thin after summing, so that points left out lose no time
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
        # float32 halves the memory: plots show six digits, and a run has millions of
        # iterations
        seconds=np.nan_to_num(commits["seconds"][rows]).astype(np.float32),
        stall_s=np.nan_to_num(commits["stall_s"][rows]).astype(np.float32),
        sent_bytes=sent.astype(np.float32),
    )


def _way(commits: Columns) -> NDArray[np.int64]:
    """Return times and iterations of some commits, with the steps back of the rank.

    The first `MOST_POINTS` steps back are kept.
    """
    iteration = commits.iteration
    back = np.flatnonzero(np.diff(iteration) <= 0)[:MOST_POINTS]
    # a step down shows work that was given up: thinning keeps both ends of the step
    keep = np.unique(
        np.concatenate([evenly(len(iteration), MOST_POINTS), back, back + 1])
    )
    return np.stack([commits.at_us[keep], iteration[keep]])


def _by_iteration(iteration: NDArray[Any], sizes: Numbers) -> Numbers:
    """Return the iterations, and the sum of the sizes of each iteration."""
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
