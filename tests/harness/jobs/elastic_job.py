"""Supervised jobs for tests, which can strike each of a job's processes.

A job has real supervisors, workers, daemons and a store, and starts in a second. A test
strikes at exact points by orders in the workers' pages, or from outside by signals. In
any case a job is over at the end of its `with` block. A job that ended by itself has
left no process and no shared memory, or the test fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from launcher.config import compose_settings
from launcher.faults.inject import kill_node, nobody_replaced
from launcher.proc import stands_still
from moe_ckpt.elastic.live_workers import LiveWorker, read_written
from moe_ckpt.elastic.status_page import ANY_ITERATION, StatusPage
from moe_ckpt.types import Phase
from tests.harness.gloo.ranks import CONTEXT
from tests.harness.jobs.agent import run_agent, supervisor_log
from tests.harness.jobs.training import fast
from tests.waits import JOB_S

T = TypeVar("T")

_PATIENT = (
    "runtime.heartbeat_s=30",
    "runtime.progress_s=300",
    "runtime.form_s=300",
    "runtime.operation_s=400",
    "runtime.join_s=900",
    "runtime.copy_s=300",
)
SHARED_MEMORY = Path("/dev/shm")
_LOOK_EVERY_S = 0.002
_ENDING_S = 30.0


class JobFailedError(AssertionError):
    """A job failed, hung, or left something behind.

    The message has the output of the job's processes.
    """


class ElasticJob:
    """A job that starts and ends with a `with` block.

    Args:
        world_size: The number of ranks.
        folder: The folder of all files of the job.
        overrides: Settings of the launcher.
        ckpt: The policy.
        timeout_s: Time limit of the job, in seconds.
        setup: A module's function that the agent calls before the agent forks. May put
            faults into the code that ranks run.
    """

    def __init__(
        self,
        world_size: int,
        folder: Path,
        *overrides: str,
        ckpt: str = "moevement",
        timeout_s: float = JOB_S,
        setup: Callable[[], None] | None = None,
    ) -> None:
        self.world_size = world_size
        self.run = folder / "run"
        self._folder = folder
        self._shared = Path(
            tempfile.mkdtemp(prefix="moe_ckpt-test-", dir=SHARED_MEMORY)
        )
        self._folder.mkdir(exist_ok=True)
        where = (f"run.dir={self.run}", f"runtime.shared_memory={self._shared}")
        settings = compose_settings(fast(f"ckpt={ckpt}", *where, *_PATIENT, *overrides))
        self._process = CONTEXT.Process(
            target=run_agent, args=(settings, world_size, folder, setup)
        )
        self._deadline_s = time.monotonic() + timeout_s
        self._pages: dict[int, StatusPage] = {}

    def __enter__(self) -> ElasticJob:
        self._process.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(_ENDING_S)
        shutil.rmtree(self._shared, ignore_errors=True)
        if error and not isinstance(error, JobFailedError):
            error.add_note(self.said())

    @property
    def shared(self) -> Path:
        """The job's folder in shared memory."""
        return self._shared

    @property
    def agent_pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait(self) -> dict[str, Any]:
        """Wait for the job's end and return the content of result.json.

        Raises:
            JobFailedError: The job did not end well.
        """
        if self._join() != 0:
            raise JobFailedError(f"the job failed: {self.said()}")
        return json.loads((self.run / "result.json").read_text())

    def wait_for_failure(self) -> str:
        """Wait until the job has failed, and return the output of its processes.

        Raises:
            JobFailedError: The job ended well, or not in time.
        """
        if self._join() == 0:
            raise JobFailedError(f"the job ended well: {self.said()}")
        return self.said()

    def worker(self, rank: int, incarnation: int = 0) -> LiveWorker:
        """Wait for a living worker of a rank, of at least this incarnation."""

        def look() -> LiveWorker | None:
            workers = (
                worker
                for worker in read_written(self.run)
                if worker.global_rank == rank
            )
            return next(
                (
                    worker
                    for worker in workers
                    if worker.incarnation >= incarnation and worker.is_alive
                ),
                None,
            )

        return self.wait_for(look, f"incarnation {incarnation} of rank {rank}")

    def page(self, rank: int) -> StatusPage:
        """Return the page of a rank; the page outlives the rank's workers."""
        if rank not in self._pages:
            self._pages[rank] = self.worker(rank).open_page()
        return self._pages[rank]

    def order(
        self,
        rank: int,
        phase: Phase,
        *,
        iteration: int = ANY_ITERATION,
        skip: int = 0,
        number: signal.Signals = signal.SIGKILL,
        incarnation: int = 0,
    ) -> None:
        """Order a rank's worker to send a signal to itself at a point.

        Args:
            rank: The rank.
            phase: The phase that the worker enters at the point.
            iteration: The iteration of the phase.
            skip: How many times the worker first enters the phase without a signal.
            number: The signal.
            incarnation: The earliest incarnation that gets the order.
        """
        self.worker(rank, incarnation)
        self.page(rank).order(number, phase, iteration=iteration, skip=skip)

    def wait_until(self, rank: int, iteration: int, phase: Phase | None = None) -> None:
        """Wait until a rank has reached an iteration, or a phase of the iteration."""
        page = self.page(rank)
        at = (iteration, phase or 0)
        self.wait_for(
            lambda: (page.iteration, page.phase) >= at or None,
            f"iteration {iteration} of rank {rank}",
        )

    def kill(self, *ranks: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the workers of these ranks, all at once.

        Several workers are stopped first, so that none acts on the death of another.
        """
        pids = [self.worker(rank).pid for rank in ranks]
        if len(pids) > 1:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            for pid in pids:
                self.wait_for(
                    lambda pid=pid: stands_still(pid) or None,
                    f"process {pid} to stand still",
                )
        for pid in pids:
            os.kill(pid, number)

    def lose_nodes(self, *ranks: int) -> None:
        """Kill the workers of these ranks, and delete the host memory of these ranks.

        The memory has the ranks' own state and copies of other ranks' states.
        """
        for rank in ranks:
            self.worker(rank)
        with nobody_replaced(self.run, ranks, wait_s=30.0) as workers:
            kill_node(self.run, workers, wait_s=30.0)

    def hold(
        self,
        rank: int,
        phase: Phase,
        *,
        iteration: int = ANY_ITERATION,
        skip: int = 0,
        incarnation: int = 0,
    ) -> int:
        """Make a rank's worker stand still at a point (see `order`), and wait for that.

        The supervisor takes the worker for dead after `runtime.heartbeat_s`.

        Returns:
            The pid of the worker, for SIGCONT.
        """
        self.order(
            rank,
            phase,
            iteration=iteration,
            skip=skip,
            number=signal.SIGSTOP,
            incarnation=incarnation,
        )
        pid = self.worker(rank, incarnation).pid
        self.wait_for(
            lambda: stands_still(pid) or None,
            f"rank {rank} to stand still in {phase.name}",
        )
        return pid

    def daemon_pid(self, rank: int) -> int:
        """Return the pid of the daemon of a rank, which keeps copies.

        The daemon is the other child process of the supervisor, beside the worker.
        """
        worker = self.worker(rank)
        children = (
            Path(f"/proc/{worker.supervisor_pid}/task/{worker.supervisor_pid}/children")
            .read_text()
            .split()
        )
        (pid,) = {int(child) for child in children} - {worker.pid}
        return pid

    def processes(self) -> list[int]:
        """Return the pids of the agent, supervisors, daemons and workers that live."""
        if self._process.pid is None:
            return []
        return [pid for pid, session in _sessions() if session == self._process.pid]

    def left_behind(self) -> list[str]:
        """Return the job's processes, and the paths in its folder in shared memory."""
        return [f"process {pid}" for pid in self.processes()] + [
            str(path) for path in self._shared.iterdir()
        ]

    def said(self) -> str:
        """Return supervisors' and workers' output; frequent lines appear only once."""
        logs = [supervisor_log(self._folder, rank) for rank in range(self.world_size)]
        texts = [
            f"--- rank {rank}\n{_squeezed(log.read_text())}"
            for rank, log in enumerate(logs)
            if log.exists()
        ]
        return "\n".join(["", *texts])

    def wait_for(self, look: Callable[[], T | None], what: str) -> T:
        """Return the first result of `look` that is not None.

        Args:
            look: Called again and again.
            what: The result in words, for the message of an error.

        Raises:
            JobFailedError: The job or its time has ended first.
        """
        while (seen := look()) is None:
            if not self._process.is_alive():
                raise JobFailedError(f"the job ended before {what}: {self.said()}")
            self._require_time(what)
            # other processes announce nothing: only their files and pages change
            time.sleep(_LOOK_EVERY_S)
        return seen

    def _join(self) -> int | None:
        self._process.join(max(0.0, self._deadline_s - time.monotonic()))
        if self._process.is_alive():
            self._require_time("its end")
        until_s = time.monotonic() + _ENDING_S
        while (left := self.left_behind()) and time.monotonic() < until_s:
            time.sleep(_LOOK_EVERY_S)
        if left:
            raise JobFailedError(f"the job has left behind: {left}")
        return self._process.exitcode

    def _require_time(self, what: str) -> None:
        if time.monotonic() < self._deadline_s:
            return
        for pid in self.processes():
            if pid != self.agent_pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR2)
        time.sleep(0.5)  # the processes write their stacks
        pages = [_describe(rank, page) for rank, page in sorted(self._pages.items())]
        raise JobFailedError(
            "\n".join([f"no time left to wait for {what}", *pages, self.said()])
        )


def _describe(rank: int, page: StatusPage) -> str:
    waiting = "waiting for others, " if page.waiting else ""
    return (
        f"rank {rank}: {waiting}in generation {page.generation}, iteration"
        f" {page.iteration}, {page.phase.name}"
    )


def _squeezed(text: str) -> str:
    counts = Counter(text.splitlines())
    return "\n".join(
        f"{line}{f'   ({count} times)' if count > 3 else ''}"
        for line, count in _first(counts, text)
    )


def _first(counts: Counter[str], text: str) -> Iterable[tuple[str, int]]:
    seen: set[str] = set()
    for line in text.splitlines():
        if counts[line] <= 3 or line not in seen:
            seen.add(line)
            yield line, counts[line]


def _sessions() -> Iterable[tuple[int, int]]:
    """Yield pid and session of each living process of this machine."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                state, _, _, session, *_ = (
                    (entry / "stat").read_text().rpartition(")")[2].split()
                )
                if state not in "ZX":
                    yield int(entry.name), int(session)
