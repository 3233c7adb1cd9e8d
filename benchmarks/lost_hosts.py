"""Runs a job with spare nodes on hosts that are network namespaces, and loses hosts.

Each rank has a host of its own. All processes of a lost host are killed at once, and
the host's memory is deleted. No lost host comes back. Needs root.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.compare import JobOutcome
from launcher.faults.inject import fault_of
from launcher.faults.log import append_faults
from launcher.output_folder import log_of
from moe_ckpt.elastic.live_workers import LiveWorker, read_live
from moe_ckpt.faults.schedule import TimedFault
from scripts import hosts
from scripts.run_on_hosts import agent_command

_TRAIN = Path(__file__).resolve().parents[1] / "launcher" / "train.py"
_LOOK_EVERY_S = 0.02


def run_job(
    overrides: Sequence[str],
    run: Path,
    *,
    num_hosts: int,
    losses: Sequence[TimedFault],
    training_s: Callable[[], float],
    goes_on: Callable[[], bool],
) -> JobOutcome:
    """Run a job that loses hosts until the job ends, or stop the job.

    Args:
        overrides: The settings of the run, as Hydra overrides, with
            `runtime.spare_nodes`.
        run: The run folder; the output of the job goes to a log file beside it.
        num_hosts: The number of hosts: one for each rank, and the spare ones.
        losses: The losses, each of one rank's host, in order of time. The times count
            in the seconds of `training_s`.
        training_s: Returns the seconds of training; a negative number before its start.
        goes_on: Returns False once the job is to be stopped.

    Returns:
        The end of the job. The status is that of the agent on the first host.
    """
    words = [str(_TRAIN), *overrides, f"run.dir={run}"]
    hosts.up(num_hosts)
    agents: list[subprocess.Popen[bytes]] = []
    was_stopped = False
    try:
        with log_of(run).open("w") as output:
            agents += [
                subprocess.Popen(
                    agent_command(host, num_hosts, 1, words),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                for host in range(num_hosts)
            ]

        def is_running() -> bool:
            return agents[0].poll() is None and goes_on()

        pending = list(losses)
        while pending and is_running():
            if training_s() >= pending[0].after_s and _lose_host_of(run, pending[0]):
                pending.pop(0)
            time.sleep(_LOOK_EVERY_S)
        while is_running():
            with contextlib.suppress(subprocess.TimeoutExpired):
                agents[0].wait(_LOOK_EVERY_S)
        was_stopped = agents[0].poll() is None
    finally:
        hosts.lose(*range(num_hosts))
        for agent in agents:
            agent.wait()
        hosts.down()
    return JobOutcome(
        status=agents[0].returncode, was_stopped=was_stopped, left=pending
    )


def _lose_host_of(run: Path, loss: TimedFault) -> bool:
    """Lose the host of a rank's worker, if the rank has a worker that lives.

    Returns:
        Whether the host was lost.
    """
    worker = _worker_of(run, loss.ranks[0])
    if worker is None:
        return False
    page = worker.open_page()
    append_faults(run, [fault_of(worker, page, loss.signal, loss.scope, time.time())])
    hosts.lose(hosts.host_of(worker.pid))
    return True


def _worker_of(run: Path, rank: int) -> LiveWorker | None:
    return next(
        (worker for worker in read_live(run) if worker.global_rank == rank), None
    )
