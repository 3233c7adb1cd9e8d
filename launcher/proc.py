"""Processes of other jobs: whether one has stopped, and how one is ended."""

from __future__ import annotations

import subprocess

from moe_ckpt.linux import thread_states


def stands_still(pid: int) -> bool:
    """Return whether every thread of a process is stopped or gone."""
    return all(state in "TtZX" for state in thread_states(pid))


def end_job(process: subprocess.Popen[bytes], *, within_s: float = 20.0) -> None:
    """End a job that still runs; torchrun ends the processes that it has started. After `within_s` it is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
