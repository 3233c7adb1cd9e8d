"""Which trainers of a run live, and where: RUN/live/rankNNNN.json, written by each trainer at its start.

A file says what was true then. Its trainer lives only if the process does, which its machine alone can tell; another
process that has got the pid since is recognised by when it was started.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_ckpt.elastic.status_page import Page
from moe_ckpt.linux import is_alive, start_ticks

LATEST = Path("outputs/latest")
_OLDER = {"guard_start_ticks": -1}  # what files of older runs lack: no process was ever started then


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveTrainer:
    """A rank's trainer, as its file tells. `memory`: its folder in shared memory; `life` counts processes, from 0."""

    global_rank: int
    node: int
    host: str
    pid: int
    start_ticks: int
    guard_pid: int
    guard_start_ticks: int
    memory: str
    life: int

    @property
    def is_here(self) -> bool:
        """Whether the trainer runs, or ran, on this machine."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether it lives, on this machine, and has its page."""
        return self.is_here and is_alive(self.pid, started=self.start_ticks) and self._page_path.is_file()

    @property
    def is_guarded(self) -> bool:
        """Whether its guard lives, on this machine: then a dead trainer is about to be replaced."""
        return self.is_here and is_alive(self.guard_pid, started=self.guard_start_ticks)

    def open_page(self) -> Page:
        """Return its page; raises FileNotFoundError where there is none, as a page that is made anew says nothing."""
        self._page_path.stat()
        return Page(self._page_path)

    @property
    def _page_path(self) -> Path:
        return Path(self.memory) / "page"


def write_live(run: Path, *, global_rank: int, node: int, guard_pid: int, memory: Path, life: int) -> None:
    """Say that the calling process is a rank's trainer."""
    trainer = LiveTrainer(
        global_rank=global_rank,
        node=node,
        host=socket.gethostname(),
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()),
        guard_pid=guard_pid,
        guard_start_ticks=start_ticks(guard_pid),
        memory=str(memory),
        life=life,
    )
    path = _path(run, global_rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(asdict(trainer)) + "\n")
    temporary.replace(path)


def remove_live(run: Path, global_rank: int) -> None:
    """Say that a rank has no trainer any more."""
    _path(run, global_rank).unlink(missing_ok=True)


def read_written(run: Path) -> list[LiveTrainer]:
    """Return the trainers that have a file, by rank, dead or alive."""
    trainers: list[LiveTrainer] = []
    for path in sorted((run / "live").glob("rank*.json")):
        with contextlib.suppress(FileNotFoundError):  # removed since
            trainers.append(LiveTrainer(**(_OLDER | json.loads(path.read_text()))))
    return trainers


def read_live(run: Path) -> list[LiveTrainer]:
    """Return the trainers that are alive on this machine, by rank."""
    return [trainer for trainer in read_written(run) if trainer.is_alive]


def is_running(trainers: Collection[LiveTrainer]) -> bool:
    """Return whether any of these trainers lives on this machine, or is about to be replaced."""
    return any(trainer.is_alive or trainer.is_guarded for trainer in trainers)


def read_world_size(run: Path) -> int:
    """Return how many ranks a run has; raises FileNotFoundError where there is no run."""
    return int(json.loads((run / "run.json").read_text())["world_size"])


def _path(run: Path, global_rank: int) -> Path:
    return run / "live" / f"rank{global_rank:04d}.json"
