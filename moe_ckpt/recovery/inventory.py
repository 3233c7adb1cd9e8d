"""The sources of a recovery: windows in ranks' own and others' memory, and boundary logs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowRef:
    """A complete, verified sparse window, with the step log that belongs to it, in some memory.

    It begins with the state after iteration `start`; its rank can be rebuilt from it at every iteration from `end` to
    `steps_to`. `cut` tells which operators are in which slot: all ranks of a stage need the same.
    """

    start: int
    num_slots: int
    steps_to: int
    cut: str

    def __post_init__(self) -> None:
        assert self.num_slots >= 1, self
        assert self.steps_to >= self.end, self

    @property
    def end(self) -> int:
        return self.states[-1]

    @property
    def states(self) -> range:
        """The iterations after which its snapshots were taken: windows that are used together have the same."""
        return range(self.start, self.start + self.num_slots)

    def is_of(self, other: WindowRef) -> bool:
        """Whether ranks of one stage can use the two together."""
        return (self.states, self.cut) == (other.states, other.cut)

    def __str__(self) -> str:
        return f"{self.start} to {self.end} (steps to {self.steps_to}, cut {self.cut})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """One rank's sources: its own `windows`, copies `held` for ranks without, by owner, and its boundary log.

    It keeps no two windows of the same owner and start. The log holds all of iterations `logged_from` to `logged_to`;
    it is empty where the first is past the second.
    """

    global_rank: int
    stage: int
    windows: tuple[WindowRef, ...]
    held: Mapping[int, tuple[WindowRef, ...]]
    logged_from: int
    logged_to: int

    def __post_init__(self) -> None:
        assert self.global_rank not in self.held, self
        for windows in (self.windows, *self.held.values()):
            assert len({window.start for window in windows}) == len(windows), self

    def leads_to(self, iteration: int | None) -> bool:
        """Whether this rank can be rebuilt from a window of its own at an iteration, or anywhere at all (None)."""
        return any(iteration is None or window.end <= iteration <= window.steps_to for window in self.windows)


Memories = Mapping[int, Mapping[int, tuple[WindowRef, ...]]]
"""By owner: by the rank whose memory it is, the windows that are there for that owner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageInventory:
    """The sources that the ranks of a stage have in common.

    `windows`, by their states: those that each rank has in some memory, with the steps that all have for them. Where
    that is so for several cuts, the one that leads furthest. All their boundary logs hold `logged_from` to `logged_to`.
    """

    windows: Mapping[range, WindowRef]
    logged_from: int
    logged_to: int

    def has_logged(self, first: int, last: int) -> bool:
        """Whether all ranks logged the iterations from `first` to `last`: none if that is `first` - 1."""
        return first > last or self.logged_from <= first <= last <= self.logged_to


def find_memories(inventories: Iterable[Inventory]) -> Memories:
    """Return the holders of each rank's windows."""
    memories = {inventory.global_rank: {inventory.global_rank: inventory.windows} for inventory in inventories}
    for inventory in inventories:
        for owner, windows in inventory.held.items():
            memories[owner][inventory.global_rank] = windows
    return memories


def combine_stages(inventories: Sequence[Inventory], memories: Memories) -> tuple[StageInventory, ...]:
    """Return what each stage has, from the first to the last.

    Rank 0 with a window of 10 to 12 and steps to 14, rank 1 of the same stage with a copy of its own in rank 5's memory
    and steps to 13: the stage has the window, with steps to 13.
    """
    num_stages = 1 + max(inventory.stage for inventory in inventories)
    return tuple(_combine([i for i in inventories if i.stage == stage], memories) for stage in range(num_stages))


def _combine(inventories: Sequence[Inventory], memories: Memories) -> StageInventory:
    first, *others = [_longest(memories[inventory.global_rank]) for inventory in inventories]
    shared = set(first).intersection(*others)
    least = [replace(first[key], steps_to=min(windows[key].steps_to for windows in (first, *others))) for key in shared]
    return StageInventory(
        windows={window.states: window for window in sorted(least, key=lambda window: (window.steps_to, window.cut))},
        logged_from=max(inventory.logged_from for inventory in inventories),
        logged_to=min(inventory.logged_to for inventory in inventories),
    )


def _longest(memories: Mapping[int, tuple[WindowRef, ...]]) -> dict[tuple[range, str], WindowRef]:
    """Return a rank's windows in whichever memory has the most steps for each."""
    windows = [window for memory in memories.values() for window in memory]
    return {(window.states, window.cut): window for window in sorted(windows, key=lambda window: window.steps_to)}
