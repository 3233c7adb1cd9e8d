"""The operators of each snapshot of a window: their order, the slots, and how many slots fit.

Pure: all ranks of a stage group compute the same schedule from the same table and the same summed counts. Arrays, not
lists, so that a million operators take a fraction of a second. MoEvement, Algorithm 1, section 3.5 and Appendix E;
paper_window and paper_schedule are Algorithm 1 to the letter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_ckpt.config import require, require_at_least
from moe_ckpt.types import IntArray, OperatorId, OperatorKind, OperatorTable

Array = npt.NDArray[np.float64]

EXACT_SLOTS = 64  # up to here fitting_window tries every number of slots
GROWTH = 1.25  # beyond, the factor between numbers of slots that are tried when none fits
AS_GOOD = 1.01  # a worst slot that is at most this much larger is no reason for a longer window


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FixedOrder:
    """The part of the order that popularity does not change: positions in the OperatorTable, both int64 [number].

    `experts` in the order of the table; `others` in the order of their snapshots.
    """

    experts: IntArray
    others: IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowSchedule:
    """The slot of a window in which each operator is taken with its whole state; `slot_of` is int64 [operators]."""

    num_slots: int
    slot_of: IntArray

    def full(self, slot: int) -> tuple[int, ...]:
        """Return the ascending positions of the operators that `slot` takes with their whole state."""
        return tuple(np.flatnonzero(self.slot_of == slot).tolist())

    def compute(self, slot: int) -> tuple[int, ...]:
        """Return the ascending positions of the operators that `slot` takes with compute weights: those to come."""
        return tuple(np.flatnonzero(self.slot_of > slot).tolist())


def fixed_order(operators: Sequence[OperatorId]) -> FixedOrder:
    """Return the experts of a table, and its other operators in snapshot order.

    These are the gates from the last to the first, then the rest from back to front, so that the fewest operators are
    active behind the operator whose gradient is needed. A dense model has only the rest. MoEvement, section 3.5,
    Appendix E.
    """
    special = (OperatorKind.EXPERT, OperatorKind.GATE)
    experts = [position for position, operator in enumerate(operators) if operator.kind is OperatorKind.EXPERT]
    gates = [position for position, operator in enumerate(operators) if operator.kind is OperatorKind.GATE]
    rest = [position for position, operator in enumerate(operators) if operator.kind not in special]
    return FixedOrder(experts=np.array(experts, np.int64), others=np.array(gates[::-1] + rest[::-1], np.int64))


def order_operators(fixed: FixedOrder, popularity: Array) -> IntArray:
    """Return the positions of all operators (int64) in snapshot order.

    Experts by ascending popularity (float64 [experts], as in `fixed.experts`; equals stay in that order), so that
    popular ones stay frozen longest in a replay; then the others. Popularities 5, 1, 5 of experts at 2, 3, 4 and others
    1, 0 make 3, 2, 4, 1, 0. MoEvement, section 3.5: OrderOperators.
    """
    assert popularity.shape == fixed.experts.shape, (popularity.shape, fixed.experts.shape)
    # stable: all ranks of a stage have to break ties alike, or they cut other slots
    return np.concatenate([fixed.experts[np.argsort(popularity, kind="stable")], fixed.others])


def cut_slots(order: IntArray, table: OperatorTable, num_slots: int) -> WindowSchedule:
    """Cut an order into slots that hold about as many bytes as each other on every rank.

    Along the order, an operator's slot follows from where the middle of its bytes lies among all bytes of the rank that
    has them: of 10, 10, 20 bytes and 2 slots, the middles 5, 15, 30 of 40 lie in slots 0, 0, 1. Where several ranks
    have a share of an operator, it is the mean over its bytes. There may be more slots than operators, for another
    stage's sake: some are empty then. Raises ConfigError for fewer than 1.
    """
    require_at_least("ckpt.window", num_slots, 1)
    # by the bytes of each rank: cut by count, as in Algorithm 1, some ranks have slots of twice the bytes of others
    return _middles(order, table).cut(num_slots)


def slot_bytes(table: OperatorTable, schedule: WindowSchedule) -> IntArray:
    """Return the bytes that each rank copies in each slot, int64 [slots, ranks].

    12 bytes a parameter of operators that the slot takes whole and 2 of those with later slots: three operators of one
    parameter and three slots make 12 + 4, 12 + 2, 12. MoEvement, section 3.2.
    """

    def by_slot(sizes: IntArray) -> IntArray:
        # bincount adds float64: exact below 2^53 bytes
        rows = [np.bincount(schedule.slot_of, weights=row, minlength=schedule.num_slots) for row in sizes]
        return np.stack(rows, axis=1).astype(np.int64)

    compute_bytes = by_slot(table.compute_bytes)
    still_to_come = compute_bytes.sum(axis=0) - np.cumsum(compute_bytes, axis=0)
    # slot 0 has compute weights of nearly all operators: it is the largest, and decides whether a window fits
    return by_slot(table.full_bytes) + still_to_come


def window_bytes(table: OperatorTable, schedule: WindowSchedule) -> IntArray:
    """Return the host memory of one complete window on each rank in bytes, int64 [ranks].

    W equal slots of 12 bytes a parameter, 2 for compute, hold 12 + (W - 1) bytes a parameter.
    """
    return slot_bytes(table, schedule).sum(axis=0)


def fitting_window(table: OperatorTable, order: IntArray, budget_bytes: float, *, max_slots: int) -> int:
    """Return the fewest slots of which the largest, on any rank, is within the budget.

    The budget is what a rank can copy in an iteration: 0.5 s at 20e9 bytes/s make 10e9. Where no number up to
    `max_slots` fits, it is the one with the smallest largest slot (the fewest among equals within 1 %). There are never
    more slots than operators. Exact where up to 64 slots are allowed; else a search that may miss the fewest, since now
    and then more slots have a larger largest one, but that finds some that fit wherever the most allowed fit.
    Raises ConfigError for `max_slots` below 1. MoEvement, Algorithm 1: FindWindowSize, with sizes per operator.
    """
    limit = min(max_slots, len(order))
    require(1 <= limit <= len(order), "ckpt.window", limit, f"between 1 and {len(order)}, the number of operators")
    middles = _middles(order, table)

    def worst(num_slots: int) -> int:
        return int(slot_bytes(table, middles.cut(num_slots)).max())

    def fits(num_slots: int) -> bool:
        return worst(num_slots) <= budget_bytes

    first = _first_trial(table, budget_bytes, limit)
    if limit <= EXACT_SLOTS:
        fitting = next((num_slots for num_slots in range(first, limit + 1) if fits(num_slots)), None)
    else:
        fitting = _gallop(fits, first, limit)
    return fitting or _smallest(worst, limit, budget_bytes)


def refit(current: int, fitting: int, *, drift: float) -> int:
    """Return the next number of slots: `fitting` if it is off by more than `drift` of `current`, else `current`.

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
    """Return (W_sparse, O_active) of Algorithm 1 to the letter, for operators of equal size (bytes per operator).

    As printed, it never tests whether 2 active operators fit. 6 operators of 2 + 4 + 8 bytes, 32 bytes an iteration:
    2 active ones copy 2 * 12 + 4 * 2 = 32, so 3 slots. MoEvement, Algorithm 1: FindWindowSize.
    """
    assert num_operators >= 1, num_operators
    active = np.arange(num_operators, 2, -1)
    sizes = (master_bytes + optimizer_bytes) * active + compute_bytes * (num_operators - active)
    fitting = active[sizes / copy_bytes_per_s <= iteration_s]
    num_active = int(fitting[0]) if fitting.size else min(num_operators, 2)
    return math.ceil(num_operators / num_active), num_active


