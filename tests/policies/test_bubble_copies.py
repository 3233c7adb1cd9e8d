"""The parts of a snapshot that fit into bubbles."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.policies.bubble_copies import parts_in_bubbles


@given(
    part_bytes=st.lists(st.integers(0, 100), max_size=10),
    bubble_bytes=st.integers(0, 600),
)
def test_it_is_the_longest_beginning_that_fits(
    part_bytes: list[int], bubble_bytes: int
) -> None:
    num = parts_in_bubbles(part_bytes, bubble_bytes)
    assert sum(part_bytes[:num]) <= bubble_bytes
    assert num == len(part_bytes) or sum(part_bytes[: num + 1]) > bubble_bytes


@given(
    num_parts=st.integers(1, 50), size=st.integers(1, 100), bubble_s=st.integers(0, 100)
)
def test_parts_of_equal_size_are_split_as_printed(
    num_parts: int, size: int, bubble_s: int
) -> None:
    """Algorithm 4, at one byte per second.

    W[: floor(n * t_bubble / t_ss)] if a snapshot takes longer than the bubble.
    """
    snapshot_s = num_parts * size
    printed = (
        num_parts * bubble_s // snapshot_s if snapshot_s >= bubble_s else num_parts
    )
    assert parts_in_bubbles([size] * num_parts, bubble_s) == printed
