"""The promise under which a run recovers (`run.exactness`), from the run's events."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from moe_ckpt.events import Event, ModelBuilt, read_events


def exactness_of(events: Iterable[Event]) -> str | None:
    """Return the promise of the newest worker among events.

    Returns:
        `bitwise` or `state`; None if no worker has built its model.
    """
    newest = None
    for event in events:
        if isinstance(event, ModelBuilt):
            newest = event.exactness
    return newest


def read_exactness(run: Path) -> str | None:
    """Return the promise of a run's rank 0.

    Args:
        run: The run folder.

    Returns:
        `bitwise` or `state`; None if rank 0 has no events or has not built its model
        yet.
    """
    path = run / "events" / "rank0000.jsonl"
    if not path.exists():
        return None
    return exactness_of(
        logged.event for logged in read_events(path, only=[ModelBuilt.__name__])
    )
