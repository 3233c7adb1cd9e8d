"""Carries a plan of kills out on a job without supervisors, by its event files. Linux.

Workers of such a job (ckpt=none, dense) have no status page. A kill at a point comes as
soon as its rank has committed the iteration before, whatever the phase. One kill ends
all workers, and torchrun starts the workers again.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.faults.inject import signal_number
from launcher.faults.log import InjectedFault, append_faults
from moe_ckpt.faults.schedule import Kill, TimedFault, plan_faults, victims
from moe_ckpt.linux import is_alive, parent_of

_LOOK_EVERY_S = 0.02


def inject_from_outside(
    kills: Sequence[Kill],
    run: Path,
    *,
    world_size: int,
    parent_pid: int,
    goes_on: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
) -> list[TimedFault]:
    """Inflict kills on the workers that a process has started.

    Each rank is a node of its own.

    Args:
        kills: The kills, each with a rank.
        run: The run folder.
        world_size: The number of ranks.
        parent_pid: The parent of the workers.
        goes_on: Returns False once the job has ended or is to be stopped.
        clock: The clock of the kills' times, which count from the first sight of a
            worker.

    Returns:
        The faults that could not be inflicted.
    """
    pending = [
        _Due(fault=fault, after_iteration=None)
        for fault in plan_faults(kills, world_size, 1)
    ]
    for kill in (kill for kill in kills if kill.after_s is None):
        fault = TimedFault(
            after_s=0.0,
            ranks=victims(kill, world_size, 1),
            signal=kill.signal,
            scope=kill.scope,
        )
        # at least 1: before the first commit of a rank no event shows that the rank
        # trains
        pending.append(
            _Due(fault=fault, after_iteration=max((kill.iteration or 1) - 1, 1))
        )
    ranks = [
        _Rank(path=run / "events" / f"rank{rank:04d}.jsonl")
        for rank in range(world_size)
    ]
    begun_s: float | None = None
    while goes_on() and pending:
        for rank in ranks:
            rank.look()
        if begun_s is None and any(rank.pid for rank in ranks):
            begun_s = clock()
        elapsed_s = clock() - begun_s if begun_s is not None else -1.0
        pending = [
            due
            for due in pending
            if not _inject_if_due(due, ranks, run, parent_pid, elapsed_s)
        ]
        time.sleep(_LOOK_EVERY_S)
    return [due.fault for due in pending]


@dataclass(frozen=True, kw_only=True)
class _Due:
    """A fault at a time, or once its first rank has committed an iteration."""

    fault: TimedFault
    after_iteration: int | None

    def has_come(self, ranks: Sequence[_Rank], elapsed_s: float) -> bool:
        if self.after_iteration is None:
            return elapsed_s >= self.fault.after_s
        return ranks[self.fault.ranks[0]].iteration >= self.after_iteration


@dataclass(kw_only=True)
class _Rank:
    """The newest worker of a rank."""

    path: Path
    """The event file."""

    pid: int = 0
    """Process id of the newest worker; 0: none yet."""

    iteration: int = 0
    """The last iteration that the worker has committed; 0: none."""

    struck: set[int] = field(default_factory=set)
    """Process ids of workers that were struck."""

    _offset: int = 0

    def look(self) -> None:
        """Read the events that were appended to the file since the last look."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                # a half-written line: the next look begins with this line
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                if b'"WorkerStarted"' in line:
                    self.pid, self.iteration = json.loads(line)["pid"], 0
                elif b'"IterationCommitted"' in line:
                    self.iteration = json.loads(line)["iteration"]

    def can_be_struck(self, parent_pid: int) -> bool:
        # only a child of the agent: the pid of an old event may belong to any process
        # by now
        return (
            self.pid not in {0, *self.struck}
            and is_alive(self.pid)
            and parent_of(self.pid) == parent_pid
        )


def _inject_if_due(
    due: _Due, ranks: Sequence[_Rank], run: Path, parent_pid: int, elapsed_s: float
) -> bool:
    """Send the signals of a fault that is due, if all victims live.

    Returns:
        Whether the signals were sent.
    """
    hit = [(number, ranks[number]) for number in due.fault.ranks]
    if not due.has_come(ranks, elapsed_s) or not all(
        rank.can_be_struck(parent_pid) for _, rank in hit
    ):
        return False
    faults = [
        InjectedFault(
            unix_s=time.time(),
            rank=number,
            pid=rank.pid,
            signal=due.fault.signal,
            scope=due.fault.scope,
            generation=0,
            iteration=rank.iteration + 1,
            phase="unknown",
            ordered=False,
        )
        for number, rank in hit
    ]
    append_faults(run, faults)
    for _, rank in hit:
        rank.struck.add(rank.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, signal_number(due.fault.signal))
    return True
