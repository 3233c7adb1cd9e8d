"""The protocol of generations, steps and windows, as an executable model.

A checker visits every interleaving of the model. There are three ranks, one per stage.
The copies of rank r are in the memory of rank r + 1. A window has one slot. Each write
to the store is an action of its own, and so is each message: copies, records and drops
travel from a rank's daemon to the rank's peer, in the order of sending. Plans come from
the real code: `plan_target` and `plan_recovery`.

A fault kills a worker (memory and daemon of the node stay), loses a node (memory,
daemon and worker), or cuts a node off (the job loses the memory, and the old worker
lives on beside its replacement until the old worker is fenced).

    worker       READ > ARRIVE (> DECIDE) > WAIT > FORMED > LISTED (> CARRY > REPLAY) >
                 CARRIED > COMPUTE (> KEEP)
                 > RECORD > VOTED > COMPUTE ... > DONE (> FINISH) > LAST > OVER
    end(g)       outcome, generation, decision and end: three writes of a supervisor, or
                 of a worker that misses a rank

`tests/recovery/traces.py` has the same sentences for the acts of real processes, and
requires each trace to be a path of this model. A name that begins with `(` belongs to a
move that no trace shows.

Simplifications: the job begins with all ranks in generation 1, with first windows. The
loss of a node restarts only the rank of that node, without new numbers. A fetch and the
replay after the fetch are one action. A worker that was cut off writes to no peer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, partial
from typing import Any, NamedTuple

from moe_ckpt.errors import NothingLeftError
from moe_ckpt.recovery.inventory import Inventory, WindowRef
from moe_ckpt.recovery.plan import RecoveryPlan, plan_recovery
from moe_ckpt.recovery.target import Standing, plan_target

RANKS = range(3)
HOLDER = (1, 2, 0)
OWNER = (2, 0, 1)  # the owner of the copies that each rank holds


class At(IntEnum):
    """The next action of a worker."""

    READ = 0
    """Read the number of the newest generation."""

    ARRIVE = 1
    """Arrive in the generation."""

    DECIDE = 2
    """Decide that the generation begins. Only the worker that arrives last does so."""

    WAIT = 3
    """Wait for the decision."""

    FORMED = 4
    """List the copies that the worker's memory holds."""

    LISTED = 5
    """Agree on a plan with all ranks. The worker has listed the copies."""

    CARRY = 6
    """Give up the state, because the worker is to roll back."""

    REPLAY = 7
    """Fetch a window, where the worker lacks the window, and replay."""

    CARRIED = 8
    """Go on with training, once all ranks are at the target."""

    COMPUTE = 9
    """Compute the gradients of the next iteration, with all ranks."""

    KEEP = 10
    """Keep only the newest window, and drop older windows.

    The peers of all ranks have the newest windows by then.
    """

    RECORD = 11
    """Vote for the iteration, once the peer has the record of the iteration."""

    VOTED = 12
    """Step, once all ranks have voted."""

    DONE = 13
    """Report that the last iteration is done."""

    FINISH = 14
    """Finish the job. Only the worker that is done last does so."""

    LAST = 15
    """Wait until the job is finished."""

    OVER = 16
    """No action: the worker has ended."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of the protocol.

    The checker can leave out each rule, to show that the rule is needed.
    """

    waits_for_all: bool = True
    """A generation begins once all ranks have arrived."""

    fences: bool = True
    """A worker that was replaced does not join."""

    fences_first: bool = True
    """A replacement is announced before the generation ends."""

    votes: bool = True
    """A rank steps once all ranks have complete gradients."""

    confirms: bool = True
    """An older window is dropped once all ranks have the newer window, and its copies.
    """

    keeps_safest: bool = True
    """After a recovery, the window with the most copies stays."""

    finishes_once: bool = True
    """A finished generation is not ended."""

    heeds_finish: bool = True
    """A supervisor replaces no worker of a job that has finished meanwhile."""


class Worker(NamedTuple):
    """A process that trains."""

    incarnation: int
    """Number of the worker among the workers of the rank, from 0."""

    at: int = At.READ
    """Next action."""

    generation: int = 0
    """Generation that the worker has read. 0: none."""

    reached: int = -1
    """Iteration of the state. -1: the worker has no state."""

    is_prepared: bool = False
    """Whether the worker is prepared for the step to the next iteration."""

    log_from: int = 1
    """First iteration of the boundary log."""

    log_to: int = 0
    """Last iteration of the boundary log."""

    takes: bool = False
    """Whether the snapshot of this state is not complete yet."""

    awaits: bool = False
    """Whether some ranks do not keep the newest window yet."""

    copies: bool = False
    """Whether the worker sends windows and records to the rank's peer.

    True from the moment at which the worker goes on in a generation, until the worker
    lists copies in the next generation.
    """

    acked: int = -1
    """Newest own window that the peer has, by the answers of the peer. -1: none."""

    acked_record: int = 0
    """Newest iteration whose record the peer has, by the answers of the peer."""

    stale: frozenset[int] = frozenset()
    """Windows that the peer is to drop once the peer has all others."""

    ending: int = 0
    """Number of writes that the worker has made of the three that end a generation."""


