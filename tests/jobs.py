"""A job of small real processes, to inject faults into: a supervisor and a worker per
rank, forked, without training.

A worker walks through the phases of its iterations and keeps writing into its host
memory. It parks where it is told to, until an order stands in its page. A supervisor
notes how and where each worker died, then replaces it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moe_ckpt.elastic.live_workers import remove_live, write_live
from moe_ckpt.elastic.status_page import Phase, StatusPage
from tests.elastic.processes import Child

RECOVERS_AT = 8
ITERATION = (
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.REDUCE,
    Phase.STEP,
    Phase.SNAPSHOT,
    Phase.BETWEEN,
)
_STEP_S = 0.001


@dataclass(frozen=True, kw_only=True)
class Walk:
    """What a rank of the job does. `hold`: its supervisor waits for a line before it
    replaces a worker.
    """

    run: Path
    memory: Path
    global_rank: int
    ranks_per_node: int = 1
    park: tuple[int, str] = (3, "backward")
    last_iteration: int = 10**9
    hold: bool = False

    @property
    def deaths(self) -> Path:
        return self.run / f"deaths{self.global_rank}.jsonl"


@dataclass(frozen=True, kw_only=True)
class Died:
    """What a supervisor noted about a worker."""

    pid: int
    signal: str
    generation: int
    iteration: int
    phase: str


class Job:
    """A running job: what a test may ask of it."""

    def __init__(self, run: Path, walks: list[Walk], stack: ExitStack) -> None:
        self.run = run
        self._walks = walks
        self._supervisors = [_Supervisor(stack, _supervise, walk) for walk in walks]
        for supervisor in self._supervisors:
            assert supervisor.hear() == "ready"

    def memory(self, rank: int) -> Path:
        return self._walks[rank].memory

    def page(self, rank: int) -> StatusPage:
        return StatusPage(self.memory(rank) / "page")

    def supervisor_pid(self, rank: int) -> int:
        return self._supervisors[rank].pid

    def kill_supervisor(self, rank: int) -> None:
        """Kill a supervisor with its worker; nothing of them is left to be replaced."""
        self._supervisors[rank].kill()

    def next_word(self, rank: int) -> str:
        """Wait for what a rank says next: `parked PID`, `died PID`, or nothing once it
        has ended.
        """
        try:
            return self._supervisors[rank].hear()
        except EOFError:
            return ""

    def wait_for_death(self, rank: int, *, times: int = 1) -> Died:
        """Wait until a rank's worker has died, or so many one after the other; return
        how the last one died.
        """
        for _ in range(times):
            word = self.next_word(rank)
            if word.startswith("parked"):
                word = self.next_word(rank)
            assert word.startswith("died"), word
        return self.deaths(rank)[-1]

    def wait_to_park(self, rank: int) -> int:
        """Return the pid of a rank's worker, which parks before it says anything
        else.
        """
        word, pid = self.next_word(rank).split()
        assert word == "parked"
        return int(pid)

    def parked_pids(self) -> list[int]:
        """Wait until each rank's worker parks."""
        return [self.wait_to_park(rank) for rank in range(len(self._supervisors))]

    def let_go(self) -> None:
        """Let all workers go on from where they park, by an order that is far away."""
        for rank in range(len(self._walks)):
            self.page(rank).order(signal.SIGKILL, Phase.STEP, iteration=10**8)

    def release(self, rank: int) -> None:
        """Let a supervisor that holds replace its worker."""
        self._supervisors[rank].tell("go on")

    def deaths(self, rank: int) -> list[Died]:
        path = self._walks[rank].deaths
        return (
            [Died(**json.loads(line)) for line in path.read_text().splitlines()]
            if path.exists()
            else []
        )

    def wait_for_end(self) -> None:
        assert [supervisor.exit_status() for supervisor in self._supervisors] == [
            0
        ] * len(self._supervisors)


class _Supervisor(Child):
    """A supervisor, the leader of a process group with its worker, and a connection to
    both.
    """

    def kill(self) -> None:
        if self._process.exitcode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        super().kill()


@contextmanager
def running_job(folder: Path, world_size: int, **walk: Any) -> Iterator[Job]:
    """Run a job in `folder`/run until the block ends; no process of it outlives that.
    `walk`: see `Walk`.
    """
    run = make_run(folder / "run", world_size)
    ranks = range(world_size)
    walks = [
        Walk(run=run, memory=folder / f"rank{rank:04d}", global_rank=rank, **walk)
        for rank in ranks
    ]
    with ExitStack() as stack:
        yield Job(run, walks, stack)


@contextmanager
def parked_job(
    folder: Path, world_size: int, **walk: Any
) -> Iterator[tuple[Job, list[int]]]:
    """Run a job and wait until its workers park; yields their pids with it."""
    with running_job(folder, world_size, **walk) as job:
        yield job, job.parked_pids()


def make_run(run: Path, world_size: int) -> Path:
    """Make a run's folder, as far as the injector of faults looks into it."""
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"world_size": world_size}))
    return run


def rewrite_live(run: Path, rank: int, **changes: Any) -> None:
    """Change what a rank's worker has written of itself."""
    path = run / "live" / f"rank{rank:04d}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _supervise(connection: Connection, walk: Walk) -> None:
    os.setsid()
    connection.send("ready")
    walk.memory.mkdir()
    page = StatusPage(walk.memory / "page")
    incarnation = 0
    while True:
        page.reset()
        pid = os.fork()
        if pid == 0:
            _train(walk, page, incarnation, connection)
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
        with walk.deaths.open("a") as file:
            file.write(json.dumps(asdict(died)) + "\n")
        connection.send(f"died {pid}")
        if walk.hold:
            connection.recv()
        incarnation += 1


def _train(
    walk: Walk, page: StatusPage, incarnation: int, connection: Connection
) -> None:
    rank, memory = walk.global_rank, walk.memory
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    page.join(generation := incarnation + 1)
    node = rank // walk.ranks_per_node
    write_live(
        walk.run,
        global_rank=rank,
        node=node,
        supervisor_pid=os.getppid(),
        memory=memory,
        incarnation=incarnation,
    )
    for iteration in range(1, walk.last_iteration + 1):
        if iteration == RECOVERS_AT:
            page.join(generation := generation + 1)
            page.enter(Phase.RECOVERY)
        for phase in ITERATION:
            page.enter(phase, iteration)
            _work(memory, page, incarnation)
            if (iteration, phase.name.lower()) == walk.park:
                connection.send(f"parked {os.getpid()}")
                while not page.has_order:
                    _work(memory, page, incarnation)
    remove_live(walk.run, rank)


def _work(memory: Path, page: StatusPage, incarnation: int) -> None:
    for part in ("own", "held"):
        (memory / part).mkdir(exist_ok=True)
        (memory / part / f"incarnation{incarnation}").write_text("state")
    page.beat()
    time.sleep(_STEP_S)  # as training does, it leaves processors to others
