"""Processes of this machine by pid, sockets by descriptor, and signals.

The facts about processes come from /proc. Must not: change another process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

# not psutil: psutil converts start times into seconds of the wall clock, and has no
# states of threads
# fields of /proc/PID/stat that follow the name
_STATE = 0
_PARENT = 1
_START_TICKS = 19


def start_ticks(pid: int) -> int:
    """Return the start time of a process, in clock ticks since boot.

    With the pid the start time is a name that is never used again.

    Raises:
        ProcessLookupError: No process has this pid.
    """
    return _number(pid, _START_TICKS)


def age_s(pid: int) -> float:
    """Return the seconds since the start of a process.

    Raises:
        ProcessLookupError: No process has this pid.
    """
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return uptime_s - start_ticks(pid) / os.sysconf("SC_CLK_TCK")


def is_alive(pid: int, *, started: int | None = None) -> bool:
    """Return whether a process is alive. A zombie is not.

    Args:
        pid: The process.
        started: The start time that the process must have, in ticks; None: any.
    """
    fields = _stat(Path(f"/proc/{pid}/stat"))
    if not fields or fields[_STATE] in "ZX":
        return False
    return started is None or int(fields[_START_TICKS]) == started


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process.

    A stop by a debugger does not count.
    """
    fields = _stat(Path(f"/proc/{pid}/stat"))
    return bool(fields) and fields[_STATE] == "T"


def boot_id() -> str:
    """Return a name of this start of this machine.

    All containers of the machine share the name, and no other machine has the same one.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> int:
    """Return the number of this process's PID namespace.

    A pid names a process within one namespace only.
    """
    return Path("/proc/self/ns/pid").stat().st_ino


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent.

    Raises:
        ProcessLookupError: No process has this pid.
    """
    return _number(pid, _PARENT)


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's children.

    Children that have ended and were not waited for are included.
    """
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [
        each
        for each in pids
        if (fields := _stat(Path(f"/proc/{each}/stat"))) and int(fields[_PARENT]) == pid
    ]


def descendants_of(pid: int) -> list[int]:
    """Return the pids of all processes below a process, parents before children."""
    return [
        each for child in children_of(pid) for each in (child, *descendants_of(child))
    ]


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with.

    Empty for a process that has ended or belongs to another user.
    """
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    pairs = (os.fsdecode(word).partition("=") for word in content.split(b"\0") if word)
    return {name: value for name, _, value in pairs}


def thread_states(pid: int) -> str:
    """Return one letter, as in /proc/PID/stat, for each thread of a process.

    Empty for a process that has ended.
    """
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "".join(
        fields[_STATE] for thread in threads if (fields := _stat(thread / "stat"))
    )


def own_files() -> Iterator[tuple[int, str]]:
    """Yield the descriptors of this process with the names of their files.

    A name is `socket:[1234]`, a path, and so on.
    """
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            yield int(entry.name), os.readlink(entry)


def signal_name(number: int) -> str:
    """Return the name of a signal.

    Real-time signals between the first and the last have only numbers.
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Delay signals that arrive in this block until the block ends.

    Threads and processes started in the block delay signals, too.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def duplicate_socket(fd: int) -> socket.socket:
    """Return another object for the socket of a descriptor.

    The object stays open when the descriptor is closed.

    Raises:
        OSError: The descriptor is closed, or is not a socket.
    """
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _stat(path: Path) -> list[str]:
    try:
        # the name before the fields is in parentheses, and may contain spaces and
        # parentheses
        return path.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _number(pid: int, field: int) -> int:
    fields = _stat(Path(f"/proc/{pid}/stat"))
    if not fields:
        raise ProcessLookupError(f"no process has pid {pid}")
    return int(fields[field])
