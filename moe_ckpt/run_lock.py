"""RUN/lock: one job at a time uses a run's folder.

    RUN/lock             the job that has the folder; locked while a process reads and
                         changes the file
    RUN/lock-NUMBER      locked by that job's first process while that process lives

Owns: both files. Another job may take the folder if no process of the owner has the
second file locked, which the kernel reports across containers, and if the owner's agent
(torchrun's process) has ended. The end is known if the agent was in this PID namespace,
or in another container of this machine, or on this machine before a reboot. A job that
torchrun has moved takes its own folder: its number in torchrun's store, or its
--rdzv-id, is unchanged.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TextIO

from moe_ckpt.agent import agent_pid
from moe_ckpt.elastic.torchrun_variables import has_agent_store, job_name
from moe_ckpt.errors import ConfigError
from moe_ckpt.linux import boot_id, is_alive, pid_namespace, start_ticks
from moe_ckpt.private_files import open_private

# torchrun's names of jobs without --rdzv-id
_ANY_JOB = ("", "none")
# PROC_PID_INIT_INO: the PID namespace of processes outside of containers
_OF_MACHINE = 0xEFFFFFFC
# fields that the files of older versions lack
_OLDER = {"boot": "", "pid_namespace": 0, "job_id": "", "held": ""}
# the files that this process has locked, and their descriptors
_held: dict[str, int] = {}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The job that has a run's folder, by the process of its global rank 0."""

    host: str
    """Name of the machine, for messages."""

    boot: str
    """The machine's present start: `linux.boot_id`."""

    pid_namespace: int
    """PID namespace of `agent_pid`."""

    agent_pid: int
    """Process that started the job's global rank 0: torchrun's agent."""

    start_ticks: int
    """Start time of the agent, in clock ticks since boot."""

    job: str
    """torchrun's name of the job."""

    job_id: str
    """The job's number in its store, which restarts by torchrun keep; empty without a
    store.
    """

    held: str = field(default="", compare=False)
    """Name of the locked file; empty if the file system has no locks."""

    @property
    def is_here(self) -> bool:
        """Whether the job's machine is this one, in its present start."""
        return self.boot == boot_id()

    def is_gone(self, run: Path) -> bool:
        """Return whether all processes of the job's first rank have ended.

        The result is as far as this machine can find out.
        """
        if self.has_lock(run):
            return False
        if not self.is_here:
            # true if this machine was started again since. Containers on several
            # machines may share a name, so both processes must be outside of
            # containers.
            is_of_machine = self.pid_namespace == pid_namespace() == _OF_MACHINE
            return is_of_machine and self.host == socket.gethostname()
        if self.pid_namespace == pid_namespace():
            return not is_alive(self.agent_pid, started=self.start_ticks)
        return self.held != ""

    def has_lock(self, run: Path) -> bool:
        """Return whether another process is known to have the job's file locked."""
        return (
            self.held != "" and self.held not in _held and _is_locked(run / self.held)
        )


def take_lock(run: Path, job_id: str = "") -> None:
    """Lock a run's folder for this job, until a release or the end of its processes.

    The calling process has the lock as long as the process lives; processes forked from
    it do not have the lock.

    Args:
        run: The folder.
        job_id: The job's number in its store; the same after a restart by torchrun.

    Raises:
        ConfigError: Another job has the folder.
        OSError: The folder cannot be written.
    """
    mine = _this_job(job_id)
    with _opened(run) as file:
        holder = _read(file)
        if holder and not _may_take(holder, mine, run):
            raise used_by(run, *_described(holder, run))
        _write(file, mine, _hold(run))
        if holder and holder.held:
            (run / holder.held).unlink(missing_ok=True)


def release_lock(run: Path) -> None:
    """Release a run's folder if this job has it.

    Raises:
        OSError: The folder cannot be written.
    """
    with _opened(run) as file:
        holder, mine = _read(file), _this_job("")
        if holder and _agent_of(holder) == _agent_of(mine):
            if holder.held:
                (run / holder.held).unlink(missing_ok=True)
            file.truncate(0)


