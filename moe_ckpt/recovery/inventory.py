"""Sources of a recovery: windows in own memory and in peers' memory, and boundary logs.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowRef:
    """A complete, verified sparse window in some rank's memory, with its step log.

    The window begins with the state after iteration `start`. From the window its rank
    can be rebuilt at every iteration from `end` to `replayable_to`.
    """

    start: int
    """Iteration of the first snapshot."""

    num_slots: int
    """Number of slots, at least 1."""

    replayable_to: int
    """Last iteration to which the window's step log leads."""

    assignment: str
    """Identifies the assignment of operators to slots, which must be the same on all
    ranks of a stage.
    """

    branches: tuple[int, ...] = ()
    """Branches of the run in which the iterations from `end` to `replayable_to` were
    trained. Empty where branches make no difference.
    """

    def __post_init__(self) -> None:
        assert self.num_slots >= 1, self
        assert self.replayable_to >= self.end, self

    @property
    def end(self) -> int:
        """Iteration of the last snapshot."""
        return self.span[-1]

    @property
    def span(self) -> range:
        """Iterations after which the snapshots were taken.

        Windows that are used together have equal `span`.
        """
        return range(self.start, self.start + self.num_slots)

    def leads_to(self, iteration: int) -> int | None:
        """Return the branch of the state at `iteration` to which the window leads.

        Returns:
            The branch, 0 where branches make no difference. None if the window does not
            lead to the iteration.
        """
        if not self.end <= iteration <= self.replayable_to:
            return None
        return self.branches[iteration - self.end] if self.branches else 0

    def is_of(self, other: WindowRef) -> bool:
        """Return whether two ranks of one stage can use these two windows together."""
        return (self.span, self.assignment) == (other.span, other.assignment)

    def __str__(self) -> str:
        return (
            f"{self.start} to {self.end} (steps to {self.replayable_to}, assignment"
            f" {self.assignment})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedState:
    """Live state of a rank whose replay was cut off."""

    span: range
    """`span` of the replayed window."""

    assignment: str
    """`assignment` of the replayed window."""

    iteration: int
    """Iteration that the replay has reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """Sources on one rank.

    No two windows of one owner have the same start.
    """

    global_rank: int
    """Rank in the job."""

    stage: int
    """Pipeline stage of the rank."""

    windows: tuple[WindowRef, ...]
    """The rank's own windows."""

    held: Mapping[int, tuple[WindowRef, ...]]
    """Copies of windows that the rank holds for other ranks, by owner."""

    logged_from: int
    """First iteration that the boundary log covers. The log covers all iterations up to
    `logged_to`, and is empty if `logged_from` exceeds `logged_to`.
    """

    logged_to: int
    """Last iteration that the boundary log covers."""

    replayed: ReplayedState | None = None
    """State of the rank, if a recovery was cut off between two iterations of a replay.
    """

    def __post_init__(self) -> None:
        assert self.global_rank not in self.held, self
        for windows in (self.windows, *self.held.values()):
            assert len({window.start for window in windows}) == len(windows), self

    def leads_to(self, iteration: int | None) -> bool:
        """Return whether an own window can rebuild the rank at `iteration`.

        Args:
            iteration: An iteration; None for any iteration.
        """
        return any(
            iteration is None or window.end <= iteration <= window.replayable_to
            for window in self.windows
        )


Memories = Mapping[int, Mapping[int, tuple[WindowRef, ...]]]
"""Windows by the rank that the windows belong to, then by the rank in whose memory the
windows are.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageInventory:
    """Sources that all ranks of a stage have in common."""

    windows: Mapping[range, WindowRef]
    """Windows that each rank can get from some memory, by `span`, with the steps that
    all ranks have for the window. Of several assignments, the one with the most steps.
    """

    logged_from: int
    """First iteration that the boundary logs of all ranks cover."""

    logged_to: int
    """Last iteration that the boundary logs of all ranks cover."""

    replayed: ReplayedState | None = None
    """State of all ranks, if a replay was cut off at the same iteration on all of them.
    """

    def has_replayed(self, span: range) -> int | None:
        """Return the iteration that a replay of a window has reached, or None.

        Args:
            span: `span` of the window.
        """
        replayed = self.replayed
        is_of_window = replayed is not None and (
            (replayed.span, replayed.assignment)
            == (span, self.windows[span].assignment)
        )
        return replayed.iteration if replayed is not None and is_of_window else None

    def has_logged(self, first: int, last: int) -> bool:
        """Return whether all ranks logged the iterations from `first` to `last`.

        An empty range (`last` = `first` - 1) counts as logged.
        """
        return first > last or self.logged_from <= first <= last <= self.logged_to


def find_memories(inventories: Iterable[Inventory]) -> Memories:
    """Return, for each rank, the ranks whose memory holds windows of that rank.

    Returns:
        The windows, by owner, then by holder.
    """
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

    For example, rank 0 has a window of 10 to 12 and steps to 14. Rank 1 of the same
    stage has a copy of its own window in rank 5's memory, with steps to 13. The stage
    then has the window, with steps to 13.

    Args:
        inventories: Sources of all ranks.
        memories: Result of `find_memories`.
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
    # the ranks of a stage replay together: the rank with the fewest steps ends the
    # replay
    least = [
        replace(
            first[key],
            replayable_to=min(
                windows[key].replayable_to for windows in (first, *others)
            ),
        )
        for key in shared
    ]
    return StageInventory(
        # sorted by assignment too: of two assignments with as many steps all ranks must
        # take the same one
        windows={
            window.span: window
            for window in sorted(
                least,
                key=lambda window: (window.replayable_to, window.assignment),
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
    """Return each window of a rank from the memory with the most steps for it."""
    windows = [window for memory in memories.values() for window in memory]
    return {
        (window.span, window.assignment): window
        for window in sorted(windows, key=lambda window: window.replayable_to)
    }
