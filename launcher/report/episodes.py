"""Recoveries of a run: causes, stretches of each rank, and cost. Pure.

An episode is a time in which at least one rank is in a part of a recovery. An episode
has one fault, or several faults that overlap.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from launcher.report.digest import Stretches
from launcher.report.parts import RECOVERY, PagePart
from launcher.report.rank_log import Noted
from launcher.report.read import RunLog
from moe_ckpt.events import (
    CorruptionFound,
    GenerationEnded,
    LossNotFinite,
    Rejoined,
    StageRecovered,
    StateLost,
    StateResumed,
    WorkerStarted,
)

_MARKING_EVENTS = (
    CorruptionFound,
    GenerationEnded,
    LossNotFinite,
    Rejoined,
    StageRecovered,
    StateLost,
    StateResumed,
    WorkerStarted,
)
_START, _END, _PART, _ITERATION, _RANK = range(5)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStretch:
    """A stretch of one rank's time within an episode."""

    rank: int
    """Global rank."""

    part: PagePart
    """Part of the recovery."""

    start_us: int
    """Start, in microseconds since the run's origin."""

    end_us: int
    """End, in microseconds since the run's origin."""

    note: str
    """Iterations that the rank replayed, in words; empty if no event names the
    iterations.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """A recovery of a run."""

    number: int
    """Number of the episode in the run, from 1."""

    start_us: int
    """Start, in microseconds since the run's origin."""

    end_us: int
    """End, in microseconds since the run's origin."""

    struck: int
    """Iteration that the fault fell into."""

    iteration: int | None
    """Iteration after which training continues; None if no event names the iteration.
    """

    causes: tuple[str, ...]
    """Causes, in words."""

    mean_us: Mapping[PagePart, float]
    """Time of each part of the recovery, and of the lost work, in microseconds.

    Mean over all ranks.
    """

    fetched_bytes: int
    """Bytes fetched from the memory of other ranks, on the rank with the most."""

    replayed_iters: int
    """Iterations that were run again, on the rank with the most."""

    replaying_ranks: tuple[int, ...]
    """Ranks that replayed iterations."""

    stretches: tuple[RankStretch, ...]
    """Stretches of all ranks, by start."""

    @property
    def cost_us(self) -> float:
        """The mean cost for a rank: the recovery and the lost work, in microseconds."""
        return sum(self.mean_us.values())


def find_episodes(run: RunLog) -> tuple[Episode, ...]:
    """Return the recoveries of a run, in the order of time."""
    stretches = np.concatenate(
        [np.empty((0, 5), np.int64), *(rank.stretches for rank in run.ranks)]
    )
    stretches = stretches[np.argsort(stretches[:, _START], kind="stable")]
    lost = stretches[stretches[:, _PART] == PagePart.LOST]
    unassigned = np.ones(len(lost), bool)
    marking = _marking(run)
    times_us = [noted.at_us for _, noted in marking]
    episodes: list[Episode] = []
    for rows in _merged(stretches[stretches[:, _PART] != PagePart.LOST]):
        first, last = int(rows[:, _START].min()), int(rows[:, _END].max())
        noted = marking[bisect_left(times_us, first) : bisect_right(times_us, last)]
        iteration = _goes_on_after(noted)
        # lost work belongs to the first later recovery that went back far enough
        undone = (lost[:, _ITERATION] < 0) | (
            lost[:, _ITERATION] > (-1 if iteration is None else iteration)
        )
        mine = unassigned & undone & (lost[:, _START] < last)
        unassigned &= ~mine
        episodes.append(_episode(len(episodes) + 1, run, rows, lost[mine], noted))
    return tuple(episodes)


def _merged(rows: Stretches) -> list[Stretches]:
    """Return the rows in groups that overlap or touch."""
    if not len(rows):
        return []
    reached_us = np.maximum.accumulate(rows[:, _END])
    return np.split(rows, np.flatnonzero(rows[1:, _START] > reached_us[:-1]) + 1)


def _marking(run: RunLog) -> list[tuple[int, Noted]]:
    """Return the events that may belong to a recovery, with ranks, by time."""
    found = [
        (log.rank, noted)
        for log in run.ranks
        for noted in log.events
        if isinstance(noted.event, _MARKING_EVENTS)
    ]
    return sorted(found, key=lambda each: each[1].at_us)