class RankWindows(NamedTuple):
    """The windows of a rank in one memory."""

    windows: frozenset[int] = frozenset()
    """Starts of the windows."""

    replayable_to: int = 0
    """Last iteration of the rank's step log in this memory."""

    def refs(self) -> tuple[WindowRef, ...]:
        return tuple(
            WindowRef(
                start=start,
                num_slots=1,
                replayable_to=max(start, self.replayable_to),
                assignment="c",
            )
            for start in sorted(self.windows)
        )


class Generation(NamedTuple):
    """The keys of a generation in the store, and the collectives of its ranks."""

    outcome: str = ""
    """Outcome: "ended" or "finished". Empty: none yet."""

    decision: str = ""
    """Decision: "go" or "stop". Empty: none yet."""

    has_ended: bool = False
    """Whether ranks can see that the generation has ended."""

    arrived: tuple[int, ...] = ()
    """Ranks that have arrived."""

    done: int = 0
    """Number of ranks that are done."""

    votes: tuple[int, ...] = (0,) * 3
    """Iteration for which each rank has voted last, by rank."""

    carried: frozenset[int] = frozenset()
    """Ranks that are at the target."""

    listed: tuple[RankWindows | None, ...] = (None,) * 3
    """Copies that each rank's peer has listed, by owner. None: not listed."""

    has_base: bool = False
    """Whether all ranks have a window of the state that the generation begins with."""

    plan: tuple[int, tuple[tuple[int, int], ...]] | None = None
    """Target, and (stage, window) of each stage that rolls back. None: no plan."""


class Message(NamedTuple):
    """A message of a rank's daemon to the rank's peer."""

    kind: str
    """Kind: "copy", "record" or "drop"."""

    number: int
    """Start of a window, or iteration of a record."""

    counts: bool = True
    """Whether the worker that sent the message waits for an answer."""


class World(NamedTuple):
    """A state of the whole job. Tuples are by rank unless stated otherwise."""

    workers: tuple[Worker | None, ...]
    """Workers. None: the rank has no worker."""

    cut_off: tuple[tuple[int, Worker], ...]
    """Ranks and workers of nodes that are cut off, in the order of the faults."""

    supervisors: tuple[tuple[int, int, bool], ...]
    """The supervisor's next action (0: none), the generation that the supervisor ends,
    and whether the supervisor has announced the next worker.
    """

    own: tuple[RankWindows, ...]
    """Windows of the rank in the rank's own memory."""

    held: tuple[RankWindows, ...]
    """Copies of the rank's windows in the memory of the peer, by owner."""

    lanes: tuple[tuple[Message, ...] | None, ...]
    """Messages about windows on the way from the rank's daemon. None: the peer is gone.
    """

    records: tuple[tuple[Message, ...] | None, ...]
    """Messages about steps on the way from the rank's daemon. None: the peer is gone.
    """

    lives: tuple[int, ...]
    """Incarnation of the rank's newest worker that was announced or started."""

    current: int
    """Number of the newest generation."""

    generations: tuple[Generation, ...]
    """Generations by number, from 1."""

    faults: int
    """Faults so far."""

    memories_lost: int
    """Memories that were lost so far."""

    has_failed: bool = False
    """Whether ranks have found nothing left."""

    def generation(self, number: int) -> Generation:
        return self.generations[number - 1]


Move = tuple[str, World]
_IDLE = (0, 0, False)
_GONE = Generation(outcome="ended", decision="stop", has_ended=True)
# actions of a supervisor; END has three writes
_S_END, _S_START, _S_FENCE, _S_READ = 1, 4, 5, 6


