"""Plan to restore partial checkpoints: the version to load, and the level of each unit.

Pure. The cores of all ranks are of one iteration, since parameters of different
iterations do not fit each other. Any other unit may be older, but all ranks that have a
piece of the unit take the same version. Recovery has two levels: a rank that has lost
its memory takes units from peers or disk, and only those units may be as old as their
copies there (MoC, section 5.1).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from moe_ckpt.types import CORE, Version

Units = Mapping[str, Collection[Version]]
"""Versions of each unit, by the unit's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitInventory:
    """Units of one rank."""

    global_rank: int
    """Rank in the job."""

    levels: Mapping[str, Units]
    """Units on each level, the nearest level first."""

    needed: Mapping[Version, frozenset[str]]
    """Names of the units that the rank needs with each version of the core."""

    def versions(self, name: str) -> frozenset[Version]:
        """Return the versions of a unit on all levels."""
        return frozenset(
            version for units in self.levels.values() for version in units.get(name, ())
        )

    def level_of(self, name: str, version: Version) -> str:
        """Return the nearest level that has a version of a unit."""
        return next(
            level
            for level, units in self.levels.items()
            if version in units.get(name, ())
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRecovery:
    """Units with which all ranks go back to one version."""

    version: Version
    """Version of the core on all ranks."""

    units: Mapping[str, Version]
    """Version of each unit, by name."""

    sources: Mapping[int, Mapping[str, str]]
    """Level of each unit, by rank and name."""

    def lines(self) -> list[str]:
        """Return a readable description of the versions and their levels."""
        old = {
            name: version
            for name, version in self.units.items()
            if version != self.version
        }
        levels = sorted(
            {level for sources in self.sources.values() for level in sources.values()}
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
            f" {', '.join(levels)}{older}"
        ]


def plan_units(inventories: Sequence[UnitInventory]) -> UnitRecovery | None:
    """Return the newest version that all ranks can load, or None.

    For example, rank 0 has the core at 6 and 9, and expert 3 at 4 and 8. Rank 1 has
    lost its memory; its disk has the core at 6, and expert 3 at 2 and 4. Both ranks
    have a piece of expert 3. All ranks go back to 6, with expert 3 at 4.

    Args:
        inventories: Units of all ranks.
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
    """Return the highest epoch among all versions; 0 if there are none."""
    lines = (
        version.epoch
        for inventory in inventories
        for units in inventory.levels.values()
        for versions in units.values()
        for version in versions
    )
    return max(lines, default=0)


def _at(version: Version, inventories: Sequence[UnitInventory]) -> UnitRecovery | None:
    """Return the plan for a version whose core all ranks have.

    None if a unit that the version needs has no common version.
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
        # an older core may still be possible: that core may need other units
        if not fitting:
            return None
        # the newer an expert, the fewer of the expert's tokens are lost
        units[name] = max(fitting)
    sources = {
        inventory.global_rank: {
            name: inventory.level_of(name, units[name])
            for name in sorted(inventory.needed[version])
        }
        for inventory in inventories
    }
    return UnitRecovery(version=version, units=units, sources=sources)


def _fits(name: str, unit: Version, core: Version) -> bool:
    if name == CORE:
        return unit == core
    # after a rollback an iteration runs again from another state: units of the new
    # epoch fit no core of the epoch before
    return unit.epoch == core.epoch and unit.iteration <= core.iteration
