"""The running job as a fault injector sees it: live ranks, killed ranks, and whether it
still runs.
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

    `patience_s`: time without a live rank after which the run counts as ended, also at
    its start.
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
        """How long ago the first worker was seen."""
        return self._clock() - self._begin_s

    def look(self) -> bool:
        """See who lives, unless that was done just now; return whether the run goes on,
        or may yet begin.
        """
        if time.monotonic() - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = time.monotonic()
            written = read_written(self.run)
            self.workers = {worker.global_rank: worker for worker in written}
            if is_running(written):
                self._seen_s = self._clock()
                self._begin_s = self._begin_s if self.has_begun else self._seen_s
                self.has_begun = True
        # workers that finish remove their files, and those that die leave them
        has_ended_well = self.has_begun and not self.workers
        return not has_ended_well and self._clock() - self._seen_s <= self.patience_s

    def targets(self, ranks: Sequence[int]) -> list[LiveWorker]:
        """Return those of the ranks' workers that live and were not struck yet."""
        known = [self.workers[rank] for rank in ranks if rank in self.workers]
        # a worker may outlive its signal for a moment, and the next kill is meant for
        # its successor
        return [
            worker for worker in known if worker.is_alive and worker not in self._hit
        ]

    def elsewhere(self, ranks: Sequence[int]) -> list[LiveWorker]:
        """Return those of the ranks' workers that run on other machines, or in other
        containers.
        """
        return [
            self.workers[rank]
            for rank in ranks
            if rank in self.workers and not self.workers[rank].is_here
        ]

    def leave(self, workers: Sequence[LiveWorker]) -> None:
        """Say that these are not struck from here."""
        for worker in workers:
            self.say(
                f"rank {worker.global_rank} runs {worker.where}: left to processes"
                " there"
            )

    def inject(self, workers: Sequence[LiveWorker], fault: TimedFault) -> None:
        """Send the signal to these workers; with a node goes the host memory of all the
        fault's ranks.
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
        self._hit.update(workers)