def start() -> World:
    """Return the state in which all ranks have met and have copies of first windows."""
    first = RankWindows(windows=frozenset({0}))
    return World(
        workers=(
            Worker(
                incarnation=0,
                at=At.COMPUTE,
                generation=1,
                reached=0,
                copies=True,
                acked=0,
            ),
        )
        * 3,
        cut_off=(),
        supervisors=(_IDLE,) * 3,
        own=(first,) * 3,
        held=(first,) * 3,
        lanes=((),) * 3,
        records=((),) * 3,
        lives=(0,) * 3,
        current=1,
        generations=(Generation(decision="go", arrived=(0, 1, 2)),),
        faults=0,
        memories_lost=0,
    )


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """All moves of the job."""

    rules: Rules = Rules()
    """Rules that hold."""

    iterations: int = 2
    """Iterations of the job."""

    faults: int = 2
    """Largest number of faults."""

    kinds: tuple[str, ...] = ("kill", "lose", "cut off")
    """Kinds of faults."""

    moments: tuple[At, ...] | None = None
    """Faults strike only workers with one of these next actions. None: any worker."""

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
            yield from self._messages(world, rank)
        for position, (rank, worker) in enumerate(world.cut_off):
            yield from self._stale(world, position, rank, worker)
        yield from self._survey(world)

    # Faults and supervisors

    def _fault(self, world: World, rank: int) -> Iterator[Move]:
        worker = world.workers[rank]
        if (
            worker is None
            or worker.at == At.OVER
            or world.faults >= self.faults
            or world.supervisors[rank][0]
        ):
            return
        if self.moments is not None and worker.at not in self.moments:
            return
        dead = world._replace(
            workers=_put(world.workers, rank, None), faults=world.faults + 1
        )
        if "kill" in self.kinds:
            supervisor = (
                _S_END if worker.generation else _S_START,
                worker.generation,
                False,
            )
            yield (
                f"rank {rank}'s worker dies",
                dead._replace(supervisors=_put(world.supervisors, rank, supervisor)),
            )
        if not {"lose", "cut off"} & {*self.kinds} or any(
            _finished(world, g) for g in _numbers(world)
        ):
            return
        first = _S_FENCE if self.rules.fences_first else _S_READ
        lost = dead._replace(
            own=_put(world.own, rank, RankWindows()),
            held=_put(world.held, OWNER[rank], RankWindows()),
            lanes=_put(_put(world.lanes, OWNER[rank], None), rank, ()),
            records=_put(_put(world.records, OWNER[rank], None), rank, ()),
            memories_lost=world.memories_lost + 1,
            supervisors=_put(world.supervisors, rank, (first, 0, False)),
        )
        if "lose" in self.kinds:
            yield f"rank {rank}'s node is lost", lost
        if "cut off" in self.kinds:
            # acts of this worker after FORMED do not affect other ranks
            at = min(worker.at, At.FORMED)
            stale = Worker(
                incarnation=worker.incarnation, at=at, generation=worker.generation
            )
            yield (
                f"rank {rank}'s node is cut off",
                lost._replace(cut_off=(*world.cut_off, (rank, stale))),
            )

    def _supervisor(self, world: World, rank: int) -> Iterator[Move]:
        at, generation, is_announced = world.supervisors[rank]
        if not at:
            return
        then = lambda at, announced=is_announced: world._replace(  # noqa: E731
            supervisors=_put(world.supervisors, rank, (at, generation, announced))
        )
        name = f"rank {rank}'s supervisor"
        if at == _S_FENCE:
            lives = _put(world.lives, rank, world.lives[rank] + 1)
            yield (
                f"{name} announces the next worker",
                then(_S_READ, True)._replace(lives=lives),
            )
        elif at == _S_READ:
            supervisor = (_S_END, world.current, is_announced)
            reads = world._replace(
                supervisors=_put(world.supervisors, rank, supervisor)
            )
            yield f"({name} reads generation {world.current})", reads
        elif _S_END <= at < _S_START:
            ended, goes_on = self._end(world, generation, at - _S_END)
            after = at + 1 if goes_on else (0 if self.rules.heeds_finish else _S_START)
            yield (
                _write(world, ended, name, generation, at - _S_END),
                ended._replace(
                    supervisors=_put(
                        world.supervisors, rank, (after, generation, is_announced)
                    )
                ),
            )
        elif at == _S_START:
            life = world.lives[rank] if is_announced else world.lives[rank] + 1
            started = then(0)._replace(
                lives=_put(world.lives, rank, life),
                workers=_put(world.workers, rank, Worker(incarnation=life)),
            )
            yield f"{name} starts worker {life}", started

    def _end(self, world: World, number: int, write: int) -> tuple[World, bool]:
        """Make one of the three writes that end a generation.

        Returns:
            The state after the write, and whether the next write follows.
        """
        generation = world.generation(number)
        if write == 0:
            if generation.outcome == "finished" and self.rules.finishes_once:
                return world, False
            return _with(world, number, outcome=generation.outcome or "ended"), True
        if write == 1:
            if world.current != number:
                return world, True
            return world._replace(
                current=number + 1, generations=(*world.generations, Generation())
            ), True
        return _with(
            world, number, decision=generation.decision or "stop", has_ended=True
        ), True

    # Workers

    def _stale(
        self, world: World, position: int, rank: int, worker: Worker
    ) -> Iterator[Move]:
        """Yield the moves of a cut-off worker, which may come back and try to join."""
        generation = world.generation(worker.generation) if worker.generation else None
        put = lambda new: world._replace(  # noqa: E731
            cut_off=tuple(
                (rank, new) if at == position else each
                for at, each in enumerate(world.cut_off)
            )
        )
        gone = world._replace(
            cut_off=tuple(
                each for at, each in enumerate(world.cut_off) if at != position
            )
        )
        name = f"rank {rank}'s worker {worker.incarnation}, cut off"
        if worker.at == At.READ:
            if self.rules.fences and world.lives[rank] != worker.incarnation:
                yield f"{name}, is fenced", gone
            else:
                yield (
                    f"{name}, reads",
                    put(worker._replace(at=At.ARRIVE, generation=world.current)),
                )
        elif worker.at == At.ARRIVE:
            assert generation is not None
            arrived, is_last = self._arrive(generation, rank)
            decides = is_last and not generation.decision
            changed = _with(
                put(worker._replace(at=At.WAIT)), worker.generation, arrived=arrived
            )
            yield (
                f"{name}, arrives",
                _with(changed, worker.generation, decision="go")
                if decides
                else changed,
            )
        elif generation and (
            generation.has_ended
            or (worker.at == At.WAIT and generation.decision == "stop")
        ):
            yield f"{name}, leaves", put(worker._replace(at=At.READ))
        elif generation and worker.at == At.WAIT and generation.decision == "go":
            yield f"{name}, sees: go", put(worker._replace(at=At.FORMED))

    def _worker(self, world: World, rank: int, worker: Worker) -> Iterator[Move]:
        name, number = f"rank {rank}", worker.generation
        put = partial(_with_worker, world, rank, worker)
        if worker.takes and (worker.at <= At.FORMED or worker.at >= At.COMPUTE):
            yield self._take(put(takes=False), rank, worker)
        if worker.at == At.READ:
            yield (
                f"({name} reads generation {world.current})",
                put(at=At.ARRIVE, generation=world.current),
            )
            return
        generation = world.generation(number)
        if worker.ending:
            yield self._worker_ends(world, rank, worker)
            return
        if generation.has_ended and worker.at > At.WAIT:
            yield f"({name} leaves generation {number})", put(at=At.READ)
        elif (
            At.WAIT < worker.at < At.FINISH
            and worker.at != At.CARRY
            and _misses_a_rank(world, number)
        ):
            yield self._worker_ends(world, rank, worker)
        yield from self._recover(world, rank, worker)
        yield from self._train(world, rank, worker)

    def _worker_ends(self, world: World, rank: int, worker: Worker) -> Move:
        """Return the next of the three writes by which a worker ends a generation.

        The worker misses a rank of that generation.
        """
        ended, goes_on = self._end(world, worker.generation, worker.ending)
        there = (
            worker._replace(ending=worker.ending + 1)
            if goes_on and worker.ending < 2
            else worker._replace(at=At.READ, ending=0)
        )
        name = _write(world, ended, f"rank {rank}", worker.generation, worker.ending)
        return name, ended._replace(workers=_put(ended.workers, rank, there))

    def _recover(self, world: World, rank: int, worker: Worker) -> Iterator[Move]:
        """Yield the moves of a worker from the arrival to the first iteration."""
        name, number = f"rank {rank}", worker.generation
        generation = world.generation(number)
        put = partial(_with_worker, world, rank, worker)
        match worker.at:
            case At.ARRIVE:
                arrived, is_last = self._arrive(generation, rank)
                there = put(at=At.DECIDE if is_last else At.WAIT)
                yield (
                    f"{name} arrives in generation {number}",
                    _with(there, number, arrived=arrived),
                )
            case At.DECIDE:
                decision = generation.decision or "go"
                decided = _with(put(at=At.WAIT), number, decision=decision)
                yield (
                    (
                        f"({name} is late)"
                        if generation.decision
                        else f"{name} decides: go"
                    ),
                    decided,
                )
            case At.FORMED:
                yield f"({name} lists copies)", _list_copies(world, rank, worker)
            case At.CARRY:
                lost = put(at=At.REPLAY, reached=-1, is_prepared=False)
                yield f"({name} gives up its state)", lost
            case At.REPLAY if not _misses_a_rank(world, number):
                yield self._replay(world, rank, worker)
            case At.CARRIED if len(generation.carried) == len(RANKS):
                yield (
                    f"({name} goes on after iteration {worker.reached})",
                    self._go_on(world, rank, worker),
                )
            case _:
                pass

    def _train(self, world: World, rank: int, worker: Worker) -> Iterator[Move]:
        """Yield the moves of a worker that trains."""
        name, number, iteration = f"rank {rank}", worker.generation, worker.reached + 1
        generation = world.generation(number)
        put = partial(_with_worker, world, rank, worker)
        if (
            worker.stale
            and worker.copies
            and not any(message.counts for message in world.lanes[rank] or ())
        ):
            drops = (
                Message("drop", start, counts=False) for start in sorted(worker.stale)
            )
            dropped = _send(put(stale=frozenset()), rank, "lanes", *drops)
            yield f"({name}'s peer has all windows, and is to drop others)", dropped
        match worker.at:
            case At.COMPUTE if _all_compute(world, number, worker.reached):
                logged = world._replace(
                    own=_put(
                        world.own,
                        rank,
                        world.own[rank]._replace(replayable_to=iteration),
                    )
                )
                sent = (
                    _send(logged, rank, "records", Message("record", iteration))
                    if worker.copies
                    else logged
                )
                at = At.KEEP if worker.awaits else At.RECORD
                yield (
                    f"({name} has complete gradients of {iteration})",
                    _with_worker(sent, rank, worker, at=at, log_to=iteration),
                )
            case At.KEEP if self._agree(world, worker):
                kept = self._keep_newest(world, rank, worker)
                fields = {
                    "at": At.RECORD,
                    "awaits": False,
                    "log_from": max(worker.log_from, iteration),
                }
                yield (
                    f"{name} keeps window {worker.reached} only",
                    _with_worker(kept, rank, worker, **fields),
                )
            case At.RECORD if worker.acked_record >= iteration:
                votes = _put(generation.votes, rank, iteration)
                voted = _with(put(at=At.VOTED, is_prepared=True), number, votes=votes)
                yield f"{name} votes for iteration {iteration}", voted
            case At.VOTED if min(generation.votes) >= iteration or not self.rules.votes:
                fields = {
                    "reached": iteration,
                    "is_prepared": False,
                    "takes": True,
                    "awaits": True,
                }
                yield (
                    f"{name} steps to {iteration}",
                    put(at=self._next(iteration), **fields),
                )
            case At.DONE:
                done = generation.done + 1
                at = At.FINISH if done == len(RANKS) else At.LAST
                yield f"{name} is done", _with(put(at=at), number, done=done)
            case At.FINISH:
                outcome = generation.outcome or "finished"
                decided = _with(put(at=At.LAST), number, outcome=outcome)
                yield (
                    (
                        f"({name} is too late)"
                        if generation.outcome
                        else f"{name} finishes the job"
                    ),
                    decided,
                )
            case _:
                pass

    def _arrive(
        self, generation: Generation, rank: int
    ) -> tuple[tuple[int, ...], bool]:
        """Return the arrived ranks, this rank included, and whether it is the last."""
        arrived = (*generation.arrived, rank)
        return arrived, len(arrived) == len(RANKS) - (not self.rules.waits_for_all)

    def _next(self, reached: int) -> At:
        return At.COMPUTE if reached < self.iterations else At.DONE

    # Windows and their copies

    def _take(self, world: World, rank: int, worker: Worker) -> Move:
        """Return the move that completes the snapshot of a worker's state.

        The snapshot then goes to the peer.
        """
        own = world.own[rank]
        taken = world._replace(
            own=_put(
                world.own, rank, own._replace(windows=own.windows | {worker.reached})
            )
        )
        if worker.copies:
            there = worker._replace(takes=False, stale=worker.stale - {worker.reached})
            taken = _send(taken, rank, "lanes", Message("copy", worker.reached))
            taken = taken._replace(workers=_put(taken.workers, rank, there))
        return f"rank {rank} takes window {worker.reached}", taken

    def _agree(self, world: World, worker: Worker) -> bool:
        """Return whether all ranks have come to one reduction, with copies at peers.

        The newest window of each rank that still waits must be at the peer. `acked`
        decides, because each worker answers for its own window.
        """
        if not self.rules.confirms:
            return not worker.takes
        return all(
            each is not None
            and each.generation == worker.generation
            and (
                each.at > At.KEEP
                or (
                    each.at == At.KEEP and each.acked == each.reached and not each.takes
                )
            )
            for each in world.workers
        )

    def _keep_newest(self, world: World, rank: int, worker: Worker) -> World:
        """Drop all windows but the newest, in the rank's own memory and at the peer.

        All ranks have the newest window, with its copy.
        """
        own = world.own[rank]
        old = sorted(start for start in own.windows if start < worker.reached)
        after = world._replace(
            own=_put(world.own, rank, own._replace(windows=own.windows - {*old}))
        )
        return _send(
            after,
            rank,
            "lanes",
            *(Message("drop", start, counts=False) for start in old),
        )

    def _messages(self, world: World, rank: int) -> Iterator[Move]:
        """Yield the arrivals of messages of a rank's daemon at the peer.

        The worker has the answer at once: any act of the worker between an arrival and
        the reading of the answer is also possible before the arrival.
        """
        held = world.held[rank]
        for lane in ("lanes", "records"):
            messages = getattr(world, lane)[rank]
            if not messages:
                continue
            message, rest = (
                messages[0],
                world._replace(
                    **{lane: _put(getattr(world, lane), rank, messages[1:])}
                ),
            )
            if message.kind == "copy" and message.number not in world.own[rank].windows:
                yield (
                    (
                        f"(rank {rank}'s window {message.number} was dropped before it"
                        " was sent)"
                    ),
                    rest,
                )
                continue
            name, there = _arrived(held, rank, message)
            after = rest._replace(held=_put(world.held, rank, there))
            worker = world.workers[rank]
            if worker is not None and message.counts:
                known = "acked" if message.kind == "copy" else "acked_record"
                worker = worker._replace(
                    **{known: max(getattr(worker, known), message.number)}
                )
                after = after._replace(workers=_put(world.workers, rank, worker))
            yield name, after

    def _go_on(self, world: World, rank: int, worker: Worker) -> World:
        """Return the state in which a worker goes on with training.

        The worker's windows go to the peer. Once the peer has these windows, the peer
        drops all others.
        """
        generation, own = world.generation(worker.generation), world.own[rank]
        listed = generation.listed[rank] or RankWindows()
        known = frozenset(
            message.number
            for message in world.lanes[rank] or ()
            if message.kind == "copy"
        )
        stale = (
            (listed.windows | known) - own.windows if own.windows else frozenset[int]()
        )
        copies = [
            Message("copy", start) for start in sorted(own.windows - listed.windows)
        ]
        lanes = _put(world.lanes, rank, world.lanes[rank] or ())
        records = _put(world.records, rank, world.records[rank] or ())
        after = world._replace(lanes=lanes, records=records)
        after = _send(after, rank, "lanes", *copies)
        after = _send(
            after, rank, "records", Message("record", own.replayable_to, counts=False)
        )
        takes = not generation.has_base
        there = worker._replace(
            at=self._next(worker.reached),
            copies=True,
            takes=takes,
            awaits=takes,
            acked=max(own.windows & listed.windows, default=-1),
            stale=stale,
        )
        return after._replace(workers=_put(after.workers, rank, there))

    def _replay(self, world: World, rank: int, worker: Worker) -> Move:
        number, plan = worker.generation, world.generation(worker.generation).plan
        assert plan is not None
        target, start_at = plan[0], dict(plan[1])[rank]
        own, held = world.own[rank], world.held[rank]
        has = start_at in own.windows and max(own.replayable_to, start_at) >= target
        source = own if has else held
        if start_at < 0:  # the whole job begins anew
            world = world._replace(own=_put(world.own, rank, RankWindows()))
        else:
            assert start_at in source.windows, (rank, plan, own, held)
            world = world._replace(
                own=_put(world.own, rank, source._replace(replayable_to=target))
            )
        there = worker._replace(
            at=At.CARRIED, reached=target, log_from=max(start_at, 0) + 1, log_to=target
        )
        after = world._replace(workers=_put(world.workers, rank, there))
        carried = world.generation(number).carried | {rank}
        return f"rank {rank} replays from window {start_at} to {target}", self._carried(
            after, number, carried
        )

    def _carried(self, world: World, number: int, carried: frozenset[int]) -> World:
        """Return the state in which these ranks are at the target.

        Once all ranks are there, each rank keeps the window with the most copies.
        """
        world = _with(world, number, carried=carried)
        if len(carried) < len(RANKS):
            return world
        plan = world.generation(number).plan
        assert plan is not None
        kept = self._keep(world, number)
        own = tuple(
            each._replace(replayable_to=min(each.replayable_to, plan[0]))
            for each in kept.own
        )
        has_base = all(plan[0] in each.windows for each in own)
        return _with(kept._replace(own=own), number, has_base=has_base)

    def _keep(self, world: World, number: int) -> World:
        """Keep, of the windows that all ranks have, the one with the most copies.

        `WindowRecovery` does the same.
        """
        common = frozenset.intersection(*(each.windows for each in world.own))
        if not common:
            return world
        listed = world.generation(number).listed
        copies = lambda start: min(  # noqa: E731
            each is not None and start in each.windows for each in listed
        )
        safest = max(
            common,
            key=lambda start: (copies(start) if self.rules.keeps_safest else 0, start),
        )
        return world._replace(
            own=tuple(each._replace(windows=frozenset({safest})) for each in world.own)
        )

    def _survey(self, world: World) -> Iterator[Move]:
        """Yield the collective in which all ranks of a generation agree on a plan."""
        numbers = {
            worker.generation
            for worker in world.workers
            if worker and worker.at == At.LISTED
        }
        for number in numbers:
            there = [
                worker
                for worker in world.workers
                if worker and worker.generation == number
            ]
            if len(there) != len(RANKS) or any(
                worker.at != At.LISTED or worker.ending for worker in there
            ):
                continue
            listed = world.generation(number).listed
            plan = plan_of(
                tuple(there), world.own, tuple(each or RankWindows() for each in listed)
            )
            if plan is None:
                yield (
                    f"generation {number} finds nothing left",
                    world._replace(has_failed=True),
                )
                continue
            rolling = dict(plan[1])
            workers = tuple(
                worker._replace(at=At.CARRY)
                if rank in rolling
                else worker._replace(at=At.CARRIED, reached=plan[0], is_prepared=False)
                for rank, worker in enumerate(there)
            )
            carried = frozenset(rank for rank in RANKS if rank not in rolling)
            after = _with(world._replace(workers=workers), number, plan=plan)
            yield describe_plan(number, *plan), self._carried(after, number, carried)


