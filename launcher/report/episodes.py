"""Recoveries of a run: what they were for, when each rank did what in them, and what
they cost. Pure.

An episode is the time in which any rank is in a part of a recovery: one fault, or
several that overlap.
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
    GenerationEnded,
    LossNotFinite,
    Rejoined,
    StageRecovered,
    StateLost,
    StateResumed,
    WorkerStarted,
)

_MARKING_EVENTS = (
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
    """A rank's part of an episode; `note` names the iterations that it replayed."""

    rank: int
    part: PagePart
    start_us: int
    end_us: int
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """A recovery. `mean_us`: what it took, by part, mean over all ranks.

    It fell into iteration `struck`; training goes on after `iteration`.
    """

    number: int
    start_us: int
    end_us: int
    struck: int
    iteration: int | None
    causes: tuple[str, ...]
    mean_us: Mapping[PagePart, float]
    fetched_bytes: int
    replayed_iters: int
    replaying_ranks: tuple[int, ...]
    stretches: tuple[RankStretch, ...]

    @property
    def cost_us(self) -> float:
        """The average price for a rank: the recovery, and the time lost to the fault."""
        return sum(self.mean_us.values())


def find_episodes(run: RunLog) -> tuple[Episode, ...]:
    """Return the recoveries of a run, in order."""
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
        # lost work belongs to the first recovery after it that went back far enough
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
    """Return the events, with their ranks, that may tell of a recovery, in order of
    time.
    """
    found = [
        (log.rank, noted)
        for log in run.ranks
        for noted in log.events
        if isinstance(noted.event, _MARKING_EVENTS)
    ]
    return sorted(found, key=lambda each: each[1].at_us)


def _goes_on_after(noted: Sequence[tuple[int, Noted]]) -> int | None:
    """Return the iteration that the last to rejoin or to load goes on after; where that
    is not told, None.
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
    """Return what is said to have failed, by the most reliable witness there is."""
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
    # an order names the time at which it was given, not that of the death
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
        (each for each in (deaths, states, losses, ends, inflicted, anew) if each),
        ["no event tells why"],
    )
    # a reason may be a traceback of a library, over many lines
    return tuple(dict.fromkeys(re.sub(r"\s+", " ", each)[:300] for each in said))
