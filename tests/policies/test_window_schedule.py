"""Order, slots and length of a window: tables, the papers' numbers, and properties against brute force."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.window_schedule import (
    WindowSchedule,
    cut_slots,
    fitting_window,
    fixed_order,
    order_operators,
    paper_schedule,
    paper_window,
    refit,
    slot_bytes,
    window_bytes,
)
from moe_ckpt.types import OperatorId, OperatorKind, OperatorTable

IntArray = npt.NDArray[np.int64]


def operator(kind: OperatorKind, layer: int | None = None, expert: int | None = None) -> OperatorId:
    return OperatorId(kind=kind, layer=layer, expert=expert)


BLOCK = operator(OperatorKind.BLOCK, 0)


def make_table(full: Sequence[Sequence[int]], compute: Sequence[Sequence[int]] | None = None) -> OperatorTable:
    """A table of blocks; compute weights are a sixth unless they are given."""
    full_bytes = np.array(full, np.int64).reshape(len(full), -1)
    compute_bytes = full_bytes // 6 if compute is None else np.array(compute, np.int64).reshape(full_bytes.shape)
    return OperatorTable(operators=[BLOCK] * full_bytes.shape[1], full_bytes=full_bytes, compute_bytes=compute_bytes)


def literal_slot_bytes(table: OperatorTable, schedule: WindowSchedule) -> list[list[int]]:
    return [
        [
            int(sum(table.full_bytes[rank, list(schedule.full(slot))]))
            + int(sum(table.compute_bytes[rank, list(schedule.compute(slot))]))
            for rank in range(len(table.full_bytes))
        ]
        for slot in range(schedule.num_slots)
    ]


def worst(table: OperatorTable, order: IntArray, num_slots: int) -> int:
    return max(max(row) for row in literal_slot_bytes(table, cut_slots(order, table, num_slots)))


@st.composite
def tables_and_orders(draw: st.DrawFn, most: int = 12) -> tuple[OperatorTable, IntArray]:
    """Small tables of one to three ranks, zeros among the sizes, and any order of their operators."""
    num_ranks, num_operators = draw(st.integers(1, 3)), draw(st.integers(1, most))
    sizes = st.lists(st.one_of(st.just(0), st.integers(0, 100)), min_size=num_operators, max_size=num_operators)
    full = draw(st.lists(sizes, min_size=num_ranks, max_size=num_ranks))
    compute = draw(st.lists(sizes, min_size=num_ranks, max_size=num_ranks)) if draw(st.booleans()) else None
    return make_table(full, compute), np.array(draw(st.permutations(range(num_operators))), np.int64)


def test_gates_come_before_the_rest_and_both_from_the_back() -> None:
    kind = OperatorKind
    operators = [
        operator(kind.EMBEDDING),
        *(operator(kind.BLOCK, 0), operator(kind.GATE, 0), operator(kind.EXPERT, 0, 0), operator(kind.EXPERT, 0, 1)),
        *(operator(kind.BLOCK, 1), operator(kind.GATE, 1), operator(kind.EXPERT, 1, 0), operator(kind.EXPERT, 1, 1)),
        operator(kind.FINAL_NORM),
        operator(kind.OUTPUT),
    ]
    fixed = fixed_order(operators)
    assert fixed.experts.tolist() == [3, 4, 7, 8]
    assert fixed.others.tolist() == [6, 2, 10, 9, 5, 1, 0]
    ordered = order_operators(fixed, np.array([5.0, 1.0, 5.0, 0.5]))
    assert ordered.tolist() == [8, 4, 3, 7, 6, 2, 10, 9, 5, 1, 0]
    assert ordered.dtype == np.int64


@given(popularity=st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_experts_ascend_and_equals_keep_their_order(popularity: list[int]) -> None:
    fixed = fixed_order([operator(OperatorKind.EXPERT, 0, expert) for expert in range(len(popularity))])
    ordered = order_operators(fixed, np.array(popularity, np.float64)).tolist()
    assert ordered == sorted(range(len(popularity)), key=lambda expert: (popularity[expert], expert))


@pytest.mark.parametrize("num_slots", [-1, 0])
def test_a_window_without_slots_is_refused(num_slots: int) -> None:
    with pytest.raises(ConfigError, match=rf"^ckpt\.window: got {num_slots}, wanted at least 1$"):
        cut_slots(np.arange(3), make_table([[1, 1, 1]]), num_slots)


@given(case=tables_and_orders(), data=st.data())
def test_a_slot_is_where_an_operators_middle_lies(case: tuple[OperatorTable, IntArray], data: st.DataObject) -> None:
    table, order = case
    num_slots = data.draw(st.integers(1, len(order)))
    schedule = cut_slots(order, table, num_slots)
    totals, before = table.full_bytes.sum(axis=1).tolist(), [0] * len(table.full_bytes)
    for position in order.tolist():
        sizes = table.full_bytes[:, position].tolist()
        middle = 0.0  # the mean over all bytes of the operator
        for rank, size in enumerate(sizes):
            middle += size / max(1, sum(sizes)) * (num_slots * (before[rank] + size / 2) / max(1, totals[rank]))
            before[rank] += size
        assert schedule.slot_of[position] == min(num_slots - 1, int(middle))


def test_ranks_that_share_operators_evenly_have_slots_of_the_same_bytes() -> None:
    """Four experts on each of two ranks, and half of each of four other operators."""
    table = make_table([[30] * 4 + [0] * 4 + [15] * 4, [0] * 4 + [30] * 4 + [15] * 4])
    schedule = cut_slots(np.arange(12), table, 6)
    assert schedule.slot_of.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 4, 5, 5]
    assert slot_bytes(table, schedule).tolist() == [[53] * 2, [48] * 2, [43] * 2, [38] * 2, [34] * 2, [30] * 2]


@given(case=tables_and_orders(), data=st.data())
def test_every_operator_is_whole_once_and_has_compute_weights_before(
    case: tuple[OperatorTable, IntArray], data: st.DataObject
) -> None:
    table, order = case
    schedule = cut_slots(order, table, data.draw(st.integers(1, len(order))))
    slots = range(schedule.num_slots)
    assert sorted(position for slot in slots for position in schedule.full(slot)) == list(range(len(order)))
    for slot in slots:
        later = sorted(position for after in slots[slot + 1 :] for position in schedule.full(after))
        assert list(schedule.compute(slot)) == later


@given(case=tables_and_orders(), data=st.data())
def test_bytes_are_those_of_what_a_slot_takes(case: tuple[OperatorTable, IntArray], data: st.DataObject) -> None:
    table, order = case
    schedule = cut_slots(order, table, data.draw(st.integers(1, len(order))))
    got = slot_bytes(table, schedule)
    assert got.dtype == np.int64
    assert got.tolist() == literal_slot_bytes(table, schedule)
    assert window_bytes(table, schedule).tolist() == [sum(column) for column in zip(*got.tolist(), strict=True)]


@pytest.mark.parametrize(
    ("full", "max_slots", "num_slots"),
    [
        pytest.param([12] * 6, 6, 6, id="one a slot is the smallest"),
        pytest.param([500, 500, 8990, 5, 5], 5, 2, id="all after two are as good"),
        pytest.param([12] * 6, 3, 3, id="as many as allowed"),
        pytest.param([12] * 6, 100, 6, id="not more than operators"),
        pytest.param([500, 500, 9000], 3, 2, id="fewest within 1 percent"),
        pytest.param([0, 0, 0], 3, 1, id="nothing to split"),
    ],
)
def test_where_none_fits_the_smallest_is_taken(full: list[int], max_slots: int, num_slots: int) -> None:
    for budget_bytes in (-1e300, -1.0, 0.0, 5e-324, 1.0):
        got = fitting_window(make_table([full]), np.arange(len(full)), budget_bytes, max_slots=max_slots)
        assert got == num_slots


def test_a_search_that_starts_too_early_ends_at_the_fewest() -> None:
    """Only the last half has compute weights, so the first slots hold 2000 + 12000 / W, not the 10000 / W of a mix."""
    half = 500
    table = make_table([[12] * 2 * half], [[0] * half + [4] * half])
    assert fitting_window(table, np.arange(2 * half), 2000 + 120, max_slots=2 * half) == 100


@pytest.mark.parametrize("max_slots", [0, -2])
def test_no_slots_allowed_is_refused(max_slots: int) -> None:
    with pytest.raises(ConfigError, match=rf"^ckpt\.window: got {max_slots}, wanted between 1 and 3, "):
        fitting_window(make_table([[1, 1, 1]]), np.arange(3), 1.0, max_slots=max_slots)


@given(case=tables_and_orders(), max_slots=st.integers(1, 14), data=st.data())
def test_fitting_is_as_by_brute_force(
    case: tuple[OperatorTable, IntArray], max_slots: int, data: st.DataObject
) -> None:
    table, order = case
    sizes = [worst(table, order, num_slots) for num_slots in range(1, min(max_slots, len(order)) + 1)]
    budget_bytes = data.draw(st.just(math.inf) | st.sampled_from(sizes + [size - 0.5 for size in sizes]))
    fitting = [index + 1 for index, size in enumerate(sizes) if size <= budget_bytes]
    nearly_smallest = [index + 1 for index, size in enumerate(sizes) if size <= 1.01 * min(sizes)]
    expected = fitting[0] if fitting else nearly_smallest[0]
    assert fitting_window(table, order, budget_bytes, max_slots=max_slots) == expected


@given(sizes=st.lists(st.integers(1, 50), min_size=65, max_size=90), share=st.floats(0.01, 1.0))
def test_a_longer_search_ends_where_it_fits_or_nearly_at_the_best(sizes: list[int], share: float) -> None:
    table, order = make_table([[12 * size for size in sizes]], [[2 * size for size in sizes]]), np.arange(len(sizes))
    budget_bytes = 14 * max(sizes) + share * 12 * sum(sizes)
    worsts = [int(slot_bytes(table, cut_slots(order, table, w)).max()) for w in range(1, len(sizes) + 1)]
    got = worsts[fitting_window(table, order, budget_bytes, max_slots=len(sizes)) - 1]
    assert got <= max(budget_bytes, 1.01 * min(worsts[:64]))
    assert got <= budget_bytes or worsts[-1] > budget_bytes


def test_what_only_the_last_resort_finds_fits_too() -> None:
    """Two of 100 operators make the largest slot of 50 to 65 slots: 2006 bytes, but 2004 in 60."""
    table, order = make_table([[1000 + 2 * position % 5 for position in range(100)]], [[0] * 100]), np.arange(100)
    assert [worst(table, order, num_slots) for num_slots in (50, 60, 65)] == [2006, 2004, 2006]
    assert [fitting_window(table, order, budget, max_slots=65) for budget in (2006, 2004, 2003)] == [50, 60, 50]


@pytest.mark.parametrize(("num_operators", "num_slots"), [(1000, 10), (1000, 100), (1000, 1000), (100, 50), (70, 1)])
def test_many_equal_operators_fit_in_as_many_slots_as_the_formula(num_operators: int, num_slots: int) -> None:
    """The largest slot is the first: 2 bytes of every parameter and 10 more of what it takes whole."""
    table, order = make_table([[12] * num_operators]), np.arange(num_operators)
    exactly = 2 * num_operators + 10 * (num_operators // num_slots)
    assert fitting_window(table, order, exactly, max_slots=num_operators) == num_slots
    longer = fitting_window(table, order, exactly - 1, max_slots=num_operators)
    assert longer > num_slots or longer < num_slots == 1000  # nothing fits: the fewest that are nearly as good


@pytest.mark.parametrize(
    ("current", "fitting", "drift", "expected"),
    [(8, 10, 0.25, 8), (8, 11, 0.25, 11), (8, 6, 0.25, 8), (8, 5, 0.25, 5), (3, 4, 0.0, 4), (1, 1, 0.0, 1)],
)
def test_a_window_is_kept_up_to_the_drift(current: int, fitting: int, drift: float, expected: int) -> None:
    assert refit(current, fitting, drift=drift) == expected


def literal_window(
    num_operators: int,
    compute_bytes: int,
    master_bytes: int,
    optimizer_bytes: int,
    iteration_s: float,
    copy_bytes_per_s: float,
) -> tuple[int, int]:
    active = num_operators
    while active > 2:
        size = (master_bytes + optimizer_bytes) * active + compute_bytes * (num_operators - active)
        if size / copy_bytes_per_s <= iteration_s:
            break
        active -= 1
    return math.ceil(num_operators / active), active


@given(
    st.fixed_dictionaries(
        {
            "num_operators": st.integers(1, 200),
            **dict.fromkeys(("compute_bytes", "master_bytes", "optimizer_bytes"), st.integers(0, 20)),
            "iteration_s": st.floats(0, 100),
            "copy_bytes_per_s": st.floats(0.1, 200),
        }
    )
)
def test_the_window_is_that_of_the_loop_as_printed(arguments: dict[str, Any]) -> None:
    assert paper_window(**arguments) == literal_window(**arguments)


def test_the_papers_loop_takes_no_time_for_a_million_operators() -> None:
    sizes = {"compute_bytes": 2, "master_bytes": 4, "optimizer_bytes": 8}
    got = paper_window(num_operators=1_000_000, **sizes, iteration_s=3e6, copy_bytes_per_s=1)
    assert got == (10, 100_000)


@given(order=st.integers(1, 30).flatmap(lambda n: st.permutations(range(n))), data=st.data())
def test_the_schedule_is_that_of_the_loop_as_printed(order: list[int], data: st.DataObject) -> None:
    num_active = data.draw(st.integers(1, len(order)))
    num_slots = math.ceil(len(order) / num_active)
    schedule = paper_schedule(np.array(order), num_slots=num_slots, num_active=num_active)
    assert (schedule.num_slots, schedule.slot_of.dtype) == (num_slots, np.int64)
    for slot in range(num_slots):
        start = slot * num_active
        end = min(start + num_active, len(order))
        assert schedule.full(slot) == tuple(sorted(order[start:end]))
        assert schedule.compute(slot) == tuple(sorted(order[end:]))


def test_a_million_operators() -> None:
    num_operators, num_gates = 1_000_000, 1000
    random = np.random.default_rng(0)
    experts = [operator(OperatorKind.EXPERT, 0, 0)] * (num_operators - num_gates)
    sizes = random.integers(1, 1000, (1, num_operators))
    table = OperatorTable(
        operators=[operator(OperatorKind.GATE, 0)] * num_gates + experts,
        full_bytes=12 * sizes,
        compute_bytes=2 * sizes,
    )
    popularity = random.gamma(0.5, 100.0, len(experts))
    order = order_operators(fixed_order(table.operators), popularity)
    assert np.array_equal(np.sort(order), np.arange(num_operators))
    budget_bytes = int(sizes.sum()) * (2 + 10 / 12)
    num_slots = fitting_window(table, order, budget_bytes, max_slots=num_operators)
    assert num_slots in (12, 13)
    schedule = cut_slots(order, table, num_slots)
    assert slot_bytes(table, schedule).max() <= budget_bytes
    assert np.all(np.diff(schedule.slot_of[order]) >= 0)
