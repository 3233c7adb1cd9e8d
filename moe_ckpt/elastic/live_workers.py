"""Which workers of a run live, and where: RUN/live/rankNNNN.json, written by each
worker at its start.

A file describes its worker as of that start. Whether the worker still lives, only
processes of the same PID namespace on the same machine can tell; another process with
the same pid has another start time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.linux import boot_id, is_alive, pid_namespace, start_ticks
from moe_ckpt.private_files import make_private, write_private

LATEST = Path("outputs/latest")
# for fields that files of older runs lack: values that no process and no machine has
_OLDER = {"supervisor_start_ticks": -1, "boot": "", "pid_namespace": 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveWorker:
    """A rank's worker, by its file."""

    global_rank: int
    """The rank."""

    node: int
    """The number of its node."""

    host: str
    """The name of its machine, for messages."""

    boot: str
    """The machine's present start: `linux.boot_id`."""

    pid_namespace: int
    """The PID namespace of both pids: that of a container, or of the machine."""

    pid: int
    """The worker."""

    start_ticks: int
    """When the worker was started."""

    supervisor_pid: int
    """The process that replaces the worker."""

    supervisor_start_ticks: int
    """When the supervisor was started."""

    memory: str
    """The rank's folder in shared memory."""

    incarnation: int
    """The workers of this rank before this one."""

    @property
    def is_here(self) -> bool:
        """Whether this process can tell if the worker lives: it is not on another
        machine or in another container.
        """
        return (self.boot, self.pid_namespace) == (boot_id(), pid_namespace())

    @property
    def where(self) -> str:
        """Where a worker is that is not here, for messages."""
        return "in another container" if self.boot == boot_id() else f"on {self.host}"

    @property
    def is_alive(self) -> bool:
        """Whether it is here, lives, and has its page."""
        return (
            self.is_here
            and is_alive(self.pid, started=self.start_ticks)
            and self._page_path.is_file()
        )

    @property
    def is_supervised(self) -> bool:
        """Whether its supervisor is here and lives: then a dead worker is about to be
        replaced.
        """
        return self.is_here and is_alive(
            self.supervisor_pid, started=self.supervisor_start_ticks
        )

    def open_page(self) -> StatusPage:
        """Return its page; raises FileNotFoundError where there is none, as a page that
        is made anew says nothing.
        """
        self._page_path.stat()
        return StatusPage(self._page_path)

    @property
    def _page_path(self) -> Path:
        return Path(self.memory) / "page"


def write_live(
    run: Path,
    *,
    global_rank: int,
    node: int,
    supervisor_pid: int,
    memory: Path,
    incarnation: int,
) -> None:
    """Say that the calling process is a rank's worker."""
    worker = LiveWorker(
        global_rank=global_rank,
        node=node,
        host=socket.gethostname(),
        boot=boot_id(),
        pid_namespace=pid_namespace(),
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()),
        supervisor_pid=supervisor_pid,
        supervisor_start_ticks=start_ticks(supervisor_pid),
        memory=str(memory),
        incarnation=incarnation,
    )
    path = _path(run, global_rank)
    make_private(path.parent)
    # replaced as a whole: other processes read the files at any time
    temporary = path.with_suffix(f".{os.getpid()}")
    write_private(temporary, json.dumps(asdict(worker)) + "\n")
    temporary.replace(path)


def remove_live(run: Path, global_rank: int) -> None:
    """Say that a rank has no worker any more."""
    _path(run, global_rank).unlink(missing_ok=True)


def read_written(run: Path) -> list[LiveWorker]:
    """Return the workers that have a file, by rank, dead or alive."""
    workers: list[LiveWorker] = []
    for path in sorted((run / "live").glob("rank*.json")):
        with contextlib.suppress(FileNotFoundError):  # removed since
            workers.append(LiveWorker(**(_OLDER | json.loads(path.read_text()))))
    return workers


def read_live(run: Path) -> list[LiveWorker]:
    """Return the workers that are here and alive, by rank."""
    return [worker for worker in read_written(run) if worker.is_alive]


def is_running(workers: Collection[LiveWorker]) -> bool:
    """Return whether any of these workers is here and lives, or is about to be
    replaced.
    """
    return any(worker.is_alive or worker.is_supervised for worker in workers)


def read_world_size(run: Path) -> int:
    """Return how many ranks a run has; raises FileNotFoundError where there is no run."""
    return int(json.loads((run / "run.json").read_text())["world_size"])


def _path(run: Path, global_rank: int) -> Path:
    return run / "live" / f"rank{global_rank:04d}.json"
