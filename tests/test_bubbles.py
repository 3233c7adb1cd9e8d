"""Bubbles: the closed form against 1F1B played out, and what fits into one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.bubbles import Bubbles, one_f_one_b, parts_in_bubble


def test_where_a_stage_idles() -> None:
    bubbles = one_f_one_b(1, pp=4, forward_s=1.0, backward_s=2.0)
    assert bubbles == Bubbles(before_s=1.0, between_s=6.0, after_s=2.0)
    assert bubbles.total_s == 9.0
    assert one_f_one_b(0, pp=1, forward_s=1.0, backward_s=2.0).total_s == 0.0


Operation = tuple[int, str, int]
"""Stage, F or B, micro-batch."""


def operations(stage: int, pp: int, num_micro_batches: int) -> list[Operation]:
    """Return what a stage does, in its order: warm-up, then a forward and a backward in turns, then the rest."""
    warm_up = min(num_micro_batches, pp - 1 - stage)
    order = [(stage, "F", batch) for batch in range(warm_up)]
    for batch in range(num_micro_batches - warm_up):
        order += [(stage, "F", warm_up + batch), (stage, "B", batch)]
    return order + [(stage, "B", batch) for batch in range(num_micro_batches - warm_up, num_micro_batches)]


def waits_for(operation: Operation, pp: int) -> Operation | None:
    """Return the operation whose result this one takes."""
    stage, kind, batch = operation
    if kind == "F":
        return (stage - 1, "F", batch) if stage else None
    return (stage + 1, "B", batch) if stage + 1 < pp else (stage, "F", batch)


def played_out(pp: int, num_micro_batches: int, forward_s: int, backward_s: int) -> list[Bubbles]:
    """Return the bubbles of all stages of 1F1B, operation by operation."""
    orders = [operations(stage, pp, num_micro_batches) for stage in range(pp)]
    left = [list(order) for order in orders]
    ends: dict[Operation | None, int] = {None: 0}
    free_at = [0] * pp
    while any(left):
        for stage, order in enumerate(left):
            if order and (needed := waits_for(order[0], pp)) in ends:
                operation = order.pop(0)
                start = max(ends[needed], free_at[stage])
                ends[operation] = free_at[stage] = start + (forward_s if operation[1] == "F" else backward_s)
    starts = [ends[order[0]] - forward_s for order in orders]
    busy_s = num_micro_batches * (forward_s + backward_s)
    return [
        Bubbles(before_s=start, between_s=end - start - busy_s, after_s=max(free_at) - end)
        for start, end in zip(starts, free_at, strict=True)
    ]


@given(
    pp=st.integers(1, 6),
    num_micro_batches=st.integers(1, 12),
    forward_s=st.integers(1, 9),
    backward_s=st.integers(1, 9),
)
def test_the_closed_form_is_what_1f1b_does(pp: int, num_micro_batches: int, forward_s: int, backward_s: int) -> None:
    closed = [one_f_one_b(stage, pp=pp, forward_s=forward_s, backward_s=backward_s) for stage in range(pp)]
    assert closed == played_out(pp, num_micro_batches, forward_s, backward_s)
    assert {bubbles.total_s for bubbles in closed} == {(pp - 1) * (forward_s + backward_s)}


# What fits


@pytest.mark.parametrize(
    ("part_bytes", "bubble_s", "expected"),
    [
        pytest.param([10, 10, 10, 10], 2.0, 2, id="equal parts: by count as by bytes"),
        pytest.param([60, 20, 20], 8.0, 2, id="exactly"),
        pytest.param([60, 20, 20], 7.9, 1, id="a part is not cut"),
        pytest.param([20, 20, 60], 5.0, 2, id="by count it would be 1"),
        pytest.param([60, 20, 20], 5.0, 0, id="by count it would be 1, too"),
        pytest.param([60, 20, 20], 10.0, 3, id="all"),
        pytest.param([60, 20, 20], 0.0, 0, id="no bubble"),
        pytest.param([], 5.0, 0, id="no parts"),
        pytest.param([0, 0, 1], 0.0, 2, id="nothing takes no time"),
    ],
)
def test_the_first_parts_go_into_the_bubble(part_bytes: list[int], bubble_s: float, expected: int) -> None:
    assert parts_in_bubble(part_bytes, copy_bytes_per_s=10.0, bubble_s=bubble_s) == expected


@given(part_bytes=st.lists(st.integers(0, 100), max_size=10), seconds=st.integers(0, 300))
def test_it_is_the_longest_beginning_that_fits(part_bytes: list[int], seconds: int) -> None:
    num = parts_in_bubble(part_bytes, copy_bytes_per_s=2.0, bubble_s=seconds)
    assert sum(part_bytes[:num]) <= 2 * seconds
    assert num == len(part_bytes) or sum(part_bytes[: num + 1]) > 2 * seconds


@given(num_parts=st.integers(1, 50), size=st.integers(1, 100), bubble_s=st.integers(0, 100))
def test_parts_of_equal_size_are_split_as_printed(num_parts: int, size: int, bubble_s: int) -> None:
    """Algorithm 4: W[: floor(n * t_bubble / t_ckpt)] if the checkpoint takes longer than the bubble, else all."""
    checkpoint_s = num_parts * size
    printed = num_parts * bubble_s // checkpoint_s if checkpoint_s >= bubble_s else num_parts
    assert parts_in_bubble([size] * num_parts, copy_bytes_per_s=1.0, bubble_s=bubble_s) == printed
