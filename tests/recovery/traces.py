"""Traces of real jobs: the acts of all processes, as sentences of the model, in order.

The model is in protocol.py. `record` wraps, in the processes of a job, the calls that
write to the store, take, keep, copy and drop windows, vote, step, plan and replay. A
call and its sentence are one turn, for which all other processes and threads wait, so
the order of the sentences is an order of the calls. `follow` then looks for a path of
the model with these sentences.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe_ckpt.elastic.generations import Generations
from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.elastic.supervisor import Supervisor
from moe_ckpt.engine import stage_recovery
from moe_ckpt.engine.session import Session
from moe_ckpt.engine.stage_recovery import StageRecovery
from moe_ckpt.engine.step_state import StepState
from moe_ckpt.recovery.plan import RecoveryPlan
from moe_ckpt.replication import copy_server
from moe_ckpt.replication.publisher import Publisher
from moe_ckpt.replication.replica_folder import ReplicaFolder
from moe_ckpt.snapshot.blobs import BlobFolder
from moe_ckpt.snapshot.windows import SnapshotMemory
from tests.recovery.protocol import Protocol, World, describe_plan, settled, start

_BEGINS = re.compile(r"\(rank (\d+) begins\)")
_SNAPSHOT_KEY = re.compile(r"snapshot-(\d+)-0-")

Say = Callable[[str], None]


@contextlib.contextmanager
def turn(path: Path) -> Iterator[Say]:
    """Keep other processes and threads of the job from recorded acts meanwhile.

    Args:
        path: The trace.

    Yields:
        A function that adds a sentence to the trace.
    """
    # opened here: a lock belongs to one opening of a file
    with path.open("a") as trace:
        fcntl.flock(trace, fcntl.LOCK_EX)
        yield lambda sentence: print(sentence, file=trace, flush=True)


def record(path: Path) -> None:
    """Record the acts of this process and of its children from now on.

    Args:
        path: The trace.
    """
    _Recorder(path).wrap_all()


class _Recorder:
    """Wraps the calls that are recorded.

    Each process has a copy, with the generation of the process and with the process id
    of the supervisor.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # held in turns of this process, and by a thread that obeys an order: a process
        # that stops in a turn of another thread would keep the turn
        self._acts = threading.Lock()
        self._generation = 0
        self._supervisor_pid = 0

    @property
    def _rank(self) -> str:
        return f"rank {os.environ['RANK']}"

    @property
    def who(self) -> str:
        return (
            f"{self._rank}'s supervisor"
            if os.getpid() == self._supervisor_pid
            else self._rank
        )

    @contextlib.contextmanager
    def turn(self) -> Iterator[Say]:
        with self._acts, turn(self._path) as say:
            yield say

    def wrap_all(self) -> None:
        wrap(
            Generations,
            "__init__",
            lambda call, own, store: call(own, _RecordedStore(store, self)),
        )
        wrap(Supervisor, "run", self._supervise)
        wrap(StatusPage, "join", self._join)
        wrap(StatusPage, "enter", self._enter)
        wrap(Session, "iteration_started", self._iteration_started)
        wrap(Session, "update_applied", self._update_applied)
        wrap(StepState, "prepare", self._prepare)
        wrap(Publisher, "add_snapshot", self._add_snapshot)
        wrap(SnapshotMemory, "keep_in_flight", self._keep_in_flight)
        wrap(StageRecovery, "carry_out", self._carry_out)
        wrap(ReplicaFolder, "discard", self._discard)
        wrap(stage_recovery, "plan_recovery", self._plan)
        wrap(copy_server, "receive_blob", self._receive)

    def _supervise(self, call: Any, supervisor: Supervisor) -> int:
        self._supervisor_pid = os.getpid()
        return call(supervisor)

    def _join(self, call: Any, page: StatusPage, generation: int) -> None:
        self._generation = generation
        call(page, generation)

    def _enter(self, call: Any, page: StatusPage, *point: Any) -> None:
        with self._acts:
            call(page, *point)

    def _iteration_started(self, call: Any, session: Session, iteration: int) -> None:
        call(session, iteration)
        with self.turn() as say:
            say(f"({self._rank} begins)")

    def _update_applied(self, call: Any, session: Session, iteration: int) -> None:
        with self.turn() as say:
            say(f"{self._rank} steps to {iteration}")
        call(session, iteration)  # after the turn: a test may stop the process there

    def _prepare(self, call: Any, state: StepState, gradients: Any) -> None:
        with self.turn() as say:
            assert state.reached is not None
            say(f"{self._rank} votes for iteration {state.reached + 1}")
            call(state, gradients)

    def _add_snapshot(
        self, call: Any, publisher: Publisher, snapshot: Any, *rest: Any
    ) -> None:
        with self.turn() as say:
            call(publisher, snapshot, *rest)
            say(f"{self._rank} takes window {snapshot.header.window_start}")

    def _keep_in_flight(
        self, call: Any, memory: SnapshotMemory, *rest: Any, **options: Any
    ) -> None:
        with self.turn() as say:
            window = memory.in_flight()
            assert window is not None
            say(f"{self._rank} keeps window {window.start} only")
            call(memory, *rest, **options)

    def _carry_out(
        self, call: Any, recovery: StageRecovery, plan: RecoveryPlan, **options: Any
    ) -> int:
        done = call(recovery, plan, **options)
        rollback = plan.rollback_of(int(os.environ["RANK"]))  # a rank is a stage
        if rollback:
            with self.turn() as say:
                say(
                    f"{self._rank} replays from window {rollback.window_start} to"
                    f" {plan.target_iteration}"
                )
        return done

    def _plan(self, call: Any, *arguments: Any, **options: Any) -> RecoveryPlan:
        with self.turn() as say:
            plan = call(*arguments, **options)
            rollbacks = [
                (stage, each.window_start)
                for each in plan.rollbacks
                for stage in each.stages
            ]
            say(describe_plan(self._generation, plan.target_iteration, rollbacks))
        return plan

    def _receive(
        self, call: Any, link: Any, found: Any, folder: BlobFolder, key: str, *rest: Any
    ) -> int:
        with self.turn() as say:
            size_bytes = call(link, found, folder, key, *rest)
            if (window := _window_of(key)) is not None:
                say(f"rank {_owner_of(folder)}'s window {window} reaches its peer")
        return size_bytes

    def _discard(self, call: Any, folder: ReplicaFolder, key: str) -> None:
        with self.turn() as say:
            # SIM118: a folder is not a mapping
            before = {_window_of(each) for each in folder.keys()}  # noqa: SIM118
            call(folder, key)
            # another version of that window may stay
            for window in before - {_window_of(each) for each in folder.keys()}:  # noqa: SIM118
                say(f"rank {_owner_of(folder)}'s peer drops window {window}")


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function of a class or module.

    Args:
        owner: The class or module.
        name: The function's name.
        around: Is called instead, with the original before the arguments.
    """
    call = getattr(owner, name)

    @functools.wraps(call)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        return around(call, *arguments, **options)

    setattr(owner, name, wrapper)


def _window_of(key: str) -> int | None:
    found = _SNAPSHOT_KEY.match(key)
    return int(found[1]) if found else None


def _owner_of(folder: BlobFolder) -> int:
    return int(folder.path.name.removeprefix("rank"))


class _RecordedStore:
    """A store whose protocol writes are turns.

    Reads, and writes that change nothing, have no sentence.
    """

    def __init__(self, store: dist.Store, recorder: _Recorder) -> None:
        self._store = store
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._recorder.turn() as say:
            sentence = self._sentence(key, expected, desired)
            answer = self._store.compare_set(key, expected, desired)
            if sentence:
                say(sentence)
        return answer

    def add(self, key: str, amount: int) -> int:
        generation, _, what = key.partition("/")
        with self._recorder.turn() as say:
            answer = self._store.add(key, amount)
            if amount and what == "arrived":
                say(f"{self._recorder.who} arrives in generation {generation}")
            if amount and what == "done":
                say(f"{self._recorder.who} is done")
        return answer

    def _sentence(self, key: str, expected: str, desired: str) -> str | None:
        """Return the sentence of a write.

        Returns None if the write will change nothing, or does not concern the model.
        """
        who, (first, _, what) = self._recorder.who, key.partition("/")
        if first == "incarnation":
            is_claim = bool(expected) and self._store.get(key).decode() == expected
            number, _, _ = desired.partition(" ")
            return f"{who} starts worker {number}" if is_claim else None
        if key == "generation":
            has_effect = bool(expected) and self._store.get(key).decode() == expected
            return (
                f"{who} ends generation {expected}: begins the next"
                if has_effect
                else None
            )
        if what not in ("outcome", "decision", "end") or self._store.check([key]):
            return None
        match what, desired:
            case "outcome", "finished":
                return f"{who} finishes the job"
            case "outcome", _:
                return f"{who} ends generation {first}: decides that it ends"
            case "decision", "go":
                return f"{who} decides: go"
            case "decision", _:
                return f"{who} ends generation {first}: stops those who wait"
            case _:
                # `end`: a generation that has not begun has its sentence by `decision`
                has_begun = self._store.get(f"{first}/decision") == b"go"
                return (
                    f"{who} ends generation {first}: stops those who wait"
                    if has_begun
                    else None
                )


def read_trace(path: Path) -> list[str]:
    """Return the sentences of a trace, with each plan once.

    The sentences start from the state in which all ranks begin iteration 1.
    """
    begun: set[str] = set()
    sentences: list[str] = []
    for line in path.read_text().splitlines():
        begins = _BEGINS.fullmatch(line)
        if begins:
            begun.add(begins[1])
        elif _is_told(line, begun) and not (" plans " in line and line in sentences):
            sentences.append(line)
    return sentences


def _is_told(line: str, begun: set[str]) -> bool:
    subject, number = line.split()[:2]
    return number.removesuffix("'s") in begun if subject == "rank" else len(begun) > 2


def follow(protocol: Protocol, sentences: Sequence[str]) -> World:
    """Look for a path of the model with these sentences, depth first.

    Args:
        protocol: The model. Moves whose names begin with a bracket have no sentence.
        sentences: The acts of a job.

    Returns:
        The state at the end of a path.

    Raises:
        AssertionError: There is no such path; the message marks the first sentence
            that does not follow.
    """
    waiting = [(settled(start()), 0)]
    seen, furthest = set(waiting), 0
    while waiting:
        world, position = waiting.pop()
        if position == len(sentences):
            return world
        moves = [(name, settled(after)) for name, after in protocol.moves(world)]
        hidden = [(after, position) for name, after in moves if name[0] == "("]
        told = [
            (after, position + 1)
            for name, after in moves
            if name == sentences[position]
        ]
        furthest = max(furthest, position + bool(told))
        for step in (*hidden, *told):  # the last is the next
            if step not in seen:
                seen.add(step)
                waiting.append(step)
    at_furthest = [world for world, position in seen if position == furthest]
    possible = sorted(
        {
            name
            for world in at_furthest
            for name, _ in protocol.moves(world)
            if name[0] != "("
        }
    )
    text = "\n".join(
        [*sentences[:furthest], f"> {sentences[furthest]}", "wanted one of:", *possible]
    )
    raise AssertionError(f"no path of the model has the sentence marked:\n{text}")
