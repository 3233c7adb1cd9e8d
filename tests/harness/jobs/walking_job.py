"""A job of small real processes without training, for tests that inject faults.

Each rank has a supervisor and a forked worker. A worker walks through the phases of its
iterations and keeps writing into its host memory. A worker parks at a given point until
its page has an order. A supervisor records how and where each worker died, then
replaces the worker.
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
from tests.harness.gloo.processes import Child

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
    """Settings of a rank of the job."""

    run: Path
    """Run folder."""

    memory: Path
    """Folder in place of the rank's host memory."""

    global_rank: int
    ranks_per_node: int = 1
    park: tuple[int, str] = (3, "backward")
    """Iteration and phase at which the worker parks."""

    last_iteration: int = 10**9
    hold: bool = False
    """Whether the supervisor waits for `Job.release` before each replacement."""

    @property
    def deaths(self) -> Path:
        """File with the deaths that the supervisor has recorded."""
        return self.run / f"deaths{self.global_rank}.jsonl"


@dataclass(frozen=True, kw_only=True)
class Died:
    """Record of a supervisor about a worker's death."""

    pid: int
    signal: str
    generation: int
    iteration: int
    phase: str


class Job:
    """A running job, as a test sees the job."""

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
        """Kill a supervisor together with its worker, which is not replaced."""
        self._supervisors[rank].kill()

    def next_word(self, rank: int) -> str:
        """Wait for the next message of a rank.

        Returns:
            `parked PID`, `died PID`, or nothing if the rank has ended.
        """
        try:
            return self._supervisors[rank].hear()
        except EOFError:
            return ""

    def wait_for_death(self, rank: int, *, times: int = 1) -> Died:
        """Wait until `times` workers of a rank have died; return the last death."""
        for _ in range(times):
            word = self.next_word(rank)
            if word.startswith("parked"):
                word = self.next_word(rank)
            assert word.startswith("died"), word
        return self.deaths(rank)[-1]

    def wait_to_park(self, rank: int) -> int:
        """Wait until a rank's worker parks, as its next message, and return its pid."""
        word, pid = self.next_word(rank).split()
        assert word == "parked"
        return int(pid)

    def parked_pids(self) -> list[int]:
        """Wait until each rank's worker parks, and return the workers' pids."""
        return [self.wait_to_park(rank) for rank in range(len(self._supervisors))]

    def let_go(self) -> None:
        """Let all parked workers go on, by an order for an iteration far away."""
        for rank in range(len(self._walks)):
            self.page(rank).order(signal.SIGKILL, Phase.STEP, iteration=10**8)

    def release(self, rank: int) -> None:
        """Let a supervisor with `Walk.hold` replace its worker."""
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
    """A supervisor, and a connection to the supervisor and its worker.

    The supervisor is the leader of a process group with its worker.
    """

    def kill(self) -> None:
        if self._process.exitcode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        super().kill()


@contextmanager
def running_job(folder: Path, world_size: int, **walk: Any) -> Iterator[Job]:
    """Run a job until the block ends; no process of the job outlives the block.

    Args:
        folder: The folder of the run folder `run` and of all ranks' memory.
        world_size: The number of ranks.
        walk: Further fields of `Walk`.
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
    """Run a job until the block ends; yield the job and the pids of parked workers."""
    with running_job(folder, world_size, **walk) as job:
        yield job, job.parked_pids()


def make_run(run: Path, world_size: int) -> Path:
    """Make a run folder with the file that the injector of faults reads."""
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"world_size": world_size}))
    return run


def rewrite_live(run: Path, rank: int, **changes: Any) -> None:
    """Change fields of the file that a rank's worker has written about itself."""
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
    time.sleep(_STEP_S)  # leaves processors to other processes, as training does
