"""The folder in shared memory in which the ranks of one node keep data that outlives their workers, and its janitor.

Owns: the folder's name, which follows from the process that started the ranks (torchrun's agent), so that restarted
supervisors find it again; and its end. The last supervisor of a node removes the folder once all have trained to the
end, or torchrun starts none again. If the agent or a supervisor is killed, a separate process, the janitor, removes it
once the agent has ended. A janitor ends with its PID namespace: what is left then is removed by the next process of
the same user that opens a folder, as no process has it locked.

    ROOT                   locked, shared, by all processes that use it
    ROOT/janitor           locked by the janitor
    ROOT/process-janitor-PID-TICKS        a process of the folder, and when it was started
    ROOT/process-rankNNNN-PID-TICKS       a rank's supervisor
    ROOT/ended-rankNNNN-HOW               a supervisor that has ended
    ROOT/numbers           the ranks' present numbers; locked to change them
    ROOT/rankNNNN          a rank's memory

Names have these facts, and not contents: an empty file needs no memory, of which snapshots may have left none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import shutil
import signal
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from moe_ckpt.config import require
from moe_ckpt.elastic.stopped import StoppedProcesses, go_on
from moe_ckpt.linux import is_alive, is_stopped, pid_namespace, start_ticks
from moe_ckpt.private_files import FOLDER_MODE, is_private, make_private, open_private
from moe_ckpt.snapshot.blobs import held_path, own_path

_NAME = re.compile(r"moe_ckpt-(\d+)-(\d+)-(\d+)")  # the agent's pid, when it was started, whose pids are meant
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_PATIENCE_S = 5.0
_LOOKS = 4  # in the time for which a supervisor may be stopped
_SUPERVISORS = "rank*"
_END_S = 60.0  # more than a supervisor takes to end its processes
_LOOK_S = 0.1


class Ended(Enum):
    """How a supervisor has ended."""

    WELL = "well"
    """The rank has trained to the end."""

    FOR_GOOD = "for-good"
    """The job has failed, and torchrun starts no process of this node again."""

    TO_GO_ON = "to-go-on"
    """The job may be started again, and use what is in memory."""


def open_memory_root(
    base: Path, agent_pid: int, setting: str = "runtime.shared_memory", *, patience_s: float = _PATIENCE_S
) -> Path:
    """Return the folder of the node that `agent_pid` started, with a janitor; it is created if it is missing.

    The folder stays while this process and its children live, even if the agent dies. Folders of agents that have ended
    are removed. Call from a process with one thread.

    Args:
        base: The folder in memory, in which this one is created.
        agent_pid: The process that started this one.
        setting: The name of the setting of `base`, for errors.
        patience_s: The time after which the janitor lets a stopped supervisor go on.

    Returns:
        The folder.

    Raises:
        ConfigError: `base` cannot be written, or another user has put something there in place of the folder.
    """
    _remove_left(base)
    root = base / f"moe_ckpt-{agent_pid}-{start_ticks(agent_pid)}-{pid_namespace()}"
    while (users := _enter(root, setting)) is None:
        pass
    _start_janitor(root, users, agent_pid, patience_s)
    return root


def _enter(root: Path, setting: str) -> int | None:
    """Return the descriptor that has a folder locked until the last process that inherits it has ended.

    None: another process has removed the folder meanwhile.
    """
    try:
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=FOLDER_MODE)
    except OSError as error:
        require(False, setting, str(root.parent), f"a folder in memory that can be written ({error})")
    try:
        users = os.open(root, _FOLDER)
        is_own = is_private(os.fstat(users), os.geteuid())
    except FileNotFoundError:
        return None
    except OSError:  # a link, a file, or a folder that this user cannot read
        users, is_own = -1, False
    # the name is no secret, and in a folder that all users share, as /dev/shm, any of them can take it
    wanted = f"a folder in which no other user has made {root.name}, such as one of your own"
    require(is_own, setting, str(root.parent), wanted)
    fcntl.flock(users, fcntl.LOCK_SH)
    if _is_at(root, users):
        return users
    os.close(users)
    return None


def _is_at(path: Path, fd: int) -> bool:
    """Return whether an open folder is still the one at a path."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def rank_memory(root: Path, global_rank: int) -> Path:
    """Return one rank's folder; it is created if it is missing."""
    folder = root / f"rank{global_rank:04d}"
    folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    return folder


def begin_rank(root: Path, global_rank: int) -> Path:
    """Return the folder of a rank whose supervisor the calling process is; the janitor watches it from now on."""
    folder = rank_memory(root, global_rank)
    for how in Ended:
        _mark(root, global_rank, how).unlink(missing_ok=True)
    _note_process(root, folder.name)
    return folder


def end_rank(root: Path, global_rank: int, ranks: range, how: Ended) -> None:
    """Note how a rank's supervisor ends; remove the node's folder if no start of the job will use it.

    Call it when no process of the rank uses its memory.

    Args:
        root: The node's folder.
        global_rank: The rank.
        ranks: All ranks of the node.
        how: How the supervisor ends.
    """
    # an OSError: the folder is gone, or is full; the janitor removes what is left
    with contextlib.suppress(OSError), _locked(root / "numbers"):
        _mark(root, global_rank, how).touch()
        ends = [[how for how in Ended if _mark(root, rank, how).exists()] for rank in ranks]
        is_over = [Ended.FOR_GOOD] in ends or [Ended.TO_GO_ON] not in ends
        if is_over and all(ends):
            shutil.rmtree(root, ignore_errors=True)


