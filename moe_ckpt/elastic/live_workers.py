"""The live workers of a run, and their locations: RUN/live/rankNNNN.json.

Each worker writes its file at its start, and the file describes the worker as of that
start. Only processes of the same PID namespace on the same machine can find out whether
the worker still lives. Another process with the same pid has another start time.
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
# values for fields that files of older runs lack, which no process and no machine has
_OLDER = {"supervisor_start_ticks": -1, "boot": "", "pid_namespace": 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveWorker:
    """A rank's worker, as described in its file."""

    global_rank: int
    """The rank."""

    node: int
    """Number of the rank's node."""

    host: str
    """Name of the machine, for messages."""

    boot: str
    """Name of the machine's present start, from `linux.boot_id`."""

    pid_namespace: int
    """PID namespace of both pids: of a container, or of the machine."""

    pid: int
    """The worker's process."""

    start_ticks: int
    """Start time of the worker, from `linux.start_ticks`."""

    supervisor_pid: int
    """The supervisor's process, which replaces the worker."""

    supervisor_start_ticks: int
    """Start time of the supervisor, from `linux.start_ticks`."""

    memory: str
    """The rank's folder in shared memory."""

    incarnation: int
    """Number of workers of this rank before this one."""

    @property
    def is_here(self) -> bool:
        """Whether this process can find out if the worker lives.

        False for a worker on another machine or in another container.
        """
        return (self.boot, self.pid_namespace) == (boot_id(), pid_namespace())

    @property
    def where(self) -> str:
        """Location of a worker that is not here, for messages."""
        return "in another container" if self.boot == boot_id() else f"on {self.host}"

    @property
    def is_alive(self) -> bool:
        """Whether the worker is here, lives, and has its status page."""
        return (
            self.is_here
            and is_alive(self.pid, started=self.start_ticks)
            and self._page_path.is_file()
        )

    @property
    def is_supervised(self) -> bool:
        """Whether the worker's supervisor is here and lives.

        Such a supervisor is about to replace a dead worker.
        """
        return self.is_here and is_alive(
            self.supervisor_pid, started=self.supervisor_start_ticks
        )

    def open_page(self) -> StatusPage:
        """Return the worker's status page.

        Raises:
            FileNotFoundError: The page is missing. A new page would say nothing.
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
    """Record the calling process as a rank's worker.

    Args:
        run: The run folder.
        global_rank: The rank.
        node: The number of the rank's node.
        supervisor_pid: The rank's supervisor.
        memory: The rank's folder in shared memory.
        incarnation: The number of workers of this rank before this one.
    """
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
    # replaced as a whole: other processes may read the file at any time
    temporary = path.with_suffix(f".{os.getpid()}")
    write_private(temporary, json.dumps(asdict(worker)) + "\n")
    temporary.replace(path)


def remove_live(run: Path, global_rank: int) -> None:
    """Record that a rank has no worker any more."""
    _path(run, global_rank).unlink(missing_ok=True)


def read_written(run: Path) -> list[LiveWorker]:
    """Return all workers that have a file, dead or alive, by rank."""
    workers: list[LiveWorker] = []
    for path in sorted((run / "live").glob("rank*.json")):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            workers.append(LiveWorker(**(_OLDER | json.loads(path.read_text()))))
    return workers


def read_live(run: Path) -> list[LiveWorker]:
    """Return the workers that are here and alive, by rank."""
    return [worker for worker in read_written(run) if worker.is_alive]


def is_running(workers: Collection[LiveWorker]) -> bool:
    """Return whether any of these workers is alive here, or is about to be replaced."""
    return any(worker.is_alive or worker.is_supervised for worker in workers)


def read_world_size(run: Path) -> int:
    """Return the number of ranks of a run.

    Raises:
        FileNotFoundError: The folder holds no run.
    """
    return int(json.loads((run / "run.json").read_text())["world_size"])


def _path(run: Path, global_rank: int) -> Path:
    return run / "live" / f"rank{global_rank:04d}.json"
