"""The folder in shared memory for data of a node's ranks that outlives their workers.

Owns: the folder's name, which follows from the process that started the ranks
(torchrun's agent), so that restarted supervisors find the folder again; and the
folder's end. The last supervisor of a node removes the folder once all ranks have
trained to the end, or torchrun starts no rank again. If the agent or a supervisor is
killed, a separate process, the janitor, removes the folder once the agent has ended. A
janitor ends with its PID namespace. The next process of the same user that opens a
folder then removes the remaining folders, which no process has locked.

    ROOT                   locked, shared, by all processes that use it
    ROOT/numbers           the ranks' present numbers; locked to change them
    ROOT/rankNNNN          a rank's memory
    ROOT/ended-rankNNNN-HOW               how a supervisor has ended
    ROOT/janitor, ROOT/process-...        processes of the node (`node_process.py`)

File names contain the facts: an empty file needs no memory, of which snapshots may have
left none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from enum import Enum
from pathlib import Path

from moe_ckpt.config import require
from moe_ckpt.elastic.janitor import JANITOR, janitor_of, start_janitor
from moe_ckpt.elastic.node_process import note_process
from moe_ckpt.elastic.stopped import go_on
from moe_ckpt.linux import is_alive, pid_namespace, start_ticks
from moe_ckpt.private_files import FOLDER_MODE, is_private, locked, make_private
from moe_ckpt.snapshot.blobs import held_path, own_path

# the agent's pid, the agent's start time, the PID namespace
_NAME = re.compile(r"moe_ckpt-(\d+)-(\d+)-(\d+)")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_PATIENCE_S = 5.0


class Ended(Enum):
    """How a supervisor has ended."""

    WELL = "well"
    """The rank has trained to the end."""

    FOR_GOOD = "for-good"
    """The job has failed or was interrupted, and torchrun starts no process of this
    node again.
    """

    TO_GO_ON = "to-go-on"
    """The job may be started again, and use the data in memory."""


def open_memory_root(
    base: Path,
    agent_pid: int,
    setting: str = "runtime.shared_memory",
    *,
    patience_s: float = _PATIENCE_S,
) -> Path:
    """Return the folder of the ranks that an agent has started on this node.

    The folder is created if it is missing, and has a janitor. The folder stays while
    this process and its children live, even if the agent dies. Folders of agents that
    have ended are removed. Call from a process with one thread.

    Args:
        base: The folder in memory, in which this folder is created.
        agent_pid: The process that started this process.
        setting: The name of the setting of `base`, for errors.
        patience_s: Seconds after which the janitor sends SIGCONT to a stopped
            supervisor.

    Raises:
        ConfigError: `base` cannot be written, or another user has put something in
            place of the folder.
    """
    _remove_left(base)
    root = base / f"moe_ckpt-{agent_pid}-{start_ticks(agent_pid)}-{pid_namespace()}"
    while not _enter(root, setting):
        pass
    start_janitor(root, agent_pid, patience_s)
    return root


def _enter(root: Path, setting: str) -> bool:
    """Create a folder if it is missing, and lock the folder.

    The folder is locked until this process and the last of its children have ended.

    Returns:
        False if another process has removed the folder meanwhile.

    Raises:
        ConfigError: As in `open_memory_root`.
    """
    try:
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=FOLDER_MODE)
    except OSError as error:
        require(
            False,
            setting,
            str(root.parent),
            f"a folder in memory that can be written ({error})",
        )
    try:
        users = os.open(root, _FOLDER)
        is_own = is_private(os.fstat(users), os.geteuid())
    except FileNotFoundError:
        return False
    except OSError:  # a link, a file, or a folder that this user cannot read
        users, is_own = -1, False
    # the name is no secret: in a folder that all users share, such as /dev/shm, any of
    # them can take the name
    wanted = (
        f"a folder in which no other user has made {root.name}, such as one of your own"
    )
    require(is_own, setting, str(root.parent), wanted)
    fcntl.flock(users, fcntl.LOCK_SH)
    if _is_at(root, users):
        return True
    os.close(users)
    return False


def _is_at(path: Path, fd: int) -> bool:
    """Return whether an open folder is still the folder at a path."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def rank_memory(root: Path, global_rank: int) -> Path:
    """Return one rank's folder, which is created if it is missing."""
    folder = _folder_of(root, global_rank)
    folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    return folder


