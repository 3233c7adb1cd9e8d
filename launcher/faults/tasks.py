"""The parts of a plan of kills, each of which advances in small steps.

A part is a fault at a time, orders to a rank, or the loss of a node at a point.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.faults.inject import fault_of, signal_number
from launcher.faults.job import LOOK_EVERY_S, TargetJob
from launcher.faults.log import append_faults
from moe_ckpt.elastic.live_workers import LiveWorker
from moe_ckpt.elastic.status_page import ANY_ITERATION, Phase, StatusPage
from moe_ckpt.faults.schedule import Kill, TimedFault, has_come

_WATCH_EVERY_S = 0.001
_SLEEP_AT_MOST_S = 0.2


class Task(ABC):
    """One part of a plan.

    Attributes:
        outcome: Whether the whole part was carried out; None while the part is in
            progress.
    """

    def __init__(self, job: TargetJob) -> None:
        self.job = job
        self.outcome: bool | None = None

    @abstractmethod
    def advance(self) -> None:
        """Do all that can be done now."""

    @abstractmethod
    def look_again_s(self) -> float:
        """Return the seconds for which `advance` has nothing to do."""

    @abstractmethod
    def __str__(self) -> str: ...


class FaultAtTime(Task):
    """A fault at a time, on all its workers together.

    Workers that do not come within `patience_s` are left out.
    """

    def __init__(self, job: TargetJob, fault: TimedFault) -> None:
        super().__init__(job)
        self._fault = fault

    def advance(self) -> None:
        late_s = self.job.elapsed_s - self._fault.after_s
        if late_s < 0:
            return
        ranks = self._fault.ranks
        elsewhere = self.job.elsewhere(ranks)
        workers = self.job.targets(ranks)
        missing = set(ranks) - {worker.global_rank for worker in (*workers, *elsewhere)}
        # all at one time, as in a trace: a rank that is being replaced is waited for
        if missing and late_s < self.job.patience_s:
            return
        self.job.leave(elsewhere)
        for rank in sorted(missing):
            self.job.say(
                f"rank {rank}: no new worker within {self.job.patience_s:g} s, left"
                " alone"
            )
        if workers:
            self.job.inject(workers, self._fault)
        self.outcome = len(workers) == len(ranks)

    def look_again_s(self) -> float:
        return min(
            max(LOOK_EVERY_S, self._fault.after_s - self.job.elapsed_s),
            _SLEEP_AT_MOST_S,
        )

    def __str__(self) -> str:
        return str(self._fault)


class NodeAtPoint(Task):
    """The loss of a node as soon as the page of one of its ranks shows the point."""

    def __init__(self, job: TargetJob, kill: Kill, ranks: Sequence[int]) -> None:
        super().__init__(job)
        assert kill.rank is not None
        self._kill = kill
        self._rank = kill.rank
        self._fault = TimedFault(
            after_s=0, ranks=tuple(ranks), signal=kill.signal, scope=kill.scope
        )
        self._page: StatusPage | None = None
        self._memory = ""

    def advance(self) -> None:
        elsewhere = self.job.elsewhere([self._rank])
        if elsewhere:
            self.job.leave(elsewhere)
            self.outcome = False
        elif self._has_come() and self.job.targets([self._rank]):
            self.job.inject(self.job.targets(self._fault.ranks), self._fault)
            self.outcome = True

    def look_again_s(self) -> float:
        return _WATCH_EVERY_S

    def __str__(self) -> str:
        return str(self._kill)

    def _has_come(self) -> bool:
        worker = self.job.workers.get(self._rank)
        if worker is None or not worker.is_alive:
            return False
        if self._page is None or self._memory != worker.memory:
            self._page, self._memory = worker.open_page(), worker.memory
        # read before the iteration, because a worker writes the phase last
        phase = self._page.phase.name.lower()
        return has_come(self._kill, self._page.iteration, phase)


class Orders(Task):
    """Kills of one rank's process at points, one after the other.

    Each kill is an order to another process of the rank.
    """

    def __init__(self, job: TargetJob, rank: int, kills: Sequence[Kill]) -> None:
        super().__init__(job)
        self._rank = rank
        self._kills = list(kills)
        self._order: _Order | None = None

    def advance(self) -> None:
        # read before `was_obeyed`: a worker obeys an order before a replacement takes
        # its place
        workers = self.job.targets([self._rank])
        if self._order is None:
            self._order_next(workers)
        elif self._order.was_obeyed():
            self._finish(self._order)
        # the worker died of another cause
        elif workers and workers[0] != self._order.worker:
            # if the page still has the order, the page already belonged to the
            # replacement when the order was given
            is_for_the_next = self._order.page.has_order
            self._order = (
                replace(self._order, worker=workers[0]) if is_for_the_next else None
            )

    def look_again_s(self) -> float:
        return LOOK_EVERY_S

    def __str__(self) -> str:
        return "; ".join(map(str, self._kills))

    def _order_next(self, workers: Sequence[LiveWorker]) -> None:
        elsewhere = self.job.elsewhere([self._rank])
        if elsewhere:
            self.job.leave(elsewhere)
            self.outcome = False
        for worker in workers:
            page = worker.open_page()
            # an order of another injector may stand there, and is carried out first
            if not page.has_order:
                self._order = _Order(
                    worker=worker, page=page, obeyed_before=page.orders_obeyed
                )
                _give_order(self.job.run, self._kills[0], self._order)
                self.job.say(f"ordered from pid {worker.pid}: {self._kills[0]}")

    def _finish(self, order: _Order) -> None:
        self.job.say(f"carried out by pid {order.worker.pid}: {self._kills.pop(0)}")
        self.job.mark_hit([order.worker])
        self._order = None
        if not self._kills:
            self.outcome = True


@dataclass(frozen=True, kw_only=True, slots=True)
class _Order:
    """An order in a worker's status page."""

    worker: LiveWorker
    page: StatusPage
    obeyed_before: int
    """Number of orders that had been carried out in the page before this order."""

    def was_obeyed(self) -> bool:
        return self.page.orders_obeyed > self.obeyed_before


def _give_order(run: Path, kill: Kill, order: _Order) -> None:
    now = fault_of(order.worker, order.page, kill.signal, kill.scope, time.time())
    append_faults(
        run,
        [replace(now, iteration=kill.iteration, phase=kill.point_phase, ordered=True)],
    )
    iteration = ANY_ITERATION if kill.iteration is None else kill.iteration
    order.page.order(
        signal_number(kill.signal), Phase[kill.point_phase.upper()], iteration=iteration
    )
