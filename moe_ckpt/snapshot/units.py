"""The partial checkpoints of one rank in host memory: the newest snapshot of every unit, and older ones.

Owns: the units of each checkpoint, and the time at which a buffer is free again. Must not: look into payloads, copy, or
communicate. MoC, section 5.1: modules are stored and found by name.

A checkpoint of a version has each unit of that iteration or, if it was not taken then, its last snapshot before, in the
same epoch. Versions on peers or disks stay in memory for as long as these levels need them: ranks that recover from
there and ranks that do not must agree on the version of every unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from moe_ckpt.snapshot.codec import Snapshot
from moe_ckpt.snapshot.windows import BYTES_OF_ROLE, HostBuffers, SnapshotPublisher, Window, WindowState
from moe_ckpt.types import CORE, Version


class StorageLevel(IntEnum):
    """The levels that store units, in the order of `UnitTag.taken_with`."""

    IN_MEMORY = 0
    ON_PEERS = 1
    ON_DISK = 2


@dataclass(kw_only=True, slots=True)
class _Flight:
    """A snapshot of `num_units` units that is being taken."""

    version: Version
    num_units: int
    taken: list[Snapshot] = field(default_factory=list)


class UnitMemory:
    """Implements `snapshot.windows.Memory` for snapshots that are tagged as units; for one thread.

    An added snapshot belongs to the memory. Once no checkpoint needs it, the memory tells `daemon` to drop it, and
    releases its buffer.
    """

    def __init__(self, buffers: HostBuffers, daemon: SnapshotPublisher | None = None) -> None:
        self._buffers = buffers
        self._daemon = daemon
        self._flight: _Flight | None = None
        self._kept: list[Snapshot] = []
        self._needed: set[Version] = set()

    def begin(self, version: Version, num_units: int) -> None:
        """Start a snapshot; one that is still in flight is dropped."""
        self.abandon()
        self._flight = _Flight(version=version, num_units=num_units)

    def add(self, snapshot: Snapshot) -> None:
        """Add a finished unit to the snapshot in flight."""
        flight = self._flight
        assert flight is not None, f"{snapshot.header}: nothing is in flight"
        assert snapshot.header.version == flight.version, f"{snapshot.header}: in flight is {flight.version}"
        flight.taken.append(snapshot)

    def in_flight(self) -> Window | None:
        """Return the units of the snapshot in flight so far."""
        flight = self._flight
        return None if flight is None else _window(flight.version, flight.taken, flight.num_units)

    def windows(self) -> list[Window]:
        """Return the stored checkpoints, each with its own and its older units, the newest first."""
        complete = (_window(version, self.checkpoint(version)) for version in sorted(self._needed, reverse=True))
        return [window for window in complete if window.snapshots]

    def snapshots(self) -> list[Snapshot]:
        """Return all units in all versions."""
        return [*self._kept, *(self._flight.taken if self._flight else [])]

    def checkpoint(self, version: Version) -> tuple[Snapshot, ...]:
        """Return the units of a checkpoint; an empty tuple if it is not complete here."""
        return compose(self._kept, version)

    def confirm(self, also: Collection[Version] = ()) -> None:
        """All ranks and their peers have the snapshot in flight: keep its checkpoint, and those of versions on disk."""
        flight = self._flight
        assert flight is not None, "nothing is in flight"
        assert len(flight.taken) == flight.num_units, flight
        self._needed = {flight.version, *also}
        self._land()

    def keep_complete(self) -> None:
        """Keep the snapshot in flight beside the others if it is complete: other ranks may have confirmed it."""
        flight = self._flight
        if flight is None or len(flight.taken) < flight.num_units:
            self.abandon()
            return
        self._needed |= {flight.version}
        self._land()

    def abandon(self) -> None:
        """Drop the snapshot in flight, if there is one."""
        flight, self._flight = self._flight, None
        self._release(flight.taken if flight else [])

    def adopt(self, snapshots: Sequence[Snapshot]) -> None:
        """Take over the snapshots of an earlier process."""
        assert not self._kept, self._kept
        for snapshot in snapshots:
            self._buffers.adopt(snapshot.payload)
        self._kept = list(snapshots)
        whole = without_torn(snapshots, StorageLevel.IN_MEMORY)
        self._needed = {snapshot.header.version for snapshot in whole if name_of(snapshot) == CORE}

    def clear(self) -> None:
        """Drop all snapshots."""
        self.abandon()
        gone, self._kept = self._kept, []
        self._needed.clear()
        self._release(gone)

    def oldest_needed_iteration(self) -> int | None:
        """Return the start of the oldest checkpoint; None without checkpoints."""
        return min((version.iteration for version in self._needed), default=None)

    def bytes_by_role(self) -> dict[str, int]:
        """Return the bytes of optimizer state, of compute weights, and of buffers."""
        totals = dict.fromkeys(BYTES_OF_ROLE.values(), 0)
        for snapshot in self.snapshots():
            for part in snapshot.header.parts:
                totals[BYTES_OF_ROLE[part.key.role]] += part.nbytes
        return totals

    def _land(self) -> None:
        """Keep the snapshot that was in flight; drop versions that no level needs."""
        assert self._flight is not None
        held = [*self._kept, *self._flight.taken]
        self._flight = None
        needed = {id(snapshot) for version in self._needed for snapshot in _needed_for(held, version)}
        self._kept = [snapshot for snapshot in held if id(snapshot) in needed]
        self._release(snapshot for snapshot in held if id(snapshot) not in needed)

    def _release(self, gone: Iterable[Snapshot]) -> None:
        for snapshot in gone:
            if self._daemon:
                self._daemon.drop_snapshot(snapshot)
            self._buffers.release(snapshot.payload)


def name_of(snapshot: Snapshot) -> str:
    """Return the name of a snapshot's unit."""
    assert snapshot.header.unit is not None, snapshot.header
    return snapshot.header.unit.name


