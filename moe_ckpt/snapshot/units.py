"""The snapshots that make one version of a rank's state: the slots of a sparse window,
or the units of a checkpoint.

Pure. A sparse window is whole by itself. A checkpoint of a version has each unit of
that iteration or, if it was not taken then, its last snapshot before, in the same
epoch. MoC, section 5.1: modules are stored and found by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import IntEnum

from moe_ckpt.snapshot.codec import Snapshot
from moe_ckpt.types import CORE, Version


class StorageLevel(IntEnum):
    """The levels that store units, in the order of `UnitTag.taken_with`."""

    IN_MEMORY = 0
    ON_PEERS = 1
    ON_DISK = 2


def without_torn(snapshots: Sequence[Snapshot], place: StorageLevel) -> list[Snapshot]:
    """Return the units on a level without cores whose snapshot never arrived there
    completely.

    A rank that dies while it publishes a snapshot leaves only some of its units: the
    others would be older than their core.
    """
    # of a set: a unit that a folder holds twice must not stand in for one that is
    # missing
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
            and numbers[each.header.version] >= each.header.unit.taken_with[place]
        )
    ]


def compose(snapshots: Iterable[Snapshot], version: Version) -> tuple[Snapshot, ...]:
    """Return the snapshots that make a version, by slot or with the core first; an
    empty tuple if one is missing.
    """
    newest = _newest(snapshots, version)
    # a core of this very version: shared parameters of two iterations do not fit each
    # other
    headers = (
        each.header for each in newest.values() if each.header.version == version
    )
    names = next(
        (header.complete_with for header in headers if header.complete_with), ()
    )
    return tuple(newest[name] for name in names) if newest.keys() >= set(names) else ()


def needed_for(snapshots: Sequence[Snapshot], version: Version) -> list[Snapshot]:
    """Return the snapshots that a version needs in own memory, on peers, and on disk:
    the newest on each level.

    Older units stay for as long as any level needs them: ranks that recover from there
    and ranks that do not must agree on the version of every unit.
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
    """Return by name the newest snapshots that can be part of a version: its own, and
    older units of its epoch.
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
