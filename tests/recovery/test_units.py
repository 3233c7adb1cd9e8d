"""Which version all ranks go back to, and which version of every unit: the newest that all who need it can have."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.recovery.units import UnitInventory, newest_line, plan_units
from moe_ckpt.types import CORE, Version

Told = Mapping[str, Mapping[str, list[int]]]


def at(iteration: int, lineage: int = 0) -> Version:
    return Version(lineage=lineage, iteration=iteration)


def rank(number: int, places: Told, *, lineage: int = 0, needed: tuple[str, ...] = ()) -> UnitInventory:
    """A rank with units in places; it needs what it has anything of, and `needed`."""
    units = {
        place: {name: [at(each, lineage) for each in iterations] for name, iterations in told.items()}
        for place, told in places.items()
    }
    names = frozenset(name for told in places.values() for name in told) | {CORE, *needed}
    cores = {version for told in units.values() for version in told.get(CORE, ())}
    return UnitInventory(global_rank=number, places=units, needed=dict.fromkeys(cores, names))


def test_all_go_back_to_the_newest_core_that_all_have() -> None:
    ranks = [
        rank(0, {"memory": {CORE: [6, 9], "a": [8]}}),
        rank(1, {"memory": {CORE: [6, 9], "b": [9, 3]}}),
    ]
    plan = plan_units(ranks)
    assert plan is not None
    assert plan.version == at(9)
    assert plan.units == {CORE: at(9), "a": at(8), "b": at(9)}
    assert plan.sources == {0: {CORE: "memory", "a": "memory"}, 1: {CORE: "memory", "b": "memory"}}


def test_pieces_of_one_expert_are_of_one_version() -> None:
    ranks = [
        rank(0, {"memory": {CORE: [6, 9], "e": [4, 8]}, "disk": {CORE: [6], "e": [4]}}),
        rank(1, {"memory": {}, "disk": {CORE: [6], "e": [2, 4]}}),
    ]
    plan = plan_units(ranks)
    assert plan is not None
    assert (plan.version, plan.units["e"]) == (at(6), at(4))
    assert plan.sources == {0: {CORE: "memory", "e": "memory"}, 1: {CORE: "disk", "e": "disk"}}
    assert plan.lines() == [
        "all ranks go back to iteration 6, from disk, memory; 1 of 1 experts are older, e is of iteration 4"
    ]


def test_who_has_lost_nothing_keeps_newer_experts_than_the_disk_has() -> None:
    ranks = [
        rank(0, {"memory": {CORE: [6, 9], "a": [5, 9]}, "disk": {CORE: [6], "a": [2]}}),
        rank(1, {"memory": {}, "disk": {CORE: [6], "b": [3]}}),
    ]
    plan = plan_units(ranks)
    assert plan is not None
    assert plan.units == {CORE: at(6), "a": at(5), "b": at(3)}
    assert plan.sources[0] == {CORE: "memory", "a": "memory"}


def test_no_unit_is_newer_than_the_core() -> None:
    plan = plan_units([rank(0, {"memory": {CORE: [6], "a": [5, 7]}})])
    assert plan is not None
    assert plan.units["a"] == at(5)


def test_a_core_without_all_its_units_is_passed_over() -> None:
    ranks = [rank(0, {"memory": {CORE: [6, 9], "a": [7, 9]}}), rank(1, {"memory": {CORE: [6, 9], "a": [4, 7]}})]
    plan = plan_units(ranks)
    assert plan is not None
    assert plan.units == {CORE: at(9), "a": at(7)}
    assert plan_units([rank(0, {"memory": {CORE: [6], "a": [7]}})]) is None
    assert plan_units([rank(0, {"memory": {CORE: [6]}}, needed=("a",))]) is None


def test_lines_are_not_mixed() -> None:
    old, new = {CORE: [6], "a": [5]}, {CORE: [4], "a": [4]}
    both = [
        UnitInventory(
            global_rank=number,
            places={"memory": {name: [at(old[name][0]), *([at(new[name][0], 1)] if has_new else [])] for name in old}},
            needed={at(6): frozenset(old), at(4, 1): frozenset(new)},
        )
        for number, has_new in ((0, True), (1, False))
    ]
    assert newest_line(both) == 1
    for ranks, version, unit in ((both[:1], at(4, 1), at(4, 1)), (both, at(6), at(5))):
        plan = plan_units(ranks)
        assert plan is not None
        assert (plan.version, plan.units["a"]) == (version, unit)


def test_a_unit_of_an_older_line_does_not_complete_a_newer_core() -> None:
    places, names = {"memory": {CORE: [at(6), at(4, 1)], "a": [at(3)]}}, frozenset({CORE, "a"})
    plan = plan_units([UnitInventory(global_rank=0, places=places, needed={at(6): names, at(4, 1): names})])
    assert plan is not None
    assert plan.units == {CORE: at(6), "a": at(3)}


def test_where_nothing_is_common_there_is_no_plan() -> None:
    assert plan_units([rank(0, {"memory": {CORE: [6]}}), rank(1, {"memory": {CORE: [9]}})]) is None
    assert plan_units([rank(0, {}), rank(1, {})]) is None
    assert newest_line([rank(0, {})]) == 0


VERSIONS = st.lists(st.integers(0, 5), max_size=4)
UNITS = st.fixed_dictionaries({CORE: VERSIONS}, optional={"a": VERSIONS, "b": VERSIONS})
RANKS = st.lists(st.fixed_dictionaries({"memory": UNITS, "disk": UNITS}), min_size=1, max_size=3)


@given(told=RANKS)
def test_a_plan_is_right_and_the_newest(told: list[Told]) -> None:
    ranks = [rank(number, places) for number, places in enumerate(told)]
    plan = plan_units(ranks)
    possible = [iteration for iteration in range(6) if _is_possible(ranks, iteration)]
    assert (None if plan is None else plan.version.iteration) == max(possible, default=None)
    if plan is None:
        return
    for each in ranks:
        for name, place in plan.sources[each.global_rank].items():
            assert plan.units[name] in each.places[place][name]
            assert plan.units[name] <= plan.version
            assert name != CORE or plan.units[name] == plan.version


def _is_possible(ranks: list[UnitInventory], iteration: int) -> bool:
    """By trying: every version of every unit."""
    if any(at(iteration) not in each.versions(CORE) for each in ranks):
        return False
    names = {name for each in ranks for name in each.needed[at(iteration)]} - {CORE}
    return all(
        any(
            all(at(old) in each.versions(name) for each in ranks if name in each.needed[at(iteration)])
            for old in range(iteration + 1)
        )
        for name in names
    )
