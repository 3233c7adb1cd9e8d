"""A plan to restore partial checkpoints: the version that all ranks load, and the place
of each unit. Pure.

The cores of all ranks are of one iteration, since parameters of different iterations do
not fit each other. Any other unit may be older, but all ranks that have a piece of it
take the same version. Recovery has two levels: a rank that has lost its memory takes
units from peers or disk, and only those units may be as old as their copies there (MoC,
section 5.1).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from moe_ckpt.types import CORE, Version

Units = Mapping[str, Collection[Version]]
"""Versions of each unit, by the unit's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitInventory:
    """The units of one rank by place, the nearest place first.

    `needed`: for each version of the core, the names of the units that the rank needs
    with it.
    """

    global_rank: int
    places: Mapping[str, Units]
    needed: Mapping[Version, frozenset[str]]

    def versions(self, name: str) -> frozenset[Version]:
        """Return the versions of a unit in all places."""
        return frozenset(
            version for units in self.places.values() for version in units.get(name, ())
        )

    def place_of(self, name: str, version: Version) -> str:
        """Return the nearest place that has a version of a unit."""
        return next(
            place
            for place, units in self.places.items()
            if version in units.get(name, ())
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRecovery:
    """All ranks go back to `version`.

    `units`: the version of each unit by name; `sources`: its place, by rank and name.
    """

    version: Version
    units: Mapping[str, Version]
    sources: Mapping[int, Mapping[str, str]]

    def lines(self) -> list[str]:
        """Return a readable description of the versions and their places."""
        old = {
            name: version
            for name, version in self.units.items()
            if version != self.version
        }
        places = sorted(
            {place for sources in self.sources.values() for place in sources.values()}
        )
        older = ""
        if old:
            oldest = min(old, key=lambda name: (old[name], name))
            older = (
                f"; {len(old)} of {len(self.units) - 1} experts are older, {oldest} is"
                f" of iteration {old[oldest]}"
            )
        return [
            f"all ranks go back to iteration {self.version}, from"
            f" {', '.join(places)}{older}"
        ]


def plan_units(inventories: Sequence[UnitInventory]) -> UnitRecovery | None:
    """Return the newest version that all ranks can load, or None. `inventories` are
    those of all ranks.

    Rank 0 has the core at 6 and 9 and expert 3 at 4 and 8. Rank 1 has lost its memory;
    its disk has the core at 6 and expert 3, of which both ranks have a piece, at 2 and
    4. All ranks go back to 6, with expert 3 at 4.
    """
    cores = frozenset[Version].intersection(
        *(inventory.versions(CORE) for inventory in inventories)
    )
    for version in sorted(cores, reverse=True):
        recovery = _at(version, inventories)
        if recovery is not None:
            return recovery
    return None


def newest_epoch(inventories: Sequence[UnitInventory]) -> int:
    """Return the highest epoch number among all versions, 0 if there are none."""
    lines = (
        version.epoch
        for inventory in inventories
        for units in inventory.places.values()
        for versions in units.values()
        for version in versions
    )
    return max(lines, default=0)


def _at(version: Version, inventories: Sequence[UnitInventory]) -> UnitRecovery | None:
    """Return the plan for a version whose core all ranks have; None if a unit that it
    needs has no common version.
    """
    units: dict[str, Version] = {}
    for name in sorted(
        {name for inventory in inventories for name in inventory.needed[version]}
    ):
        needing = [
            inventory for inventory in inventories if name in inventory.needed[version]
        ]
        common = frozenset[Version].intersection(
            *(inventory.versions(name) for inventory in needing)
        )
        fitting = [each for each in common if _fits(name, each, version)]
        # an older core may still do: the units that it needs need not be those of this
        # one
        if not fitting:
            return None
        # the newer an expert, the fewer of its tokens are lost
        units[name] = max(fitting)
    sources = {
        inventory.global_rank: {
            name: inventory.place_of(name, units[name])
            for name in sorted(inventory.needed[version])
        }
        for inventory in inventories
    }
    return UnitRecovery(version=version, units=units, sources=sources)


def _fits(name: str, unit: Version, core: Version) -> bool:
    if name == CORE:
        return unit == core
    # after a return an iteration runs again from another state: its units fit no core
    # of the epoch before
    return unit.epoch == core.epoch and unit.iteration <= core.iteration
