"""The protocol of generations, steps and windows as an executable model, for a checker that visits every interleaving.

Three ranks, one a stage; the copies of rank r are in the memory of rank r + 1. A window has one slot. Each write to the
store is an action of its own. Plans come from the real code: `plan_target` and `plan_recovery`. A fault kills a worker
(its node's memory stays), loses a node (memory and worker), or cuts a node off (memory is lost to the job, and the old
worker lives on beside its replacement, as long as it is not fenced).

    worker       READ (> DECIDE) > WAIT > FORMED (> CARRY > REPLAY) > CARRIED > COMPUTE > VOTED > SNAP >
                 COMPUTE ... > DONE (> FINISH) > LAST > OVER
    end(g)       outcome, generation, decision and end: three writes of a supervisor

Simplified: the job begins with all ranks in generation 1, with their first windows; the loss of a node restarts its
rank only, without new numbers; a fetch with its replay is one action, and so is the end of a generation by a worker
that misses a rank, and the way of a worker into the next generation; a worker that was cut off writes to no peer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import NamedTuple

from moe_ckpt.errors import NothingLeftError
from moe_ckpt.recovery.inventory import Inventory, WindowRef
from moe_ckpt.recovery.plan import RecoveryPlan, plan_recovery
from moe_ckpt.recovery.target import Standing, plan_target

RANKS = range(3)
HOLDER = (1, 2, 0)
OWNER = (2, 0, 1)  # whose copies a rank holds


class At(IntEnum):
    """The next action of a worker."""

    READ = 0
    ARRIVE = 1
    DECIDE = 2
    WAIT = 3
    FORMED = 4
    CARRY = 5
    REPLAY = 6
    CARRIED = 7
    COMPUTE = 8
    VOTED = 9
    SNAP = 10
    DONE = 11
    FINISH = 12
    LAST = 13
    OVER = 14


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of the protocol, each of which the checker can leave out to show that it is needed."""

    waits_for_all: bool = True  # a generation begins once all ranks have arrived
    fences: bool = True  # a worker that was replaced does not join
    fences_first: bool = True  # a replacement is announced before the generation ends
    votes: bool = True  # a rank steps once all have complete gradients
    confirms: bool = True  # an older window is dropped once all ranks have the newer one, and its copies
    keeps_safest: bool = True  # after a recovery, the window with the most copies stays
    finishes_once: bool = True  # a finished generation is not ended
    heeds_finish: bool = True  # a supervisor replaces no worker of a job that has finished meanwhile


class Worker(NamedTuple):
    """A process that trains. `reached` is -1 without state; the boundary log begins at `log_from`."""

    incarnation: int
    at: int = At.READ
    generation: int = 0
    reached: int = -1
    is_prepared: bool = False
    log_from: int = 1

    @property
    def log_to(self) -> int:
        return self.reached + self.is_prepared


class Place(NamedTuple):
    """The windows of a rank in one memory, with the last iteration of its step log there."""

    windows: frozenset[int] = frozenset()
    steps_to: int = 0

    def refs(self) -> tuple[WindowRef, ...]:
        return tuple(
            WindowRef(start=start, num_slots=1, steps_to=max(start, self.steps_to), cut="c")
            for start in sorted(self.windows)
        )


class Generation(NamedTuple):
    """The keys of a generation in the store, and the collectives of its ranks."""

    outcome: str = ""
    decision: str = ""
    has_ended: bool = False
    arrived: tuple[int, ...] = ()
    done: int = 0
    votes: tuple[int, ...] = (0,) * 3  # by rank: the iteration
    based: tuple[int, ...] = (0,) * 3  # by rank: how many windows it has with the one that the generation begins with
    carried: frozenset[int] = frozenset()
    plan: tuple[int, tuple[tuple[int, int], ...]] | None = None  # the target, and (stage, window) that roll back


class World(NamedTuple):
    """A state of the whole job.

    `supervisors`: the next action of each (0: none), the generation that it ends, and whether it has announced the next
    worker.
    """

    workers: tuple[Worker | None, ...]
    cut_off: tuple[tuple[int, Worker], ...]
    supervisors: tuple[tuple[int, int, bool], ...]
    own: tuple[Place, ...]
    held: tuple[Place, ...]  # by owner
    lives: tuple[int, ...]
    current: int
    generations: tuple[Generation, ...]
    faults: int
    memories_lost: int
    has_failed: bool = False

    def generation(self, number: int) -> Generation:
        return self.generations[number - 1]


