"""The version to which all ranks go back, and the version of every unit.

Each is the newest version that all ranks which need the unit can have.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.recovery.units import UnitInventory, newest_epoch, plan_units
from moe_ckpt.types import CORE, Version

Units = Mapping[str, Collection[Version]]
VERSIONS = [
    Version(epoch=epoch, iteration=iteration)
    for epoch in range(2)
    for iteration in range(4)
]
LEVELS = ("memory", "disk")


def at(iteration: int, epoch: int = 0) -> Version:
    return Version(epoch=epoch, iteration=iteration)


def rank(
    number: int, memory: Units, disk: Units, names: Collection[str]
) -> UnitInventory:
    """Return a rank that needs these units with each core that the rank has."""
    needed = dict.fromkeys(
        [*memory.get(CORE, ()), *disk.get(CORE, ())], frozenset({CORE, *names})
    )
    return UnitInventory(
        global_rank=number, levels={"memory": memory, "disk": disk}, needed=needed
    )


def test_pieces_of_one_expert_are_of_one_version() -> None:
    on_disk = {CORE: [at(6)], "e": [at(2), at(4)]}
    ranks = [
        rank(
            0,
            {CORE: [at(6), at(9)], "e": [at(4), at(8)]},
            {CORE: [at(6)], "e": [at(4)]},
            ["e"],
        ),
        rank(1, {}, on_disk, ["e"]),
    ]
    plan = plan_units(ranks)
    assert plan is not None
    assert (plan.version, plan.units) == (at(6), {CORE: at(6), "e": at(4)})
    assert plan.sources == {
        0: {CORE: "memory", "e": "memory"},
        1: {CORE: "disk", "e": "disk"},
    }
    assert plan.lines() == [
        "all ranks go back to iteration 6, from disk, memory; 1 of 1 experts are older,"
        " e is of iteration 4"
    ]


def versions() -> st.SearchStrategy[list[Version]]:
    return st.lists(st.sampled_from(VERSIONS), max_size=6)


UNITS = st.fixed_dictionaries(
    {CORE: versions()}, optional={"a": versions(), "b": versions()}
)
RANKS = st.lists(
    st.tuples(UNITS, UNITS, st.sets(st.sampled_from("ab"))), min_size=1, max_size=3
)


@given(drawn=RANKS)
def test_a_plan_is_right_and_the_newest(
    drawn: list[tuple[Units, Units, set[str]]],
) -> None:
    ranks = [rank(number, *levels) for number, levels in enumerate(drawn)]
    found = [
        version
        for each in ranks
        for units in each.levels.values()
        for told in units.values()
        for version in told
    ]
    assert newest_epoch(ranks) == max((version.epoch for version in found), default=0)
    plan, possible = (
        plan_units(ranks),
        [version for version in VERSIONS if units_at(ranks, version) is not None],
    )
    if plan is None:
        assert not possible
        return
    assert (plan.version, plan.units) == (max(possible), units_at(ranks, max(possible)))
    for each in ranks:
        nearest = {
            name: next(
                level
                for level in LEVELS
                if plan.units[name] in each.levels[level].get(name, ())
            )
            for name in each.needed[plan.version]
        }
        assert plan.sources[each.global_rank] == nearest


def units_at(ranks: list[UnitInventory], core: Version) -> dict[str, Version] | None:
    """Return the newest version of each unit that goes with a core, by trying all.

    Returns None if a unit or the core is missing.
    """
    if any(core not in each.versions(CORE) for each in ranks):
        return None
    units = {}
    for name in {name for each in ranks for name in each.needed[core]}:
        needing = [each for each in ranks if name in each.needed[core]]
        candidates = (
            [core]
            if name == CORE
            else [old for old in VERSIONS if old.epoch == core.epoch and old <= core]
        )
        common = [
            old
            for old in candidates
            if all(old in each.versions(name) for each in needing)
        ]
        if not common:
            return None
        units[name] = max(common)
    return units
