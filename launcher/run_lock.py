"""RUN/lock: one job at a time uses a run's folder.

Owns: the file, which names the process that started the job's global rank 0 (torchrun's agent), so that all lives and
restarts of its ranks are the same job's. A lock whose process is gone from this machine is taken over; of another
machine's processes nothing is known here.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.launch import has_agent_store, job_name
from moe_ckpt.errors import ConfigError
from moe_ckpt.runtime.parent import agent_pid
from moe_ckpt.runtime.processes import is_alive, start_ticks

_TRIES = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Whose a run's folder is: the agent of global rank 0, and what torchrun calls the job."""

    host: str
    agent_pid: int
    start_ticks: int
    job: str

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_gone(self) -> bool:
        """Whether its agent has ended, for all that this machine knows."""
        return self.is_here and not is_alive(self.agent_pid, started=self.start_ticks)


def take_lock(run: Path, *, is_ours: bool = False) -> None:
    """Let this job have a run's folder, until it releases it or its agent ends; again for each life of its rank 0.

    `is_ours`: that this job had the folder before is known, whatever agent its rank 0 is started by now. Raises
    ConfigError where another job has it, OSError where it cannot be written.
    """
    mine, path = _this_job(), run / "lock"
    for _ in range(_TRIES):
        with contextlib.suppress(FileExistsError):
            _create(path, mine)
        holder = _read(path)
        if holder == mine:
            return
        if holder and not (is_ours or _may_take(holder, mine)):
            raise used_by(run, *_described(holder, path))
        _remove(path, holder)
    raise used_by(run, "somebody else")


def release_lock(run: Path) -> None:
    """Let others have a run's folder, if this job has it."""
    path = run / "lock"
    holder = _read(path)
    if holder == _this_job():
        _remove(path, holder)


def used_by(run: Path, whose: str, hint: str = "") -> ConfigError:
    """Return the error that a folder is in use: by the run of `whose`."""
    wanted = "a folder of its own for every run"
    return ConfigError(f"run.dir: got {str(run)!r}, which the run of {whose} uses, wanted {wanted}{hint}")


def _this_job() -> Holder:
    agent = agent_pid()
    return Holder(host=socket.gethostname(), agent_pid=agent, start_ticks=start_ticks(agent), job=job_name())


def _may_take(holder: Holder, mine: Holder) -> bool:
    """Return whether a holder has ended, or is this job before torchrun moved its rank 0 to another agent.

    Where torchrun keeps a store, that tells on this machine what is the same job's; else its name has to.
    """
    if has_agent_store():
        same_job = not holder.is_here and holder.job == mine.job and mine.job not in ("", "none")
    else:
        same_job = holder.job == mine.job != ""
    return same_job or holder.is_gone


def _described(holder: Holder, path: Path) -> tuple[str, str]:
    process = f"process {holder.agent_pid}"
    if holder.is_here:
        return process, ""
    return f"{process} of {holder.host}", f" (if that run is over, remove {str(path)!r})"


def _create(path: Path, holder: Holder) -> None:
    with path.open("x") as file:
        file.write(json.dumps(asdict(holder)) + "\n")


def _read(path: Path) -> Holder | None:
    """Return who has the lock; None where nobody has, or who was about to have it never wrote so."""
    try:
        return Holder(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _remove(path: Path, holder: Holder | None) -> None:
    """Remove the lock of a holder, but not that of one who has been quicker to."""
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        if _read(aside) == holder:
            aside.unlink()
        else:
            aside.rename(path)
