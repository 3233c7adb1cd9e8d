"""Time from the loss of a node to the next new iteration: spare nodes, and a restart.

    python benchmarks/lost_node.py [--rounds 5] [OVERRIDES]   # model=tiny, PP=2 EP=2

Nodes are agents of torchrun on this machine, two ranks each: two nodes train, and one
waits. All processes of the second node are killed at once, and its memory is deleted.
A round loses one node of each job, the jobs in turns:

    spare       runtime.spare_nodes=1: the waiting node takes the lost ranks
    silent      the same, but the node is frozen: nothing says that it is lost
    restart     torchrun's c10d rendezvous starts all ranks again, with the waiting node

All limits are the defaults. Printed: medians, least and most, and the ratios of the
rounds. Absolute times mean little on a laptop; ratios are meaningful.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launcher.markdown_table import table_lines  # noqa: E402
from launcher.proc import kill_at_once  # noqa: E402
from moe_ckpt.elastic.live_workers import read_written  # noqa: E402
from moe_ckpt.events import (  # noqa: E402
    IterationCommitted,
    LoggedEvent,
    Rejoined,
    WorkerStarted,
    read_events,
)
from moe_ckpt.linux import descendants_of, parent_of  # noqa: E402

E = TypeVar("E")

JOBS = ("spare", "silent", "restart")
NODES, PER_NODE = 2, 2
WARM_ITERATIONS = 10
PATIENCE_S = 400.0
_AGENTS = NODES + 1
_LOOK_S = 0.02
_SETTINGS = (
    "+ckpt=moevement",
    "ckpt.replicas=1",
    "train.iterations=100000",
    "train.eval_every_iters=0",
    "run.tensorboard=false",
    "run.progress=none",
)

console = Console(highlight=False)


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The recovery from the loss of a node. All times in seconds since the loss."""

    found_s: float | None
    """Time until the loss was found; None if no rank has recorded it."""

    committed_s: float
    """Time until the next new iteration."""

    new_processes: int
    """Number of workers that were started since the loss."""


