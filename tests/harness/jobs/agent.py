"""A small torchrun for tests: starts the supervisors of a job and hosts their store.

The agent ends all supervisors when one has failed. Agent and supervisors are forked
from the process that has imported everything slow, because torchrun's own start takes
seconds. Like torchrun's agent, this agent is the parent of the supervisors and the host
of the store, so killing the agent has the effect of killing torchrun. All processes of
a job except the janitor of the job's shared memory are in the agent's session. A
supervisor or worker that receives SIGUSR2 writes its stacks.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from launcher.config import Settings
from launcher.entry import start
from moe_ckpt.agent import die_with_parent
from moe_ckpt.elastic.job_store import say_once
from moe_ckpt.errors import MoeCkptError

_ENDING_S = 30.0


def run_agent(
    settings: Settings, world_size: int, folder: Path, setup: Callable[[], None] | None
) -> None:
    """Run the agent of a job of the launcher; see `run_job`."""
    run_job(lambda: _supervise(settings), world_size, folder, setup)


def run_job(
    supervise: Callable[[], int],
    world_size: int,
    folder: Path,
    setup: Callable[[], None] | None,
) -> None:
    """Run the agent of a job in this process, and end the process with the job.

    The exit status is 0, or that of the first supervisor that fails. Supervisors write
    to `supervisor_log`.

    Args:
        supervise: Runs in each supervisor; returns the exit status of the supervisor.
        world_size: The number of ranks, each of which has a supervisor.
        folder: The folder of the logs.
        setup: Called in the agent before the supervisors are forked.
    """
    os.setsid()
    if setup:
        setup()
    pipes = [os.pipe() for _ in range(world_size)]
    pids = [
        _fork_supervisor(supervise, rank, world_size, folder, pipes)
        for rank in range(world_size)
    ]
    # created after the forks, because the store has threads
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for reading, writing in pipes:
        os.write(writing, str(store.port).encode())
        os.close(writing)
        os.close(reading)
    status = _wait_for_supervisors(set(pids))
    sys.stdout.flush()
    os._exit(status)


def supervisor_log(folder: Path, global_rank: int) -> Path:
    """Return the file of standard output and error of a supervisor and its workers."""
    return folder / f"supervisor{global_rank}.log"


def _fork_supervisor(
    supervise: Callable[[], int],
    rank: int,
    world_size: int,
    folder: Path,
    pipes: list[tuple[int, int]],
) -> int:
    agent_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent(signal.SIGKILL, parent=agent_pid)
        _be_heard(supervisor_log(folder, rank))
        port = os.read(pipes[rank][0], 10).decode()
        for pipe in pipes:
            os.close(pipe[0])
            os.close(pipe[1])
        _set_environment(rank, world_size, port)
        status = supervise()
    except BaseException:  # the top of a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _supervise(settings: Settings) -> int:
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    try:
        return start(settings)
    except MoeCkptError as error:
        say_once(str(error))
        return 1


def _be_heard(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(fd, standard)
    os.close(fd)
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)


def _set_environment(rank: int, world_size: int, port: str) -> None:
    """Set the environment variables that torchrun sets."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _wait_for_supervisors(pids: set[int]) -> int:
    """Wait until all supervisors have ended; end the others after a failure.

    Returns:
        0, or the absolute status of the first supervisor that failed.
    """
    while pids:
        pid, status = os.waitpid(-1, 0)
        pids.discard(pid)
        if os.waitstatus_to_exitcode(status):
            _end(pids)
            return abs(os.waitstatus_to_exitcode(status))
    return 0


def _end(pids: set[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + _ENDING_S
    while pids and time.monotonic() < deadline_s:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        pids.discard(pid)
        time.sleep(0.002)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