def without_torn(snapshots: Sequence[Snapshot], place: StorageLevel) -> list[Snapshot]:
    """Return the snapshots on a level without cores whose snapshot never arrived there completely.

    A rank that dies while it publishes a snapshot leaves only some of its units: the others would be older than their
    core.
    """
    found = {(snapshot.header.version, name_of(snapshot)) for snapshot in snapshots}
    numbers = Counter(version for version, _ in found)
    return [
        snapshot
        for snapshot in snapshots
        if name_of(snapshot) != CORE or numbers[snapshot.header.version] >= _told(snapshot, place)
    ]


def compose(snapshots: Iterable[Snapshot], version: Version) -> tuple[Snapshot, ...]:
    """Return the units of a version's checkpoint; an empty tuple if one is missing."""
    newest = _newest(snapshots, version)
    core = newest.get(CORE)
    if core is None or core.header.version != version or core.header.unit is None:
        return ()
    names = core.header.unit.complete_with
    return tuple(newest[name] for name in names) if newest.keys() >= set(names) else ()


def _told(core: Snapshot, place: StorageLevel) -> int:
    """Return the number of units of the core's snapshot that belong on a level."""
    assert core.header.unit is not None, core.header
    return core.header.unit.taken_with[place]


def _needed_for(snapshots: Sequence[Snapshot], version: Version) -> list[Snapshot]:
    """Return the snapshots that a checkpoint needs in own memory, on peers, and on disk: the newest on each level."""
    places: list[Callable[[Snapshot], bool]] = [
        lambda _: True,
        lambda snapshot: snapshot.header.unit is not None and snapshot.header.unit.on_peers,
        lambda snapshot: snapshot.header.unit is not None and snapshot.header.unit.on_disk,
    ]
    return [unit for is_there in places for unit in _newest(filter(is_there, snapshots), version).values()]


def _newest(snapshots: Iterable[Snapshot], version: Version) -> dict[str, Snapshot]:
    """Return the newest snapshot of each unit in a version's epoch, up to its iteration."""
    fitting = [
        snapshot
        for snapshot in snapshots
        if snapshot.header.version.lineage == version.lineage and snapshot.header.iteration <= version.iteration
    ]
    return {name_of(snapshot): snapshot for snapshot in sorted(fitting, key=lambda snapshot: snapshot.header.iteration)}


def _window(version: Version, snapshots: Sequence[Snapshot], num_units: int | None = None) -> Window:
    number = len(snapshots) if num_units is None else num_units
    state = WindowState.PERSISTED if num_units is None else WindowState.IN_FLIGHT
    return Window(start=version.iteration, num_slots=number, state=state, snapshots=tuple(snapshots))