def describe_plan(
    generation: int, target: int, rollbacks: Iterable[tuple[int, int]]
) -> str:
    """Return the name of the move in which a generation agrees on a plan.

    Args:
        generation: The number of the generation.
        target: The target iteration.
        rollbacks: (stage, window) of each stage that rolls back.
    """
    back = ", ".join(
        f"stage {stage} from window {start}" for stage, start in sorted(rollbacks)
    )
    return (
        f"generation {generation} plans iteration {target}:"
        f" {back or 'no stage rolls back'}"
    )


@cache
def plan_of(
    workers: tuple[Worker, ...],
    own: tuple[RankWindows, ...],
    held: tuple[RankWindows, ...],
) -> tuple[int, tuple[tuple[int, int], ...]] | None:
    """Return the target and the rollbacks that the real code plans.

    Returns:
        The target, and (stage, window) of each rollback; window -1: the job begins
        anew. None: nothing is left.
    """
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
    has_progress = any(
        each.replayable_to or any(each.windows) for each in (*own, *held)
    )
    if (target is not None and target.iteration == 0) or (
        not has_progress
        and (target is None or not any(worker.is_prepared for worker in workers))
    ):
        return 0, tuple((rank, -1) for rank in RANKS)
    goal = None if target is None else target.iteration
    lost = frozenset(RANKS) if target is None else target.lost_stages
    last = 0 if goal is None else goal
    logs = [
        (worker.log_from, last)
        if worker.reached >= 0 and worker.log_to >= last
        else (last + 1, last)
        for worker in workers
    ]
    plan = recovery_of(lost, goal, own, held, tuple(logs))
    if plan is None:
        return None
    rollbacks = [
        (stage, each.window_start) for each in plan.rollbacks for stage in each.stages
    ]
    return plan.target_iteration, tuple(rollbacks)


