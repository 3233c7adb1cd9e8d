"""The act itself: a signal to trainers, at once, and for a lost node the loss of its host memory. Linux.

A node is lost in this order, so that nothing can be written between the loss and the deaths, and that nothing of a
replacement is touched:

    SIGSTOP to all its guards, then to its trainers -> every thread of them stands still -> `own` and `held` of all its
    ranks are deleted -> SIGKILL to the trainers, which a stopped process obeys, too -> SIGCONT to the guards
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from launcher.faults.log import InjectedFault, append_faults
from launcher.live import LiveTrainer, read_written
from launcher.proc import stands_still

_HOST_MEMORY = ("own", "held")
_LOOK_AGAIN_S = 0.001
_VERBS = {"KILL": "killed", "STOP": "stopped", "SEGV": "sent SIGSEGV to", "TERM": "sent SIGTERM to"}


def signal_number(name: str) -> signal.Signals:
    return signal.Signals[f"SIG{name}"]


def strike_processes(run: Path, trainers: Sequence[LiveTrainer], name: str) -> list[InjectedFault]:
    """Send a signal to each of these trainers; return what was written about it."""
    return _send(run, trainers, name, "process")


@contextlib.contextmanager
def nobody_replaced(run: Path, ranks: Collection[int], *, wait_s: float) -> Iterator[list[LiveTrainer]]:
    """Within, these ranks get no new trainers; yield the last that they got on this machine, dead or alive.

    A trainer that is being born has seen nothing of its rank's memory yet. Guards that do not stand still within
    `wait_s` are not waited for.
    """
    guards = {trainer.guard_pid for trainer in _trainers_here(run, ranks) if trainer.is_guarded}
    try:
        _stop(guards, wait_s)
        yield _trainers_here(run, ranks)
    finally:
        _signal_all(guards, signal.SIGCONT)


def strike_node(run: Path, trainers: Sequence[LiveTrainer], *, wait_s: float) -> list[InjectedFault]:
    """Kill these trainers and delete their host memory, of those that are dead already as well.

    Trainers that do not stand still within `wait_s` (a driver call, say) are killed all the same.
    """
    alive = [trainer for trainer in trainers if trainer.is_alive]
    _stop({trainer.pid for trainer in alive}, wait_s)
    for trainer in trainers:
        _lose_memory(Path(trainer.memory))
    return _send(run, alive, "KILL", "node")


def describe(fault: InjectedFault, run: Path) -> str:
    """Return for people what happened to whom, where, when."""
    where = f"in generation {fault.generation}, iteration {fault.iteration}, {fault.phase}"
    return f"{_VERBS[fault.signal]} rank {fault.rank} (pid {fault.pid}) of {run} {where}"


def _send(run: Path, trainers: Sequence[LiveTrainer], name: str, scope: str) -> list[InjectedFault]:
    now_s = time.time()
    faults = [_fault(trainer, name, scope, now_s) for trainer in trainers]
    append_faults(run, faults)
    _signal_all([trainer.pid for trainer in trainers], signal_number(name))
    return faults


def _fault(trainer: LiveTrainer, name: str, scope: str, unix_s: float) -> InjectedFault:
    page = trainer.open_page()
    return InjectedFault(
        unix_s=unix_s,
        rank=trainer.global_rank,
        pid=trainer.pid,
        signal=name,
        scope=scope,
        generation=page.generation,
        iteration=page.iteration,
        phase=page.phase.name.lower(),
        ordered=False,
    )


def _lose_memory(memory: Path) -> None:
    """Delete what is in a rank's memory; its keeper, which lives on, may be writing there."""
    lost = tempfile.mkdtemp(prefix="lost-", dir=memory)
    for part in _HOST_MEMORY:
        with contextlib.suppress(FileNotFoundError):
            (memory / part).rename(Path(lost) / part)
    shutil.rmtree(lost)


def _trainers_here(run: Path, ranks: Collection[int]) -> list[LiveTrainer]:
    return [trainer for trainer in read_written(run) if trainer.global_rank in ranks and trainer.is_here]


def _stop(pids: Collection[int], wait_s: float) -> None:
    _signal_all(pids, signal.SIGSTOP)
    deadline_s = time.monotonic() + wait_s
    while not all(map(stands_still, pids)) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_AGAIN_S)


def _signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it died by itself since it was looked at
            os.kill(pid, number)