Move = tuple[str, World]
_IDLE = (0, 0, False)
_GONE = Generation(outcome="ended", decision="stop", has_ended=True)
_S_DEATH, _S_END, _S_START, _S_FENCE, _S_READ = 1, 2, 5, 6, 7  # actions of a supervisor; END has three


def start() -> World:
    """Return the state in which all ranks have met, and taken their first windows, with copies."""
    first = Place(windows=frozenset({0}))
    return World(
        workers=(Worker(incarnation=0, at=At.COMPUTE, generation=1, reached=0),) * 3,
        cut_off=(),
        supervisors=(_IDLE,) * 3,
        own=(first,) * 3,
        held=(first,) * 3,
        lives=(0,) * 3,
        current=1,
        generations=(Generation(decision="go", arrived=(0, 1, 2), based=(1, 1, 1)),),
        faults=0,
        memories_lost=0,
    )


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """All moves of the job, of `iterations` and with up to `faults`, under `rules`.

    `moments`: the next actions of workers that faults may strike; None: any.
    """

    rules: Rules = Rules()
    iterations: int = 2
    faults: int = 2
    kinds: tuple[str, ...] = ("kill", "lose", "cut off")
    moments: tuple[At, ...] | None = None

    def moves(self, world: World) -> Iterator[Move]:
        """Yield each possible next action with the state after it."""
        if world.has_failed:
            return
        for rank in RANKS:
            worker = world.workers[rank]
            if worker is not None:
                yield from self._worker(world, rank, worker)
            yield from self._supervisor(world, rank)
            yield from self._fault(world, rank)
        for position, (rank, worker) in enumerate(world.cut_off):
            yield from self._stale(world, position, rank, worker)
        yield from self._survey(world)

    # Faults and supervisors

    def _fault(self, world: World, rank: int) -> Iterator[Move]:
        worker = world.workers[rank]
        if worker is None or worker.at == At.OVER or world.faults >= self.faults or world.supervisors[rank][0]:
            return
        if self.moments is not None and worker.at not in self.moments:
            return
        dead = world._replace(workers=_put(world.workers, rank, None), faults=world.faults + 1)
        if "kill" in self.kinds:
            supervisor = (_S_DEATH if worker.generation else _S_START, worker.generation, False)
            yield f"rank {rank}'s worker dies", dead._replace(supervisors=_put(world.supervisors, rank, supervisor))
        if not {"lose", "cut off"} & {*self.kinds} or any(_finished(world, g) for g in _numbers(world)):
            return
        first = _S_FENCE if self.rules.fences_first else _S_READ
        lost = dead._replace(
            own=_put(world.own, rank, Place()),
            held=_put(world.held, OWNER[rank], Place()),
            memories_lost=world.memories_lost + 1,
            supervisors=_put(world.supervisors, rank, (first, 0, False)),
        )
        if "lose" in self.kinds:
            yield f"rank {rank}'s node is lost", lost
        if "cut off" in self.kinds:
            yield f"rank {rank}'s node is cut off", lost._replace(cut_off=(*world.cut_off, (rank, worker)))

    def _supervisor(self, world: World, rank: int) -> Iterator[Move]:
        at, generation, is_announced = world.supervisors[rank]
        if not at:
            return
        then = lambda at, announced=is_announced: world._replace(  # noqa: E731
            supervisors=_put(world.supervisors, rank, (at, generation, announced))
        )
        name = f"rank {rank}'s supervisor"
        if at == _S_DEATH:
            over = _finished(world, generation)
            yield f"{name} finds the death", then(0 if over else _S_END)
        elif at == _S_FENCE:
            lives = _put(world.lives, rank, world.lives[rank] + 1)
            yield f"{name} announces the next worker", then(_S_READ, True)._replace(lives=lives)
        elif at == _S_READ:
            supervisor = (_S_END, world.current, is_announced)
            reads = world._replace(supervisors=_put(world.supervisors, rank, supervisor))
            yield f"{name} reads generation {world.current}", reads
        elif _S_END <= at < _S_START:
            ended, goes_on = self._end(world, generation, at - _S_END)
            after = at + 1 if goes_on else (0 if self.rules.heeds_finish else _S_START)
            yield (
                f"{name} ends generation {generation}, write {at - _S_END + 1}",
                ended._replace(supervisors=_put(world.supervisors, rank, (after, generation, is_announced))),
            )
        elif at == _S_START:
            life = world.lives[rank] if is_announced else world.lives[rank] + 1
            started = then(0)._replace(
                lives=_put(world.lives, rank, life), workers=_put(world.workers, rank, Worker(incarnation=life))
            )
            yield f"{name} starts worker {life}", started

    def _end(self, world: World, number: int, write: int) -> tuple[World, bool]:
        """Make one of the three writes that end a generation; return whether the next one follows."""
        generation = world.generation(number)
        if write == 0:
            if generation.outcome == "finished" and self.rules.finishes_once:
                return world, False
            return _with(world, number, outcome=generation.outcome or "ended"), True
        if write == 1:
            if world.current != number:
                return world, True
            return world._replace(current=number + 1, generations=(*world.generations, Generation())), True
        return _with(world, number, decision=generation.decision or "stop", has_ended=True), True

    # Workers

    def _stale(self, world: World, position: int, rank: int, worker: Worker) -> Iterator[Move]:
        """Yield the moves of a worker that was cut off: it may come back, and try to join."""
        generation = world.generation(worker.generation) if worker.generation else None
        put = lambda new: world._replace(  # noqa: E731
            cut_off=tuple((rank, new) if at == position else each for at, each in enumerate(world.cut_off))
        )
        gone = world._replace(cut_off=tuple(each for at, each in enumerate(world.cut_off) if at != position))
        name = f"rank {rank}'s worker {worker.incarnation}, cut off"
        if worker.at == At.READ:
            if self.rules.fences and world.lives[rank] != worker.incarnation:
                yield f"{name}, is fenced", gone
            else:
                yield f"{name}, reads", put(worker._replace(at=At.ARRIVE, generation=world.current))
        elif worker.at == At.ARRIVE:
            assert generation is not None
            arrived, is_last = self._arrive(generation, rank)
            decides = is_last and not generation.decision
            changed = _with(put(worker._replace(at=At.WAIT)), worker.generation, arrived=arrived)
            yield f"{name}, arrives", _with(changed, worker.generation, decision="go") if decides else changed
        elif generation and (generation.has_ended or (worker.at == At.WAIT and generation.decision == "stop")):
            yield f"{name}, leaves", put(worker._replace(at=At.READ))
        elif generation and worker.at == At.WAIT and generation.decision == "go":
            yield f"{name}, sees: go", put(worker._replace(at=At.FORMED))

    def _worker(self, world: World, rank: int, worker: Worker) -> Iterator[Move]:
        name, number = f"rank {rank}", worker.generation
        put = lambda to=world, **fields: to._replace(  # noqa: E731
            workers=_put(to.workers, rank, worker._replace(**fields))
        )
        if worker.at == At.READ:
            yield self._join(world, rank, worker)
            return
        generation = world.generation(number)
        if generation.has_ended and worker.at > At.WAIT:
            name, after = self._join(world, rank, worker)
            yield f"{name}: generation {number} has ended", after
        elif At.WAIT < worker.at < At.SNAP and worker.at != At.CARRY and _misses_a_rank(world, number):
            ended = world
            for write in range(3):
                ended, _ = self._end(ended, number, write)
            yield f"{name} misses a rank and ends generation {number}", put(ended, at=At.READ)
        match worker.at:
            case At.DECIDE:
                decision = generation.decision or "go"
                yield f"{name} decides: {decision}", _with(put(at=At.WAIT), number, decision=decision)
            case At.CARRY:
                lost = put(at=At.REPLAY, reached=-1, is_prepared=False)
                yield f"{name} gives up its state", lost
            case At.REPLAY if not _misses_a_rank(world, number):
                yield self._replay(world, rank, worker)
            case At.CARRIED if len(generation.carried) == len(RANKS):
                after = self._take(put(at=self._next(worker.reached)), rank, worker.reached)
                based = _put(generation.based, rank, len(after.own[rank].windows))
                yield f"{name} takes window {worker.reached}, and trains", _with(after, number, based=based)
            case At.SNAP:
                taken = self._take(put(at=self._next(worker.reached)), rank, worker.reached)
                yield f"{name} takes window {worker.reached}", taken
            case At.COMPUTE if self._are_safe(world, generation) and _all_compute(world, number, worker.reached):
                yield self._compute(world, rank, worker)
            case At.VOTED if min(generation.votes) > worker.reached or not self.rules.votes:
                yield (
                    f"{name} steps to {worker.reached + 1}",
                    put(at=At.SNAP, reached=worker.reached + 1, is_prepared=False),
                )
            case At.DONE if self._are_safe(world, generation):
                done = generation.done + 1
                at = At.FINISH if done == len(RANKS) else At.LAST
                yield f"{name} is done", _with(put(at=at), number, done=done)
            case At.FINISH:
                outcome = generation.outcome or "finished"
                yield f"{name} decides: {outcome}", _with(put(at=At.LAST), number, outcome=outcome)
            case _:
                pass
        if At.CARRIED < worker.at < At.OVER and world.own[rank].windows - world.held[rank].windows:
            own = world.own[rank]
            held = Place(own.windows | world.held[rank].windows, max(own.steps_to, world.held[rank].steps_to))
            yield f"{name}'s windows reach their peer", world._replace(held=_put(world.held, rank, held))

    def _join(self, world: World, rank: int, worker: Worker) -> Move:
        """The worker reads the newest generation and arrives there."""
        number = world.current
        arrived, is_last = self._arrive(world.generation(number), rank)
        joins = worker._replace(at=At.DECIDE if is_last else At.WAIT, generation=number)
        after = _with(world._replace(workers=_put(world.workers, rank, joins)), number, arrived=arrived)
        return f"rank {rank} arrives in generation {number}", after

    def _arrive(self, generation: Generation, rank: int) -> tuple[tuple[int, ...], bool]:
        """Return the ranks that have arrived with this one, and whether it is the last."""
        arrived = (*generation.arrived, rank)
        return arrived, len(arrived) == len(RANKS) - (not self.rules.waits_for_all)

    def _next(self, reached: int) -> At:
        return At.COMPUTE if reached < self.iterations else At.DONE

    def _take(self, world: World, rank: int, reached: int) -> World:
        own = world.own[rank]
        return world._replace(own=_put(world.own, rank, own._replace(windows=own.windows | {reached})))

    def _are_safe(self, world: World, generation: Generation) -> bool:
        """Return whether all ranks have their newest window, with its copy; a generation begins with it, too."""
        if not self.rules.confirms:
            return True
        return min(generation.based) > 0 and all(
            max(own.windows) in held.windows for own, held in zip(world.own, world.held, strict=True) if own.windows
        )

    def _replay(self, world: World, rank: int, worker: Worker) -> Move:
        number, plan = worker.generation, world.generation(worker.generation).plan
        assert plan is not None
        target, start_at = plan[0], dict(plan[1])[rank]
        own, held = world.own[rank], world.held[rank]
        has = start_at in own.windows and max(own.steps_to, start_at) >= target
        source = own if has else held
        if start_at < 0:  # the whole job begins anew
            world = world._replace(own=_put(world.own, rank, Place()))
        else:
            assert start_at in source.windows, (rank, plan, own, held)
            world = world._replace(own=_put(world.own, rank, source._replace(steps_to=target)))
        there = worker._replace(at=At.CARRIED, reached=target, log_from=max(start_at, 0) + 1)
        after = world._replace(workers=_put(world.workers, rank, there))
        after = _with(after, number, carried=world.generation(number).carried | {rank})
        is_last = len(after.generation(number).carried) == len(RANKS)
        return f"rank {rank} replays from window {start_at} to {target}", self._keep(after) if is_last else after

    def _keep(self, world: World) -> World:
        """Keep the window with the most copies of those that all ranks have, as `WindowRecovery` does."""
        common = frozenset.intersection(*(place.windows for place in world.own))
        if not common:
            return world
        copies = lambda start: min(start in place.windows for place in world.held)  # noqa: E731
        safest = max(common, key=lambda start: (copies(start) if self.rules.keeps_safest else 0, start))
        return world._replace(own=tuple(place._replace(windows=frozenset({safest})) for place in world.own))

    def _compute(self, world: World, rank: int, worker: Worker) -> Move:
        """The rank has complete gradients: older windows are dropped, its peer has the record, and it votes."""
        iteration, number, safe = worker.reached + 1, worker.generation, worker.reached
        newer = lambda place: Place(frozenset(start for start in place.windows if start >= safe), iteration)  # noqa: E731
        voted = worker._replace(at=At.VOTED, is_prepared=True, log_from=max(worker.log_from, safe + 1))
        after = world._replace(
            workers=_put(world.workers, rank, voted),
            own=_put(world.own, rank, newer(world.own[rank])),
            held=_put(world.held, rank, newer(world.held[rank])),
        )
        votes = _put(world.generation(number).votes, rank, iteration)
        name = f"rank {rank} drops windows before {safe} and votes for iteration {iteration}"
        return name, _with(after, number, votes=votes)

    def _survey(self, world: World) -> Iterator[Move]:
        """The collective in which all ranks of a generation agree on a plan."""
        numbers = {worker.generation for worker in world.workers if worker and worker.at == At.FORMED}
        for number in numbers:
            there = [worker for worker in world.workers if worker and worker.generation == number]
            if len(there) != len(RANKS) or any(worker.at != At.FORMED for worker in there):
                continue
            plan = plan_of(tuple(there), world.own, world.held)
            if plan is None:
                yield f"generation {number} finds nothing left", world._replace(has_failed=True)
                continue
            rolling = dict(plan[1])
            workers = tuple(
                worker._replace(at=At.CARRY)
                if rank in rolling
                else worker._replace(at=At.CARRIED, reached=plan[0], is_prepared=False)
                for rank, worker in enumerate(there)
            )
            carried = frozenset(rank for rank in RANKS if rank not in rolling)
            after = _with(world._replace(workers=workers), number, plan=plan, carried=carried)
            yield f"generation {number} plans: target {plan[0]}, (stage, window) {list(plan[1])}", after