def paper_schedule(order: IntArray, *, num_slots: int, num_active: int) -> WindowSchedule:
    """Give every slot the next `num_active` operators of the order, and the last slot the remaining ones.

    5 operators, 2 active: slots of 2, 2 and 1. MoEvement, Algorithm 1: GenerateSchedule.
    """
    assert num_slots * num_active >= len(order), (num_slots, num_active, len(order))
    slot_of = np.empty(len(order), np.int64)
    slot_of[order] = np.arange(len(order)) // num_active
    return WindowSchedule(num_slots=num_slots, slot_of=slot_of)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Middles:
    """Where the middle of each operator lies in an order, float64 [ranks, operators]: bytes of each rank before it.

    `totals`: all bytes of a rank, float64 [ranks, 1]; `shares`: of an operator's bytes, float64 [ranks, operators].
    """

    before: Array
    totals: Array
    shares: Array

    def cut(self, num_slots: int) -> WindowSchedule:
        """Return the slots of operators; those without any bytes are in slot 0."""
        # added rank by rank: every rank of a stage has to round alike
        slot_of = (self.shares * (num_slots * self.before / self.totals)).sum(axis=0).astype(np.int64)
        return WindowSchedule(num_slots=num_slots, slot_of=np.minimum(slot_of, num_slots - 1))