@cache
def recovery_of(
    lost: frozenset[int],
    goal: int | None,
    own: tuple[RankWindows, ...],
    held: tuple[RankWindows, ...],
    logs: tuple[tuple[int, int], ...],
) -> RecoveryPlan | None:
    """Return the plan of the real code, or None if nothing is left."""
    inventories = [
        Inventory(
            global_rank=rank,
            stage=rank,
            windows=own[rank].refs(),
            held={OWNER[rank]: held[OWNER[rank]].refs()}
            if held[OWNER[rank]].windows
            else {},
            logged_from=logs[rank][0],
            logged_to=logs[rank][1],
        )
        for rank in RANKS
    ]
    try:
        return plan_recovery(
            lost, inventories, target_iteration=goal, boundary_log=True
        )
    except NothingLeftError:
        return None


def has_source(own: tuple[RankWindows, ...], held: tuple[RankWindows, ...]) -> bool:
    """Return whether these memories alone lead to a common state.

    No worker has a state.
    """
    return recovery_of(frozenset(RANKS), None, own, held, ((1, 0),) * 3) is not None


def may_begin_anew(own: tuple[RankWindows, ...], held: tuple[RankWindows, ...]) -> bool:
    """Return whether any rank has no window after the first step yet.

    Nothing is then lost if the job begins anew.
    """
    return not all(
        any(mine.windows | copies.windows)
        for mine, copies in zip(own, held, strict=True)
    )


