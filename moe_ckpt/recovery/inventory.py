"""The sources of a recovery: windows in a rank's own memory and in its peers' memory,
and boundary logs. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowRef:
    """A complete, verified sparse window in the memory of some rank, with the step log
    that belongs to it.

    The window begins with the state after iteration `start`; its rank can be rebuilt
    from it at every iteration from `end` to `steps_to`. `cut` identifies the assignment
    of operators to slots: all ranks of a stage need the same one.
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
        """The iterations after which the snapshots were taken. Windows that are used
        together have equal `states`.
        """
        return range(self.start, self.start + self.num_slots)

    def is_of(self, other: WindowRef) -> bool:
        """Whether two ranks of one stage can use these two windows together."""
        return (self.states, self.cut) == (other.states, other.cut)

    def __str__(self) -> str:
        return f"{self.start} to {self.end} (steps to {self.steps_to}, cut {self.cut})"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedState:
    """The live state of a rank whose replay was cut off: the window of `states` and
    `cut`, replayed to `iteration`.
    """

    states: range
    cut: str
    iteration: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """The sources on one rank: its own `windows`, the copies `held` for other ranks (by
    owner), and its boundary log.

    No two windows of one owner have the same start. The log covers all iterations from
    `logged_from` to `logged_to`; it is empty if `logged_from` exceeds `logged_to`.
    `replayed`: the rank's state, if a recovery was cut off between two of its
    iterations.
    """

    global_rank: int
    stage: int
    windows: tuple[WindowRef, ...]
    held: Mapping[int, tuple[WindowRef, ...]]
    logged_from: int
    logged_to: int
    replayed: ReplayedState | None = None

    def __post_init__(self) -> None:
        assert self.global_rank not in self.held, self
        for windows in (self.windows, *self.held.values()):
            assert len({window.start for window in windows}) == len(windows), self

    def leads_to(self, iteration: int | None) -> bool:
        """Whether a window of this rank's own can rebuild it at `iteration`, or at any
        iteration (None).
        """
        return any(
            iteration is None or window.end <= iteration <= window.steps_to
            for window in self.windows
        )


Memories = Mapping[int, Mapping[int, tuple[WindowRef, ...]]]
"""Windows by the rank that they belong to, then by the rank in whose memory they are.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageInventory:
    """The sources that all ranks of a stage have in common.

    `windows`, by their states: the windows that each rank can get from some memory,
    with the steps that all ranks have for them; among several cuts, the one with the
    most steps. The boundary logs of all ranks cover `logged_from` to `logged_to`.
    `replayed`: the state of all ranks, if a replay was cut off at the same iteration on
    all of them.
    """

    windows: Mapping[range, WindowRef]
    logged_from: int
    logged_to: int
    replayed: ReplayedState | None = None

    def has_replayed(self, states: range) -> int | None:
        """Return the iteration that a replay of the window with these states has
        reached, or None.
        """
        replayed = self.replayed
        is_of_window = replayed is not None and (replayed.states, replayed.cut) == (
            states,
            self.windows[states].cut,
        )
        return replayed.iteration if replayed is not None and is_of_window else None

    def has_logged(self, first: int, last: int) -> bool:
        """Whether all ranks logged the iterations from `first` to `last`.

        An empty range (`last` = `first` - 1) is logged.
        """
        return first > last or self.logged_from <= first <= last <= self.logged_to


def find_memories(inventories: Iterable[Inventory]) -> Memories:
    """Return the ranks whose memory holds windows of each rank, with these windows."""
    memories = {
        inventory.global_rank: {inventory.global_rank: inventory.windows}
        for inventory in inventories
    }
    for inventory in inventories:
        for owner, windows in inventory.held.items():
            memories[owner][inventory.global_rank] = windows
    return memories


def combine_stages(
    inventories: Sequence[Inventory], memories: Memories
) -> tuple[StageInventory, ...]:
    """Return the common sources of each stage, from the first stage to the last.

    Rank 0 has a window of 10 to 12 and steps to 14; rank 1 of the same stage has a copy
    of its own window in rank 5's memory, with steps to 13: the stage has the window,
    with steps to 13.
    """
    num_stages = 1 + max(inventory.stage for inventory in inventories)
    return tuple(
        _combine([i for i in inventories if i.stage == stage], memories)
        for stage in range(num_stages)
    )


def _combine(inventories: Sequence[Inventory], memories: Memories) -> StageInventory:
    first, *others = [
        _longest(memories[inventory.global_rank]) for inventory in inventories
    ]
    shared = set(first).intersection(*others)
    # the ranks of a stage replay together: the one with the fewest steps ends it
    least = [
        replace(
            first[key],
            steps_to=min(windows[key].steps_to for windows in (first, *others)),
        )
        for key in shared
    ]
    return StageInventory(
        # by cut, too: of two with as many steps all ranks have to take the same one
        windows={
            window.states: window
            for window in sorted(
                least, key=lambda window: (window.steps_to, window.cut)
            )
        },
        logged_from=max(inventory.logged_from for inventory in inventories),
        logged_to=min(inventory.logged_to for inventory in inventories),
        replayed=inventories[0].replayed
        if len({inventory.replayed for inventory in inventories}) == 1
        else None,
    )


def _longest(
    memories: Mapping[int, tuple[WindowRef, ...]],
) -> dict[tuple[range, str], WindowRef]:
    """Return each window of a rank from the memory that has the most steps for it."""
    windows = [window for memory in memories.values() for window in memory]
    return {
        (window.states, window.cut): window
        for window in sorted(windows, key=lambda window: window.steps_to)
    }
