"""The operators of each snapshot of a window: their order, the slots, and the bytes of
each slot.

Pure: all ranks of a stage group compute the same schedule from the same table and the
same summed counts. Arrays, not lists, so that a million operators take a fraction of a
second. MoEvement, Algorithm 1, section 3.5 and Appendix E; paper_window and
paper_schedule are Algorithm 1 to the letter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_ckpt.config import require_at_least
from moe_ckpt.types import IntArray, OperatorId, OperatorKind, OperatorTable

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FixedOrder:
    """The part of the order that popularity does not change: positions in the
    OperatorTable, both int64 [number].

    `experts` in the order of the table; `others` in the order of their snapshots.
    """

    experts: IntArray
    others: IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowSchedule:
    """The slot of a window in which each operator is taken with its whole state;
    `slot_of` is int64 [operators].
    """

    num_slots: int
    slot_of: IntArray

    def full(self, slot: int) -> tuple[int, ...]:
        """Return the ascending positions of the operators that `slot` takes with their
        whole state.
        """
        return tuple(np.flatnonzero(self.slot_of == slot).tolist())

    def compute(self, slot: int) -> tuple[int, ...]:
        """Return the ascending positions of the operators that `slot` takes with
        compute weights: those to come.
        """
        return tuple(np.flatnonzero(self.slot_of > slot).tolist())


def fixed_order(operators: Sequence[OperatorId]) -> FixedOrder:
    """Return the experts of a table, and its other operators in snapshot order.

    These are the gates from the last to the first, then the rest from back to front, so
    that the fewest operators are active behind the operator whose gradient is needed. A
    dense model has only the rest. MoEvement, section 3.5, Appendix E.
    """
    special = (OperatorKind.EXPERT, OperatorKind.GATE)
    experts = [
        position
        for position, operator in enumerate(operators)
        if operator.kind is OperatorKind.EXPERT
    ]
    gates = [
        position
        for position, operator in enumerate(operators)
        if operator.kind is OperatorKind.GATE
    ]
    rest = [
        position
        for position, operator in enumerate(operators)
        if operator.kind not in special
    ]
    return FixedOrder(
        experts=np.array(experts, np.int64),
        others=np.array(gates[::-1] + rest[::-1], np.int64),
    )


def order_operators(fixed: FixedOrder, popularity: Array) -> IntArray:
    """Return the positions of all operators (int64) in snapshot order.

    Experts by ascending popularity (float64 [experts], as in `fixed.experts`; equals
    stay in that order), so that popular ones stay frozen longest in a replay; then the
    others. Popularities 5, 1, 5 of experts at 2, 3, 4 and others 1, 0 make 3, 2, 4, 1,
    0. MoEvement, section 3.5: OrderOperators.
    """
    assert popularity.shape == fixed.experts.shape, (
        popularity.shape,
        fixed.experts.shape,
    )
    # stable: all ranks of a stage have to break ties alike, or they cut other slots
    return np.concatenate(
        [fixed.experts[np.argsort(popularity, kind="stable")], fixed.others]
    )


class StageBytes:
    """Windows of a stage are cut and added up over the pairs of a rank and an operator
    with bytes.

    Args:
        table: The operators, and each rank's bytes of them.
    """

    def __init__(self, table: OperatorTable) -> None:
        self._owned = table.owned

    def middles(self, order: IntArray) -> Middles:
        """Return where the middle of each operator lies in an order."""
        owned = self._owned
        place = np.empty(owned.num_operators, np.int64)
        place[order] = np.arange(owned.num_operators)
        along = np.lexsort((place[owned.operators], owned.ranks))
        ranks, operators, full = (
            owned.ranks[along],
            owned.operators[along],
            owned.full[along],
        )
        ends = np.cumsum(full)
        totals = np.bincount(ranks, weights=full, minlength=owned.num_ranks)
        of_all = np.bincount(operators, weights=full, minlength=owned.num_operators)
        before_ranks = np.concatenate([[0.0], np.cumsum(totals)[:-1]])
        return Middles(
            num_operators=owned.num_operators,
            operators=operators,
            before=ends - before_ranks[ranks] - full / 2,
            totals=np.maximum(totals, 1)[ranks],
            shares=full / np.maximum(of_all, 1)[operators],
        )

    def slot_bytes(self, schedule: WindowSchedule) -> IntArray:
        """Return the bytes that each rank copies in each slot, int64 [slots, ranks].

        12 bytes a parameter of operators that the slot takes whole and 2 of those with
        later slots: three operators of one parameter and three slots make 12 + 4, 12 +
        2, 12. MoEvement, section 3.2.
        """
        owned = self._owned
        cells = schedule.slot_of[owned.operators] * owned.num_ranks + owned.ranks
        shape = (schedule.num_slots, owned.num_ranks)

        def by_slot(nbytes: IntArray) -> IntArray:
            # bincount adds float64: exact below 2^53 bytes
            summed = np.bincount(cells, weights=nbytes, minlength=shape[0] * shape[1])
            return summed.astype(np.int64).reshape(shape)

        compute = by_slot(owned.compute)
        still_to_come = compute.sum(axis=0) - np.cumsum(compute, axis=0)
        # slot 0 has compute weights of nearly all operators: it is the largest
        return by_slot(owned.full) + still_to_come


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Middles:
    """Where the middle of each operator's bytes lies in an order, by pairs of a rank
    and an operator.
    """

    num_operators: int
    """The operators of the stage."""

    operators: npt.NDArray[np.int32]
    """The operator of each pair, int32 [pairs]; the ranks of pairs ascend."""

    before: Array
    """The bytes of the rank before the middle of the operator's, float64 [pairs]."""

    totals: Array
    """All bytes of the rank, float64 [pairs]."""

    shares: Array
    """The part of an operator's bytes that the rank has, float64 [pairs]."""

    def cut(self, num_slots: int) -> WindowSchedule:
        """Cut the order into slots that hold about as many bytes as each other on every
        rank.

        Along the order, an operator's slot follows from where the middle of its bytes
        lies among all bytes of the rank that has them: of 10, 10, 20 bytes and 2 slots,
        the middles 5, 15, 30 of 40 lie in slots 0, 0, 1. Where several ranks have a
        share of an operator, it is the mean over its bytes; an operator without bytes
        is in slot 0. There may be more slots than operators, for another stage's sake:
        some are empty then.

        Raises:
            ConfigError: There are fewer slots than 1.
        """
        require_at_least("ckpt.window", num_slots, 1)
        # by the bytes of each rank: cut by count, as in Algorithm 1, some ranks have
        # slots of twice the bytes of others. Added rank by rank: every rank of a stage
        # has to round alike
        places = self.shares * (num_slots * self.before / self.totals)
        slot_of = np.bincount(
            self.operators, weights=places, minlength=self.num_operators
        )
        return WindowSchedule(
            num_slots=num_slots,
            slot_of=np.minimum(slot_of.astype(np.int64), num_slots - 1),
        )


