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
    last_event,
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
    paths = [run / "events" / f"rank{rank:04d}.jsonl" for rank in range(world_size)]
    return JobState(
        recovery=_recovery([_last(path, _OF_GENERATIONS) for path in paths]),
        without_copies=_without_copies(paths),
    )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks in words, such as `rank 3` or `ranks 0 to 3, 6`.

    Args:
        ranks: The ranks, ascending.
    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    named = [
        f"{span[0]} to {span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans
    ]
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(named)}"


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


def _without_copies(paths: Sequence[Path]) -> list[int] | None:
    if all(_last(path, _WITH_COPIES) is None for path in paths):
        return None
    kinds = _WITH_COPIES + _WITHOUT_COPIES
    return [
        rank
        for rank, path in enumerate(paths)
        if not isinstance(_last(path, kinds), _WITH_COPIES)
    ]


def _last(path: Path, kinds: Sequence[type[Event]]) -> Event | None:
    """Return a rank's last event of some kinds; None if it has none."""
    try:
        logged = last_event(path, [kind.__name__ for kind in kinds])
    except FileNotFoundError:
        return None
    return logged.event if logged else None