@cache
def plan_of(
    workers: tuple[Worker, ...], own: tuple[Place, ...], held: tuple[Place, ...]
) -> tuple[int, tuple[tuple[int, int], ...]] | None:
    """Return the target and the rollbacks that the real code plans; None if nothing is left."""
    standings = [
        Standing(
            stage=rank,
            reached=None if worker.reached < 0 else worker.reached,
            prepared=worker.is_prepared,
            whole=worker.reached >= 0,
        )
        for rank, worker in enumerate(workers)
    ]
    target = plan_target(standings)
    has_progress = any(place.steps_to or any(place.windows) for place in (*own, *held))
    if (target is not None and target.iteration == 0) or (
        not has_progress and (target is None or not any(worker.is_prepared for worker in workers))
    ):
        return 0, tuple((rank, -1) for rank in RANKS)
    goal = None if target is None else target.iteration
    lost = frozenset(RANKS) if target is None else target.lost_stages
    logs = [(worker.log_from, worker.log_to) if worker.reached >= 0 else (1, 0) for worker in workers]
    plan = recovery_of(lost, goal, own, held, tuple(logs))
    if plan is None:
        return None
    rollbacks = [(stage, each.window_start) for each in plan.rollbacks for stage in each.stages]
    return plan.target_iteration, tuple(rollbacks)