def normalized(world: World) -> World:
    """Return a state in the form that the checker stores.

    Waits that can end have ended, and data that no process reads is left out. Old
    generations that no process reads any more are dropped, and all others get new
    numbers from 1.
    """
    world = settled(world)
    workers = world.workers
    supervisors = tuple(
        _without_vain_writes(world, *each) for each in world.supervisors
    )
    read = {world.current, *(worker.generation for worker in workers if worker)}
    read |= {worker.generation for _, worker in world.cut_off} | {
        number for _, number, _ in supervisors
    }
    shift = min(read - {0}) - 1
    kept = [
        _as_read(
            each,
            [worker for worker in workers if worker and worker.generation == number],
        )
        if number in read
        else _GONE
        for number, each in enumerate(world.generations, 1)
    ]
    moved = lambda worker: (  # noqa: E731
        worker._replace(generation=max(0, worker.generation - shift))
        if worker and shift
        else worker
    )
    is_cut_off = [any(stale == rank for stale, _ in world.cut_off) for rank in RANKS]
    return world._replace(
        workers=tuple(
            moved(
                worker
                if cut_off or not (worker and worker.incarnation)
                else worker._replace(incarnation=0)
            )
            for worker, cut_off in zip(workers, is_cut_off, strict=True)
        ),
        lives=tuple(
            life if cut_off else 0
            for life, cut_off in zip(world.lives, is_cut_off, strict=True)
        ),
        cut_off=tuple((rank, moved(worker)) for rank, worker in world.cut_off),
        supervisors=tuple(
            (at, max(0, number - shift), announced)
            for at, number, announced in supervisors
        ),
        generations=tuple(kept[shift:]),
        current=world.current - shift,
    )


