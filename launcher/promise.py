"""What a run promised of its recoveries, as its events say."""

from __future__ import annotations

from pathlib import Path

from moe_ckpt.events import ModelBuilt, read_events


def read_exactness(run: Path) -> str | None:
    """Return `bitwise` or `state`, as the newest worker of rank 0 has it; None: no worker has built its model yet."""
    path = run / "events" / "rank0000.jsonl"
    built = [logged.event for logged in read_events(path, only=[ModelBuilt.__name__])] if path.exists() else []
    newest = built[-1] if built else None
    return newest.exactness if isinstance(newest, ModelBuilt) else None
