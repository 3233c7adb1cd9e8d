"""The running job as whoever injects faults sees it: who lives, who was struck already, whether it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.faults.strike import describe, nobody_replaced, strike_node, strike_processes
from launcher.live import LiveTrainer, is_running, read_written
from moe_ckpt.faults.schedule import Strike

LOOK_EVERY_S = 0.02
_STAND_STILL_S = 1.0


class Job:
    """A run on this machine. `patience_s`: how long nobody may live before it counts as ended, at its start, too."""

    def __init__(self, run: Path, say: Callable[[str], None], patience_s: float, clock: Callable[[], float]) -> None:
        self.run = run
        self.say = say
        self.patience_s = patience_s
        self.has_begun = False
        self.trainers: dict[int, LiveTrainer] = {}
        self._clock = clock
        self._begin_s = self._seen_s = clock()
        self._looked_s = -LOOK_EVERY_S
        self._struck: set[LiveTrainer] = set()

    @property
    def elapsed_s(self) -> float:
        """How long ago the first trainer was seen."""
        return self._clock() - self._begin_s

    def look(self) -> bool:
        """See who lives, unless that was done just now; return whether the run goes on, or may yet begin."""
        if time.monotonic() - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = time.monotonic()
            self._see(read_written(self.run))
        has_ended_well = self.has_begun and not self.trainers
        return not has_ended_well and self._clock() - self._seen_s <= self.patience_s

    def strikable(self, ranks: Sequence[int]) -> list[LiveTrainer]:
        """Return those of the ranks' trainers that live and were not struck yet."""
        known = [self.trainers[rank] for rank in ranks if rank in self.trainers]
        return [trainer for trainer in known if trainer.is_alive and trainer not in self._struck]

    def elsewhere(self, ranks: Sequence[int]) -> list[LiveTrainer]:
        """Return those of the ranks' trainers that run on other machines."""
        return [self.trainers[rank] for rank in ranks if rank in self.trainers and not self.trainers[rank].is_here]

    def leave(self, trainers: Sequence[LiveTrainer]) -> None:
        """Say that these are not struck from here."""
        for trainer in trainers:
            self.say(f"rank {trainer.global_rank} runs on {trainer.host}: left to that machine")

    def strike(self, trainers: Sequence[LiveTrainer], strike: Strike) -> None:
        """Send the signal to these trainers; with a node goes the host memory of all the strike's ranks."""
        if strike.scope == "node":
            with nobody_replaced(self.run, strike.ranks, wait_s=_STAND_STILL_S) as trainers:
                faults = strike_node(self.run, trainers, wait_s=_STAND_STILL_S)
            lost = ", ".join(str(trainer.global_rank) for trainer in trainers)
            self.say(f"lost the host memory of ranks {lost}")
        else:
            faults = strike_processes(self.run, trainers, strike.signal)
        self.mark_struck(trainers)
        for fault in faults:
            self.say(describe(fault, self.run))

    def mark_struck(self, trainers: Sequence[LiveTrainer]) -> None:
        self._struck.update(trainers)

    def _see(self, written: Sequence[LiveTrainer]) -> None:
        self.trainers = {trainer.global_rank: trainer for trainer in written}
        if is_running(written):
            self._seen_s = self._clock()
            if not self.has_begun:
                self.has_begun, self._begin_s = True, self._seen_s
