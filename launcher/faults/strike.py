"""The act itself: a signal to trainers, at once, and for a lost node the loss of its host memory. Linux.

A node is lost in this order, so that nothing can be written between the loss and the deaths, and that nothing of a
replacement is touched:

    SIGSTOP to all its trainers -> every thread of them stands still -> `own` and `held` of all its ranks are deleted
    -> SIGKILL, which a stopped process obeys, too
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.faults.log import InjectedFault, append_faults
from launcher.live import LiveTrainer
from launcher.proc import stands_still

_HOST_MEMORY = ("own", "held")
_LOOK_AGAIN_S = 0.001
_VERBS = {"KILL": "killed", "STOP": "stopped", "SEGV": "sent SIGSEGV to", "TERM": "sent SIGTERM to"}


def signal_number(name: str) -> signal.Signals:
    return signal.Signals[f"SIG{name}"]


def strike_processes(run: Path, trainers: Sequence[LiveTrainer], name: str) -> list[InjectedFault]:
    """Send a signal to each of these trainers; return what was written about it."""
    return _send(run, trainers, name, "process")


def strike_node(
    run: Path, trainers: Sequence[LiveTrainer], memories: Sequence[Path], *, wait_s: float
) -> list[InjectedFault]:
    """Kill these trainers and delete the host memory in these folders, of dead trainers as well.

    Trainers that do not stand still within `wait_s` (a driver call, say) are killed all the same.
    """
    _send_to_all(trainers, signal.SIGSTOP)
    deadline_s = time.monotonic() + wait_s
    while not all(stands_still(trainer.pid) for trainer in trainers) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_AGAIN_S)
    for memory in memories:
        for part in _HOST_MEMORY:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(memory / part)
    return _send(run, trainers, "KILL", "node")


def describe(fault: InjectedFault, run: Path) -> str:
    """Return for people what happened to whom, where, when."""
    where = f"in generation {fault.generation}, iteration {fault.iteration}, {fault.phase}"
    return f"{_VERBS[fault.signal]} rank {fault.rank} (pid {fault.pid}) of {run} {where}"


def _send(run: Path, trainers: Sequence[LiveTrainer], name: str, scope: str) -> list[InjectedFault]:
    now_s = time.time()
    faults = [_fault(trainer, name, scope, now_s) for trainer in trainers]
    append_faults(run, faults)
    _send_to_all(trainers, signal_number(name))
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


def _send_to_all(trainers: Sequence[LiveTrainer], number: signal.Signals) -> None:
    for trainer in trainers:
        with contextlib.suppress(ProcessLookupError):  # it died by itself since it was looked at
            os.kill(trainer.pid, number)
