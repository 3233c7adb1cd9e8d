"""Tables of operators' bytes: kept as given, and only for pairs with any bytes.

A pair is a rank and an operator.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moe_ckpt.types import OperatorId, OperatorKind, OperatorTable

IntArray = npt.NDArray[np.int64]


def named(count: int, layer: int = 0) -> Sequence[OperatorId]:
    return [
        OperatorId(kind=OperatorKind.EXPERT, layer=layer, expert=expert)
        for expert in range(count)
    ]


@st.composite
def given_bytes(draw: st.DrawFn) -> tuple[IntArray, IntArray, IntArray | None]:
    """Return bytes of full state, compute weights and moments, by rank and operator.

    One to four ranks; many of the numbers are 0.
    """
    shape = (draw(st.integers(1, 4)), draw(st.integers(0, 6)))
    numbers = st.just(0) | st.integers(0, 1 << 45)
    full, compute = (
        draw(arrays.arrays(np.int64, shape, elements=numbers)) for _ in "ab"
    )
    return full, compute, draw(st.sampled_from([None, full // 2]))


@given(case=given_bytes())
def test_a_table_has_the_bytes_that_it_was_given(
    case: tuple[IntArray, IntArray, IntArray | None],
) -> None:
    full, compute, moments = case
    table = OperatorTable(
        operators=named(full.shape[1]),
        full_bytes=full,
        compute_bytes=compute,
        moment_bytes=moments,
    )
    np.testing.assert_array_equal(table.full_bytes, full)
    np.testing.assert_array_equal(table.compute_bytes, compute)
    np.testing.assert_array_equal(table.moment_bytes, moments)
    np.testing.assert_array_equal(
        table.owned.by_rank(table.owned.full), full.sum(axis=1)
    )
    found = 2 * full // 3 if moments is None else moments
    np.testing.assert_array_equal(table.bytes_of("moments"), found)
    np.testing.assert_array_equal(table.bytes_of("weights"), full - found)
    np.testing.assert_array_equal(table.bytes_of("both"), full)


def test_pairs_without_bytes_are_not_kept() -> None:
    full = np.diag(np.arange(1, 9))
    table = OperatorTable(operators=named(8), full_bytes=full, compute_bytes=full // 2)
    assert table.owned.full.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (
        table.owned.ranks.tolist() == table.owned.operators.tolist() == list(range(8))
    )


@pytest.mark.parametrize("layer", [0, 7])
def test_a_table_with_other_names_shares_the_bytes(layer: int) -> None:
    full = np.ones((2, 3), np.int64)
    table = OperatorTable(operators=named(3), full_bytes=full, compute_bytes=full)
    other = table.with_operators(named(3, layer))
    assert (table.operators, other.operators) == (named(3), named(3, layer))
    assert other.owned is table.owned
