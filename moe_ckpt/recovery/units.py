"""From what is left of partial checkpoints to a version that all ranks can have, and where each finds its units. Pure.

The core of all ranks is of one iteration, or parameters would not fit each other; any other unit may be older, but all
ranks that have a piece of it take the same version of it. Two levels: who has lost memory brings units from elsewhere,
and only these units are as old as they are there (MoC, section 5.1).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from moe_ckpt.types import CORE, Version

Units = Mapping[str, Collection[Version]]
"""By name: the versions that there are of a unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitInventory:
    """One rank's units by place, the nearest place first.

    `needed`: by version of the core, the names of the units that the rank needs with it.
    """

    global_rank: int
    places: Mapping[str, Units]
    needed: Mapping[Version, frozenset[str]]

    def versions(self, name: str) -> frozenset[Version]:
        """Return the versions of a unit that are in any place."""
        return frozenset(version for units in self.places.values() for version in units.get(name, ()))

    def place_of(self, name: str, version: Version) -> str:
        """Return the nearest place with a version of a unit."""
        return next(place for place, units in self.places.items() if version in units.get(name, ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRecovery:
    """All ranks go back to `version`. `units`: by name, which version; `sources`: by rank and name, from where."""

    version: Version
    units: Mapping[str, Version]
    sources: Mapping[int, Mapping[str, str]]

    def lines(self) -> list[str]:
        """Return for people what is loaded from where."""
        old = {name: version for name, version in self.units.items() if version != self.version}
        places = sorted({place for sources in self.sources.values() for place in sources.values()})
        older = ""
        if old:
            oldest = min(old, key=lambda name: (old[name], name))
            older = f"; {len(old)} of {len(self.units) - 1} experts are older, {oldest} is of iteration {old[oldest]}"
        return [f"all ranks go back to iteration {self.version}, from {', '.join(places)}{older}"]


def plan_units(inventories: Sequence[UnitInventory]) -> UnitRecovery | None:
    """Return the newest version that all ranks can have, or None. `inventories` are those of all ranks.

    Rank 0 has the core at 6 and 9 and expert 3 at 4 and 8; rank 1, whose memory is lost, has on disk the core at 6, and
    of expert 3, which both have a piece of, versions 2 and 4: all go back to 6, with expert 3 at 4.
    """
    cores = frozenset[Version].intersection(*(inventory.versions(CORE) for inventory in inventories))
    for version in sorted(cores, reverse=True):
        recovery = _at(version, inventories)
        if recovery is not None:
            return recovery
    return None


def newest_line(inventories: Sequence[UnitInventory]) -> int:
    """Return the highest number of a line of which there is anything, 0 for none."""
    lines = (
        version.lineage
        for inventory in inventories
        for units in inventory.places.values()
        for versions in units.values()
        for version in versions
    )
    return max(lines, default=0)


def _at(version: Version, inventories: Sequence[UnitInventory]) -> UnitRecovery | None:
    """Return how all ranks get to a version that all have a core of; None where a unit is nowhere to be had."""
    units: dict[str, Version] = {}
    for name in sorted({name for inventory in inventories for name in inventory.needed[version]}):
        needing = [inventory for inventory in inventories if name in inventory.needed[version]]
        common = frozenset[Version].intersection(*(inventory.versions(name) for inventory in needing))
        fitting = [each for each in common if _fits(name, each, version)]
        if not fitting:
            return None
        units[name] = max(fitting)
    sources = {
        inventory.global_rank: {
            name: inventory.place_of(name, units[name]) for name in sorted(inventory.needed[version])
        }
        for inventory in inventories
    }
    return UnitRecovery(version=version, units=units, sources=sources)


def _fits(name: str, unit: Version, core: Version) -> bool:
    if name == CORE:
        return unit == core
    return unit.lineage == core.lineage and unit.iteration <= core.iteration
