"""Jobs of several torchrun agents on this machine, for tests.

Each agent is a node of one rank; the last agents are spare nodes. As on several
machines, an agent is lost together with all its processes and their shared memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from launcher.proc import kill_at_once
from moe_ckpt.elastic.live_workers import LiveWorker, read_written
from moe_ckpt.events import IterationCommitted, read_events
from moe_ckpt.linux import descendants_of, parent_of
from tests.harness.jobs.training import fast
from tests.scenarios import ROOT
from tests.waits import JOB_S

_PATIENT = ("runtime.join_s=900", "runtime.progress_s=300", "runtime.operation_s=400")
_LOOK_EVERY_S = 0.05
_TORCHRUN = Path(sys.executable).with_name("torchrun")
# torchrun gives up a lost node within seconds
_SOON = "keep_alive_interval=1,keep_alive_max_attempt=5"


class AgentsJob:
    """A job of one rank per node; all its processes end when `stack` closes.

    Args:
        stack: Ends the job.
        folder: The folder of the run folder and of the agents' logs.
        num_nodes: The number of ranks.
        rendezvous: torchrun's options of the rendezvous of the agents.
        overrides: Settings of the launcher.
        num_spares: With a static rendezvous, the number of agents beside the nodes;
            None: another rendezvous.
        program: Returns a program and its arguments for a run folder; None: the
            launcher, with `overrides`.
        ranks_per_node: The number of ranks on each node.
    """

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        num_nodes: int,
        rendezvous: tuple[str, ...],
        *overrides: str,
        num_spares: int | None = None,
        program: Callable[[Path], Sequence[str]] | None = None,
        ranks_per_node: int = 1,
    ) -> None:
        self._is_static = num_spares is not None
        self.run = folder / "run"
        self._folder = folder
        self._until_s = time.monotonic() + JOB_S
        self._agents: list[subprocess.Popen[bytes]] = []
        where = (
            f"run.dir={self.run}",
            "parallel.ranks_per_node=1",
            f"runtime.spare_nodes={num_spares or 0}",
        )
        agents = num_nodes + (num_spares or 0)
        torchrun = (
            str(_TORCHRUN),
            f"--nnodes={agents}:{agents}",
            f"--nproc-per-node={ranks_per_node}",
            *(() if self._is_static else ("--max-restarts=3", f"--rdzv-conf={_SOON}")),
        )
        meeting = (
            *rendezvous,
            f"--rdzv-id={folder.name}",
            "--local-addr=127.0.0.1",
        )
        job = (
            program(self.run)
            if program
            else (
                str(ROOT / "launcher" / "train.py"),
                *fast(*_PATIENT, *where, *overrides),
            )
        )
        self._torchrun, self._job = (*torchrun, *meeting), job
        stack.callback(self._end)

    def start_agent(self) -> None:
        """Start another agent."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE")
        }
        environment |= {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            # with more threads, ranks would add up in another order than the ranks of
            # the reference
            "OMP_NUM_THREADS": "1",
        }
        number = [f"--node-rank={len(self._agents)}"] if self._is_static else []
        with self._log(len(self._agents)).open("w") as log:
            agent = subprocess.Popen(
                [*self._torchrun, *number, *self._job],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
        self._agents.append(agent)

    @property
    def agents(self) -> list[int]:
        """The pids of the agents, in the order of their starts."""
        return [agent.pid for agent in self._agents]

    def said(self) -> str:
        logs = [self._log(number) for number in range(len(self._agents))]
        return "\n".join(
            f"--- agent {number}\n{log.read_text()}" for number, log in enumerate(logs)
        )

    def wait_for_iteration(self, iteration: int) -> None:
        """Wait until rank 0 has committed an iteration."""
        self.wait_for(
            lambda: any(committed >= iteration for committed in self._committed()),
            f"iteration {iteration}",
        )

    def worker(self, rank: int) -> LiveWorker:
        return next(
            worker for worker in read_written(self.run) if worker.global_rank == rank
        )

    def agent_of(self, rank: int) -> int:
        """Return the pid of the agent that has a rank now."""
        return parent_of(self.worker(rank).supervisor_pid)

    def lose(self, rank: int) -> None:
        """Kill all processes of a rank's node at once, and delete the node's memory."""
        memory = Path(self.worker(rank).memory).parent
        kill_at_once(_with_descendants(self.agent_of(rank)))
        shutil.rmtree(memory, ignore_errors=True)

    def statuses(self) -> list[int]:
        """Wait for the end of all agents; return their exit statuses."""
        self.wait_for(
            lambda: all(agent.poll() is not None for agent in self._agents),
            "the end of all agents",
        )
        return [agent.returncode for agent in self._agents]

    def result(self) -> dict[str, Any]:
        """Return result.json of a job that has ended."""
        path = self.run / "result.json"
        assert path.exists(), self.said()
        return json.loads(path.read_text())

    def wait_for(self, is_there: Callable[[], bool], what: str) -> None:
        """Wait for a condition that files or ended processes show.

        Args:
            is_there: Returns whether the condition holds.
            what: The condition in words, for the message of an error.

        Raises:
            AssertionError: The job or its time has ended first; with all agents' logs.
        """
        while not is_there():
            assert time.monotonic() < self._until_s, (
                f"no time left to wait for {what}: {self.said()}"
            )
            assert any(agent.poll() is None for agent in self._agents), (
                f"the job ended before {what}: {self.said()}"
            )
            time.sleep(_LOOK_EVERY_S)

    def _committed(self) -> list[int]:
        path = self.run / "events" / "rank0000.jsonl"
        logged = read_events(path) if path.exists() else []
        return [
            entry.event.iteration
            for entry in logged
            if isinstance(entry.event, IterationCommitted)
        ]

    def _log(self, number: int) -> Path:
        return self._folder / f"agent{number}.log"

    def _end(self) -> None:
        for agent in self._agents:
            for pid in _with_descendants(agent.pid) if agent.poll() is None else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.wait()


def _with_descendants(pid: int) -> list[int]:
    return [pid, *descendants_of(pid)]
