"""RUN/lock: one job at a time uses a run's folder.

Owns: the file, which names the process that started the job's global rank 0 (torchrun's agent), so that all
incarnations and restarts of its ranks belong to the same job. A lock whose process has ended on this machine is taken
over; processes of other machines cannot be checked here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from moe_ckpt.agent import agent_pid
from moe_ckpt.elastic.torchrun import has_agent_store, job_name
from moe_ckpt.errors import ConfigError
from moe_ckpt.linux import is_alive, start_ticks
from moe_ckpt.private_files import open_private


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The owner of a run's folder: the agent of global rank 0, and torchrun's name of the job."""

    host: str
    agent_pid: int
    start_ticks: int
    job: str

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_gone(self) -> bool:
        """Whether its agent has ended, as far as this machine can tell."""
        return self.is_here and not is_alive(self.agent_pid, started=self.start_ticks)


def take_lock(run: Path, *, is_ours: bool = False) -> None:
    """Lock a run's folder for this job, until it releases it or its agent ends.

    Each incarnation of rank 0 calls it. `is_ours`: this job is known to have had the folder before, under any agent.
    Raises ConfigError if another job has it, OSError if it cannot be written.
    """
    mine = _this_job()
    with _opened(run) as file:
        holder = _read(file)
        if holder and holder != mine and not (is_ours or _may_take(holder, mine)):
            raise used_by(run, *_described(holder, run))
        _write(file, mine)


def release_lock(run: Path) -> None:
    """Release a run's folder if this job has it. Raises OSError if it cannot be written."""
    with _opened(run) as file:
        if _read(file) == _this_job():
            _write(file, None)


def used_by(run: Path, whose: str, hint: str = "") -> ConfigError:
    """Return the error that a folder is in use by the run of `whose`."""
    wanted = "a folder of its own for every run"
    return ConfigError(f"run.dir: got {str(run)!r}, which the run of {whose} uses, wanted {wanted}{hint}")


def _this_job() -> Holder:
    agent = agent_pid()
    # the agent, not this process: workers come and go within a job; the start time tells a pid that is used again
    return Holder(host=socket.gethostname(), agent_pid=agent, start_ticks=start_ticks(agent), job=job_name())


def _may_take(holder: Holder, mine: Holder) -> bool:
    """Return whether a holder has ended, or is this job before torchrun moved its rank 0 to another agent.

    If torchrun keeps a store, that identifies the job on this machine; else its name must.
    """
    if has_agent_store():
        # "none" is torchrun's name for any job without --rdzv-id
        same_job = not holder.is_here and holder.job == mine.job and mine.job not in ("", "none")
    else:
        same_job = holder.job == mine.job != ""
    return same_job or holder.is_gone


def _described(holder: Holder, run: Path) -> tuple[str, str]:
    process = f"process {holder.agent_pid}"
    if holder.is_here:
        return process, ""
    return f"{process} of {holder.host}", f" (if that run is over, remove {str(run / 'lock')!r})"


@contextlib.contextmanager
def _opened(run: Path) -> Iterator[TextIO]:
    """Open the file, empty if it was missing, for one process at a time."""
    with open(run / "lock", "a+", opener=open_private) as file:
        with contextlib.suppress(OSError):  # a file system without locks: what is left is a race of microseconds
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _read(file: TextIO) -> Holder | None:
    """Return the owner of the folder; None without one, also if an owner was killed before it wrote its name."""
    file.seek(0)
    try:
        return Holder(**json.loads(file.read()))
    except (ValueError, TypeError):
        return None


def _write(file: TextIO, holder: Holder | None) -> None:
    # in place: after a rename, a process that holds or waits for the old file's lock would not exclude others
    file.truncate(0)
    if holder:
        file.write(json.dumps(asdict(holder)) + "\n")
    file.flush()
