"""A job of small real processes, to inject faults into: a guard and a trainer per rank, forked, without training.

A trainer walks through the phases of its iterations and keeps writing into its host memory. It parks where it is told
to, until an order stands in its page. A guard notes how and where each trainer died, then replaces it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from launcher.live import remove_live, write_live
from moe_ckpt.runtime.page import Page, Phase
from tests.ranks import _CONTEXT
from tests.waits import START_S, WAIT_S

RECOVERS_AT = 8
ITERATION = (Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.STEP, Phase.SNAPSHOT, Phase.BETWEEN)
_STEP_S = 0.001


@dataclass(frozen=True, kw_only=True)
class Walk:
    """What a rank of the job does. `hold`: its guard waits for a line before it replaces a trainer."""

    run: str
    memory: str
    global_rank: int
    ranks_per_node: int
    park_iteration: int
    park_phase: str
    last_iteration: int
    hold: bool


@dataclass(frozen=True, kw_only=True)
class Died:
    """What a guard noted about a trainer."""

    pid: int
    signal: str
    generation: int
    iteration: int
    phase: str


class Job:
    """A running job: what a test may ask of it."""

    def __init__(self, run: Path, walks: list[Walk]) -> None:
        self.run = run
        self._walks = walks
        self._guards = [_Guard(walk) for walk in walks]
        for guard in self._guards:
            assert guard.hear() == "ready"

    def memory(self, rank: int) -> Path:
        return Path(self._walks[rank].memory)

    def page(self, rank: int) -> Page:
        return Page(self.memory(rank) / "page")

    def guard_pid(self, rank: int) -> int:
        return self._guards[rank].process.pid

    def kill_guard(self, rank: int) -> None:
        """Kill a guard with its trainer; nothing of them is left to be replaced."""
        self._guards[rank].kill()

    def next_word(self, rank: int) -> str:
        """Wait for what a rank says next: `parked PID`, `died PID`, or nothing once it has ended."""
        return self._guards[rank].hear()

    def parked_pids(self) -> list[int]:
        """Wait until each rank's trainer parks."""
        words = [self.next_word(rank).split() for rank in range(len(self._guards))]
        assert all(word[0] == "parked" for word in words), words
        return [int(word[1]) for word in words]

    def let_go(self) -> None:
        """Let all trainers go on from where they park, by an order that is far away."""
        for rank in range(len(self._walks)):
            self.page(rank).order(signal.SIGKILL, Phase.STEP, iteration=10**8)

    def release(self, rank: int) -> None:
        """Let a guard that holds replace its trainer."""
        self._guards[rank].connection.send("go on")

    def deaths(self, rank: int) -> list[Died]:
        path = _deaths(self.run, rank)
        return [Died(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_end(self) -> None:
        for guard in self._guards:
            guard.process.join(WAIT_S)
            assert guard.process.exitcode == 0

    def end(self) -> None:
        for guard in self._guards:
            guard.kill()
            guard.process.join()
            guard.process.close()
            guard.connection.close()


class _Guard:
    """A guard's process, the leader of a process group with its trainer, and a connection to both."""

    def __init__(self, walk: Walk) -> None:
        self.connection, theirs = _CONTEXT.Pipe()
        self.process: Any = _CONTEXT.Process(target=_guard, args=(walk, theirs))
        self.process.start()
        theirs.close()

    def hear(self) -> str:
        assert self.connection.poll(START_S), "a rank says nothing"
        try:
            return self.connection.recv()
        except EOFError:
            return ""

    def kill(self) -> None:
        if self.process.exitcode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def running_job(
    folder: Path,
    world_size: int,
    *,
    ranks_per_node: int = 1,
    park: tuple[int, str] = (3, "backward"),
    last_iteration: int = 10**9,
    hold: bool = False,
) -> Iterator[Job]:
    """Run a job in `folder`/run until the block ends; no process of it outlives that."""
    run = make_run(folder / "run", world_size)
    walk = Walk(
        run=str(run),
        memory="",
        global_rank=0,
        ranks_per_node=ranks_per_node,
        park_iteration=park[0],
        park_phase=park[1],
        last_iteration=last_iteration,
        hold=hold,
    )
    walks = [replace(walk, global_rank=rank, memory=str(folder / f"rank{rank:04d}")) for rank in range(world_size)]
    job = Job(run, walks)
    try:
        yield job
    finally:
        job.end()


def make_run(run: Path, world_size: int) -> Path:
    """Make a run's folder, as far as whoever injects faults looks into it."""
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"world_size": world_size}))
    return run


def _deaths(run: Path, rank: int) -> Path:
    return run / f"deaths{rank}.jsonl"


def _guard(walk: Walk, connection: Connection) -> None:
    os.setsid()
    connection.send("ready")
    memory = Path(walk.memory)
    memory.mkdir()
    page = Page(memory / "page")
    life = 0
    while True:
        page.reset()
        pid = os.fork()
        if pid == 0:
            _train(walk, page, life, connection)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            sys.exit(os.WEXITSTATUS(status))
        died = Died(
            pid=pid,
            signal=signal.Signals(os.WTERMSIG(status)).name,
            generation=page.generation,
            iteration=page.iteration,
            phase=page.phase.name.lower(),
        )
        with _deaths(Path(walk.run), walk.global_rank).open("a") as file:
            file.write(json.dumps(asdict(died)) + "\n")
        connection.send(f"died {pid}")
        if walk.hold:
            connection.recv()
        life += 1


def _train(walk: Walk, page: Page, life: int, connection: Connection) -> None:
    run, memory, rank = Path(walk.run), Path(walk.memory), walk.global_rank
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    page.join(generation := life + 1)
    node = rank // walk.ranks_per_node
    write_live(run, global_rank=rank, node=node, guard_pid=os.getppid(), memory=memory, life=life)
    for iteration in range(1, walk.last_iteration + 1):
        if iteration == RECOVERS_AT:
            page.join(generation := generation + 1)
            page.enter(Phase.RECOVERY)
        for phase in ITERATION:
            page.enter(phase, iteration)
            _work(memory, page, life)
            if (iteration, phase.name.lower()) == (walk.park_iteration, walk.park_phase):
                connection.send(f"parked {os.getpid()}")
                while not page.has_order:
                    _work(memory, page, life)
    remove_live(run, rank)


def _work(memory: Path, page: Page, life: int) -> None:
    for part in ("own", "held"):
        (memory / part).mkdir(exist_ok=True)
        (memory / part / f"life{life}").write_text("state")
    page.beat()
    time.sleep(_STEP_S)  # as training does, it leaves processors to others
