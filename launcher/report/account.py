"""Where one rank's time went, cut into parts without a gap.

The parts cover all time from the run's origin to the end. The module is pure and counts
whole microseconds, so the parts of a rank sum to the wall time exactly. Time that no
event explains is not guessed but is a part of its own. Iterations without events inside
are cut all at once, the other iterations by `walk`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from launcher.report.columns import Microseconds
from launcher.report.parts import PagePart
from launcher.report.rank_log import Noted, RankLog
from launcher.report.walk import MARKING_EVENTS, Walk, walk_gap, walk_iteration
from moe_ckpt.events import Rejoined, StageRecovered, StateResumed

_NONE = -1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tiling:
    """A rank's time, cut into stretches.

    Stretch i begins where stretch i - 1 ends; the first begins at 0.
    """

    ends_us: Microseconds
    """End of each stretch, in microseconds since the run's origin; ascending."""

    parts: NDArray[np.int64]
    """`PagePart` of each stretch."""

    iterations: NDArray[np.int64]
    """Iteration in which each stretch was spent, or that a recovery fell into; -1
    outside all iterations.
    """

    @property
    def starts_us(self) -> Microseconds:
        return np.append(0, self.ends_us[:-1])

    @property
    def lengths_us(self) -> Microseconds:
        return np.diff(self.ends_us, prepend=0)

    def totals_us(self) -> dict[PagePart, int]:
        """Return the length of each part. The lengths sum to the wall time."""
        lengths_us = self.lengths_us
        return {part: int(lengths_us[self.parts == part].sum()) for part in PagePart}


def account(log: RankLog, end_us: int) -> Tiling:
    """Cut a rank's time from 0 to `end_us`.

    Args:
        log: The events of the rank.
        end_us: The end of the time to cut, in microseconds since the run's origin.
    """
    at_us = np.clip(log.commits.at_us, 0, end_us)
    marks = _marks_by_gap(log, at_us, end_us)
    # always walk the time after the last commit, because no iteration ends that time
    marks.setdefault(len(at_us), [])
    commits = _commits(log, at_us, marks)
    walks = [_walk(log, commits, gap, end_us, found) for gap, found in marks.items()]
    walked = [stretch for walk in walks for stretch in walk.stretches]
    rows = np.concatenate(
        [_plain(commits, marks), np.array(walked, dtype=np.int64).reshape(-1, 3)]
    )
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    assert (np.diff(rows[:, 0], prepend=0) > 0).all(), log.rank
    return Tiling(ends_us=rows[:, 0], parts=rows[:, 1], iterations=rows[:, 2])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Commits:
    """A rank's commits, by number.

    Gap k lies before commit k; the last gap lies after all commits.
    """

    iterations: NDArray[np.int64]
    """Iteration of each commit."""

    previous_us: Microseconds
    """Time of the commit before each gap; 0 for the first gap."""

    begin_us: Microseconds
    """Start of the iteration of each commit."""

    at_us: Microseconds
    """Time of each commit."""

    stall_us: Microseconds
    """Stall at the end of each iteration."""

    given_up: NDArray[np.bool_]
    """Whether each commit was undone later."""


def _commits(
    log: RankLog, at_us: Microseconds, marks: Mapping[int, Sequence[Noted]]
) -> _Commits:
    previous_us = np.append(0, at_us)
    # lengths come from the monotonic clock and commits from the wall clock: a
    # difference between the clocks must not make stretches overlap
    begin_us = np.clip(at_us - log.commits.us("seconds"), previous_us[:-1], at_us)
    return _Commits(
        iterations=log.commits.iteration,
        previous_us=previous_us,
        begin_us=begin_us,
        at_us=at_us,
        stall_us=np.clip(log.commits.us("stall_s"), 0, at_us - begin_us),
        given_up=_given_up(log.commits.iteration, marks),
    )


