"""Random faults of all classes for a job's ranks, and resource use of its processes."""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGSEGV, SIGSTOP, SIGTERM

from moe_ckpt.elastic.live_workers import read_written
from moe_ckpt.elastic.status_page import RAISE_NUMBER
from moe_ckpt.events import HostMemoryUsed
from moe_ckpt.types import Phase
from tests.harness.jobs.elastic_job import ElasticJob
from tests.harness.jobs.training import events_of

PHASES = (
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.REDUCE,
    Phase.STEP,
    Phase.SNAPSHOT,
    Phase.BETWEEN,
)
ENDURING = (
    "ckpt.window=2",
    "runtime.max_deaths=1000000",
    "runtime.sick_deaths=0",
    "runtime.heartbeat_s=5",
)
"""Settings of a job that survives any number of faults."""

MIB = 1 << 20


class Chaos:
    """Random faults for random ranks, at random points or times.

    Some faults strike while an earlier fault is repaired. `daemon_deaths` is the number
    of daemons that were killed.
    """

    def __init__(self, job: ElasticJob, seed: int) -> None:
        self._job = job
        self._chosen = random.Random(seed)
        self.daemon_deaths = 0

    @property
    def num_faults(self) -> int:
        """The number of workers and daemons that have been replaced so far."""
        return self.daemon_deaths + sum(
            worker.incarnation for worker in read_written(self._job.run)
        )

    def inject(self) -> None:
        kinds: list[Callable[[], None]] = [
            *(
                self._order,
                self._kill_now,
                self._kill_several,
                self._lose_a_node,
                self._stop,
            ),
            *(self._raise, self._kill_a_daemon),
        ]
        # the process may have died of an earlier order
        with contextlib.suppress(ProcessLookupError):
            self._chosen.choices(kinds, [10, 10, 3, 1, 1, 3, 1])[0]()
        if self._chosen.random() < 0.5:
            self._let_it_go_on(self._chosen.randrange(1, 4))

    def _order(self) -> None:
        rank, phase = (
            self._any_rank(),
            self._chosen.choice((*PHASES, Phase.RECOVERY, Phase.JOIN)),
        )
        self._job.order(rank, phase, skip=self._chosen.randrange(3))
        if phase in (Phase.RECOVERY, Phase.JOIN):
            self._kill_now()

    def _raise(self) -> None:
        """Order an exception in a later iteration.

        The second exception of a rank in one iteration is an error of the program.
        """
        rank, phase = self._any_rank(), self._chosen.choice(PHASES)
        iteration = self._job.page(rank).iteration + 2
        self._job.order(rank, phase, iteration=iteration, number=RAISE_NUMBER)
        self._let_it_go_on(3)

    def _kill_now(self) -> None:
        number = self._chosen.choices([SIGKILL, SIGSEGV, SIGTERM], [8, 1, 1])[0]
        self._job.kill(self._any_rank(), number=number)

    def _kill_several(self) -> None:
        self._job.kill(
            *self._chosen.sample(
                range(self._job.world_size), self._chosen.randrange(2, 5)
            )
        )

    def _kill_a_daemon(self) -> None:
        os.kill(self._job.daemon_pid(self._any_rank()), SIGKILL)
        self.daemon_deaths += 1

    def _stop(self) -> None:
        self._job.kill(self._any_rank(), number=SIGSTOP)

    def _lose_a_node(self) -> None:
        """Lose one node, and wait before and after the loss until all copies are there.

        The copy in the memory of one other node survives the loss of one node. A lost
        copy is made again with the next window.
        """
        self._await_copies()
        self._job.lose_nodes(self._any_rank())
        self._await_copies()

    def _await_copies(self) -> None:
        """Wait until the next window is complete, including its copies."""
        before = self._windows()
        self._job.wait_for(lambda: self._windows() > before or None, "another window")

    def _windows(self) -> int:
        return len(events_of(self._job.run, HostMemoryUsed, 0))

    def _let_it_go_on(self, iterations: int) -> None:
        rank = self._any_rank()
        self._job.wait_until(rank, self._job.page(rank).iteration + iterations)

    def _any_rank(self) -> int:
        return self._chosen.randrange(self._job.world_size)


@dataclass(frozen=True, kw_only=True)
class Used:
    """Resources of a process that could run out."""

    files: int
    """Number of open files, sockets included."""

    threads: int
    sockets: int
    private_bytes: int
    """Resident anonymous memory (RssAnon)."""

    @classmethod
    def by(cls, pid: int) -> Used:
        """Return the resources that a process uses.

        Raises:
            FileNotFoundError: The process has ended.
            ProcessLookupError: The process has ended.
        """
        status = dict(
            line.split(":", 1)
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if ":" in line
        )
        targets = list(_targets(Path(f"/proc/{pid}/fd")))
        return cls(
            files=len(targets),
            threads=int(status["Threads"]),
            sockets=sum(target.startswith("socket:") for target in targets),
            private_bytes=1024 * int(status["RssAnon"].split()[0]),
        )


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Resources of a job at one moment."""

    by_kind: dict[str, Used]
    """By kind of process: the most that any process of the kind uses."""

    zombies: int
    """Number of zombies in the job's session."""

    memory_files: int
    """Number of the job's files in shared memory."""

    memory_bytes: int
    """Size of these files."""


def take_sample(job: ElasticJob) -> Sample:
    """Measure the processes of a job; processes that end meanwhile are left out."""
    workers = read_written(job.run)
    supervisors = {worker.supervisor_pid for worker in workers}
    living = {worker.pid for worker in workers}
    beside = set(job.processes()) - supervisors - living - {job.agent_pid}
    files = [path for path in job.shared.rglob("*") if path.is_file()]
    return Sample(
        by_kind={
            kind: _most(pids)
            for kind, pids in (
                ("supervisor", supervisors),
                ("daemon", beside),
                ("worker", living),
            )
        },
        zombies=_zombies_of(job.agent_pid),
        memory_files=len(files),
        memory_bytes=sum(_size(path) for path in files),
    )


def _most(pids: Iterable[int]) -> Used:
    found: list[Used] = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, KeyError):
            found.append(Used.by(pid))
    names = ("files", "threads", "sockets", "private_bytes")
    return Used(
        **{
            name: max((getattr(used, name) for used in found), default=0)
            for name in names
        }
    )


def _targets(folder: Path) -> Iterable[str]:
    for entry in list(folder.iterdir()):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield os.readlink(entry)


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _zombies_of(session: int) -> int:
    states: Counter[str] = Counter()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                state, _, _, of, *_ = (
                    (entry / "stat").read_text().rpartition(")")[2].split()
                )
                states[state] += int(of) == session
    return states["Z"]


def require_level(used: Sequence[Sequence[Used]]) -> None:
    """Require that many faults have cost processes nothing that stays.

    Args:
        used: What each of the same processes used, at one fault after another. The
            faults after the first one are compared with the last ones.
    """
    for early, late in zip(
        zip(*used[1:5], strict=True), zip(*used[-4:], strict=True), strict=True
    ):
        assert min(use.files for use in late) <= max(use.files for use in early)
        assert min(use.threads for use in late) <= max(use.threads for use in early)
        grown = min(use.private_bytes for use in late) - min(
            use.private_bytes for use in early
        )
        assert grown < 4 * MIB, f"{grown / MIB:.1f} MiB in {len(used)} faults"
