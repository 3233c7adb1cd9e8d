"""Processes of other jobs: whether a process has stopped, and how to end it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence

from moe_ckpt.linux import thread_states

_LOOK_EVERY_S = 0.05


def stands_still(pid: int) -> bool:
    """Return whether every thread of a process is stopped or gone."""
    return all(state in "TtZX" for state in thread_states(pid))


def kill_at_once(pids: Sequence[int]) -> None:
    """Kill processes so that none of them acts on the death of another.

    Args:
        pids: The processes, parents before children.
    """
    # all are stopped first. The parents die last: with the process that leads a group,
    # the kernel lets stopped processes of the group go on
    for number, order in ((signal.SIGSTOP, pids), (signal.SIGKILL, pids[::-1])):
        for pid in order:
            with contextlib.suppress(ProcessLookupError):  # the process has ended
                os.kill(pid, number)


def end_session(process: subprocess.Popen[bytes], *, within_s: float = 20.0) -> None:
    """End a command and all processes of its session, such as torchrun under a shell.

    Args:
        process: The command, which has begun a session of its own.
        within_s: The seconds in which processes can end by themselves before they are
            killed.
    """
    until_s = time.monotonic() + within_s
    with contextlib.suppress(ProcessLookupError):  # no process is left
        os.killpg(process.pid, signal.SIGTERM)
        # polled: there is no event for the end of a group
        while time.monotonic() < until_s:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(_LOOK_EVERY_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_job(process: subprocess.Popen[bytes], *, within_s: float = 20.0) -> None:
    """End a job that still runs.

    torchrun ends the processes that it has started.

    Args:
        process: The process of torchrun.
        within_s: The seconds after which the process is killed.
    """
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
