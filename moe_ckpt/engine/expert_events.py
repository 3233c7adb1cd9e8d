"""Writes events on the popularity of a stage's experts and on their order in windows.

Must not: count, or decide an order. The first rank of each stage writes for all ranks
of the stage, which agree. In a long run only some windows are reported: otherwise these
events would outgrow the events of iterations.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from moe_ckpt.events import EventLog, ExpertPopularity, ExpertsOrdered
from moe_ckpt.types import OperatorKind, OperatorTable, SlotPlan

# after a reported window at iteration N, the next reported window begins at N * 1.001
# or later: 6000 windows in a run of 100,000 iterations
_SPACING = 1000


class ExpertEvents:
    """The events of one generation.

    Args:
        table: The operators of the stage.
        events: This rank's log of events.
        writes: Whether this rank writes the events.
    """

    def __init__(self, table: OperatorTable, events: EventLog, *, writes: bool) -> None:
        experts = [
            (op, i)
            for i, op in enumerate(table.operators)
            if op.kind is OperatorKind.EXPERT
        ]
        self._number = {
            position: number for number, (_, position) in enumerate(experts)
        }
        self._layers = [
            str(replace(op, kind=OperatorKind.BLOCK, expert=None))
            for op, _ in experts
            if op.expert == 0
        ]
        self._writes = writes and bool(experts)
        self._events = events
        self._counted_by_all = False
        self._popularity: npt.NDArray[np.float64] | None = None
        self._slots = np.zeros(len(experts), np.int64)
        self._written_slots: tuple[int, list[int]] | None = None
        self._written_iteration = 0
        self._is_written = False

    def measured(self, popularity: npt.NDArray[np.float64]) -> None:
        """Note the popularity that the policy has received. Counts begin anew.

        A window may begin with this popularity. The first popularity, and the first
        after a loss of counts, is not reported: a replacement rank has not counted all
        of these tokens.
        """
        self._popularity = popularity if self._counted_by_all else None
        self._counted_by_all = True

    def interrupted(self) -> None:
        """Note that a rank has lost its counts."""
        self._counted_by_all = False

    def took(self, plan: SlotPlan) -> None:
        """Note that the snapshot of a plan begins."""
        if not self._writes:
            return
        if plan.slot == 0:
            self._begin(plan.window_start)
        taken = [
            self._number[position] for position in plan.full if position in self._number
        ]
        self._slots[taken] = plan.slot
        # one slot takes all experts at once: there is no order to report
        if not (self._is_written and plan.is_last and plan.num_slots > 1):
            return
        before, self._written_slots = (
            self._written_slots,
            (plan.num_slots, self._slots.tolist()),
        )
        if before != self._written_slots:
            slots = self._slots.reshape(len(self._layers), -1).tolist()
            self._events.append(
                ExpertsOrdered(
                    iteration=plan.window_start,
                    num_slots=plan.num_slots,
                    layers=self._layers,
                    slots=slots,
                )
            )

    def _begin(self, iteration: int) -> None:
        popularity, self._popularity = self._popularity, None
        self._is_written = (
            popularity is not None
            and iteration * _SPACING >= self._written_iteration * (_SPACING + 1)
        )
        if popularity is not None and self._is_written:
            self._written_iteration = iteration
            # the shortest JSON: exact for a number of tokens, six digits for a sum of
            # probabilities
            short = [
                int(count) if count == int(count) else float(f"{count:.6g}")
                for count in popularity
            ]
            tokens = np.array(short, object).reshape(len(self._layers), -1).tolist()
            self._events.append(
                ExpertPopularity(
                    iteration=iteration, layers=self._layers, tokens=tokens
                )
            )