def _goes_on_after(noted: Sequence[tuple[int, Noted]]) -> int | None:
    """Return the iteration after which the last rank to rejoin or to load continues.

    None if no event names the iteration.
    """
    back = [
        (n.at_us, n.event.iteration)
        for _, n in noted
        if isinstance(n.event, Rejoined | StateResumed | StageRecovered)
    ]
    return max(back)[1] if back else None


def _episode(
    number: int,
    run: RunLog,
    rows: Stretches,
    lost: Stretches,
    noted: Sequence[tuple[int, Noted]],
) -> Episode:
    num_ranks = max(len(run.ranks), 1)
    spent = np.concatenate([rows, lost])
    lengths_us = spent[:, _END] - spent[:, _START]
    mean_us = {
        part: float(lengths_us[spent[:, _PART] == part].sum()) / num_ranks
        for part in (PagePart.LOST, *RECOVERY)
    }
    rejoined = [n.event for _, n in noted if isinstance(n.event, Rejoined)]
    recovered = [n.event for _, n in noted if isinstance(n.event, StageRecovered)]
    replaying = np.unique(rows[rows[:, _PART] == PagePart.REPLAY, _RANK]).tolist()
    replays = {
        (rank, n.at_us): n.event
        for rank, n in noted
        if isinstance(n.event, StageRecovered)
    }
    start_us, end_us = int(rows[:, _START].min()), int(rows[:, _END].max())
    return Episode(
        number=number,
        start_us=start_us,
        end_us=end_us,
        struck=int(rows[:, _ITERATION].min()),
        iteration=_goes_on_after(noted),
        causes=_causes(run, noted, start_us, end_us),
        mean_us=mean_us,
        fetched_bytes=max((event.fetched_bytes for event in rejoined), default=0),
        replayed_iters=max(
            [
                0,
                *(e.replayed_iters for e in recovered),
                *(e.executed_iters for e in rejoined),
            ]
        ),
        replaying_ranks=tuple(replaying),
        stretches=tuple(_rank_stretch(row, replays) for row in rows.tolist()),
    )


def _rank_stretch(
    row: Sequence[int], replays: Mapping[tuple[int, int], StageRecovered]
) -> RankStretch:
    part = PagePart(row[_PART])
    replay = replays.get((row[_RANK], row[_END])) if part is PagePart.REPLAY else None
    return RankStretch(
        rank=row[_RANK],
        part=part,
        start_us=row[_START],
        end_us=row[_END],
        note=_iterations_of(replay) if replay else "",
    )


def _iterations_of(recovered: StageRecovered) -> str:
    last, count = recovered.iteration, recovered.replayed_iters
    if count == 0:
        return f"the snapshots at {last}, no iteration"
    return (
        f"iteration {last}"
        if count == 1
        else f"iterations {last - count + 1} to {last}"
    )


def _causes(
    run: RunLog, noted: Sequence[tuple[int, Noted]], start_us: int, end_us: int
) -> tuple[str, ...]:
    """Return the causes of an episode, from the most reliable source that names any."""
    events = [(rank, n.event) for rank, n in noted]
    deaths = [
        death
        for _, event in events
        if isinstance(event, Rejoined)
        for death in event.deaths
    ]
    ends = [event.reason for _, event in events if isinstance(event, GenerationEnded)]
    states = [
        f"rank {rank} lost its state in {e.phase} of iteration {e.iteration}"
        for rank, e in events
        if isinstance(e, StateLost)
    ]
    losses = [
        f"the loss of iteration {e.iteration} is {e.loss}"
        for _, e in events
        if isinstance(e, LossNotFinite)
    ]
    corrupt = [
        f"an audit after iteration {e.iteration} found another state on"
        f" {'; '.join(e.where)}"
        for _, e in events
        if isinstance(e, CorruptionFound)
    ]
    # an ordered fault has the time of the order, not the time of the death
    inflicted = [
        f"rank {fault.rank} was sent SIG{fault.signal}"
        for at_s, fault in run.faults
        if not fault.ordered and start_us <= round(at_s * 1e6) <= end_us
    ]
    anew = [
        f"the process of rank {rank} was started again"
        for rank, e in events
        if isinstance(e, WorkerStarted)
    ]
    if len(anew) > 1 and len(anew) == len(run.ranks):
        anew = ["all processes were started again"]
    said = next(
        (
            each
            for each in (deaths, states, losses, corrupt, ends, inflicted, anew)
            if each
        ),
        ["no event tells why"],
    )
    # a reason may be a library's traceback of many lines
    return tuple(dict.fromkeys(re.sub(r"\s+", " ", each)[:300] for each in said))