def settled(world: World) -> World:
    """Return a state in which all waits have ended that can end.

    Messages no longer count if no worker waits for the answer.
    """
    for rank in RANKS:
        worker = world.workers[rank]
        if (
            worker is not None
            and worker.at == At.FORMED
            # with `takes`, the worker may still take the window, or die before
            and not (worker.takes or worker.ending)
            and _is_still(world, rank)
        ):
            world = _list_copies(world, rank, worker)
        if (
            worker is None
            or not worker.copies
            or worker.at < At.COMPUTE
            or worker.ending
        ):
            world = _unanswered(world, rank)
    return world._replace(
        workers=tuple(_without_wait(world, worker) for worker in world.workers)
    )


def _without_vain_writes(
    world: World, at: int, number: int, announced: bool
) -> tuple[int, int, bool]:
    """Return a supervisor's next action, without writes that change nothing."""
    if at in (0, _S_FENCE, _S_READ):
        return (at, 0, announced) if at else _IDLE
    while _S_END <= at < _S_START and number and _is_vain(world, number, at - _S_END):
        at += 1
    return (
        (_S_START, 0, announced)
        if at == _S_START or not number
        else (at, number, announced)
    )


def _is_still(world: World, rank: int) -> bool:
    """Return whether no message is on its way to a rank."""
    return not (world.lanes[OWNER[rank]] or world.records[OWNER[rank]])


def _list_copies(world: World, rank: int, worker: Worker) -> World:
    """Return the state in which a worker has listed the copies that its memory holds.

    The worker waits for no answers any more.
    """
    quiet = worker._replace(
        copies=False, takes=False, acked=-1, acked_record=0, stale=frozenset()
    )
    owner, listing = OWNER[rank], quiet._replace(at=At.LISTED)
    listed = _put(world.generation(worker.generation).listed, owner, world.held[owner])
    world = _unanswered(
        world._replace(workers=_put(world.workers, rank, listing)), rank
    )
    return _with(world, worker.generation, listed=listed)


def _is_vain(world: World, number: int, write: int) -> bool:
    """Return whether a write that ends a generation would change nothing.

    The first write to a finished generation does not count, because the other writes
    may not follow.
    """
    generation = world.generation(number)
    return (
        generation.outcome == "ended",
        world.current != number,
        generation.has_ended,
    )[write]