def has_rank(root: Path, global_rank: int) -> bool:
    """Return whether a rank has a folder here."""
    return _folder_of(root, global_rank).exists()


def _folder_of(root: Path, global_rank: int) -> Path:
    return root / f"rank{global_rank:04d}"


def begin_rank(root: Path, global_rank: int) -> Path:
    """Return a rank's folder for the rank's supervisor, the calling process.

    The janitor watches the supervisor from now on.

    Args:
        root: The node's folder.
        global_rank: The rank.
    """
    folder = rank_memory(root, global_rank)
    for how in Ended:
        _mark(root, global_rank, how).unlink(missing_ok=True)
    note_process(root, folder.name, os.getpid())
    return folder


def end_rank(root: Path, global_rank: int, ranks: range, how: Ended) -> None:
    """Record how a rank's supervisor ends.

    Also removes the node's folder if no start of the job will use the folder. Call when
    no process of the rank uses the rank's memory.

    Args:
        root: The node's folder.
        global_rank: The rank.
        ranks: All ranks of the node.
        how: How the supervisor ends.
    """
    # OSError: the folder is gone or full; the janitor removes the rest
    with contextlib.suppress(OSError), locked(root / "numbers"):
        _mark(root, global_rank, how).touch()
        ends = [
            [how for how in Ended if _mark(root, rank, how).exists()] for rank in ranks
        ]
        is_over = [Ended.FOR_GOOD] in ends or [Ended.TO_GO_ON] not in ends
        if is_over and all(ends):
            shutil.rmtree(root, ignore_errors=True)


def _mark(root: Path, global_rank: int, how: Ended) -> Path:
    return root / f"ended-rank{global_rank:04d}-{how.value}"


def take_over(root: Path, ranks: range) -> None:
    """Keep the data of an earlier attempt after torchrun has numbered the nodes anew.

    Blobs of the node's present ranks, in any rank's memory, become these ranks' own
    blobs. The first of the present ranks holds all other blobs. Every supervisor of the
    node calls this function before the use of its rank's folder. The first call moves
    everything.

    Args:
        root: The node's folder.
        ranks: All present ranks of the node.
    """
    with locked(root / "numbers") as numbers:
        if numbers.read_text() != str(ranks):
            _move(root, ranks)
            numbers.write_text(str(ranks))


def _move(root: Path, ranks: range) -> None:
    left = [
        folder for folder in sorted(root.glob("rank*")) if _number(folder) not in ranks
    ]
    for folder in left:  # before any copy: an owner has at least as much
        _keep(own_path(folder), _number(folder), root, ranks)
    for folder in left:
        for held in sorted((folder / "held").glob("rank*")):
            _keep(held, _number(held), root, ranks)


def _keep(blobs: Path, owner: int, root: Path, ranks: range) -> None:
    own = own_path(rank_memory(root, owner)) if owner in ranks else None
    target = own or held_path(rank_memory(root, ranks[0]), owner)
    if blobs.exists() and not target.exists():
        make_private(target.parent)
        blobs.rename(target)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("rank"))


def _remove_left(base: Path) -> None:
    """Remove this user's unlocked folders whose agents have ended."""
    for root in base.glob("moe_ckpt-*"):
        named = _NAME.fullmatch(root.name)
        if not named:
            continue
        is_of_here = int(named[3]) == pid_namespace()
        if is_of_here and is_alive(int(named[1]), started=int(named[2])):
            # between two starts by its agent, only the janitor has a folder locked
            continue
        # OSError: the folder is in use or another user's, or another process removes it
        with contextlib.suppress(OSError):
            _remove_unlocked(root, is_of_here=is_of_here)


def _remove_unlocked(root: Path, *, is_of_here: bool) -> None:
    """Remove a folder of this user, unless a process has the folder locked.

    If the folder is locked and has a janitor of this PID namespace, the janitor is sent
    SIGCONT.

    Raises:
        OSError: The path is no folder that this user can read.
    """
    users = os.open(root, _FOLDER)
    try:
        if not is_private(os.fstat(users), os.geteuid()):
            return
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with locked(root / JANITOR, wait=False):
            shutil.rmtree(root, ignore_errors=True)
    except BlockingIOError:
        janitor = janitor_of(root)
        if is_of_here and janitor:
            go_on(janitor)  # the janitor removes the folder, unless stopped
    finally:
        os.close(users)
