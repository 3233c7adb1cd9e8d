"""What the events of a run say about its ranks, on whatever machines the ranks are.

Workers on other machines cannot be looked at, but all ranks write events to the run
folder. Owns: two questions, each answered by the last events of every rank.

    which ranks does a recovery wait for?    GenerationEnded | WorkerStarted | Rejoined
    are all snapshots on peers?              the same, and events about copies

Events are facts of the past: a rank may have been lost since, without a trace. Must
not: look at processes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_ckpt.events import (
    CopiesRestored,
    Event,
    GenerationEnded,
    Rejoined,
    ServersChanged,
    StateResumed,
    WindowReplicated,
    WorkerStarted,
    last_events,
)

_OF_GENERATIONS = (GenerationEnded, Rejoined, WorkerStarted)
_WITH_COPIES = (CopiesRestored, WindowReplicated)
_WITHOUT_COPIES = (*_OF_GENERATIONS, ServersChanged, StateResumed)
"""After such an event, peers may lack copies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """A recovery in progress, according to the last events of all ranks."""

    left: list[int]
    """Ranks that have left the generation that ended, and have not gone on yet."""

    started: list[int]
    """Ranks with a new process that has not gone on yet."""

    missing: list[int]
    """All other ranks: lost, being replaced, or yet to notice the loss."""

    seconds: float
    """Time since the first rank left the generation, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """The state of a job, according to the last events of all ranks."""

    recovery: Recovery | None
    """The recovery in progress; None: no rank is in one."""

    without_copies: list[int] | None
    """Ranks whose snapshots are not all on peers since the last start or loss.

    None: no rank has ever had copies on peers.
    """


def read_job_state(run: Path, world_size: int) -> JobState:
    """Return the state of a job.

    Args:
        run: The run folder.
        world_size: The number of ranks.
    """
    choices = _OF_GENERATIONS, _WITH_COPIES, _WITH_COPIES + _WITHOUT_COPIES
    paths = [run / "events" / f"rank{rank:04d}.jsonl" for rank in range(world_size)]
    of_ranks = [_last(path, choices) for path in paths]
    of_generations, with_copies, of_copies = zip(*of_ranks, strict=True)
    return JobState(
        recovery=_recovery(of_generations),
        without_copies=_without_copies(with_copies, of_copies),
    )


def _recovery(last: Sequence[Event | None]) -> Recovery | None:
    left = {
        rank: event.left_unix_s
        for rank, event in enumerate(last)
        if isinstance(event, GenerationEnded)
    }
    if not left:
        return None
    started = [
        rank
        for rank, event in enumerate(last)
        # the first worker of a rank was in the generation that ended
        if isinstance(event, WorkerStarted) and event.incarnation > 0
    ]
    return Recovery(
        left=list(left),
        started=started,
        missing=sorted(set(range(len(last))).difference(left, started)),
        seconds=max(0.0, time.time() - min(left.values())),
    )


def _without_copies(
    with_copies: Sequence[Event | None], last: Sequence[Event | None]
) -> list[int] | None:
    """Return the ranks without copies.

    Args:
        with_copies: Each rank's last event after which peers have its copies.
        last: The same, or a later event after which peers may lack copies.
    """
    if all(event is None for event in with_copies):
        return None
    return [
        rank for rank, event in enumerate(last) if not isinstance(event, _WITH_COPIES)
    ]


def _last(path: Path, choices: Sequence[Sequence[type[Event]]]) -> list[Event | None]:
    """Return a rank's last event of each choice of kinds; None for no event."""
    names = [[kind.__name__ for kind in kinds] for kinds in choices]
    try:
        logged = last_events(path, *names)
    except FileNotFoundError:
        return [None for _ in choices]
    return [each.event if each else None for each in logged]
