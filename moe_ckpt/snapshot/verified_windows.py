"""Checks that a window is whole, intact, and of this rank and run.

Owns: the check by which a start, a recovery and the last save find the windows that
they can use. Must not: choose among windows.

A recovery first checks its own windows by their headers, and then reads only the
payloads that the plan takes: reading 10 GB takes more than a second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from moe_ckpt.recovery.convert import SnapshotContents, plan_conversion
from moe_ckpt.recovery.inventory import WindowRef
from moe_ckpt.snapshot.codec import ShardIdentity, Snapshot, require_own, verify
from moe_ckpt.snapshot.gradient_log import reach_by_gradients
from moe_ckpt.snapshot.step_log import StepLog, reach_by_replay
from moe_ckpt.types import RunIdentity


def verified_window(
    snapshots: Sequence[Snapshot],
    identity: RunIdentity,
    shard: ShardIdentity,
    steps: StepLog,
    checksums: Mapping[int, int] | None,
    *,
    by_headers: bool = False,
) -> WindowRef | None:
    """Check a complete window, and return a reference to the window.

    The check reads and hashes all payloads, unless `by_headers`.

    Args:
        snapshots: Snapshots of the window, by slot.
        identity: Run that the window must belong to.
        shard: Rank that the window must belong to.
        steps: The rank's step log.
        checksums: The checksums of the rank's intact logged gradients, by iteration.
            None: replays lead on from the window, and no gradients.
        by_headers: Whether only headers are checked, and no payload is read.

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
    # raises for slots that make no whole window
    plan_conversion(contents, last, by_gradients=checksums is not None)
    reach = (
        reach_by_replay(steps, snapshots)
        if checksums is None
        else reach_by_gradients(steps, checksums, snapshots)
    )
    if reach is None or reach.last < last:
        return None
    return WindowRef(
        start=contents[0].window_start,
        num_slots=len(contents),
        replayable_to=reach.last,
        assignment=assignment_of(contents),
        branches=reach.branches,
    )


def assignment_of(slots: Sequence[SnapshotContents]) -> str:
    """Return an identifier of the assignment of operators to a window's slots.

    Args:
        slots: Contents of the slots, in order.
    """
    assigned = repr([(slot.full, slot.compute) for slot in slots])
    return hashlib.sha256(assigned.encode()).hexdigest()[:12]


def contents_of(snapshot: Snapshot) -> SnapshotContents:
    """Return the contents of a snapshot, according to its header."""
    header = snapshot.header
    return SnapshotContents(
        iteration=header.iteration,
        window_start=header.window_start,
        slot=header.slot,
        num_slots=header.num_slots,
        full=header.full,
        compute=header.compute,
    )
