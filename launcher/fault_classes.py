"""Counts the faults of a run by class, from the events of its ranks. Pure.

A fault that ended a generation is in the `Rejoined` events of all ranks and counts
once. Bad states are faults of which no process dies. An error counts as the end of the
job if no other worker followed on its rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from moe_ckpt.events import (
    CorruptionFound,
    Event,
    LossNotFinite,
    Rejoined,
    ReplayDiffered,
    StateLost,
    TrainingFailed,
    WorkerStarted,
    read_events,
)

EXPLAINED = {
    "signal": "a worker died of a signal",
    "hang": "a worker was killed because it gave no sign of life or made no progress",
    "exception": "a worker was replaced after an exception of its hardware",
    "node": "a node was lost, and a spare node has taken its ranks",
    "daemon": "a replica daemon died",
    "connection": "connections between ranks broke though no process died",
    "restart": "torchrun started ranks again",
    "state lost": "the state of a stage was overwritten in living processes",
    "bad loss": "a loss soon after a load was not finite",
    "bit flip": "a replay or an audit led to other bits than a rank's state had",
    "error": "an exception ended the job",
}
"""The meaning of each class, in the order of reports."""

_MARKING_EVENTS = (
    CorruptionFound,
    LossNotFinite,
    Rejoined,
    ReplayDiffered,
    StateLost,
    WorkerStarted,
    TrainingFailed,
)
_UNKNOWN = "unknown"  # class of deaths in logs of versions without classes


def count_faults(ranks: Iterable[Sequence[Event]]) -> dict[str, int]:
    """Return the number of faults of each class.

    Args:
        ranks: The events of each rank, in order.
    """
    logs = [
        [event for event in events if isinstance(event, _MARKING_EVENTS)]
        for events in ranks
    ]
    ends = [event for events in logs for event in events if isinstance(event, Rejoined)]
    # a set, because all ranks of a generation log the same deaths
    found = {each for event in ends for each in _deaths(event)}
    with_deaths = {
        (event.generation, event.iteration) for event in ends if event.deaths
    }
    for event in ends:
        at = (event.generation, event.iteration)
        if at not in with_deaths:
            found |= {(name, str(at)) for name in event.classes}
    found |= {each for events in logs for event in events for each in _bad_state(event)}
    last = (events[-1] for events in logs if events)
    found |= {
        ("error", f"{each.iteration} {each.error}")
        for each in last
        if isinstance(each, TrainingFailed)
    }
    counts = Counter(name for name, _ in found)
    return {name: counts[name] for name in (*EXPLAINED, _UNKNOWN) if counts[name]}


def count_faults_in(run: Path) -> dict[str, int]:
    """Return the number of faults of each class in a run folder."""
    names = {kind.__name__ for kind in _MARKING_EVENTS}
    files = sorted((run / "events").glob("rank*.jsonl"))
    return count_faults(
        [[logged.event for logged in read_events(path, only=names)] for path in files]
    )


def _deaths(event: Rejoined) -> list[tuple[str, str]]:
    classes = (
        event.classes
        if len(event.classes) == len(event.deaths)
        else [_UNKNOWN] * len(event.deaths)
    )
    return list(zip(classes, event.deaths, strict=True))


def _bad_state(event: Event) -> list[tuple[str, str]]:
    """Return the class and the identity of a fault of which no process dies.

    All ranks that see the fault log the same identity.
    """
    match event:
        case StateLost(iteration=iteration, phase=phase):
            return [("state lost", f"{iteration} {phase}")]
        case LossNotFinite(iteration=iteration, source=source):
            return [("bad loss", f"{iteration} {source}")]
        case ReplayDiffered(iteration=iteration) | CorruptionFound(iteration=iteration):
            return [("bit flip", str(iteration))]
        case _:
            return []
