"""The operators of each snapshot of a window: order, slots, and bytes of each slot.

Pure: all ranks of a stage group compute the same schedule from the same table and the
same summed counts. Arrays instead of lists, so that a million operators take a fraction
of a second. MoEvement, Algorithm 1, section 3.5 and Appendix E; `paper_window` and
`paper_schedule` are Algorithm 1 to the letter.
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
    """The part of the order that popularity does not change.

    Both arrays hold positions in the OperatorTable.
    """

    experts: IntArray
    """Positions of the experts in the order of the table, int64 [experts]."""

    others: IntArray
    """Positions of all other operators in the order of their snapshots, int64 [others].
    """


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowSchedule:
    """The slot of a window in which each operator is taken with its whole state."""

    num_slots: int
    """Number of slots of the window."""

    slot_of: IntArray
    """The slot of each operator, int64 [operators]."""

    def full(self, slot: int) -> tuple[int, ...]:
        """Return the ascending positions of operators with whole state in `slot`."""
        return tuple(np.flatnonzero(self.slot_of == slot).tolist())

    def compute(self, slot: int) -> tuple[int, ...]:
        """Return the ascending positions of operators with compute weights in `slot`.

        The whole state of these operators is in later slots.
        """
        return tuple(np.flatnonzero(self.slot_of > slot).tolist())


def fixed_order(operators: Sequence[OperatorId]) -> FixedOrder:
    """Return the experts of a table, and its other operators in snapshot order.

    The other operators are the gates from the last to the first, then the rest from
    back to front. In this order the fewest operators are active behind the operator
    whose gradient is needed. A dense model has only the rest. MoEvement, section 3.5,
    Appendix E.
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
    """Return the positions of all operators in snapshot order, int64 [operators].

    Experts come first, by ascending popularity, so that popular experts stay frozen
    longest in a replay. The other operators follow. Popularities of 5, 1, 5 of experts
    at positions 2, 3, 4 and others 1, 0 give 3, 2, 4, 1, 0. MoEvement, section 3.5:
    OrderOperators.

    Args:
        fixed: The part of the order that popularity does not change.
        popularity: The popularity of each expert in the order of `fixed.experts`,
            float64 [experts]. Equally popular experts keep that order.
    """
    assert popularity.shape == fixed.experts.shape, (
        popularity.shape,
        fixed.experts.shape,
    )
    # stable: all ranks of a stage must break ties alike, to cut the same slots
    return np.concatenate(
        [fixed.experts[np.argsort(popularity, kind="stable")], fixed.others]
    )


