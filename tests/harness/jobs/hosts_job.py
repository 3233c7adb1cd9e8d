"""Jobs on several hosts for tests: torchrun agents in network namespaces.

Tests change links of hosts, and signal all processes of a host. Needs root; a test is
skipped if namespaces cannot be made, or another job has them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from moe_ckpt.elastic.live_workers import LiveWorker, read_written
from moe_ckpt.events import IterationCommitted, read_events
from scripts import hosts
from tests.harness.jobs.training import fast
from tests.made_once import FOLDER
from tests.scenarios import ROOT
from tests.waits import JOB_S

_IMPATIENT = (
    *(
        "runtime.heartbeat_s=5",
        "runtime.progress_s=10",
        "runtime.form_s=10",
        "runtime.operation_s=15",
    ),
    *("runtime.join_s=40", "runtime.copy_s=10"),
)
"""Time limits so short that a network partition exceeds them within a test."""

_LOOK_EVERY_S = 0.1


def hosts_of_one_test() -> FileLock:
    """Return the lock that a test holds while there are hosts.

    Names of hosts are fixed, so tests of other pytest workers wait for the lock.
    """
    return FileLock(Path(os.environ[FOLDER]) / "hosts.lock")


@contextlib.contextmanager
def network_of(num_hosts: int) -> Iterator[None]:
    """Make hosts for a test, or skip the test if that is impossible."""
    with hosts_of_one_test():
        reason = hosts.why_impossible() or (
            "there are hosts already" if hosts.is_up() else None
        )
        if reason:
            pytest.skip(reason)
        hosts.up(num_hosts)
        try:
            yield
        finally:
            hosts.down()


class HostsJob:
    """A job of one rank on each host, with checkpoint servers on the hosts that follow.

    Args:
        num_hosts: The number of hosts with a rank.
        folder: The folder of all files of the job.
        overrides: Settings of the launcher.
        num_servers: The number of hosts with a checkpoint server.
    """

    def __init__(
        self, num_hosts: int, folder: Path, *overrides: str, num_servers: int = 0
    ) -> None:
        self.run = folder / "run"
        self._log = folder / f"said{len(list(folder.iterdir()))}"
        where = (f"run.dir={self.run}", "parallel.ranks_per_node=1")
        job = [
            str(ROOT / "launcher" / "train.py"),
            *fast(*_IMPATIENT, *where, *overrides),
        ]
        run_on_hosts = (sys.executable, str(ROOT / "scripts" / "run_on_hosts.py"))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*run_on_hosts, f"--servers={num_servers}", str(num_hosts), *job],
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )

    def said(self) -> str:
        return self._log.read_text()

    def wait_for_iteration(self, iteration: int) -> None:
        """Wait until rank 0 has committed an iteration, in any start of the job."""
        self._wait(
            lambda: any(committed >= iteration for _, committed in self.committed()),
            f"iteration {iteration}",
        )

    def committed(self) -> list[tuple[float, int]]:
        """Return time and number of each iteration that rank 0 has committed.

        Times are in seconds since `clock_origin_unix_s` of run.json.
        """
        path = self.run / "events" / "rank0000.jsonl"
        logged = read_events(path) if path.exists() else []
        return [
            (entry.t_s, entry.event.iteration)
            for entry in logged
            if isinstance(entry.event, IterationCommitted)
        ]

    def worker(self, rank: int) -> LiveWorker:
        return next(
            worker for worker in read_written(self.run) if worker.global_rank == rank
        )

    def lose(self, *ranks: int) -> None:
        """Kill all processes of these ranks' hosts at once, and delete the memory."""
        hosts.lose(*ranks)

    def signal(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks:
            hosts.signal_all(rank, number)

    def end(self) -> int:
        """Wait for the end of the job; return its exit status."""
        try:
            return self._process.wait(JOB_S)
        except subprocess.TimeoutExpired as error:
            self._process.send_signal(signal.SIGINT)
            raise AssertionError(
                f"the job did not end in {JOB_S:g} s: {self.said()}"
            ) from error

    def result(self) -> dict[str, Any]:
        """Wait for the end of a job that ends well; return result.json."""
        assert self.end() == 0, self.said()
        return json.loads((self.run / "result.json").read_text())

    def longest_pause_s(self, since_unix_s: float) -> float:
        """Return the longest time between two committed iterations of rank 0.

        Args:
            since_unix_s: Unix time; the second of the two iterations is later.
        """
        origin_s = json.loads((self.run / "run.json").read_text())[
            "clock_origin_unix_s"
        ]
        times = [t_s + origin_s for t_s, _ in self.committed()]
        return max(
            later - earlier
            for earlier, later in itertools.pairwise(times)
            if later > since_unix_s
        )

    def _wait(self, is_there: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + JOB_S
        while not is_there():
            assert self._process.poll() is None, (
                f"the job ended before {what}: {self.said()}"
            )
            assert time.monotonic() < until_s, (
                f"no time left to wait for {what}: {self.said()}"
            )
            time.sleep(_LOOK_EVERY_S)
