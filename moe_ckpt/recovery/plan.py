"""Plan of a recovery: stages that roll back, their windows, and ranks that fetch. Pure.

MoEvement, section 3.4 and Appendix A.

    inventories -> the fewest stages that logs lead to the target, else the whole model
                -> fetches
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from moe_ckpt.errors import NothingLeftError
from moe_ckpt.recovery.inventory import (
    Inventory,
    Memories,
    StageInventory,
    WindowRef,
    combine_stages,
    find_memories,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback:
    """Rollback of a segment: neighbouring pipeline stages that recover together."""

    stages: range
    """Stages of the segment."""

    span: range
    """Iterations after which the snapshots of the segment's window were taken."""

    resumed_at: int | None = None
    """Iteration that an earlier replay of this window had reached when the replay was
    cut off, on all ranks of the segment. The ranks still have the state of that
    iteration. None: load the window.
    """

    @property
    def window_start(self) -> int:
        """Start of the window to which the segment rolls back."""
        return self.span.start

    @property
    def starts_from(self) -> int:
        """Iteration after which the replay starts."""
        return self.window_start if self.resumed_at is None else self.resumed_at

    def neighbours(self, num_stages: int) -> tuple[int, ...]:
        """Return the stages next to the segment in a pipeline of `num_stages`."""
        # on both sides: the stage before sends activations, the stage behind sends
        # gradients
        return tuple(
            stage
            for stage in (self.stages.start - 1, self.stages.stop)
            if 0 <= stage < num_stages
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetch:
    """Fetch of a rank's window with its step log, from a rank that holds a copy."""

    global_rank: int
    """Rank that fetches its window."""

    source_rank: int
    """Rank that holds the copy."""

    window_start: int
    """Start of the window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryPlan:
    """Rollbacks and fetches after which all ranks are at the target iteration."""

    target_iteration: int
    """Iteration at which all ranks end."""

    num_stages: int
    """Number of pipeline stages."""

    rollbacks: tuple[Rollback, ...]
    """Rollbacks in the order of stages."""

    fetches: tuple[Fetch, ...]
    """Fetches in the order of ranks."""

    @property
    def goes_back(self) -> bool:
        """Whether at least one rank loads a state."""
        return bool(self.rollbacks)

    @property
    def branch(self) -> None:
        """None: a replay leads to the same state in any branch of the run."""
        return

    def window_of(self, global_rank: int, stage: int) -> range | None:
        """Return the iterations of the window that a rank loads, or None.

        Args:
            global_rank: The rank, which makes no difference here: a stage rolls back
                as a whole.
            stage: Stage of the rank.
        """
        del global_rank
        rollback = self.rollback_of(stage)
        return rollback.span if rollback else None

    def rollback_of(self, stage: int) -> Rollback | None:
        """Return the rollback in which a stage takes part, or None."""
        return next(
            (rollback for rollback in self.rollbacks if stage in rollback.stages), None
        )

    def lines(self) -> list[str]:
        """Return a readable description of the plan, one fact per line."""
        rolling = {stage for rollback in self.rollbacks for stage in rollback.stages}
        sending = {
            stage
            for rollback in self.rollbacks
            if rollback.starts_from < self.target_iteration
            for stage in rollback.neighbours(self.num_stages)
        }
        waiting = set(range(self.num_stages)) - rolling - sending
        return [
            *(
                f"{_numbered('stage', rollback.stages)}: {self._replay(rollback)}"
                for rollback in self.rollbacks
            ),
            *([f"{_list(sending)}: wait and send logs"] if sending else []),
            *([f"{_list(waiting)}: wait"] if rolling and waiting else []),
            *(
                f"rank {fetch.global_rank}: get the window at {fetch.window_start} from"
                f" rank {fetch.source_rank}"
                for fetch in self.fetches
            ),
            f"all stages: go on after iteration {self.target_iteration}",
        ]

    def _replay(self, rollback: Rollback) -> str:
        iterations = range(rollback.starts_from + 1, self.target_iteration + 1)
        window = f"the window at {rollback.window_start}"
        if rollback.resumed_at is not None:
            rest = (
                f"replay {_numbered('iteration', iterations)}"
                if iterations
                else "nothing is left to replay"
            )
            return (
                f"{rest}, after the replay of {window} that was cut off at"
                f" {rollback.resumed_at}"
            )
        return (
            f"replay {_numbered('iteration', iterations)} from {window}"
            if iterations
            else f"load {window}"
        )


def _segments(stages: Collection[int]) -> list[range]:
    """Return the runs of neighbours among stages, in order.

    Stages 1, 2 and 5 make the segments 1 to 2 and 5.
    """
    firsts = sorted(stage for stage in stages if stage - 1 not in stages)
    lasts = sorted(stage for stage in stages if stage + 1 not in stages)
    return [range(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]


def plan_recovery(
    lost_stages: Collection[int],
    inventories: Collection[Inventory],
    *,
    target_iteration: int | None,
    boundary_log: bool,
) -> RecoveryPlan:
    """Return a plan in which as few stages as possible roll back.

    Each run of neighbouring lost stages recovers on its own from its newest window, fed
    by the logs of the stages next to the run: stages 1, 2 and 5 of 8 recover as 1 to 2
    and as 5. If stage 3 did not log the boundary, 1 to 3 roll back, fed by stages 0 and
    4. A segment whose replay of its newest window was cut off continues that replay.

    In three cases all stages roll back to the newest window that all ranks can get: if
    logs do not suffice, if stages are lost without `boundary_log`, or if no rank has
    state. The job may then end at another iteration: a window of 10 to 12 with steps to
    13 leads to 13 if 14 was the target, and to 12 if 11 or None was.

    After a further loss, plan again. MoEvement, Appendix A.

    Args:
        lost_stages: Stages that must be rebuilt.
        inventories: Sources of all ranks, in any order.
        target_iteration: Iteration that all ranks should reach; None if no rank has
            state.
        boundary_log: Whether stages log the tensors that they send.

    Raises:
        NothingLeftError: There is no window that all ranks can get. The error lists the
            sources.
    """
    # every rank makes the plan by itself, and all ranks must come to the same plan,
    # whatever the order of inventories
    ranks = sorted(inventories, key=lambda inventory: inventory.global_rank)
    memories = find_memories(ranks)
    stages = combine_stages(ranks, memories)
    lost = set(lost_stages)
    assert lost <= set(range(len(stages))), (sorted(lost), len(stages))
    target, rollbacks = target_iteration, None
    # without logs, any loss rolls all stages back
    if target is not None and (boundary_log or not lost):
        rollbacks = _plan_local(lost, stages, target)
    if target is None or rollbacks is None:
        whole = _common_windows(stages)
        if not whole:
            raise NothingLeftError(_nothing_found(lost, target, ranks, memories))
        span = _newest(whole)
        # another target if the common steps end before the target, or the window after
        # it
        target = max(span[-1], min(span[-1] if target is None else target, whole[span]))
        rollbacks = (Rollback(stages=range(len(stages)), span=span),)
    fetches = _plan_fetches(ranks, memories, stages, rollbacks, target)
    return RecoveryPlan(
        target_iteration=target,
        num_stages=len(stages),
        rollbacks=rollbacks,
        fetches=fetches,
    )


def _plan_local(
    lost: set[int], stages: Sequence[StageInventory], target: int
) -> tuple[Rollback, ...] | None:
    """Return the rollbacks of the fewest stages that reach the target by logs.

    None if logs do not suffice.
    """
    rolling = set(lost)
    while True:
        rollbacks, missing = [], set()
        for segment in _segments(rolling):
            replayable_to = _common_windows([stages[stage] for stage in segment])
            # a window whose steps end before the target would leave its stages behind
            # the others
            usable = [
                span
                for span in replayable_to
                if span[-1] <= target <= replayable_to[span]
            ]
            if not usable:
                return None
            rollback = _resumed(
                Rollback(stages=segment, span=_newest(usable)), stages, target
            )
            rollbacks.append(rollback)
            # logs are needed from the first iteration that runs: the state before is
            # loaded
            neighbours, first = (
                rollback.neighbours(len(stages)),
                rollback.starts_from + 1,
            )
            # an older window, or the window of a larger segment, needs still earlier
            # log entries. So a neighbour whose log is too short has to roll back
            missing |= {
                stage
                for stage in neighbours
                if not stages[stage].has_logged(first, target)
            }
        if not missing:
            return tuple(rollbacks)
        rolling |= missing


def _common_windows(stages: Sequence[StageInventory]) -> dict[range, int]:
    """Return the windows that all these stages have.

    Returns:
        Last iteration of the common steps, by `span` of the window.
    """
    shared = set(stages[0].windows).intersection(*(stage.windows for stage in stages))
    return {
        span: min(stage.windows[span].replayable_to for stage in stages)
        for span in shared
    }


def _newest(windows: Iterable[range]) -> range:
    # among equal starts the window with fewer slots: the replay begins at the same
    # iteration, and fewer of its iterations have frozen operators
    return max(windows, key=lambda span: (span.start, -len(span)))


def _resumed(
    rollback: Rollback, stages: Sequence[StageInventory], target: int
) -> Rollback:
    """Return the rollback, resumed at the state of a replay that was cut off.

    The rollback is unchanged unless the whole segment has that state. A stage thus
    continues its recovery when a stage that is no neighbour fails meanwhile. MoEvement,
    Appendix A.
    """
    reached = {stages[stage].has_replayed(rollback.span) for stage in rollback.stages}
    resumed_at = reached.pop() if len(reached) == 1 else None
    # a state past the target cannot be undone: the segment loads its window
    return (
        rollback
        if resumed_at is None or resumed_at > target
        else replace(rollback, resumed_at=resumed_at)
    )


def _plan_fetches(
    ranks: Iterable[Inventory],
    memories: Memories,
    stages: Sequence[StageInventory],
    rollbacks: Iterable[Rollback],
    target: int,
) -> tuple[Fetch, ...]:
    """Return the fetches of ranks that lack their window, or steps up to the target.

    Each rank fetches from the holder with the fewest fetches so far.
    """
    spans = {
        stage: rollback.span for rollback in rollbacks for stage in rollback.stages
    }
    asked: Counter[int] = Counter()
    fetches = []
    for rank in ranks:
        if rank.stage not in spans:
            continue
        wanted = stages[rank.stage].windows[spans[rank.stage]]
        # only holders with all steps to the target: an older copy of the window would
        # end the replay earlier
        holders = [
            holder
            for holder, windows in memories[rank.global_rank].items()
            if any(
                window.is_of(wanted) and window.replayable_to >= target
                for window in windows
            )
        ]
        if rank.global_rank in holders:
            continue
        source = min(holders, key=lambda holder: (asked[holder], holder))
        asked[source] += 1
        fetches.append(
            Fetch(
                global_rank=rank.global_rank,
                source_rank=source,
                window_start=wanted.start,
            )
        )
    return tuple(fetches)


def after_fetches(
    inventories: Sequence[Inventory],
    fetches: Iterable[Fetch],
    failed: Collection[int],
    emptied: Collection[int] = (),
) -> list[Inventory]:
    """Return the sources that are left after fetches of which some have failed.

    A successful fetch has replaced the own windows of its rank. A failed fetch has left
    the own windows. After a success the copy is still on its holder, and the next plan
    may need another window of that copy.

    Args:
        inventories: The sources before the fetches, by rank.
        fetches: The fetches of the plan.
        failed: Ranks whose fetches have failed.
        emptied: Ranks among `failed` whose own windows are gone nevertheless.

    Returns:
        The sources, by rank.
    """
    fetches = tuple(fetches)
    without_own = {fetch.global_rank for fetch in fetches}.difference(failed).union(
        emptied
    )
    bad = {
        (fetch.source_rank, fetch.global_rank)
        for fetch in fetches
        if fetch.global_rank in failed
    }
    left: list[Inventory] = []
    for inventory in inventories:
        mine = inventory.global_rank
        held = {
            owner: windows
            for owner, windows in inventory.held.items()
            if (mine, owner) not in bad
        }
        own = () if mine in without_own else inventory.windows
        left.append(replace(inventory, windows=own, held=held))
    return left


def _nothing_found(
    lost: Collection[int],
    target: int | None,
    ranks: Iterable[Inventory],
    memories: Memories,
) -> str:
    return (
        f"stages {sorted(lost)} cannot be"
        f" rebuilt{'' if target is None else f' at iteration {target}'}: looked for a"
        " complete window from which logs lead there, or that all ranks have; got "
        + "; ".join(_describe(rank, memories[rank.global_rank]) for rank in ranks)
    )


def _describe(rank: Inventory, memories: Mapping[int, Collection[WindowRef]]) -> str:
    windows = [
        f"{window} in rank {holder}'s memory"
        for holder, windows in sorted(memories.items())
        for window in windows
    ]
    logged = (
        f"{rank.logged_from} to {rank.logged_to}"
        if rank.logged_from <= rank.logged_to
        else "none"
    )
    return (
        f"rank {rank.global_rank} of stage {rank.stage}: windows"
        f" {', '.join(windows) or 'none'}, boundary log {logged}"
    )


def _numbered(noun: str, numbers: range) -> str:
    return (
        f"{noun} {numbers[0]}"
        if len(numbers) == 1
        else f"{noun}s {numbers[0]} to {numbers[-1]}"
    )


def _list(stages: Collection[int]) -> str:
    return (
        f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, sorted(stages)))}"
    )