class StageBytes:
    """Cuts windows of a stage, and adds up their bytes.

    The bytes are given by the pairs of a rank and an operator that have bytes.

    Args:
        table: The operators, and each rank's bytes of them.
    """

    def __init__(self, table: OperatorTable) -> None:
        self._owned = table.owned

    def middles(self, order: IntArray) -> Middles:
        """Return where the middle of each operator lies in an order.

        Each rank lays its bytes of the operators end to end, in the order.
        """
        owned = self._owned
        position = np.empty(owned.num_operators, np.int64)
        position[order] = np.arange(owned.num_operators)
        # pairs of a rank and an operator: by rank, and within a rank in the order
        pairs = np.lexsort((position[owned.operators], owned.ranks))
        ranks, operators = owned.ranks[pairs], owned.operators[pairs]
        nbytes = owned.full[pairs]
        of_ranks = np.bincount(ranks, weights=nbytes, minlength=owned.num_ranks)
        of_operators = np.bincount(
            operators, weights=nbytes, minlength=owned.num_operators
        )
        # the sum runs on over ranks: each rank begins where the rank before ends
        ends = np.cumsum(nbytes)
        begins = np.concatenate([[0.0], np.cumsum(of_ranks)[:-1]])
        return Middles(
            num_operators=owned.num_operators,
            operators=operators,
            before=ends - begins[ranks] - nbytes / 2,
            totals=np.maximum(of_ranks, 1)[ranks],
            shares=nbytes / np.maximum(of_operators, 1)[operators],
        )

    def slot_bytes(self, schedule: WindowSchedule) -> IntArray:
        """Return the bytes that each rank copies in each slot, int64 [slots, ranks].

        A slot takes 12 bytes per parameter of operators with their whole state and 2
        bytes per parameter of operators of later slots. Three operators of one
        parameter and three slots give 12 + 4, 12 + 2 and 12. MoEvement, section 3.2.
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
        # slot 0 has compute weights of nearly all operators, and is the largest slot
        return by_slot(owned.full) + still_to_come


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Middles:
    """Where the middle of each operator's bytes lies in an order.

    Arrays are indexed by pairs of a rank and an operator.
    """

    num_operators: int
    """Number of operators of the stage."""

    operators: npt.NDArray[np.int32]
    """The operator of each pair, int32 [pairs]; the ranks of pairs ascend."""

    before: Array
    """Bytes of the rank before the middle of the operator, float64 [pairs]."""

    totals: Array
    """All bytes of the rank, float64 [pairs]."""

    shares: Array
    """Part of the operator's bytes that the rank has, float64 [pairs]."""

    def cut(self, num_slots: int) -> WindowSchedule:
        """Cut the order into slots with about equally many bytes on every rank.

        An operator's slot follows from the position of the middle of its bytes among
        all bytes of the rank, along the order. For operators of 10, 10 and 20 bytes and
        2 slots, the middles 5, 15 and 30 of 40 lie in slots 0, 0 and 1. Where several
        ranks share an operator, the position is the mean over the operator's bytes. An
        operator without bytes is in slot 0. There may be more slots than operators, for
        the sake of another stage; some slots are then empty.

        Raises:
            ConfigError: `num_slots` is less than 1.
        """
        require_at_least("ckpt.window", num_slots, 1)
        # By the bytes of each rank: with a cut by count, as in Algorithm 1, slots of
        # some ranks would have twice the bytes of others. Added rank by rank, so that
        # every rank of a stage rounds alike.
        positions = self.shares * (num_slots * self.before / self.totals)
        slot_of = np.bincount(
            self.operators, weights=positions, minlength=self.num_operators
        )
        return WindowSchedule(
            num_slots=num_slots,
            slot_of=np.minimum(slot_of.astype(np.int64), num_slots - 1),
        )


def refit(current: int, fitting: int, *, drift: float) -> int:
    """Return the next number of slots: `fitting`, or `current` if that is close.

    The current number stays unless `fitting` differs from `current` by more than
    `drift` of `current`. With a drift of 0.25, 8 slots stay 8 until 5 or 11 slots fit.
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
    """Return (W_sparse, O_active) of Algorithm 1 to the letter.

    All operators have equal size. As printed, the algorithm never tests whether 2
    active operators fit. For 6 operators of 2 + 4 + 8 bytes and 32 bytes per iteration,
    2 active operators copy 2 * 12 + 4 * 2 = 32 bytes, so the window has 3 slots.
    MoEvement, Algorithm 1: FindWindowSize.

    Args:
        num_operators: The number of operators.
        compute_bytes: Bytes of the compute weights of an operator.
        master_bytes: Bytes of the master weights of an operator.
        optimizer_bytes: Bytes of the optimizer's state of an operator.
        iteration_s: Seconds of an iteration.
        copy_bytes_per_s: Rate of copies of a rank.
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
    """Return a schedule whose slots each take the next `num_active` operators.

    Later slots are empty once no operators are left. 5 operators with 2 active give
    slots of 2, 2 and 1. MoEvement, Algorithm 1: GenerateSchedule.
    """
    assert num_slots * num_active >= len(order), (num_slots, num_active, len(order))
    slot_of = np.empty(len(order), np.int64)
    slot_of[order] = np.arange(len(order)) // num_active
    return WindowSchedule(num_slots=num_slots, slot_of=slot_of)
