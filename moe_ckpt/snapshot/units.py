"""Which snapshots together make the whole state of a rank at one version. Pure.

A version is an iteration, in an epoch: after a recovery from a partial checkpoint a new
epoch begins. The snapshots of a version are one of these:

    a window                 all slots of the window
    a partial checkpoint     each unit (an expert, or the core) of that iteration; if a
                             unit was not taken then, its last snapshot before, of the
                             same epoch

Units are found by name (MoC, section 5.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import IntEnum

from moe_ckpt.snapshot.codec import Snapshot
from moe_ckpt.types import CORE, Version


class StorageLevel(IntEnum):
    """Levels that store units, in the order of `UnitTag.taken_with`."""

    IN_MEMORY = 0
    ON_PEERS = 1
    ON_DISK = 2


def without_torn(snapshots: Sequence[Snapshot], level: StorageLevel) -> list[Snapshot]:
    """Return the units on a level, without cores whose snapshot is incomplete there.

    If a rank dies while it publishes a snapshot, only some units of the snapshot
    arrive. The other units on the level would be older than the core.

    Args:
        snapshots: Units on the level.
        level: The level.
    """
    # counted in a set: a unit that a folder holds twice must not stand in for a missing
    # unit
    numbers = Counter(
        version
        for version, _ in {
            (each.header.version, each.header.name) for each in snapshots
        }
    )
    return [
        each
        for each in snapshots
        if each.header.name != CORE
        or (
            each.header.unit
            and numbers[each.header.version] >= each.header.unit.taken_with[level]
        )
    ]


def compose(snapshots: Iterable[Snapshot], version: Version) -> tuple[Snapshot, ...]:
    """Return the snapshots that make a version.

    Returns:
        The snapshots, by slot or with the core first; an empty tuple if a snapshot is
        missing.
    """
    newest = _newest(snapshots, version)
    # only a core of exactly this version: shared parameters of two iterations do not
    # fit each other
    headers = (
        each.header for each in newest.values() if each.header.version == version
    )
    names = next(
        (header.complete_with for header in headers if header.complete_with), ()
    )
    return tuple(newest[name] for name in names) if newest.keys() >= set(names) else ()


def needed_for(snapshots: Sequence[Snapshot], version: Version) -> list[Snapshot]:
    """Return the snapshots that a version needs in own memory, on peers, and on disk.

    On each level these are the newest snapshots. Older units stay as long as any level
    needs them: ranks that recover from that level and ranks that do not must agree on
    the version of every unit.
    """
    on_peers = [
        each
        for each in snapshots
        if each.header.unit is None or each.header.unit.on_peers
    ]
    on_disk = [
        each
        for each in snapshots
        if each.header.unit is None or each.header.unit.on_disk
    ]
    return [
        each
        for there in (snapshots, on_peers, on_disk)
        for each in _newest(there, version).values()
    ]


def _newest(snapshots: Iterable[Snapshot], version: Version) -> dict[str, Snapshot]:
    """Return the newest snapshot of each name that can be part of a version.

    These are snapshots of the version itself, and older units of its epoch.
    """
    found: dict[str, Snapshot] = {}
    for each in sorted(snapshots, key=lambda each: each.header.iteration):
        header = each.header
        is_of_epoch = header.unit is not None and header.unit.epoch == version.epoch
        if header.version == version or (
            is_of_epoch and header.iteration <= version.iteration
        ):
            found[header.name] = each  # in place of an older one
    return found