def _middles(order: IntArray, table: OperatorTable) -> _Middles:
    full_bytes = table.full_bytes
    before = np.empty(full_bytes.shape, np.float64)
    before[:, order] = np.cumsum(full_bytes[:, order], axis=1) - full_bytes[:, order] / 2
    return _Middles(
        before=before,
        totals=np.maximum(full_bytes.sum(axis=1, keepdims=True), 1).astype(np.float64),
        shares=full_bytes / np.maximum(full_bytes.sum(axis=0), 1),
    )


def _first_trial(table: OperatorTable, budget_bytes: float, limit: int) -> int:
    """Return the slots to try first, between 1 and `limit`.

    Fewer than full / budget cannot do, since every full byte lies in one slot. Slot 0 of W balanced slots also copies
    the compute weights of the others: compute + (full - compute) / W. Slots are seldom balanced better than that where
    there are many operators; where the answer shall be exact, it is no bound.
    """
    least = 1.0
    for full, compute in zip(table.full_bytes.sum(axis=1), table.compute_bytes.sum(axis=1), strict=True):
        least = max(least, _slots_for(full, budget_bytes, limit))
        if limit > EXACT_SLOTS:
            least = max(least, _slots_for(full - compute, budget_bytes - compute, limit))
    return math.ceil(least)


def _slots_for(total_bytes: float, bytes_per_slot: float, limit: int) -> float:
    if total_bytes <= 0:
        return 0.0
    return min(float(total_bytes) / bytes_per_slot, limit) if bytes_per_slot > 0 else limit


def _gallop(fits: Callable[[int], bool], first: int, limit: int) -> int | None:
    """Return the least number from `first` to `limit` that fits, if larger ones do too, in about 2 log2 trials."""
    below, trial, step = first - 1, first, 1
    while not fits(trial):
        if trial == limit:
            return None
        below, trial, step = trial, min(trial + step, limit), 2 * step
    while trial - below > 1:
        middle = (below + trial) // 2
        below, trial = (below, middle) if fits(middle) else (middle, trial)
    return trial


def _smallest(worst: Callable[[int], int], limit: int, budget_bytes: float) -> int:
    """Return the fewest slots, of all up to 64 and some up to `limit`, that fit or else are as good as the best."""
    trials = list(range(1, min(limit, EXACT_SLOTS) + 1))
    while trials[-1] < limit:
        trials.append(min(limit, math.ceil(GROWTH * trials[-1])))
    sizes = [worst(num_slots) for num_slots in trials]
    enough = budget_bytes if min(sizes) <= budget_bytes else AS_GOOD * min(sizes)
    return next(num_slots for num_slots, size in zip(trials, sizes, strict=True) if size <= enough)