@cache
def recovery_of(
    lost: frozenset[int],
    goal: int | None,
    own: tuple[Place, ...],
    held: tuple[Place, ...],
    logs: tuple[tuple[int, int], ...],
) -> RecoveryPlan | None:
    """Return the plan of the real code, or None if nothing is left."""
    inventories = [
        Inventory(
            global_rank=rank,
            stage=rank,
            windows=own[rank].refs(),
            held={OWNER[rank]: held[OWNER[rank]].refs()} if held[OWNER[rank]].windows else {},
            logged_from=logs[rank][0],
            logged_to=logs[rank][1],
        )
        for rank in RANKS
    ]
    try:
        return plan_recovery(lost, inventories, target_iteration=goal, boundary_log=True)
    except NothingLeftError:
        return None


def has_source(own: tuple[Place, ...], held: tuple[Place, ...]) -> bool:
    """Return whether a job without any living state finds a common state in these memories."""
    return recovery_of(frozenset(RANKS), None, own, held, ((1, 0),) * 3) is not None


def may_begin_anew(own: tuple[Place, ...], held: tuple[Place, ...]) -> bool:
    """Return whether any rank has no window after its first step yet: then nothing is lost by beginning anew."""
    return not all(any(mine.windows | copies.windows) for mine, copies in zip(own, held, strict=True))


