"""Carries a plan of kills out on the workers of a running job, from another process.

Kills at a time are inflicted as soon as the time has come and the workers live. A
worker that is being replaced is waited for; no process is killed twice. Kills at a
point are orders in the worker's status page, which the worker carries out on itself at
exactly that point. A lost node takes several processes and their memory, which no
worker can do to itself: this process watches the page of the kill's rank, every
millisecond, and the node is lost as soon as the page shows the point or a later one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.faults.job import LOOK_EVERY_S, TargetJob
from launcher.faults.tasks import FaultAtTime, NodeAtPoint, Orders, Task
from moe_ckpt.elastic.live_workers import read_world_size
from moe_ckpt.faults.schedule import Kill, plan_faults, victims

_log = logging.getLogger(__name__)


def carry_out(
    kills: Sequence[Kill],
    run: Path,
    *,
    ranks_per_node: int,
    say: Callable[[str], None] = _log.info,
    patience_s: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Inflict kills on a run's workers on this machine.

    The function ends once all kills are done or the run has ended. A run has ended if
    all its live files are gone, or if no worker and no supervisor has lived for
    `patience_s`.

    Args:
        kills: The kills, each with a rank.
        run: The run folder.
        ranks_per_node: The number of ranks that fail together.
        say: Receives lines for the log.
        patience_s: The seconds to wait for the start of the run, for a victim, and for
            the end of the run.
        clock: The clock of the kills' times, which count from the first sight of a
            worker.

    Returns:
        Whether all kills were inflicted.
    """
    assert all(kill.rank is not None for kill in kills), kills
    job = TargetJob(run, say, patience_s, clock)
    while not job.has_begun and job.look():
        time.sleep(LOOK_EVERY_S)
    if not job.has_begun:
        say(f"no worker of {run} came to live within {patience_s:g} s")
        return False
    tasks = _tasks(kills, job, ranks_per_node)
    pending = tasks
    while pending and job.look():
        for task in pending:
            # the memory of a rank may disappear as the job ends
            with contextlib.suppress(FileNotFoundError):
                task.advance()
        pending = [task for task in pending if task.outcome is None]
        time.sleep(min((task.look_again_s() for task in pending), default=0))
    for task in pending:
        say(f"the run ended before: {task}")
    return all(task.outcome for task in tasks)


def _tasks(kills: Sequence[Kill], job: TargetJob, ranks_per_node: int) -> list[Task]:
    world_size = read_world_size(job.run)
    nodes: list[Kill] = []
    orders: dict[int, list[Kill]] = {}
    for kill in kills:
        if kill.after_s is None and kill.scope == "node":
            nodes.append(kill)
        elif kill.after_s is None and kill.rank is not None:
            orders.setdefault(kill.rank, []).append(kill)
    return [
        *(Orders(job, rank, of_a_rank) for rank, of_a_rank in orders.items()),
        *(
            NodeAtPoint(job, kill, victims(kill, world_size, ranks_per_node))
            for kill in nodes
        ),
        *(
            FaultAtTime(job, fault)
            for fault in plan_faults(kills, world_size, ranks_per_node)
        ),
    ]