def _marks_by_gap(
    log: RankLog, at_us: Microseconds, end_us: int
) -> dict[int, list[Noted]]:
    """Return the events that mark parts of time, by gap, in the order of the file.

    The time of each event is clipped to the time between the two commits around the
    event.
    """
    bounds_us = np.concatenate([[0], at_us, [end_us]])
    marks: dict[int, list[Noted]] = {}
    for noted in log.events:
        if isinstance(noted.event, MARKING_EVENTS):
            least_us, most_us = bounds_us[noted.after_commits : noted.after_commits + 2]
            within = replace(noted, at_us=int(min(max(noted.at_us, least_us), most_us)))
            marks.setdefault(noted.after_commits, []).append(within)
    return marks


def _given_up(
    iterations: NDArray[np.int64], marks: Mapping[int, Sequence[Noted]]
) -> NDArray[np.bool_]:
    """Return whether each commit was undone.

    A commit is undone if the rank later continues with the same or an earlier
    iteration.
    """
    goes_on_with = np.append(iterations, np.iinfo(np.int64).max)
    for gap, found in marks.items():
        back = [
            noted.event.iteration
            for noted in found
            if isinstance(noted.event, Rejoined | StateResumed)
        ]
        goes_on_with[gap] = min(
            [int(goes_on_with[gap]), *(iteration + 1 for iteration in back)]
        )
    later = np.minimum.accumulate(goes_on_with[::-1])[::-1]
    return later[1:] <= iterations


def _plain(commits: _Commits, without: Mapping[int, object]) -> NDArray[np.int64]:
    """Return (end, part, iteration) of each stretch of the gaps not in `without`.

    A gap and the iteration after the gap have three stretches: the gap, the iteration
    and the stall of the iteration. Empty stretches are left out: several stretches
    would end at once, and the order of these stretches would be unknown.
    """
    is_plain = np.ones(len(commits.at_us) + 1, bool)
    is_plain[list(without)] = False
    keep = np.flatnonzero(is_plain)
    at_us, given_up, iterations = (
        commits.at_us[keep],
        commits.given_up[keep],
        commits.iterations[keep],
    )
    gap = np.where(keep == 0, PagePart.STARTUP, PagePart.OTHER)
    bounds_us = (
        commits.previous_us[keep],
        commits.begin_us[keep],
        at_us - commits.stall_us[keep],
        at_us,
    )
    stretches = (
        (*bounds_us[0:2], gap, np.full(len(keep), _NONE)),
        (
            *bounds_us[1:3],
            np.where(given_up, PagePart.LOST, PagePart.COMPUTE),
            iterations,
        ),
        (
            *bounds_us[2:4],
            np.where(given_up, PagePart.LOST, PagePart.STALL),
            iterations,
        ),
    )
    rows = np.stack(
        [np.concatenate(column) for column in zip(*stretches, strict=True)], axis=1
    )
    return rows[rows[:, 1] > rows[:, 0], 1:]


def _walk(
    log: RankLog, commits: _Commits, gap: int, end_us: int, found: Sequence[Noted]
) -> Walk:
    """Return the walk of a gap with events and of the iteration after the gap.

    The last gap lasts until the end of the run.
    """
    walk = Walk(
        int(commits.previous_us[gap]),
        next_iteration=int(commits.iterations[gap - 1]) + 1 if gap else 0,
    )
    if gap == len(commits.at_us):
        walk_gap(walk, found, is_first=gap == 0)
        walk.to(end_us, PagePart.OTHER if log.has_finished else PagePart.UNKNOWN)
        return walk
    settled_us = [
        noted.at_us for noted in found if not isinstance(noted.event, StageRecovered)
    ]
    begin_us = max([int(commits.begin_us[gap]), *settled_us])
    iteration, stall_us = int(commits.iterations[gap]), int(commits.stall_us[gap])
    before = [noted for noted in found if noted.at_us <= begin_us]
    unmeasured = not log.commits["seconds"][gap] > 0  # committed by a recovery
    rest = walk_gap(
        walk, before, is_first=gap == 0, finished=iteration if unmeasured else None
    )
    walk.to(begin_us, rest)
    inside, given_up = (
        [noted for noted in found if noted.at_us > begin_us],
        bool(commits.given_up[gap]),
    )
    walk_iteration(
        walk, inside, iteration, int(commits.at_us[gap]), stall_us, given_up=given_up
    )
    return walk