def normalized(world: World) -> World:
    """Return the state as the checker stores it: waits have ended that can end, and what no process reads is left out.

    Generations that no process looks at any more are dropped from the front, and the others numbered anew.
    """
    workers = tuple(_without_wait(world, worker) for worker in world.workers)
    supervisors = tuple(_without_vain_writes(world, *each) for each in world.supervisors)
    read = {world.current, *(worker.generation for worker in workers if worker)}
    read |= {worker.generation for _, worker in world.cut_off} | {number for _, number, _ in supervisors}
    shift = min(read - {0}) - 1
    kept = [
        _as_read(each, [worker for worker in workers if worker and worker.generation == number])
        if number in read
        else _GONE
        for number, each in enumerate(world.generations, 1)
    ]
    moved = lambda worker: worker and worker._replace(generation=max(0, worker.generation - shift))  # noqa: E731
    is_cut_off = [any(stale == rank for stale, _ in world.cut_off) for rank in RANKS]
    return world._replace(
        workers=tuple(
            worker and moved(worker if cut_off else worker._replace(incarnation=0))
            for worker, cut_off in zip(workers, is_cut_off, strict=True)
        ),
        lives=tuple(life if cut_off else 0 for life, cut_off in zip(world.lives, is_cut_off, strict=True)),
        cut_off=tuple((rank, moved(worker)) for rank, worker in world.cut_off),
        supervisors=tuple((at, max(0, number - shift), announced) for at, number, announced in supervisors),
        generations=tuple(kept[shift:]),
        current=world.current - shift,
    )


