"""Events about experts describe whole windows, and only new orders.

In a long run, only some windows have events.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from moe_ckpt.engine.expert_events import ExpertEvents
from moe_ckpt.events import EventLog, ExpertPopularity, ExpertsOrdered
from moe_ckpt.types import OperatorId, OperatorKind, OperatorTable, SlotPlan, UnitPlan
from tests.harness.jobs.training import events_of

BLOCK, EXPERT = OperatorKind.BLOCK, OperatorKind.EXPERT
LAYERS = ((3, None), (0, 0))
OPERATORS = [
    OperatorId(kind=kind, layer=layer, mtp_depth=depth, expert=expert)
    for layer, depth in LAYERS
    for kind, expert in ((BLOCK, None), (EXPERT, 0), (EXPERT, 1))
]
BYTES = np.ones((1, len(OPERATORS)), np.int64)
NAMES = ["layer 3", "mtp 0 layer 0"]
EXPERTS = tuple(
    UnitPlan(name=str(OPERATORS[position]), full=(position,)) for position in (1, 2, 4)
)


class Told:
    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self._folder = folder
        log = EventLog(
            folder / "events" / "rank0000.jsonl", global_rank=0, clock_origin_unix_s=0.0
        )
        self.of = ExpertEvents(
            OperatorTable(operators=OPERATORS, full_bytes=BYTES, compute_bytes=BYTES),
            log,
            writes=writes,
        )

    def window(
        self,
        start: int,
        *counts: float,
        slots: tuple[tuple[int, ...], ...] = ((1, 4), (0, 2, 3, 5)),
    ) -> None:
        """Begin a window, and take the snapshots of all slots.

        Args:
            start: Iteration at which the window starts.
            counts: Popularity of each expert, if the policy asks for the popularity.
            slots: Positions of the operators of each slot in the table.
        """
        if counts:
            self.of.measured(np.array(counts, np.float64))
        for slot, full in enumerate(slots):
            plan = SlotPlan(
                window_start=start,
                slot=slot,
                num_slots=len(slots),
                units=(UnitPlan(full=full),),
            )
            self.of.took(plan)

    def popularity(self) -> dict[int, list[list[float]]]:
        events = events_of(self._folder, ExpertPopularity)
        assert all(event.layers == NAMES for event in events)
        return {event.iteration: event.tokens for event in events}

    def orders(self) -> dict[int, list[list[int]]]:
        events = events_of(self._folder, ExpertsOrdered)
        assert all((event.layers, event.num_slots) == (NAMES, 2) for event in events)
        return {event.iteration: event.slots for event in events}


def test_counts_before_the_first_question_are_not_told(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.window(0, 9, 9, 9, 9)
    told.window(2, 1, 2, 3, 4.0000001)
    told.window(4)
    told.window(6, 5, 6, 7, 8)
    assert told.popularity() == {2: [[1, 2], [3, 4.0]], 6: [[5, 6], [7, 8]]}


def test_orders_are_told_where_they_are_new(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.window(0, 1, 1, 1, 1, slots=(tuple(range(6)),))
    told.window(1, 1, 1, 1, 1)
    told.window(3, 1, 1, 1, 1)
    told.window(5, 1, 1, 1, 1, slots=((1, 5), (0, 2, 3, 4)))
    assert told.orders() == {1: [[0, 1], [0, 1]], 5: [[0, 1], [1, 0]]}


def test_counts_are_not_told_of_a_window_in_which_a_rank_lost_its_own(
    tmp_path: Path,
) -> None:
    told = Told(tmp_path)
    told.window(0, 0, 0, 0, 0)
    told.of.interrupted()
    told.window(2, 1, 1, 1, 1)
    told.window(4, 2, 2, 2, 2)
    assert list(told.popularity()) == [4]


def test_partial_snapshots_have_no_order(tmp_path: Path) -> None:
    told = Told(tmp_path)
    for iteration in (0, 1):
        told.of.measured(np.array([1.0, 2.0, 3.0, 0.123456789]))
        told.of.took(SlotPlan(window_start=iteration, units=EXPERTS))
    assert (told.popularity(), told.orders()) == ({1: [[1, 2], [3, 0.123457]]}, {})


def test_a_long_run_tells_of_a_window_in_a_thousandth_of_it(tmp_path: Path) -> None:
    told = Told(tmp_path)
    for iteration in range(4000):
        told.window(iteration, 1, 1, 1, 1, slots=())
        told.of.took(SlotPlan(window_start=iteration, units=EXPERTS))
    iterations = list(told.popularity())
    assert iterations[:1000] == list(range(1, 1001))
    assert 1000 < len(iterations) < 2500
    assert (
        max(after / before for before, after in itertools.pairwise(iterations[1000:]))
        < 1.002
    )


def test_one_rank_of_a_stage_tells(tmp_path: Path) -> None:
    told = Told(tmp_path, writes=False)
    for start in (0, 2):
        told.window(start, 1, 1, 1, 1)
    assert (told.popularity(), told.orders()) == ({}, {})
