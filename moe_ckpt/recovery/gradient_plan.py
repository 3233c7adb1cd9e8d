"""Plan of a recovery by logged gradients: ranks that rebuild their state, and fetches.

Pure. A rank takes its steps again from its own window and gradients, without any other
rank. So only ranks without state are rebuilt, as long as their gradients reach the
target; else all ranks go back to the newest iteration that each of them can reach.

    inventories -> do the lost ranks reach the target? -> else the newest common
    iteration -> fetches
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from moe_ckpt.errors import NothingLeftError
from moe_ckpt.recovery.inventory import Inventory, WindowRef, find_memories
from moe_ckpt.recovery.plan import Fetch

_Windows = Mapping[int, Collection[WindowRef]]
"""The windows of one rank, by the rank in whose memory the windows are."""


class _State(NamedTuple):
    """A state of the whole job. Newer branches are greater."""

    branch: int
    """Branch of the run in which the iteration was trained."""

    iteration: int
    """Number of steps in the state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientPlan:
    """Windows and fetches from which ranks are rebuilt at the target iteration."""

    target_iteration: int
    """Iteration at which all ranks end."""

    branch: int
    """Branch of the run in which the target was trained."""

    windows: Mapping[int, range]
    """For each rank that is rebuilt, the iterations after which the snapshots of the
    rank's window were taken. Other ranks keep their state.
    """

    fetches: tuple[Fetch, ...]
    """Fetches in the order of ranks."""

    @property
    def goes_back(self) -> bool:
        """Whether at least one rank loads a state."""
        return bool(self.windows)

    def window_of(self, global_rank: int, stage: int) -> range | None:
        """Return the iterations of the window that a rank loads, or None.

        Args:
            global_rank: The rank.
            stage: Stage of the rank, which makes no difference here.
        """
        del stage
        return self.windows.get(global_rank)

    def lines(self) -> list[str]:
        """Return a readable description of the plan, one fact per line."""
        return [
            *(
                f"rank {rank}: {self._rebuild(span)}"
                for rank, span in sorted(self.windows.items())
            ),
            *(
                f"rank {fetch.global_rank}: get the window at {fetch.window_start} from"
                f" rank {fetch.source_rank}"
                for fetch in self.fetches
            ),
            f"all stages: go on after iteration {self.target_iteration}",
        ]

    def _rebuild(self, span: range) -> str:
        first, last = span.start + 1, self.target_iteration
        if first > last:
            return f"load the window at {span.start}"
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        return f"take {steps} by logged gradients from the window at {span.start}"


def plan_by_gradients(
    lost_ranks: Collection[int],
    inventories: Collection[Inventory],
    *,
    target_iteration: int | None,
    branch: int | None = None,
) -> GradientPlan:
    """Return a plan in which as few ranks as possible are rebuilt.

    For example, rank 3 is lost and the others are at 14. If rank 3's own memory has a
    window of 10 to 12 with gradients to 14, only rank 3 is rebuilt. If its memory is
    lost, too, and a peer has its gradients to 13, all ranks are rebuilt at 13.

    Args:
        lost_ranks: Ranks without state of the target.
        inventories: Sources of all ranks, in any order.
        target_iteration: Iteration that all ranks should reach; None if no rank has
            state.
        branch: Branch of the run in which that iteration was trained; None if no rank
            has state.

    Raises:
        NothingLeftError: There is no iteration that all ranks can reach. The error
            lists the sources.
    """
    # every rank makes the plan by itself, and all ranks must come to the same plan
    memories = find_memories(
        sorted(inventories, key=lambda inventory: inventory.global_rank)
    )
    rebuilt = sorted(lost_ranks)
    goal = None
    if target_iteration is not None and branch is not None:
        goal = _State(branch, target_iteration)
    if goal is None or not all(
        goal in _states(memories[rank], goal.iteration) for rank in rebuilt
    ):
        rebuilt = sorted(memories)
        common = set.intersection(
            *(_states(memory, target_iteration) for memory in memories.values())
        )
        if not common:
            raise NothingLeftError(_nothing_found(target_iteration, memories))
        # the newest branch first: the run has gone back from states of older branches
        goal = max(common)
    asked: Counter[int] = Counter()
    windows: dict[int, range] = {}
    fetches: list[Fetch] = []
    for rank in rebuilt:
        holder, window = _source(rank, memories[rank], goal, asked)
        windows[rank] = window.span
        if holder != rank:
            asked[holder] += 1
            fetches.append(
                Fetch(global_rank=rank, source_rank=holder, window_start=window.start)
            )
    return GradientPlan(
        target_iteration=goal.iteration,
        branch=goal.branch,
        windows=windows,
        fetches=tuple(fetches),
    )


def _states(memory: _Windows, last: int | None) -> set[_State]:
    """Return the states to which a rank's windows lead, up to an iteration."""
    return {
        _State(branch, iteration)
        for windows in memory.values()
        for window in windows
        for iteration in range(window.end, window.replayable_to + 1)
        if (branch := window.leads_to(iteration)) is not None
        and (last is None or iteration <= last)
    }


def _source(
    rank: int, memory: _Windows, goal: _State, asked: Mapping[int, int]
) -> tuple[int, WindowRef]:
    """Return the rank's newest window that leads to a state, and its holder.

    The rank's own memory comes first, then the holder with the fewest fetches so far.
    """
    found = [
        (holder, window)
        for holder, windows in memory.items()
        for window in windows
        if window.leads_to(goal.iteration) == goal.branch
    ]
    return min(
        found,
        key=lambda each: (
            each[0] != rank,
            -each[1].start,
            asked.get(each[0], 0),
            each[0],
        ),
    )


def _nothing_found(target: int | None, memories: Mapping[int, _Windows]) -> str:
    wanted = "" if target is None else f" at or before {target}"
    got = "; ".join(
        f"rank {rank}: {_describe(memory)}" for rank, memory in memories.items()
    )
    return (
        "ranks cannot be rebuilt: looked for an iteration"
        f"{wanted} to which windows and logged gradients of all ranks lead; got {got}"
    )


def _describe(memory: _Windows) -> str:
    windows = [
        f"{window} in rank {holder}'s memory"
        for holder, held in sorted(memory.items())
        for window in held
    ]
    return ", ".join(windows) or "no window"