def _without_vain_writes(world: World, at: int, number: int, announced: bool) -> tuple[int, int, bool]:
    """Return a supervisor's next action; the writes that end a generation that has ended change nothing."""
    if at in (0, _S_FENCE, _S_READ):
        return (at, 0, announced) if at else _IDLE
    has_ended = not number or world.generation(number).has_ended
    return (_S_START, 0, announced) if at == _S_START or has_ended else (at, number, announced)


def _without_wait(world: World, worker: Worker | None) -> Worker | None:
    """Return a worker whose wait for a decision or for the end of the job is over, as far as there is one."""
    if worker is None or worker.at not in (At.WAIT, At.LAST):
        return worker
    generation = world.generation(worker.generation)
    if worker.at == At.LAST:
        return worker._replace(at=At.OVER) if generation.outcome == "finished" else worker
    if not generation.decision:
        return worker
    return worker._replace(at=At.FORMED if generation.decision == "go" else At.READ)


def _as_read(generation: Generation, workers: list[Worker]) -> Generation:
    """Return a generation without the results of collectives that none of its workers waits for."""
    arrived = tuple(sorted(generation.arrived))
    if all(worker.at not in (At.CARRY, At.REPLAY, At.CARRIED) for worker in workers):
        generation = generation._replace(plan=None, carried=frozenset())
    return generation._replace(arrived=arrived)


def _put(values: tuple, position: int, value: object) -> tuple:
    return (*values[:position], value, *values[position + 1 :])


def _with(world: World, number: int, **fields: object) -> World:
    generation = world.generations[number - 1]._replace(**fields)
    return world._replace(generations=_put(world.generations, number - 1, generation))


def _numbers(world: World) -> range:
    return range(1, len(world.generations) + 1)


def _finished(world: World, number: int) -> bool:
    return world.generation(number).outcome == "finished"


def _misses_a_rank(world: World, number: int) -> bool:
    """Return whether a rank has no worker in a generation any more: an operation with it fails."""
    return any(worker is None or worker.generation != number or worker.at == At.READ for worker in world.workers)


def _all_compute(world: World, number: int, reached: int) -> bool:
    """Return whether all ranks take part in the iteration after `reached`."""
    return all(
        worker is not None
        and worker.generation == number
        and (
            worker.reached > reached or (worker.reached == reached and (worker.is_prepared or worker.at == At.COMPUTE))
        )
        for worker in world.workers
    )