def refit(current: int, fitting: int, *, drift: float) -> int:
    """Return the next number of slots: `fitting` if it is off by more than `drift` of
    `current`, else `current`.

    With a drift of 0.25, 8 slots stay 8 until 5 or 11 would fit.
    """
    return fitting if abs(fitting - current) > drift * current else current


def paper_window(
    *,
    num_operators: int,
    compute_bytes: float,
    master_bytes: float,
    optimizer_bytes: float,
    iteration_s: float,
    copy_bytes_per_s: float,
) -> tuple[int, int]:
    """Return (W_sparse, O_active) of Algorithm 1 to the letter, for operators of equal
    size (bytes per operator).

    As printed, it never tests whether 2 active operators fit. 6 operators of 2 + 4 + 8
    bytes, 32 bytes an iteration: 2 active ones copy 2 * 12 + 4 * 2 = 32, so 3 slots.
    MoEvement, Algorithm 1: FindWindowSize.
    """
    assert num_operators >= 1, num_operators
    active = np.arange(num_operators, 2, -1)
    sizes = (master_bytes + optimizer_bytes) * active + compute_bytes * (
        num_operators - active
    )
    fitting = active[sizes / copy_bytes_per_s <= iteration_s]
    num_active = int(fitting[0]) if fitting.size else min(num_operators, 2)
    return math.ceil(num_operators / num_active), num_active


def paper_schedule(
    order: IntArray, *, num_slots: int, num_active: int
) -> WindowSchedule:
    """Give each slot the next `num_active` operators of the order until none are left;
    later slots are empty.

    5 operators, 2 active: slots of 2, 2 and 1. MoEvement, Algorithm 1:
    GenerateSchedule.
    """
    assert num_slots * num_active >= len(order), (num_slots, num_active, len(order))
    slot_of = np.empty(len(order), np.int64)
    slot_of[order] = np.arange(len(order)) // num_active
    return WindowSchedule(num_slots=num_slots, slot_of=slot_of)
