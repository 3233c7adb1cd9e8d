"""The files that every run leaves in its run folder, whichever loop trains."""

from __future__ import annotations

import itertools
from pathlib import Path

from moe_ckpt.events import read_events

EVENTS_OF_EVERY_RUN = {
    "WorkerStarted",
    "ModelBuilt",
    "IterationCommitted",
    "RunFinished",
}
"""Events that reports and the status command need."""

EVENTS_OF_A_KILLED_RUN = EVENTS_OF_EVERY_RUN | {
    "WindowChosen",
    "SnapshotTaken",
    "GenerationEnded",
    "Rejoined",
}
"""Events of a run with `ckpt=moevement` that has lost a rank."""

RESULT_KEYS = {
    "iteration",
    "loss",
    "wall_s",
    "faults_survived",
    "digest",
    "digest_per_rank",
    "exactness",
}
"""Entries of result.json; the launcher adds `eval_loss`."""


def kinds_of_events(run: Path, world_size: int) -> set[str]:
    """Return the kinds of events that the ranks of a run have written."""
    ranks = [
        read_events(run / "events" / f"rank{rank:04d}.jsonl")
        for rank in range(world_size)
    ]
    return {type(logged.event).__name__ for logged in itertools.chain(*ranks)}
