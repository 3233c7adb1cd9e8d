"""Order, slots and length of a window: tables, numbers of the papers, brute force."""

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
    StageBytes,
    WindowSchedule,
    fixed_order,
    order_operators,
    paper_schedule,
    paper_window,
    refit,
)
from moe_ckpt.types import OperatorId, OperatorKind, OperatorTable

IntArray = npt.NDArray[np.int64]


def operator(
    kind: OperatorKind, layer: int | None = None, expert: int | None = None
) -> OperatorId:
    return OperatorId(kind=kind, layer=layer, expert=expert)


BLOCK = operator(OperatorKind.BLOCK, 0)


def make_table(
    full: Sequence[Sequence[int]], compute: Sequence[Sequence[int]] | None = None
) -> OperatorTable:
    """Return a table of blocks; compute weights are a sixth unless given."""
    full_bytes = np.array(full, np.int64).reshape(len(full), -1)
    compute_bytes = (
        full_bytes // 6
        if compute is None
        else np.array(compute, np.int64).reshape(full_bytes.shape)
    )
    return OperatorTable(
        operators=[BLOCK] * full_bytes.shape[1],
        full_bytes=full_bytes,
        compute_bytes=compute_bytes,
    )


def literal_slot_bytes(
    table: OperatorTable, schedule: WindowSchedule
) -> list[list[int]]:
    return [
        [
            int(sum(table.full_bytes[rank, list(schedule.full(slot))]))
            + int(sum(table.compute_bytes[rank, list(schedule.compute(slot))]))
            for rank in range(len(table.full_bytes))
        ]
        for slot in range(schedule.num_slots)
    ]


def cut_slots(order: IntArray, table: OperatorTable, num_slots: int) -> WindowSchedule:
    return StageBytes(table).middles(order).cut(num_slots)


@st.composite
def tables_and_orders(
    draw: st.DrawFn, most: int = 12
) -> tuple[OperatorTable, IntArray]:
    """Draw a small table of one to three ranks, and any order of the operators.

    Some sizes are zero.
    """
    num_ranks, num_operators = draw(st.integers(1, 3)), draw(st.integers(1, most))
    sizes = st.lists(
        st.one_of(st.just(0), st.integers(0, 100)),
        min_size=num_operators,
        max_size=num_operators,
    )
    full = draw(st.lists(sizes, min_size=num_ranks, max_size=num_ranks))
    compute = (
        draw(st.lists(sizes, min_size=num_ranks, max_size=num_ranks))
        if draw(st.booleans())
        else None
    )
    return make_table(full, compute), np.array(
        draw(st.permutations(range(num_operators))), np.int64
    )


def test_gates_come_before_the_rest_and_both_from_the_back() -> None:
    kind = OperatorKind
    operators = [
        operator(kind.EMBEDDING),
        *(
            operator(kind.BLOCK, 0),
            operator(kind.GATE, 0),
            operator(kind.EXPERT, 0, 0),
            operator(kind.EXPERT, 0, 1),
        ),
        *(
            operator(kind.BLOCK, 1),
            operator(kind.GATE, 1),
            operator(kind.EXPERT, 1, 0),
            operator(kind.EXPERT, 1, 1),
        ),
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
    fixed = fixed_order(
        [operator(OperatorKind.EXPERT, 0, expert) for expert in range(len(popularity))]
    )
    ordered = order_operators(fixed, np.array(popularity, np.float64)).tolist()
    assert ordered == sorted(
        range(len(popularity)), key=lambda expert: (popularity[expert], expert)
    )


@pytest.mark.parametrize("num_slots", [-1, 0])
def test_a_window_without_slots_is_refused(num_slots: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"^ckpt\.window: got {num_slots}, wanted at least 1$"
    ):
        cut_slots(np.arange(3), make_table([[1, 1, 1]]), num_slots)


@given(case=tables_and_orders(), data=st.data())
def test_a_slot_is_where_an_operators_middle_lies(
    case: tuple[OperatorTable, IntArray], data: st.DataObject
) -> None:
    table, order = case
    num_slots = data.draw(st.integers(1, len(order)))
    schedule = cut_slots(order, table, num_slots)
    totals, before = table.full_bytes.sum(axis=1).tolist(), [0] * len(table.full_bytes)
    for position in order.tolist():
        sizes = table.full_bytes[:, position].tolist()
        middle = 0.0  # the mean over all bytes of the operator
        for rank, size in enumerate(sizes):
            middle += (
                size
                / max(1, sum(sizes))
                * (num_slots * (before[rank] + size / 2) / max(1, totals[rank]))
            )
            before[rank] += size
        assert schedule.slot_of[position] == min(num_slots - 1, int(middle))


def test_ranks_that_share_operators_evenly_have_slots_of_the_same_bytes() -> None:
    """Each of two ranks has four experts, and half of each of four other operators."""
    table = make_table([[30] * 4 + [0] * 4 + [15] * 4, [0] * 4 + [30] * 4 + [15] * 4])
    schedule = cut_slots(np.arange(12), table, 6)
    assert schedule.slot_of.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 4, 5, 5]
    got = StageBytes(table).slot_bytes(schedule)
    assert got.tolist() == [[53] * 2, [48] * 2, [43] * 2, [38] * 2, [34] * 2, [30] * 2]