def janitor_of(root: Path) -> int | None:
    """Return the pid of a folder's janitor; None if it has none."""
    return next(iter(_processes(root, "janitor")), None)


def _mark(root: Path, global_rank: int, how: Ended) -> Path:
    return root / f"ended-rank{global_rank:04d}-{how.value}"


def _note_process(root: Path, name: str) -> None:
    """Note that the calling process is the janitor, or a rank's supervisor, in place of an earlier one."""
    for earlier in root.glob(f"process-{name}-*"):
        earlier.unlink(missing_ok=True)
    (root / f"process-{name}-{os.getpid()}-{start_ticks(os.getpid())}").touch()


def _processes(root: Path, name: str) -> list[int]:
    """Return the pids of processes of this name, a pattern, that are alive."""
    found = (path.name.rsplit("-", 2)[1:] for path in root.glob(f"process-{name}-*"))
    return [int(pid) for pid, started in found if is_alive(int(pid), started=int(started))]


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
def _locked(path: Path, *, wait: bool = True) -> Iterator[Path]:
    """Lock a file exclusively; it is created if it is missing. Raises BlockingIOError if that would be to `wait`."""
    fd = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path
    finally:
        os.close(fd)


def _remove_left(base: Path) -> None:
    """Remove the folders of this user whose agents have ended, and which no process has locked."""
    for root in base.glob("moe_ckpt-*"):
        named = _NAME.fullmatch(root.name)
        if not named:
            continue
        is_of_here = int(named[3]) == pid_namespace()
        if is_of_here and is_alive(int(named[1]), started=int(named[2])):
            continue  # between two starts by its agent, a folder is locked by its janitor only
        with contextlib.suppress(OSError):  # in use, another user's, or another process removes it
            _remove_unlocked(root, is_of_here=is_of_here)


def _remove_unlocked(root: Path, *, is_of_here: bool) -> None:
    """Remove a folder of this user. Raises OSError if a process has it locked, or it is no folder of this user."""
    users = os.open(root, _FOLDER)
    try:
        if not is_private(os.fstat(users), os.geteuid()):
            return
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with _locked(root / "janitor", wait=False):
            shutil.rmtree(root, ignore_errors=True)
    except BlockingIOError:
        janitor = janitor_of(root)
        if is_of_here and janitor:
            go_on(janitor)  # it removes the folder, unless it was stopped
    finally:
        os.close(users)


def _start_janitor(root: Path, users: int, agent_pid: int, patience_s: float) -> None:
    """Start a janitor unless there is one: it has its file locked as long as it lives."""
    with contextlib.suppress(BlockingIOError), _locked(root / "janitor", wait=False):
        _fork_janitor(root, users, agent_pid, patience_s)


def _fork_janitor(root: Path, users: int, agent_pid: int, patience_s: float) -> None:
    # before the forks: later the number may belong to another process
    agent = os.pidfd_open(agent_pid)
    child = os.fork()
    if child == 0:
        os.setsid()  # torchrun's signals to its children's groups are not for it
        # twice: the janitor is then no child of a supervisor, which ends the processes that its workers leave
        if os.fork() == 0:
            os.close(users)  # inherited: the janitor would wait for itself
            _wait_and_remove(root, agent_pid, agent, patience_s)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(agent)


def _wait_and_remove(root: Path, agent_pid: int, agent: int, patience_s: float) -> None:
    """Be the janitor of a folder until its agent, also given by its pidfd, has ended."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # a reader of the job's output must not wait for this process
            os.dup2(null, standard)
        os.chdir("/")
        _note_process(root, "janitor")
        users = os.open(root, _FOLDER)
        _watch_supervisors(root, agent_pid, agent, patience_s)
        supervisors = _opened(_processes(root, _SUPERVISORS))
        shutil.rmtree(root, ignore_errors=True)
        _await_unlocked(users, supervisors)  # daemons may outlive the agent for a while, and make their folders again
        shutil.rmtree(root, ignore_errors=True)
    finally:
        os._exit(0)


def _watch_supervisors(root: Path, agent_pid: int, agent: int, patience_s: float) -> None:
    """Return when the agent has ended; until then let supervisors go on that are stopped, but if the agent is, too."""
    poll = select.poll()
    poll.register(agent, select.POLLIN)
    stopped = StoppedProcesses(patience_s)
    while not poll.poll(1000 * patience_s / _LOOKS):
        # a user who stops the agent as well, as Ctrl-Z does, has suspended the job
        stopped.look([] if is_stopped(agent_pid) else _processes(root, _SUPERVISORS))


def _await_unlocked(users: int, supervisors: list[int]) -> None:
    """Return when no process has a folder locked. Its supervisors, by pidfd, end with the agent, or by SIGKILL."""
    until_s = time.monotonic() + _END_S
    while supervisors and time.monotonic() < until_s:
        # one that is stopped has yet to receive the signal of its parent's death
        _send_all(supervisors, signal.SIGCONT)
        poll = select.poll()
        for fd in supervisors:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(1000 * _LOOK_S):
            supervisors.remove(fd)
    _send_all(supervisors, signal.SIGKILL)
    fcntl.flock(users, fcntl.LOCK_EX)


def _opened(pids: list[int]) -> list[int]:
    """Return the pidfds of processes that have not ended."""
    pidfds: list[int] = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfds.append(os.pidfd_open(pid))
    return pidfds


def _send_all(pidfds: list[int], number: signal.Signals) -> None:
    for fd in pidfds:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, number)
