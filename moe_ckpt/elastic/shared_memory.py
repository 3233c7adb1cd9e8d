"""The folder in shared memory in which the ranks of one node keep data that outlives their workers, and its janitor.

Owns: the folder's name, which follows from the process that started the ranks (torchrun's agent), so that restarted
supervisors find it again; and its end: a separate process removes it once the agent has ended. If that process was
killed, too, the next process that opens a folder removes it.

    ROOT            locked, shared, by all that use it    ROOT/rankNNNN   a rank's
    ROOT/janitor    locked by the janitor                 ROOT/numbers    the ranks' present numbers; locked to change
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import shutil
from collections.abc import Iterator
from pathlib import Path

from moe_ckpt.config import require
from moe_ckpt.linux import is_alive, start_ticks
from moe_ckpt.private_files import FOLDER_MODE, make_private, open_private
from moe_ckpt.snapshot.blobs import held_path, own_path

_NAME = re.compile(r"moe_ckpt-(\d+)-(\d+)-(\d+)")  # the agent's pid, when it was started, whose pids are meant


def open_memory_root(base: Path, agent_pid: int, setting: str = "runtime.shared_memory") -> Path:
    """Return the folder of the node that `agent_pid` started, with a janitor; it is created if it is missing.

    The folder stays while this process and its children live, even if the agent dies. Folders of agents that have ended
    are removed. Raises ConfigError, naming `setting`, if `base` is not a writable folder. Call from a process with one
    thread.
    """
    root = base / f"moe_ckpt-{agent_pid}-{start_ticks(agent_pid)}-{_pid_namespace()}"
    try:
        root.mkdir(mode=FOLDER_MODE, exist_ok=True)
    except OSError as error:
        require(False, setting, str(base), f"a folder in memory that can be written ({error})")
    _remove_orphans(base)
    _start_janitor(root, agent_pid)
    # after the janitor is forked: it would inherit this lock, and wait for itself
    fcntl.flock(os.open(root, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_SH)  # open until the last of us has ended
    return root


def rank_memory(root: Path, global_rank: int) -> Path:
    """Return one rank's folder; it is created if it is missing."""
    folder = root / f"rank{global_rank:04d}"
    folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    return folder


def take_over(root: Path, ranks: range) -> None:
    """Keep the data of an earlier attempt's ranks on this node after torchrun has numbered the nodes anew.

    `ranks` are this node's now. Their blobs, in any rank's memory, become their own; their first rank holds the rest.
    Every supervisor of the node calls it before it uses its rank's folder: the first call moves everything.
    """
    with _locked(root / "numbers") as numbers:
        if numbers.read_text() != str(ranks):
            _move(root, ranks)
            numbers.write_text(str(ranks))


def _move(root: Path, ranks: range) -> None:
    left = [folder for folder in sorted(root.glob("rank*")) if _number(folder) not in ranks]
    for folder in left:  # before any copy: an owner has at least as much
        _keep(own_path(folder), _number(folder), root, ranks)
    for folder in left:
        for held in sorted((folder / "held").glob("rank*")):
            _keep(held, _number(held), root, ranks)


def _keep(blobs: Path, owner: int, root: Path, ranks: range) -> None:
    own = own_path(rank_memory(root, owner)) if owner in ranks else None
    place = own or held_path(rank_memory(root, ranks[0]), owner)
    if blobs.exists() and not place.exists():
        make_private(place.parent)
        blobs.rename(place)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("rank"))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[Path]:
    """Lock a file exclusively; it is created if it is missing."""
    fd = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(fd)


def _pid_namespace() -> int:
    """Return a number for this process's pid namespace: containers may share a folder, but not their pids."""
    return Path("/proc/self/ns/pid").stat().st_ino


def _remove_orphans(base: Path) -> None:
    for root in base.glob("moe_ckpt-*"):
        named = _NAME.fullmatch(root.name)
        if not named or int(named[3]) != _pid_namespace() or is_alive(int(named[1]), started=int(named[2])):
            continue
        with contextlib.suppress(FileNotFoundError):  # another process removes it
            # lstat: in a folder that all users share, as /dev/shm, the name may be another user's link
            if root.lstat().st_uid == os.geteuid():
                shutil.rmtree(root, ignore_errors=True)


def _start_janitor(root: Path, agent_pid: int) -> None:
    """Start a janitor unless there is one: it has its file locked as long as it lives."""
    lock = open_private(root / "janitor", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _fork_janitor(root, agent_pid)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)


def _fork_janitor(root: Path, agent_pid: int) -> None:
    # before the forks: later the number may belong to another process
    agent = os.pidfd_open(agent_pid)
    child = os.fork()
    if child == 0:
        os.setsid()  # torchrun's signals to its children's groups are not for it
        # twice: the janitor is then no child of a supervisor, which ends the processes that its workers leave
        if os.fork() == 0:
            _wait_and_remove(root, agent)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(agent)


def _wait_and_remove(root: Path, agent: int) -> None:
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # a reader of the job's output must not wait for this process
            os.dup2(null, standard)
        os.chdir("/")
        users = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        poll = select.poll()
        poll.register(agent, select.POLLIN)
        poll.poll()
        shutil.rmtree(root, ignore_errors=True)
        fcntl.flock(users, fcntl.LOCK_EX)  # daemons may outlive the agent for a while, and make their folders again
        shutil.rmtree(root, ignore_errors=True)
    finally:
        os._exit(0)