@given(case=tables_and_orders(), data=st.data())
def test_every_operator_is_whole_once_and_has_compute_weights_before(
    case: tuple[OperatorTable, IntArray], data: st.DataObject
) -> None:
    table, order = case
    schedule = cut_slots(order, table, data.draw(st.integers(1, len(order))))
    slots = range(schedule.num_slots)
    assert sorted(
        position for slot in slots for position in schedule.full(slot)
    ) == list(range(len(order)))
    for slot in slots:
        later = sorted(
            position for after in slots[slot + 1 :] for position in schedule.full(after)
        )
        assert list(schedule.compute(slot)) == later


@given(case=tables_and_orders(), data=st.data())
def test_bytes_are_those_of_what_a_slot_takes(
    case: tuple[OperatorTable, IntArray], data: st.DataObject
) -> None:
    table, order = case
    schedule = cut_slots(order, table, data.draw(st.integers(1, len(order))))
    got = StageBytes(table).slot_bytes(schedule)
    assert got.dtype == np.int64
    assert got.tolist() == literal_slot_bytes(table, schedule)


@pytest.mark.parametrize(
    ("current", "fitting", "drift", "expected"),
    [
        (8, 10, 0.25, 8),
        (8, 11, 0.25, 11),
        (8, 6, 0.25, 8),
        (8, 5, 0.25, 5),
        (3, 4, 0.0, 4),
        (1, 1, 0.0, 1),
    ],
)
def test_a_window_is_kept_up_to_the_drift(
    current: int, fitting: int, drift: float, expected: int
) -> None:
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
        size = (master_bytes + optimizer_bytes) * active + compute_bytes * (
            num_operators - active
        )
        if size / copy_bytes_per_s <= iteration_s:
            break
        active -= 1
    return math.ceil(num_operators / active), active


@given(
    st.fixed_dictionaries(
        {
            "num_operators": st.integers(1, 200),
            **dict.fromkeys(
                ("compute_bytes", "master_bytes", "optimizer_bytes"), st.integers(0, 20)
            ),
            "iteration_s": st.floats(0, 100),
            "copy_bytes_per_s": st.floats(0.1, 200),
        }
    )
)
def test_the_window_is_that_of_the_loop_as_printed(arguments: dict[str, Any]) -> None:
    assert paper_window(**arguments) == literal_window(**arguments)


def test_the_papers_loop_takes_no_time_for_a_million_operators() -> None:
    sizes = {"compute_bytes": 2, "master_bytes": 4, "optimizer_bytes": 8}
    got = paper_window(
        num_operators=1_000_000, **sizes, iteration_s=3e6, copy_bytes_per_s=1
    )
    assert got == (10, 100_000)


@given(
    order=st.integers(1, 30).flatmap(lambda n: st.permutations(range(n))),
    data=st.data(),
)
def test_the_schedule_is_that_of_the_loop_as_printed(
    order: list[int], data: st.DataObject
) -> None:
    num_active = data.draw(st.integers(1, len(order)))
    num_slots = math.ceil(len(order) / num_active)
    schedule = paper_schedule(
        np.array(order), num_slots=num_slots, num_active=num_active
    )
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
    of_stage = StageBytes(table)
    schedule = of_stage.middles(order).cut(13)
    # 2 bytes of each parameter, and 10 more of less than a twelfth of the parameters
    assert of_stage.slot_bytes(schedule).max() <= int(sizes.sum()) * (2 + 10 / 12)
    assert np.all(np.diff(schedule.slot_of[order]) >= 0)
