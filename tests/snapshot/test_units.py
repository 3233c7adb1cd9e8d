"""Units in host memory: checkpoints from units, needed units, and free buffers.

Peers and disks may need older units than own memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.snapshot.adam_update import Gradients
from moe_ckpt.snapshot.codec import Snapshot, UnitTag
from moe_ckpt.snapshot.units import StorageLevel, compose, needed_for, without_torn
from moe_ckpt.snapshot.windows import HostBuffers, SnapshotMemory, Window
from moe_ckpt.types import CORE, Version
from tests.snapshot.samples import HEADER, pool, snapshot_of, starts_of

NAMES = (CORE, "a", "b", "c")


def unit(
    name: str,
    iteration: int,
    *,
    epoch: int = 0,
    levels: str = "",
    payload: torch.Tensor | None = None,
    taken_with: tuple[int, int, int] = (1, 0, 0),
) -> Snapshot:
    """Return a snapshot of a unit.

    Args:
        name: The name of the unit.
        iteration: The iteration after which the snapshot was taken.
        epoch: The epoch of the run.
        levels: The levels that keep the snapshot beside own memory: p for peers, d for
            disk.
        payload: The payload; None: new memory of 8 bytes.
        taken_with: The `UnitTag.taken_with` of a core.
    """
    tag = UnitTag(
        name=name,
        epoch=epoch,
        on_peers="p" in levels,
        on_disk="d" in levels,
        seen_tokens=iteration,
        complete_with=NAMES if name == CORE else (),
        taken_with=taken_with if name == CORE else (0, 0, 0),
    )
    header = replace(
        HEADER,
        iteration=iteration,
        window_start=iteration,
        slot=0,
        num_slots=1,
        full=(name,),
        unit=tag,
    )
    return Snapshot(
        header=header,
        payload=torch.empty(8, dtype=torch.uint8) if payload is None else payload,
    )


def test_a_whole_state_has_neither_slots_nor_units() -> None:
    """A rank without experts has a checkpoint of one unit."""
    whole = Window(
        version=Version(epoch=0, iteration=5),
        num_snapshots=1,
        snapshots=(snapshot_of(pool(), (5, 0, 1)),),
    )
    assert whole.is_whole_state
    assert not replace(whole, snapshots=()).is_whole_state
    assert not replace(whole, snapshots=(unit(CORE, 5),)).is_whole_state
    slots = tuple(snapshot_of(pool(), (5, slot, 2)) for slot in range(2))
    assert not replace(whole, num_snapshots=2, snapshots=slots).is_whole_state


@dataclass(kw_only=True)
class Rank:
    """A rank's memory with its buffers; the rank is also the memory's daemon."""

    buffers: HostBuffers = field(default_factory=pool)
    """Buffers of the payloads."""

    dropped: list[str] = field(default_factory=list)
    """Snapshots that the memory has dropped, as text, in order."""

    def __post_init__(self) -> None:
        self.memory = SnapshotMemory(self.buffers, 1, self)

    def add_snapshot(
        self, snapshot: Snapshot, gradients: Gradients | None = None
    ) -> None:
        raise AssertionError("the engine adds")

    def drop_snapshots(self, snapshots: Iterable[Snapshot]) -> None:
        self.dropped += map(said, snapshots)

    def begin(self, iteration: int, units: dict[str, str], *, epoch: int = 0) -> None:
        """Begin a window, and take units.

        Args:
            iteration: The start of the window.
            units: The levels that keep each unit, by name of the unit, as in `unit`.
            epoch: The epoch of the run.
        """
        self.memory.begin(at(iteration, epoch), len(units))
        for name, levels in units.items():
            payload = self.buffers.acquire(8)
            self.memory.add(
                unit(name, iteration, epoch=epoch, levels=levels, payload=payload)
            )

    def take(self, iteration: int, units: dict[str, str], *, epoch: int = 0) -> None:
        self.begin(iteration, units, epoch=epoch)
        self.memory.keep_in_flight()

    def base(self, iteration: int = 0, *, epoch: int = 0) -> None:
        self.take(iteration, dict.fromkeys(NAMES, "pd"), epoch=epoch)

    def kept(self) -> set[str]:
        return all_said(self.memory.snapshots())

    def composed(self, iteration: int, epoch: int = 0) -> set[str]:
        return all_said(compose(self.memory.snapshots(), at(iteration, epoch)))


@pytest.fixture
def rank() -> Rank:
    rank = Rank()
    rank.base()
    return rank


def said(snapshot: Snapshot) -> str:
    return f"{snapshot.header.name}@{snapshot.header.iteration}"


def all_said(snapshots: Iterable[Snapshot]) -> set[str]:
    return {said(snapshot) for snapshot in snapshots}


def at(iteration: int, epoch: int = 0) -> Version:
    return Version(epoch=epoch, iteration=iteration)


def test_the_checkpoint_on_disk_stays_whole_in_memory(rank: Rank) -> None:
    for iteration in (1, 2, 3):
        rank.begin(iteration, {CORE: "d" if iteration == 2 else "", "a": ""})
        rank.memory.keep_in_flight(also=[at(2)] if iteration == 3 else [])
    assert rank.composed(2) == {"core@2", "a@2", "b@0", "c@0"}
    assert rank.composed(3) == {"core@3", "a@3", "b@0", "c@0"}


def test_an_unfinished_snapshot_makes_no_checkpoint(rank: Rank) -> None:
    rank.memory.begin(at(1), 2)
    rank.memory.add(unit(CORE, 1, payload=rank.buffers.acquire(8)))
    rank.memory.keep_complete()
    assert (rank.memory.in_flight(), rank.dropped, starts_of(rank.memory)) == (
        None,
        ["core@1"],
        [0],
    )


def test_a_complete_snapshot_is_kept_beside_the_one_before_until_the_next(
    rank: Rank,
) -> None:
    rank.begin(1, {CORE: "", "a": ""})
    rank.memory.keep_complete()
    assert starts_of(rank.memory) == [1, 0]
    rank.base(2)
    assert starts_of(rank.memory) == [2]


def test_a_unit_of_the_version_that_is_missing_makes_no_checkpoint() -> None:
    assert all_said(compose(FIRST, at(0))) == {"core@0", "a@0", "b@0", "c@0"}
    for missing in FIRST:
        assert compose([each for each in FIRST if each is not missing], at(0)) == ()


def test_an_older_slot_does_not_stand_in_for_a_missing_one() -> None:
    (first, second), (third, fourth) = (
        [snapshot_of(pool(), (start, slot, 2)) for slot in range(2)] for start in (1, 3)
    )
    assert compose([fourth, third, second, first], at(3)) == (third, fourth)
    assert compose([first, second, third], at(3)) == ()
    assert {id(each) for each in needed_for([first, second, third], at(3))} == {
        id(third)
    }


FIRST = [unit(name, 0) for name in NAMES]
TAKEN_WITH = (3, 2, 1)


@pytest.mark.parametrize("level", StorageLevel)
def test_a_core_of_which_the_snapshot_is_torn_does_not_count(
    level: StorageLevel,
) -> None:
    torn = [unit(CORE, 1, taken_with=TAKEN_WITH), unit("a", 1), unit("b", 1)]
    for number in range(1, 4):
        counts = number >= TAKEN_WITH[level]
        wanted = [*FIRST, *torn[0 if counts else 1 : number]]
        assert all_said(without_torn([*FIRST, *torn[:number]], level)) == all_said(
            wanted
        )


def test_a_unit_that_is_there_twice_does_not_stand_for_another() -> None:
    torn = [unit(CORE, 1, taken_with=TAKEN_WITH), unit("a", 1), unit("a", 1)]
    assert [said(each) for each in without_torn(torn, StorageLevel.IN_MEMORY)] == [
        "a@1",
        "a@1",
    ]


def test_a_snapshot_that_an_earlier_process_tore_is_given_up() -> None:
    rank = Rank()
    rank.memory.adopt([*FIRST, unit(CORE, 1, taken_with=TAKEN_WITH)])
    assert starts_of(rank.memory) == [0]


LEVELS = st.sampled_from(["", "p", "d", "pd"])


@given(
    st.lists(
        st.tuples(LEVELS, st.dictionaries(st.sampled_from(NAMES[1:]), LEVELS)),
        max_size=12,
    )
)
def test_each_level_can_make_a_checkpoint_and_nothing_else_is_kept(
    snapshots: list[tuple[str, dict[str, str]]],
) -> None:
    rank, taken = (
        Rank(),
        {name: {level: [0] for level in ("", "p", "d")} for name in NAMES},
    )
    rank.base()
    for iteration, (levels, others) in enumerate(snapshots, start=1):
        units = {CORE: levels, **others}
        rank.take(iteration, units)
        for name, where in units.items():
            for level in ("", *where):
                taken[name][level].append(iteration)
        newest = {
            f"{name}@{versions[-1]}"
            for name, levels in taken.items()
            for versions in levels.values()
        }
        assert rank.kept() == newest
        assert rank.composed(iteration) == {
            f"{name}@{levels[''][-1]}" for name, levels in taken.items()
        }
    ever = [
        f"{name}@{iteration}"
        for name, levels in taken.items()
        for iteration in levels[""]
    ]
    assert sorted([*rank.dropped, *rank.kept()]) == sorted(ever)
    assert rank.buffers.in_use_bytes == 8 * len(rank.memory.snapshots())
