"""Where the ranks of one node keep what must outlive their trainers: a folder in shared memory, and its janitor.

Owns: the folder's name, which follows from the process that started the ranks (torchrun's agent), so that guards
which torchrun starts anew find it again; and its end: a process of its own removes it when the agent is gone, however
it went.
"""

from __future__ import annotations

import os
import select
import shutil
from pathlib import Path

from moe_ckpt.config import require
from moe_ckpt.store.blobs import held_path, own_path


def open_memory_root(base: Path, agent_pid: int) -> Path:
    """Return the folder of the node that `agent_pid` started, made where it is missing, with a janitor.

    Raises ConfigError where `base` is no folder that can be written. Call from a process with one thread.
    """
    root = base / f"moe_ckpt-{agent_pid}-{_start_ticks(agent_pid)}"
    try:
        root.mkdir(mode=0o700)
    except FileExistsError:
        return root
    except OSError as error:
        require(False, "runtime.shared_memory", str(base), f"a folder in memory that can be written ({error})")
    _start_janitor(root, agent_pid)
    return root


def rank_memory(root: Path, global_rank: int) -> Path:
    """Return one rank's folder, made where it is missing."""
    folder = root / f"rank{global_rank:04d}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def take_over(root: Path, ranks: range) -> None:
    """Keep what ranks of an earlier attempt left on this node, where torchrun has numbered the nodes anew.

    `ranks` are this node's now. What is theirs, in whoever's memory, becomes their own; their first rank
    holds the rest.
    """
    for folder in sorted(root.glob("rank*")):
        if _number(folder) not in ranks:
            _keep(own_path(folder), _number(folder), root, ranks)
            for held in sorted((folder / "held").glob("rank*")):
                _keep(held, _number(held), root, ranks)


def _keep(blobs: Path, owner: int, root: Path, ranks: range) -> None:
    own = own_path(rank_memory(root, owner)) if owner in ranks else None
    place = own or held_path(rank_memory(root, ranks[0]), owner)
    if blobs.exists() and not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        blobs.rename(place)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("rank"))


def _start_ticks(pid: int) -> int:
    """Return when a process was started: with the pid, a name that is never used again."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    return int(after_name.split()[19])


def _start_janitor(root: Path, agent_pid: int) -> None:
    agent = os.pidfd_open(agent_pid)
    child = os.fork()
    if child == 0:
        os.setsid()  # torchrun's signals to its children's groups are not for it
        if os.fork() == 0:
            _wait_and_remove(root, agent)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(agent)


def _wait_and_remove(root: Path, agent: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # whoever reads the job's output is not to wait for this process
        os.dup2(null, standard)
    os.chdir("/")
    poll = select.poll()
    poll.register(agent, select.POLLIN)
    poll.poll()
    shutil.rmtree(root, ignore_errors=True)
    os._exit(0)
