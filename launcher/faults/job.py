"""The running job as a fault injector sees it.

Owns: the live ranks, the killed ranks, and whether the job still runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.faults.inject import (
    describe,
    kill_node,
    nobody_replaced,
    signal_processes,
)
from moe_ckpt.elastic.live_workers import LiveWorker, is_running, read_written
from moe_ckpt.faults.schedule import TimedFault

LOOK_EVERY_S = 0.02
_STAND_STILL_S = 1.0


class TargetJob:
    """A run on this machine.

    Args:
        run: The run folder.
        say: Receives lines for the log.
        patience_s: The seconds without a live worker or supervisor after which the run
            counts as ended, also at its start.
        clock: The clock of the kills' times.

    Attributes:
        has_begun: Whether a worker has been seen.
        workers: The newest worker of each rank that has not finished, by rank.
    """

    def __init__(
        self,
        run: Path,
        say: Callable[[str], None],
        patience_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.run = run
        self.say = say
        self.patience_s = patience_s
        self.has_begun = False
        self.workers: dict[int, LiveWorker] = {}
        self._clock = clock
        self._begin_s = self._seen_s = clock()
        self._looked_s = -LOOK_EVERY_S
        self._hit: set[LiveWorker] = set()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first worker was seen."""
        return self._clock() - self._begin_s

    def look(self) -> bool:
        """Read the live files again, unless the last read was just now.

        Returns:
            Whether the run continues, or may still begin.
        """
        if time.monotonic() - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = time.monotonic()
            written = read_written(self.run)
            self.workers = {worker.global_rank: worker for worker in written}
            if is_running(written):
                self._seen_s = self._clock()
                self._begin_s = self._begin_s if self.has_begun else self._seen_s
                self.has_begun = True
        # workers that finish remove their files, and workers that die leave their files
        has_ended_well = self.has_begun and not self.workers
        return not has_ended_well and self._clock() - self._seen_s <= self.patience_s

    def targets(self, ranks: Sequence[int]) -> list[LiveWorker]:
        """Return the live workers of ranks that were not struck yet."""
        known = [self.workers[rank] for rank in ranks if rank in self.workers]
        # a worker may outlive its signal for a moment, and the next kill is meant for
        # the replacement
        return [
            worker for worker in known if worker.is_alive and worker not in self._hit
        ]

    def elsewhere(self, ranks: Sequence[int]) -> list[LiveWorker]:
        """Return the workers of ranks on other machines or in other containers."""
        return [
            self.workers[rank]
            for rank in ranks
            if rank in self.workers and not self.workers[rank].is_here
        ]

    def leave(self, workers: Sequence[LiveWorker]) -> None:
        """Report that these workers are not struck from here."""
        for worker in workers:
            self.say(
                f"rank {worker.global_rank} runs {worker.where}: left to processes"
                " there"
            )

    def inject(self, workers: Sequence[LiveWorker], fault: TimedFault) -> None:
        """Send the signal of a fault to workers.

        The loss of a node also deletes the host memory of all ranks of the fault.

        Args:
            workers: The workers, for a fault of scope `process`.
            fault: The fault.
        """
        if fault.scope == "node":
            with nobody_replaced(
                self.run, fault.ranks, wait_s=_STAND_STILL_S
            ) as workers:
                faults = kill_node(self.run, workers, wait_s=_STAND_STILL_S)
            lost = ", ".join(str(worker.global_rank) for worker in workers)
            self.say(f"lost the host memory of ranks {lost}")
        else:
            faults = signal_processes(self.run, workers, fault.signal)
        self.mark_hit(workers)
        for injected in faults:
            self.say(describe(injected, self.run))

    def mark_hit(self, workers: Sequence[LiveWorker]) -> None:
        """Note that workers were struck."""
        self._hit.update(workers)
