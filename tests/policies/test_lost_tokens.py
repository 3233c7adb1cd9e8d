"""Lost tokens, counted by hand.

tests/engine/test_partial_recovery.py counts the lost tokens of whole jobs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.policies.lost_tokens import (
    TokenLedger,
    moementary_lost_tokens,
    proportion_of_lost_tokens,
)

IntArray = npt.NDArray[np.int64]


def tokens(*rows: list[int]) -> IntArray:
    return np.array(rows, np.int64)


def test_an_expert_that_is_ahead_of_the_rest_loses_nothing_and_repeats() -> None:
    at_10 = TokenLedger.at_start(1, 2).after(tokens([100, 100]))
    at_20 = at_10.after(tokens([7, 9]))
    ledger, loss = at_10.restored(np.where([[True, False]], at_20.seen, at_10.seen))
    assert loss.lost.tolist() == [[0, 0]]
    assert loss.repeated.tolist() == [[7, 0]]
    assert ledger.after(tokens([7, 9])).seen.tolist() == [[114, 109]]
    assert ledger.processed.tolist() == [[100, 100]]


def test_an_older_expert_loses_each_token_once() -> None:
    at_10 = TokenLedger.at_start(1, 2).after(tokens([100, 100]))
    at_20 = at_10.after(tokens([7, 9]))
    ledger, loss = at_20.restored(np.where([[True, False]], at_10.seen, at_20.seen))
    assert (loss.lost.tolist(), loss.repeated.tolist()) == ([[7, 0]], [[0, 0]])
    assert (ledger.processed.tolist(), ledger.seen.tolist()) == (
        [[107, 109]],
        [[100, 109]],
    )
    _, again = ledger.restored(at_10.seen)
    assert again.lost.tolist() == [[0, 9]]


@given(
    st.lists(
        st.lists(st.integers(0, 2**62), min_size=3, max_size=3), min_size=4, max_size=4
    )
)
def test_an_array_holds_all_of_a_ledger(rows: list[list[int]]) -> None:
    array = np.array(rows, np.int64).reshape(2, 2, 3)
    ledger = TokenLedger.from_array(array)
    assert ledger.processed.tolist() == rows[:2]
    assert ledger.seen.tolist() == rows[2:]
    assert ledger.as_array().dtype == np.int64
    assert ledger.as_array().tolist() == array.tolist()


@pytest.mark.parametrize("seen", [np.zeros((2, 1), np.int64), np.zeros((1, 2))])
def test_counts_of_other_shapes_or_types_are_our_own_bug(seen: IntArray) -> None:
    with pytest.raises(AssertionError):
        TokenLedger(processed=np.zeros((1, 2), np.int64), seen=seen)


@pytest.mark.parametrize(
    ("lost", "given", "top_k", "plt", "mlt"),
    [
        pytest.param([10, 30], [100, 100], 2, 0.1, 0.2, id="mean and sum over layers"),
        pytest.param(
            [3, 0, 0, 0], [80, 80, 80, 80], 1, 3 / 320, 3 / 80, id="one layer of four"
        ),
        pytest.param(
            [8, 8],
            [100, 400],
            1,
            0.05,
            0.1,
            id="layers count alike, however many tokens they had",
        ),
        pytest.param([0, 0], [0, 0], 2, 0.0, 0.0, id="before the first token"),
    ],
)
def test_shares_of_lost_tokens(
    lost: list[int], given: list[int], top_k: int, plt: float, mlt: float
) -> None:
    arguments = np.array(lost, np.int64), np.array(given, np.int64), top_k
    assert proportion_of_lost_tokens(*arguments) == pytest.approx(plt, rel=1e-15)
    assert moementary_lost_tokens(*arguments) == pytest.approx(mlt, rel=1e-15)


def test_tokens_cannot_be_lost_that_nobody_had() -> None:
    with pytest.raises(AssertionError):
        proportion_of_lost_tokens(np.array([1], np.int64), np.array([0], np.int64), 1)
