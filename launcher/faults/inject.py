"""The act itself: a signal to workers, at once, and for a lost node the loss of its
host memory. Linux.

A node is lost in this order, so that nothing can be written between the loss and the
deaths, and that nothing of a replacement is touched:

    SIGSTOP to all its supervisors, then to its workers -> every thread of them stands still -> `own` and `held` of all
    its ranks are deleted -> SIGKILL to the workers, which a stopped process obeys, too -> SIGCONT to the supervisors
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from launcher.faults.log import InjectedFault, append_faults
from launcher.proc import stands_still
from moe_ckpt.elastic.live_workers import LiveWorker, read_written
from moe_ckpt.elastic.status_page import RAISE_NUMBER, StatusPage
from moe_ckpt.faults.schedule import RAISE

_HOST_MEMORY = ("own", "held")
_LOOK_AGAIN_S = 0.001
_VERBS = {
    "KILL": "killed",
    "STOP": "stopped",
    "SEGV": "sent SIGSEGV to",
    "TERM": "sent SIGTERM to",
    RAISE: "raised in",
}


def signal_number(name: str) -> signal.Signals:
    """Return the number of a signal, or of an order to raise an exception."""
    return RAISE_NUMBER if name == RAISE else signal.Signals[f"SIG{name}"]


@contextlib.contextmanager
def nobody_replaced(
    run: Path, ranks: Collection[int], *, wait_s: float
) -> Iterator[list[LiveWorker]]:
    """Within, these ranks get no new workers; yield the last that they got on this
    machine, dead or alive.

    A worker that is being born has seen nothing of its rank's memory yet. Supervisors
    that do not stand still within `wait_s` are not waited for.
    """
    supervisors = {
        worker.supervisor_pid
        for worker in _workers_here(run, ranks)
        if worker.is_supervised
    }
    try:
        _stop(supervisors, wait_s)
        # read again: a worker may have been born before its supervisor stood still
        yield _workers_here(run, ranks)
    finally:
        # also where the fault could not be injected: a supervisor that stands still
        # replaces no worker
        _signal_all(supervisors, signal.SIGCONT)


def kill_node(
    run: Path, workers: Sequence[LiveWorker], *, wait_s: float
) -> list[InjectedFault]:
    """Kill these workers and delete their host memory, of those that are dead already
    as well.

    Workers that do not stand still within `wait_s` (a driver call, say) are killed all
    the same.
    """
    alive = [worker for worker in workers if worker.is_alive]
    _stop({worker.pid for worker in alive}, wait_s)
    for worker in workers:
        _lose_memory(Path(worker.memory))
    return signal_processes(run, alive, "KILL", "node")


def describe(fault: InjectedFault, run: Path) -> str:
    """Return for people what happened to whom, where, when."""
    where = (
        f"in generation {fault.generation}, iteration {fault.iteration}, {fault.phase}"
    )
    return (
        f"{_VERBS[fault.signal]} rank {fault.rank} (pid {fault.pid}) of {run} {where}"
    )


def signal_processes(
    run: Path, workers: Sequence[LiveWorker], name: str, scope: str = "process"
) -> list[InjectedFault]:
    """Send a signal to each of these workers; return what was written about it."""
    now_s = time.time()
    faults = [
        fault_of(worker, worker.open_page(), name, scope, now_s) for worker in workers
    ]
    # before the signals: a report that finds the effects of a fault finds the fault as
    # well
    append_faults(run, faults)
    _signal_all([worker.pid for worker in workers], signal_number(name))
    return faults


def fault_of(
    worker: LiveWorker, page: StatusPage, name: str, scope: str, unix_s: float
) -> InjectedFault:
    """Return the fault that a signal of this name, sent at a time, is to a worker, with
    what its page shows.
    """
    return InjectedFault(
        unix_s=unix_s,
        rank=worker.global_rank,
        pid=worker.pid,
        signal=name,
        scope=scope,
        generation=page.generation,
        iteration=page.iteration,
        phase=page.phase.name.lower(),
        ordered=False,
    )


def _lose_memory(memory: Path) -> None:
    """Delete what is in a rank's memory; its daemon, which lives on, may be writing
    there.
    """
    # renamed before it is deleted: `rmtree` would race with a daemon that creates files
    # meanwhile
    lost = tempfile.mkdtemp(prefix="lost-", dir=memory)
    for part in _HOST_MEMORY:
        with contextlib.suppress(FileNotFoundError):
            (memory / part).rename(Path(lost) / part)
    while os.path.lexists(lost):
        try:
            shutil.rmtree(lost)
        except OSError as error:
            # a daemon that had found its folder under the old name creates or deletes a
            # file there now: its last one
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise


def _workers_here(run: Path, ranks: Collection[int]) -> list[LiveWorker]:
    return [
        worker
        for worker in read_written(run)
        if worker.global_rank in ranks and worker.is_here
    ]


def _stop(pids: Collection[int], wait_s: float) -> None:
    _signal_all(pids, signal.SIGSTOP)
    deadline_s = time.monotonic() + wait_s
    while not all(map(stands_still, pids)) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_AGAIN_S)


def _signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        # it died by itself since it was looked at
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
