"""Jobs with spare nodes for tests, on hosts that are network namespaces.

A test loses hosts: it kills all processes of a host at an exact point of training, cuts
the host's link, or freezes the host. Needs root; see `hosts_job.network_of`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from moe_ckpt.elastic.live_workers import LiveWorker, read_written
from moe_ckpt.elastic.status_page import ANY_ITERATION
from moe_ckpt.events import IterationCommitted, Rejoined, read_events
from moe_ckpt.types import Phase
from scripts import hosts, run_on_hosts
from tests.harness.jobs.training import events_of, fast
from tests.scenarios import ROOT
from tests.waits import JOB_S

_LOOK_EVERY_S = 0.002
_SPARE = " is a spare node, and waits"


class SpareHostsJob:
    """A job of one rank on each host. All its processes end when `stack` closes.

    Args:
        stack: Ends the job.
        folder: The folder of all files of the job.
        num_nodes: The number of hosts that train.
        num_spares: The number of hosts that wait.
        overrides: Settings of the launcher.
        run: The run folder of an earlier job, which this one continues; None: a new
            run.
        timeout_s: Time limit of the job, in seconds.
    """

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        num_nodes: int,
        num_spares: int,
        *overrides: str,
        run: Path | None = None,
        timeout_s: float = JOB_S,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.run = run or folder / "run"
        self.num_nodes = num_nodes
        self._folder = folder
        self._num_hosts = num_nodes + num_spares
        self._until_s = time.monotonic() + timeout_s
        self._starts = 0
        self._logs: dict[int, Path] = {}
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        settings = fast(
            f"run.dir={self.run}", f"runtime.spare_nodes={num_spares}", *overrides
        )
        # the launcher wants each setting once; the last one counts
        by_key = {word.partition("=")[0]: word for word in settings}
        self._words = [str(ROOT / "launcher" / "train.py"), *by_key.values()]
        stack.callback(self._end)
        for host in range(self._num_hosts):
            self.start(host)

    def start(self, host: int) -> None:
        """Start torchrun on a host, at the job's start or once the host was lost."""
        if host in self._agents:
            self._agents[host].wait()
        self._starts += 1
        log = self._folder / f"start{self._starts}-host{host}.log"
        self._logs[host] = log
        with log.open("w") as written:
            self._agents[host] = subprocess.Popen(
                run_on_hosts.agent_command(host, self._num_hosts, 1, self._words),
                stdout=written,
                stderr=written,
                cwd=ROOT,
                start_new_session=True,
            )

    def said(self) -> str:
        logs = sorted(self._folder.glob("start*.log"))
        return "\n".join(f"--- {log.stem}\n{log.read_text()}" for log in logs)

    def wait_for_iteration(self, iteration: int) -> None:
        """Wait until rank 0 has committed an iteration."""
        self.wait_for(
            lambda: any(number >= iteration for number in self.committed(0)),
            f"iteration {iteration}",
        )

    def wait_for_spare(self, host: int) -> None:
        """Wait until a host waits as a spare node."""
        log = self._logs[host]
        self.wait_for(lambda: _SPARE in log.read_text(), f"spare host {host}")

    def wait_for_recovery(self, number: int) -> None:
        """Wait until rank 0 has taken part in a number of recoveries."""
        self.wait_for(
            lambda: len(events_of(self.run, Rejoined)) >= number, f"recovery {number}"
        )

    def committed(self, rank: int) -> list[int]:
        """Return the iterations that a rank has committed, in the order of the log."""
        if not (self.run / "events" / f"rank{rank:04d}.jsonl").exists():
            return []
        return [
            event.iteration for event in events_of(self.run, IterationCommitted, rank)
        ]

    def longest_pause_s(self) -> float:
        """Return the longest time between two iterations that rank 0 has committed."""
        times = [
            logged.t_s
            for logged in read_events(self.run / "events" / "rank0000.jsonl")
            if isinstance(logged.event, IterationCommitted)
        ]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def worker(self, rank: int) -> LiveWorker:
        return next(
            worker for worker in read_written(self.run) if worker.global_rank == rank
        )

    def host_of(self, rank: int) -> int:
        """Return the host of a rank's present worker."""
        return hosts.host_of(self.worker(rank).pid)

    def workers(self, *, without: int) -> dict[int, int]:
        """Return the pids of all workers on other hosts than one, by rank."""
        there = hosts.processes_of(without)
        return {
            worker.global_rank: worker.pid
            for worker in read_written(self.run)
            if worker.pid not in there
        }

    @contextlib.contextmanager
    def stopping(
        self, rank: int, phase: Phase, iteration: int = ANY_ITERATION
    ) -> Iterator[int]:
        """Order a worker to stop as it enters a phase; yield its host.

        At the end of the block, wait until the worker has stopped.

        Args:
            rank: The rank.
            phase: The phase.
            iteration: The iteration of the phase.
        """
        host, page = self.host_of(rank), self.worker(rank).open_page()
        obeyed = page.orders_obeyed
        page.order(signal.SIGSTOP, phase, iteration=iteration)
        yield host
        self.wait_for(
            lambda: page.orders_obeyed > obeyed, f"rank {rank} in {phase.name.lower()}"
        )

    def stop_at(self, rank: int, phase: Phase, iteration: int = ANY_ITERATION) -> int:
        """Stop a worker as it enters a phase of an iteration; return its host."""
        with self.stopping(rank, phase, iteration) as host:
            return host

    def lose(self, *hosts_lost: int) -> None:
        """Kill all processes of hosts at once, and delete the hosts' memory."""
        hosts.lose(*hosts_lost)

    def signal(self, number: signal.Signals, host: int) -> None:
        """Send a signal to all processes of a host."""
        hosts.signal_all(host, number)

    def status(self, host: int) -> int:
        """Wait for the end of a host's agent; return its exit status."""
        agent = self._agents[host]
        self.wait_for(lambda: agent.poll() is not None, f"the end of host {host}")
        return agent.returncode

    def result(self) -> dict[str, Any]:
        """Wait for the end of training; return result.json."""
        path = self.run / "result.json"
        self.wait_for(path.exists, "the result")
        return json.loads(path.read_text())

    def wait_for(self, is_there: Callable[[], bool], what: str) -> None:
        """Wait for a condition that files or ended processes show.

        Args:
            is_there: Returns whether the condition holds.
            what: The condition in words, for the message of an error.

        Raises:
            AssertionError: The job or its time has ended first; with all logs.
        """
        while not is_there():
            assert time.monotonic() < self._until_s, (
                f"no time left to wait for {what}: {self.said()}"
            )
            is_running = any(agent.poll() is None for agent in self._agents.values())
            assert is_running or is_there(), (
                f"the job ended before {what}: {self.said()}"
            )
            time.sleep(_LOOK_EVERY_S)

    def _end(self) -> None:
        hosts.lose(*range(self._num_hosts))
        for agent in self._agents.values():
            agent.wait()
