"""Actions of a test between iterations of a job of thread ranks.

The module also starts such a job again after its end.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable

from moe_ckpt.events import StateResumed
from tests.harness.threads.job import Observer, ThreadJob, uninterrupted
from tests.harness.threads.model import Model
from tests.waits import WAIT_S


class StoppedError(Exception):
    """An observer stops the job, in place of a scheduler."""


class At(Observer):
    """Acts once on a job after an iteration, while no rank trains.

    Args:
        job: The job.
        iteration: The iteration.
        act: The action, which one of the ranks runs.
        settles: Whether all ranks settle first: no rank saves during the action.
        ends: Whether the job ends after the action.
    """

    def __init__(
        self,
        job: ThreadJob,
        iteration: int,
        act: Callable[[], object] = lambda: None,
        *,
        settles: bool = True,
        ends: bool = False,
    ) -> None:
        self._job = job
        self._iteration = iteration
        self._act = act
        self._settles = settles
        self._ends = ends
        self._all_are_here = threading.Barrier(job.shape.world_size)
        job.observers.append(self)

    def committed(self, iteration: int, rank: int, model: Model) -> None:
        if iteration != self._iteration:
            return
        if self._settles:
            self._job.settle(rank)
        if self._all_are_here.wait(WAIT_S) == 0:
            self._act()
        self._all_are_here.wait(WAIT_S)
        if self._ends:
            raise StoppedError


def started_again(job: ThreadJob) -> list[tuple[str, int]]:
    """Start a job again after all memory is lost, and run the job to its end.

    The end must equal the end of the job without faults.

    Returns:
        Source and iteration of each rank's load.
    """
    shutil.rmtree(job.folder / "memory")
    before = [len(job.events(StateResumed, rank)) for rank in job.ranks]
    again = ThreadJob(job.folder, job.config, job.shape, iterations=job.iterations)
    assert again.run().digests == uninterrupted(job.shape, job.iterations).digests
    loads = [
        event
        for rank in again.ranks
        for event in again.events(StateResumed, rank)[before[rank] :]
    ]
    return [(load.source.rpartition("/")[2], load.iteration) for load in loads]