def used_by(run: Path, whose: str, hint: str = "") -> ConfigError:
    """Return the error that the run of `whose` uses a folder.

    Args:
        run: The folder.
        whose: The owner, in words.
        hint: Text after the message.
    """
    wanted = "a folder of its own for every run"
    return ConfigError(
        f"run.dir: got {str(run)!r}, which the run of {whose} uses, wanted"
        f" {wanted}{hint}"
    )


def _this_job(job_id: str) -> Holder:
    # the first process of a container has no parent
    agent = agent_pid() or os.getpid()
    return Holder(
        host=socket.gethostname(),
        boot=boot_id(),
        pid_namespace=pid_namespace(),
        agent_pid=agent,
        # start time and pid together: a pid alone may be used again
        start_ticks=start_ticks(agent),
        job=job_name(),
        job_id=job_id,
    )


def _agent_of(holder: Holder) -> tuple[str, int, int, int]:
    return holder.boot, holder.pid_namespace, holder.agent_pid, holder.start_ticks


def _may_take(holder: Holder, mine: Holder, run: Path) -> bool:
    """Return whether a holder has ended, or is this job before a move.

    torchrun may have moved the job's rank 0 to another agent.
    """
    if holder.job_id == mine.job_id != "":
        return True
    if _agent_of(holder) == _agent_of(mine):
        # a script may start several jobs without torchrun
        return not holder.has_lock(run)
    is_named = holder.job == mine.job and mine.job not in _ANY_JOB
    if has_agent_store():
        # on this machine the numbers would be equal
        return (is_named and not holder.is_here) or holder.is_gone(run)
    if is_named:
        return True
    # torchrun's `none`: this job, which has no other sign, or any other job
    is_left = holder.job == mine.job != "" and not holder.has_lock(run)
    return is_left or holder.is_gone(run)


def _described(holder: Holder, run: Path) -> tuple[str, str]:
    process = f"process {holder.agent_pid}"
    if holder.is_here and holder.pid_namespace == pid_namespace():
        return process, ""
    where = "in another container" if holder.is_here else f"of {holder.host}"
    return f"{process} {where}", f" (if that run is over, remove {str(run / 'lock')!r})"


def _hold(run: Path) -> str:
    """Lock a new file as long as this process lives.

    Returns:
        The name of the file; empty if the file system has no locks.
    """
    path = run / f"lock-{secrets.token_hex(4)}"
    fd = open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        path.unlink()
        _log.warning(
            "run.dir: %s has no locks (%s): another container's job in it is not"
            " noticed",
            run,
            error,
        )
        return ""
    _held[path.name] = fd
    return path.name


def _let_go() -> None:
    """Close inherited descriptors: the lock belongs to the parent process."""
    for fd in _held.values():
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


def _is_locked(path: Path) -> bool:
    """Return whether a process has a file locked; a missing file is not locked."""
    try:
        fd = open_private(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextlib.contextmanager
def _opened(run: Path) -> Iterator[TextIO]:
    """Open the file for one process at a time; create a missing file."""
    with open(run / "lock", "a+", opener=open_private) as file:
        # on a file system without locks a race of microseconds remains
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _read(file: TextIO) -> Holder | None:
    """Return the owner of the folder; None without one.

    None also if an owner was killed before it wrote its name.
    """
    file.seek(0)
    try:
        there = _OLDER | json.loads(file.read())
        # a job of another version may have fields that this one lacks
        return Holder(**{each.name: there[each.name] for each in fields(Holder)})
    except (ValueError, TypeError, KeyError):
        return None


def _write(file: TextIO, holder: Holder, held: str) -> None:
    # in place: after a rename, a process that holds or waits for the old file's lock
    # would not exclude others
    file.truncate(0)
    file.write(json.dumps(asdict(holder) | {"held": held}) + "\n")
    file.flush()
