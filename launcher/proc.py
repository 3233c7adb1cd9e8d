"""Processes of other jobs: whether one has stopped, and how one is ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

from moe_ckpt.linux import thread_states

_LOOK_EVERY_S = 0.05


def stands_still(pid: int) -> bool:
    """Return whether every thread of a process is stopped or gone."""
    return all(state in "TtZX" for state in thread_states(pid))


def end_session(process: subprocess.Popen[bytes], *, within_s: float = 20.0) -> None:
    """End a command and all processes of its session, such as torchrun under a shell.

    Args:
        process: The command, which has begun a session of its own.
        within_s: The time that processes have to end by themselves; then they are
            killed.
    """
    until_s = time.monotonic() + within_s
    with contextlib.suppress(ProcessLookupError):  # none is left
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < until_s:  # no event says that a group has ended
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(_LOOK_EVERY_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_job(process: subprocess.Popen[bytes], *, within_s: float = 20.0) -> None:
    """End a job that still runs; torchrun ends the processes that it has started. After
    `within_s` it is killed.
    """
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