class Job:
    """A job of two nodes and a waiting one, until `stop`.

    Args:
        folder: The folder of the run folder and the logs.
        overrides: Settings of the launcher.
        has_spare: Whether the waiting node is one of `runtime.spare_nodes`.
        per_node: Number of ranks of a node.
    """

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[str],
        *,
        has_spare: bool,
        per_node: int = PER_NODE,
    ) -> None:
        folder.mkdir()
        self._last_rank = NODES * per_node - 1
        self.run = folder / "run"
        self._folder = folder
        self._environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        settings = [
            *_SETTINGS,
            f"parallel.ranks_per_node={per_node}",
            f"run.dir={self.run}",
            *overrides,
        ]
        if has_spare:
            settings.append("runtime.spare_nodes=1")
            meeting = ["--master-addr=127.0.0.1", f"--master-port={port}"]
            nodes = _AGENTS
        else:
            self._environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            endpoint = f"--rdzv-endpoint=127.0.0.1:{port}"
            local = "--local-addr=127.0.0.1"
            meeting = ["--rdzv-backend=c10d", endpoint, local, "--max-restarts=3"]
            nodes = NODES
        self._command = [
            str(Path(sys.executable).with_name("torchrun")),
            f"--nnodes={nodes}:{nodes}",
            f"--nproc-per-node={per_node}",
            "--rdzv-id=lost-node",
            *meeting,
        ]
        self._settings = ["launcher/train.py", *settings]
        self._agents: list[subprocess.Popen[bytes]] = []
        for number in range(_AGENTS):
            self._start([f"--node-rank={number}"] if has_spare else [])
            if not has_spare:
                # the first agent hosts the rendezvous; the third waits for a place
                wanted = [lambda: _listens(port), self._has_begun, lambda: True]
                self.wait_for(wanted[number], f"agent {number}")
        self.wait_for(lambda: self.newest() >= WARM_ITERATIONS, "first iterations")

    def newest(self) -> int:
        """Return the newest iteration that any rank has committed."""
        return max(
            (event.iteration for _, event in self._all(IterationCommitted)), default=0
        )

    def logged(self) -> list[tuple[float, LoggedEvent]]:
        """Return the events with their times in Unix seconds, each rank's in order."""
        described = self.run / "run.json"
        if not described.exists():
            return []
        origin_s = json.loads(described.read_text())["clock_origin_unix_s"]
        return [
            (origin_s + logged.t_s, logged)
            for path in sorted((self.run / "events").glob("*.jsonl"))
            for logged in read_events(path)
        ]

    def lose_node(self, *, is_silent: bool) -> Recovery:
        """Lose the second node, and wait for the next new iteration.

        Args:
            is_silent: Whether the node is frozen and not killed.
        """
        workers = read_written(self.run)
        worker = next(each for each in workers if each.global_rank == self._last_rank)
        agent = parent_of(worker.supervisor_pid)
        # processes of the node that are no children of its agent end with the agent
        pids = [agent, *descendants_of(agent), *_of_node(Path(worker.memory).parent)]
        before = self.newest()
        lost_unix_s = time.time()
        if is_silent:
            signal_all(pids, signal.SIGSTOP)
        else:
            kill_at_once(pids)
            shutil.rmtree(Path(worker.memory).parent, ignore_errors=True)
        self.wait_for(lambda: self.newest() > before + 1, "a new iteration")
        signal_all(pids, signal.SIGKILL)
        committed = min(
            when
            for when, event in self._all(IterationCommitted)
            if event.iteration > before and when > lost_unix_s
        )
        found = [
            event.joined_unix_s - event.rebuild_s
            for when, event in self._all(Rejoined)
            if when > lost_unix_s and event.deaths
        ]
        return Recovery(
            found_s=min(found) - lost_unix_s if found else None,
            committed_s=committed - lost_unix_s,
            new_processes=sum(
                when > lost_unix_s for when, _ in self._all(WorkerStarted)
            ),
        )

    def wait_for(self, is_there: Callable[[], bool], what: str) -> None:
        """Wait for a state of the job's files. A failure ends this process."""
        until_s = time.monotonic() + PATIENCE_S
        while not is_there():
            if time.monotonic() > until_s:
                logs = sorted(self._folder.glob("*.log"))
                sys.exit(f"no {what}\n" + "\n".join(map(Path.read_text, logs)))
            time.sleep(_LOOK_S)

    def stop(self) -> None:
        for agent in self._agents:
            signal_all([agent.pid, *descendants_of(agent.pid)], signal.SIGKILL)
            agent.wait()

    def _start(self, more: Sequence[str]) -> None:
        with (self._folder / f"agent{len(self._agents)}.log").open("w") as log:
            agent = subprocess.Popen(
                [*self._command, *more, *self._settings],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        self._agents.append(agent)

    def _has_begun(self) -> bool:
        return (self.run / "run.json").exists() and self.newest() > 0

    def _all(self, kind: type[E]) -> list[tuple[float, E]]:
        """Return all ranks' events of a kind, with their times in Unix seconds."""
        return [
            (when, logged.event)
            for when, logged in self.logged()
            if isinstance(logged.event, kind)
        ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    options, overrides = parser.parse_known_args()
    rounds = [measure_round(overrides) for _ in range(options.rounds)]
    show(rounds)
    return 0


def measure_round(overrides: Sequence[str]) -> dict[str, Recovery]:
    """Lose one node of each job, and return the recoveries by name."""
    found: dict[str, Recovery] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in JOBS:
            job = Job(Path(folder) / name, overrides, has_spare=name != "restart")
            try:
                found[name] = job.lose_node(is_silent=name == "silent")
            finally:
                job.stop()
            console.print(name, found[name])
    return found


def show(rounds: Sequence[dict[str, Recovery]]) -> None:
    """Print the table of all rounds, in Markdown."""
    restarts = [each["restart"].committed_s for each in rounds]
    rows: list[list[str]] = []
    for name in JOBS:
        recoveries = [each[name] for each in rounds]
        seconds = [each.committed_s for each in recoveries]
        ratios = [
            restart / each for restart, each in zip(restarts, seconds, strict=True)
        ]
        found = [each.found_s for each in recoveries if each.found_s is not None]
        new = [float(each.new_processes) for each in recoveries]
        is_restart = name == "restart"
        rows.append(
            [
                name,
                summary(seconds),
                summary(found),
                summary(new),
                "1" if is_restart else summary(ratios),
            ]
        )
    head = (
        "job, median (least to most)",
        "loss to the next new iteration, s",
        "loss to found, s",
        "new workers",
        "a restart takes times as long",
    )
    print("\n".join(table_lines(head, rows)))


def summary(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def _of_node(root: Path) -> list[int]:
    """Return the processes of a node that are no children of its agent."""
    return [int(path.name.split("-")[-2]) for path in root.glob("process-*")]


def signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())