def _without_wait(world: World, worker: Worker | None) -> Worker | None:
    """Return a worker without waits that can end, and without vain writes.

    The waits are those for a decision and for the end of the job.
    """
    if worker is None:
        return worker
    if worker.at <= At.FORMED or worker.ending:
        worker = worker._replace(acked=-1, acked_record=0, awaits=False)
    while 0 < worker.ending < 3 and _is_vain(world, worker.generation, worker.ending):
        worker = worker._replace(ending=worker.ending + 1)
    if worker.ending == 3:
        worker = worker._replace(at=At.READ, ending=0)
    if (
        worker.at == At.READ
        and worker.generation
        and world.generation(worker.generation).has_ended
    ):
        worker = worker._replace(generation=0)
    if worker.at not in (At.WAIT, At.LAST):
        return worker
    generation = world.generation(worker.generation)
    if worker.at == At.LAST:
        return (
            worker._replace(at=At.OVER) if generation.outcome == "finished" else worker
        )
    if not generation.decision:
        return worker
    return worker._replace(at=At.FORMED if generation.decision == "go" else At.READ)


def _as_read(generation: Generation, workers: list[Worker]) -> Generation:
    """Return a generation without results of collectives that no worker waits for."""
    fields: dict[str, object] = {"arrived": tuple(sorted(generation.arrived))}
    stages = {worker.at for worker in workers}
    if not stages & {At.CARRY, At.REPLAY, At.CARRIED}:
        fields |= {"plan": None, "carried": frozenset(), "has_base": False}
        if not stages & {At.FORMED, At.LISTED}:
            fields["listed"] = (None,) * 3
    is_so = all(getattr(generation, name) == value for name, value in fields.items())
    return generation if is_so else generation._replace(**fields)


def _put(values: tuple, position: int, value: object) -> tuple:
    return (*values[:position], value, *values[position + 1 :])


def _with_worker(world: World, rank: int, worker: Worker, **fields: Any) -> World:
    """Return the world in which a rank has this worker, with other fields."""
    return world._replace(workers=_put(world.workers, rank, worker._replace(**fields)))


def _send(world: World, rank: int, lane: str, *messages: Message) -> World:
    """Return the state after a rank's daemon has sent messages to the peer.

    The messages go behind all messages that are on the way.
    """
    lanes = getattr(world, lane)
    if lanes[rank] is None:
        return world
    return world._replace(**{lane: _put(lanes, rank, (*lanes[rank], *messages))})


def _arrived(held: RankWindows, rank: int, message: Message) -> tuple[str, RankWindows]:
    """Return the name of a message's arrival, and the peer's copies after that."""
    number = message.number
    match message.kind:
        case "copy":
            return f"rank {rank}'s window {number} reaches its peer", held._replace(
                windows=held.windows | {number}
            )
        case "drop":
            is_held = number in held.windows
            name = f"rank {rank}'s peer drops window {number}"
            return (name if is_held else f"({name}, which it lacks)"), held._replace(
                windows=held.windows - {number}
            )
        case _:
            return f"(rank {rank}'s record {number} reaches its peer)", held._replace(
                replayable_to=number
            )


def _unanswered(world: World, rank: int) -> World:
    """Return the world in which a rank's worker waits for no answer any more."""
    lanes, records = _uncounted(world.lanes[rank]), _uncounted(world.records[rank])
    if lanes is world.lanes[rank] and records is world.records[rank]:
        return world
    return world._replace(
        lanes=_put(world.lanes, rank, lanes), records=_put(world.records, rank, records)
    )


def _uncounted(lane: tuple[Message, ...] | None) -> tuple[Message, ...] | None:
    if not lane or not any(message.counts for message in lane):
        return lane
    return tuple(message._replace(counts=False) for message in lane)


def _write(before: World, after: World, who: str, number: int, write: int) -> str:
    """Return the name of one of the writes that end a generation."""
    what = ("decides that it ends", "begins the next", "stops those who wait")[write]
    has_effect = (
        before.generations != after.generations or before.current != after.current
    )
    if write == 2 and before.generation(number).has_ended:
        has_effect = False
    name = f"{who} ends generation {number}: {what}"
    return name if has_effect else f"({name}, again)"


def _with(world: World, number: int, **fields: object) -> World:
    generation = world.generations[number - 1]._replace(**fields)
    return world._replace(generations=_put(world.generations, number - 1, generation))


def _numbers(world: World) -> range:
    return range(1, len(world.generations) + 1)


def _finished(world: World, number: int) -> bool:
    return world.generation(number).outcome == "finished"


def _misses_a_rank(world: World, number: int) -> bool:
    """Return whether a rank has no worker in a generation any more.

    An operation with that rank then fails.
    """
    return any(
        worker is None
        or worker.generation != number
        or worker.at == At.READ
        or worker.ending
        for worker in world.workers
    )


def _all_compute(world: World, number: int, reached: int) -> bool:
    """Return whether all ranks take part in the iteration after `reached`."""
    return all(
        worker is not None
        and worker.generation == number
        and worker.at >= At.COMPUTE
        and worker.reached >= reached
        for worker in world.workers
    )
