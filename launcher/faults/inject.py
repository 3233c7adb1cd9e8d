"""Inflicts a fault at once: a signal to workers, or the loss of a node. Linux only.

A node is lost in this order. Nothing can be written between the loss and the deaths,
and no replacement is affected:

    SIGSTOP to all supervisors of the node, then to the workers
    -> every thread of these processes stands still
    -> `own` and `held` of all ranks of the node are deleted
    -> SIGKILL to the workers, which a stopped process obeys, too
    -> SIGCONT to the supervisors
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
    """Return the number of a signal, or of an order to raise an exception.

    Args:
        name: The name without `SIG`, or `RAISE`.
    """
    return RAISE_NUMBER if name == RAISE else signal.Signals[f"SIG{name}"]


@contextlib.contextmanager
def nobody_replaced(
    run: Path, ranks: Collection[int], *, wait_s: float
) -> Iterator[list[LiveWorker]]:
    """Keep ranks from getting new workers within the block.

    A worker that is just being forked has not read its rank's memory yet.

    Args:
        run: The run folder.
        ranks: The ranks.
        wait_s: The seconds to wait until the supervisors stand still. The block begins
            in any case.

    Yields:
        The newest workers of the ranks on this machine, dead or alive.
    """
    supervisors = {
        worker.supervisor_pid
        for worker in _workers_here(run, ranks)
        if worker.is_supervised
    }
    try:
        _stop(supervisors, wait_s)
        # read again: a worker may have been forked before its supervisor stood still
        yield _workers_here(run, ranks)
    finally:
        # also if the fault could not be injected: a supervisor that stands still
        # replaces no worker
        _signal_all(supervisors, signal.SIGCONT)


def kill_node(
    run: Path, workers: Sequence[LiveWorker], *, wait_s: float
) -> list[InjectedFault]:
    """Kill workers and delete their host memory.

    The host memory of workers that are dead already is deleted as well.

    Args:
        run: The run folder.
        workers: The workers, dead or alive.
        wait_s: The seconds to wait until the workers stand still. Workers that do not,
            for example in a driver call, are killed nevertheless.

    Returns:
        The faults, as written to the log of the run.
    """
    alive = [worker for worker in workers if worker.is_alive]
    _stop({worker.pid for worker in alive}, wait_s)
    for worker in workers:
        _lose_memory(Path(worker.memory))
    return signal_processes(run, alive, "KILL", "node")


def describe(fault: InjectedFault, run: Path) -> str:
    """Return a readable line about a fault: signal, worker, and point in the run."""
    where = (
        f"in generation {fault.generation}, iteration {fault.iteration}, {fault.phase}"
    )
    return (
        f"{_VERBS[fault.signal]} rank {fault.rank} (pid {fault.pid}) of {run} {where}"
    )


def signal_processes(
    run: Path, workers: Sequence[LiveWorker], name: str, scope: str = "process"
) -> list[InjectedFault]:
    """Send a signal to each of some workers.

    Args:
        run: The run folder.
        workers: The workers.
        name: The name of the signal, as `KILL`.
        scope: `process` or `node`, for the log.

    Returns:
        The faults, as written to the log of the run.
    """
    now_s = time.time()
    faults = [
        fault_of(worker, worker.open_page(), name, scope, now_s) for worker in workers
    ]
    # before the signals, so that a report that finds the effects of a fault also finds
    # the fault
    append_faults(run, faults)
    _signal_all([worker.pid for worker in workers], signal_number(name))
    return faults


def fault_of(
    worker: LiveWorker, page: StatusPage, name: str, scope: str, unix_s: float
) -> InjectedFault:
    """Return the fault that a signal is to a worker.

    Args:
        worker: The worker.
        page: The status page of the worker, for the worker's activity.
        name: The name of the signal, as `KILL`.
        scope: `process` or `node`.
        unix_s: The time of the signal.
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
    """Delete a rank's memory.

    The rank's daemon lives on and may write there at the same time.
    """
    # renamed before the deletion, because `rmtree` would race with a daemon that
    # creates files
    lost = tempfile.mkdtemp(prefix="lost-", dir=memory)
    for part in _HOST_MEMORY:
        with contextlib.suppress(FileNotFoundError):
            (memory / part).rename(Path(lost) / part)
    while os.path.lexists(lost):
        try:
            shutil.rmtree(lost)
        except OSError as error:
            # a daemon that opened its folder under the old name may now create or
            # delete its last file there
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
        # the process may have died by itself in the meantime
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
