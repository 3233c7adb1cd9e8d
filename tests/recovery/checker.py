"""An explicit-state checker of the invariants of the protocol's model.

The checker visits every state of the model, breadth first. A violation therefore comes
with the shortest way to the violation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tests.recovery.protocol import (
    OWNER,
    RANKS,
    At,
    Protocol,
    RankWindows,
    Worker,
    World,
    has_source,
    may_begin_anew,
    normalized,
    start,
)

ONE_TRAINS = (
    "no two generations train at once, and one that trains has a worker of each rank"
)
STEPS_TOGETHER = "no rank applies a step that another rank cannot reach"
KEEPS_LAST_COPY = "the last copy of a needed window is never dropped"
SURVIVES_A_NODE = "the loss of one node never ends the job"
STAYS_FINISHED = "a finished job stays finished"
GOES_ON = "the job never stands still"
_Counted = tuple[RankWindows, ...]


@dataclass(frozen=True, kw_only=True)
class Violation:
    """An invariant that does not hold, and the moves that lead to the violation."""

    invariant: str
    moves: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a check."""

    states: int
    """States that were visited."""

    moves: int
    """Moves that were tried."""

    violation: Violation | None
    """First violation. None: all invariants hold."""


def check(protocol: Protocol) -> Report:
    """Visit all states until an invariant does not hold."""
    first = start()
    came_from: dict[World, tuple[World, str] | None] = {first: None}
    waiting, num_moves = deque([first]), 0
    while waiting:
        world = waiting.popleft()
        is_stuck = True
        for name, moved in protocol.moves(world):
            num_moves, is_stuck = num_moves + 1, False
            after = normalized(moved)
            if (broken := next(_broken(world, name, moved), None)) is not None:
                moves = (*_way_to(world, came_from), name)
                return Report(
                    states=len(came_from),
                    moves=num_moves,
                    violation=Violation(invariant=broken, moves=moves),
                )
            if after not in came_from:
                came_from[after] = (world, name)
                waiting.append(after)
        if is_stuck and not is_over(world):
            violation = Violation(invariant=GOES_ON, moves=_way_to(world, came_from))
            return Report(states=len(came_from), moves=num_moves, violation=violation)
    return Report(states=len(came_from), moves=num_moves, violation=None)


def _way_to(
    world: World, came_from: dict[World, tuple[World, str] | None]
) -> tuple[str, ...]:
    moves: list[str] = []
    while (step := came_from[world]) is not None:
        world, name = step
        moves.append(name)
    return tuple(reversed(moves))


def _broken(before: World, name: str, after: World) -> Iterator[str]:
    """Yield the invariants that a move breaks."""
    if not _one_trains(after):
        yield ONE_TRAINS
    if " steps to " in name and not _steps_together(after, int(name.split()[1])):
        yield STEPS_TOGETHER
    is_needed = (
        after.faults == before.faults
        and after.memories_lost < 2
        and not may_begin_anew(before.own, before.held)
    )
    if is_needed and has_source(before.own, before.held):
        if not has_source(after.own, after.held):
            yield KEEPS_LAST_COPY
        # the last replay is a choice, too: each rank then keeps one window
        is_choice = any(
            each in name for each in (" keeps window ", " drops window ", " replays ")
        )
        if is_choice and not after.memories_lost and not _survives_a_node(after):
            yield KEEPS_LAST_COPY
    if after.has_failed and after.memories_lost < 2:
        yield SURVIVES_A_NODE
    if not _stays_finished(after):
        yield STAYS_FINISHED


def _one_trains(world: World) -> bool:
    going = [
        number
        for number, each in enumerate(world.generations, 1)
        if each.decision == "go" and not each.outcome
    ]
    return (
        len(going) <= 1
        and all(
            sorted(world.generation(number).arrived) == list(RANKS) for number in going
        )
        and not any(
            _has_a_double(world, rank, worker)
            for rank, worker in world.cut_off
            if worker.generation in going
        )
    )


def _has_a_double(world: World, rank: int, stale: Worker) -> bool:
    """Return whether a cut-off worker trains in one generation with its replacement."""
    other = world.workers[rank]
    return (
        stale.at == At.FORMED
        and other is not None
        and other.at > At.WAIT
        and other.generation == stale.generation
    )


def _steps_together(world: World, rank: int) -> bool:
    stepped = world.workers[rank]
    assert stepped is not None
    others = [
        each
        for each in world.workers
        if each and each.generation == stepped.generation and each.reached >= 0
    ]
    furthest = max(each.reached for each in others)
    return all(_gets_to(each, furthest) for each in others)


def _gets_to(worker: Worker, iteration: int) -> bool:
    return worker.reached == iteration or (
        worker.reached == iteration - 1 and worker.is_prepared
    )


def _survives_a_node(world: World) -> bool:
    """Return whether memories lead to a common state after the loss of any node."""
    return all(
        has_source(_without(world.own, rank), _without(world.held, OWNER[rank]))
        for rank in RANKS
    )


def _without(counted: _Counted, position: int) -> _Counted:
    return (*counted[:position], RankWindows(), *counted[position + 1 :])


def _stays_finished(world: World) -> bool:
    for number, each in enumerate(world.generations, 1):
        if each.outcome == "finished":
            done = (
                worker is None or worker.at in (At.FINISH, At.LAST, At.OVER)
                for worker in world.workers
            )
            return world.current == number and all(done)
    return True


def is_over(world: World) -> bool:
    """Return whether the job has failed or finished."""
    return world.has_failed or any(
        each.outcome == "finished" for each in world.generations
    )
