"""Where one rank's time went: all of it, from the run's origin to the run's end, cut
into parts without a gap.

Pure, in whole microseconds, so that the parts of a rank sum to the wall time exactly.
Time that no event explains is not guessed: it is a part of its own. Iterations without
events inside are cut all at once, the others by `walk`.
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
    """A rank's time. Stretch i goes from the end of the one before it (the first from
    0) to `ends_us[i]`.

    `iterations[i]` is the iteration that it was spent in, or that a recovery fell into;
    -1 outside of all.
    """

    ends_us: Microseconds
    parts: NDArray[np.int64]
    iterations: NDArray[np.int64]

    @property
    def starts_us(self) -> Microseconds:
        return np.append(0, self.ends_us[:-1])

    @property
    def lengths_us(self) -> Microseconds:
        return np.diff(self.ends_us, prepend=0)

    def totals_us(self) -> dict[PagePart, int]:
        """Return the length of each part; they sum to the wall time."""
        lengths_us = self.lengths_us
        return {part: int(lengths_us[self.parts == part].sum()) for part in PagePart}


def account(log: RankLog, end_us: int) -> Tiling:
    """Cut a rank's time from 0 to `end_us`."""
    at_us = np.clip(log.commits.at_us, 0, end_us)
    marks = _marks_by_gap(log, at_us, end_us)
    # the time after the last commit is walked in any case: it has no iteration that
    # ends it
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
    """A rank's commits, by number. Gap k lies before iteration k; the last one after
    all.
    """

    iterations: NDArray[np.int64]
    previous_us: Microseconds
    begin_us: Microseconds
    at_us: Microseconds
    stall_us: Microseconds
    given_up: NDArray[np.bool_]


def _commits(
    log: RankLog, at_us: Microseconds, marks: Mapping[int, Sequence[Noted]]
) -> _Commits:
    previous_us = np.append(0, at_us)
    # lengths are of the monotonic clock and commits of the wall clock: what the two
    # differ by must not let stretches overlap
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
    """Return the events that tell what time went on, by the commit that they come
    before, in order of the file.
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
    """Return which commits were undone: later on, the rank goes on with the same
    iteration or an earlier one.
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
    """Return (end, part, iteration) for all commits but some: what lies before, the
    iteration, its stall.

    None is empty: several would end at once, and which came first could not be told.
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
    """Return a gap that holds events and the iteration after it, or the rest of the run
    after the last.
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
