"""The check that a window is whole, intact, and of this rank and run.

Owns: the check by which a start, a recovery and the last save decide what they can use.
Must not: choose among windows.

A recovery looks for its own windows by their headers, and reads the payloads of those
only that its plan takes: 10 GB take more than a second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from moe_ckpt.recovery.convert import SnapshotContents, plan_conversion
from moe_ckpt.recovery.inventory import WindowRef
from moe_ckpt.snapshot.codec import ShardIdentity, Snapshot, require_own, verify
from moe_ckpt.types import RunIdentity


def verified_window(
    snapshots: Sequence[Snapshot],
    identity: RunIdentity,
    shard: ShardIdentity,
    steps_to: int | None,
    *,
    by_headers: bool = False,
) -> WindowRef | None:
    """Return the reference of a complete window, after its payloads were read and
    hashed.

    Args:
        snapshots: The snapshots of the window, by slot.
        identity: The run.
        shard: The rank.
        steps_to: The last iteration to which steps lead; None: not even the start.
        by_headers: Whether headers alone are checked, and no payload is read.

    Returns:
        The reference; None if the steps do not reach the window's end.

    Raises:
        CheckpointLoadError: The window is damaged, incomplete, or of another run or
            shard.
    """
    check = require_own if by_headers else verify
    for snapshot in snapshots:
        check(snapshot, identity=identity, shard=shard)
    contents = [contents_of(snapshot) for snapshot in snapshots]
    last = contents[-1].iteration
    plan_conversion(contents, last)  # raises for slots that make no whole window
    if steps_to is None or steps_to < last:
        return None
    return WindowRef(
        start=contents[0].window_start,
        num_slots=len(contents),
        steps_to=steps_to,
        cut=cut_of(contents),
    )


def cut_of(slots: Sequence[SnapshotContents]) -> str:
    """Return the identity of the assignment of operators to a window's slots, in order."""
    assigned = repr([(slot.full, slot.compute) for slot in slots])
    return hashlib.sha256(assigned.encode()).hexdigest()[:12]


def contents_of(snapshot: Snapshot) -> SnapshotContents:
    """Return the contents of a snapshot, as its header names them."""
    header = snapshot.header
    return SnapshotContents(
        iteration=header.iteration,
        window_start=header.window_start,
        slot=header.slot,
        num_slots=header.num_slots,
        full=header.full,
        compute=header.compute,
    )
