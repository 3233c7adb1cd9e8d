"""Divides the time of one rank into parts: recovery, restart, evaluation, iterations.

The module is pure, and walks through the rank's events in order of time. An event is
written at the end of the work that the event describes, so each event closes stretches
that began before the event:

    `last commit   `death      `found     `all together             `Rejoined
    |     lost     | detection |  rebuild | fetch | waiting, replay | other | iteration
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from launcher.report.parts import RECOVERY, PagePart
from launcher.report.rank_log import Noted
from moe_ckpt.events import (
    Evaluated,
    GenerationEnded,
    ModelBuilt,
    Rejoined,
    RunFinished,
    StageRecovered,
    StateResumed,
    WorkerStarted,
)

MARKING_EVENTS = (
    Evaluated,
    GenerationEnded,
    ModelBuilt,
    Rejoined,
    RunFinished,
    StageRecovered,
    StateResumed,
    WorkerStarted,
)
"""The events that mark parts of time."""

_UNMEASURED = -1


class Walk:
    """The stretches of a time, in order.

    A stretch begins where the previous stretch ends. A stretch that would end before it
    begins is left out. Recoveries fall into the next iteration.

    Args:
        start_us: The start of the time, in microseconds since the run's origin.
        next_iteration: The iteration that recoveries fall into.
    """

    def __init__(self, start_us: int, next_iteration: int) -> None:
        self.now_us = start_us
        self._next = next_iteration
        self.stretches: list[tuple[int, PagePart, int]] = []

    def to(self, end_us: int, part: PagePart, iteration: int = _UNMEASURED) -> None:
        """Add the stretch up to `end_us`."""
        if end_us > self.now_us:
            self.now_us = end_us
            self.stretches.append(
                (end_us, part, self._next if part in RECOVERY else iteration)
            )


def walk_gap(
    walk: Walk, found: Sequence[Noted], *, is_first: bool, finished: int | None = None
) -> PagePart:
    """Cut the time between two iterations, up to the last event.

    Args:
        walk: The walk, at the end of the first iteration.
        found: The marking events of the gap, in order.
        is_first: Whether the gap lies before the first iteration.
        finished: The iteration that a fault cut off and that the recovery committed, so
            that the time before the fault was not lost.

    Returns:
        The part that the time after the last event belongs to.
    """
    rest = PagePart.STARTUP if is_first else None
    found = list(found)
    while found:
        rejoined = next(
            (i for i, noted in enumerate(found) if isinstance(noted.event, Rejoined)),
            None,
        )
        if rejoined is None:
            rest = _plain(walk, found, rest)
            break
        _recovery(walk, found[: rejoined + 1], rest, finished)
        rest, found = PagePart.OTHER, found[rejoined + 1 :]
    return rest or PagePart.OTHER


def walk_iteration(
    walk: Walk,
    found: Sequence[Noted],
    iteration: int,
    end_us: int,
    stall_us: int,
    *,
    given_up: bool,
) -> None:
    """Cut an iteration in which stages rebuilt state although no process was lost.

    Args:
        walk: The walk, at the start of the iteration.
        found: The marking events in the iteration, in order.
        iteration: The iteration.
        end_us: The commit, in microseconds since the run's origin.
        stall_us: The stall, in microseconds. Hooks count the rebuild as a stall.
        given_up: Whether the commit was undone later.
    """
    for noted in found:
        event = noted.event
        if isinstance(event, StageRecovered):
            again = event.iteration < iteration
            walk.to(
                noted.at_us - us(event.seconds),
                PagePart.LOST if again or given_up else PagePart.COMPUTE,
                iteration,
            )
            before_us = walk.now_us
            walk.to(noted.at_us, PagePart.REPLAY)
            stall_us -= walk.now_us - before_us
    walk.to(
        end_us - max(stall_us, 0),
        PagePart.LOST if given_up else PagePart.COMPUTE,
        iteration,
    )
    walk.to(end_us, PagePart.LOST if given_up else PagePart.STALL, iteration)


def us(seconds: float) -> int:
    """Return whole microseconds; 0 if `seconds` is not positive and finite."""
    return round(seconds * 1e6) if math.isfinite(seconds) and seconds > 0 else 0


def _plain(
    walk: Walk, found: Sequence[Noted], rest: PagePart | None
) -> PagePart | None:
    """Cut events outside the recoveries of a supervised job.

    Such events are a start, a restart by torchrun, a load from disk, and an evaluation.

    Returns:
        The part that the time after the last event belongs to; None if no event
        determines the part.
    """
    for noted in found:
        at_us, event = noted.at_us, noted.event
        if isinstance(event, WorkerStarted):
            is_first = rest is PagePart.STARTUP and event.incarnation == 0
            walk.to(
                at_us,
                rest
                if rest is PagePart.STARTUP or rest is PagePart.LOST
                else PagePart.REBUILD,
            )
            rest = PagePart.STARTUP if is_first else PagePart.REBUILD
        elif isinstance(event, ModelBuilt):
            walk.to(at_us, rest or PagePart.OTHER)
        elif isinstance(event, GenerationEnded):
            walk.to(at_us, rest or PagePart.LOST)
            rest = PagePart.REBUILD
        elif isinstance(event, StateResumed | StageRecovered):
            walk.to(at_us - us(event.seconds), rest or PagePart.LOST)
            walk.to(
                at_us,
                PagePart.FETCH if isinstance(event, StateResumed) else PagePart.REPLAY,
            )
            rest = PagePart.STARTUP if rest is PagePart.STARTUP else PagePart.OTHER
        elif isinstance(event, Evaluated):
            walk.to(
                at_us,
                PagePart.STARTUP if rest is PagePart.STARTUP else PagePart.EVALUATION,
            )
        else:
            walk.to(at_us, PagePart.OTHER)
    return rest


def _recovery(
    walk: Walk, found: Sequence[Noted], rest: PagePart | None, finished: int | None
) -> None:
    """Cut a recovery by the durations in the `Rejoined` event, the last of `found`.

    The function counts back from this event, so the latest durations are the most
    certain.
    """
    at_us, rejoined = found[-1].at_us, found[-1].event
    assert isinstance(rejoined, Rejoined)
    replay_us = at_us - us(rejoined.replay_s)
    fetch_us = replay_us - us(rejoined.fetch_s)
    rebuild_us = fetch_us - us(rejoined.rebuild_s)
    detect_us = rebuild_us - us(rejoined.detect_s)
    # an earlier fault, which hit another recovery, or a restart by torchrun has events
    # before the start of this recovery
    earlier = [noted for noted in found[:-1] if noted.at_us < detect_us]
    rest = _plain(walk, earlier, rest or PagePart.LOST) if earlier else rest
    if rest is None and finished is not None and finished == rejoined.iteration:
        walk.to(detect_us, PagePart.COMPUTE, finished)
    walk.to(detect_us, rest or PagePart.LOST)
    walk.to(rebuild_us, PagePart.DETECTION)
    walk.to(fetch_us, PagePart.REBUILD)
    walk.to(replay_us, PagePart.FETCH)
    done = [
        noted
        for noted in found[:-1]
        if isinstance(noted.event, StateResumed | StageRecovered)
    ]
    for noted in done:
        assert isinstance(noted.event, StateResumed | StageRecovered)
        walk.to(noted.at_us - us(noted.event.seconds), PagePart.WAITING)
        walk.to(
            noted.at_us,
            PagePart.FETCH
            if isinstance(noted.event, StateResumed)
            else PagePart.REPLAY,
        )
    walk.to(
        at_us,
        PagePart.REPLAY if rejoined.executed_iters and not done else PagePart.WAITING,
    )
