"""Popularity of experts: counts, sums over ranks, and comparison of windows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.config import POPULARITIES
from moe_ckpt.policies.expert_popularity import accumulate, carried_over, has_shifted

SO_FAR = np.array([[10.0, 0.0], [2.0, 4.0]])
HARD = np.array([[20, 0], [1, 3]])
SOFT = np.array([[7.5, 0.25], [0.5, 2.0]])
TOKENS = st.lists(st.integers(0, 1000), min_size=4, max_size=4)


def counts(values: list[int]) -> npt.NDArray[np.float64]:
    return np.array(values, np.float64)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("hard", [[30.0, 0.0], [3.0, 7.0]]),
        ("soft", [[17.5, 0.25], [2.5, 6.0]]),
        ("decayed", [[12.5, 0.0], [1.75, 3.75]]),
    ],
)
def test_an_iteration_adds_what_its_kind_counts(
    kind: str, expected: list[list[float]]
) -> None:
    after = accumulate(kind, SO_FAR, HARD, SOFT, decay=0.75)
    assert after.dtype == np.float64
    assert after.tolist() == expected


@pytest.mark.parametrize("kind", [kind for kind in POPULARITIES if kind != "decayed"])
def test_a_window_starts_from_zero(kind: str) -> None:
    assert carried_over(kind, SO_FAR).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_an_average_goes_on_through_windows_in_an_array_of_its_own() -> None:
    carried = carried_over("decayed", SO_FAR)
    assert carried.tolist() == SO_FAR.tolist()
    assert not np.shares_memory(carried, SO_FAR)


@given(
    kind=st.sampled_from(POPULARITIES),
    ranks=st.lists(st.tuples(TOKENS, TOKENS, TOKENS), min_size=1, max_size=4),
)
def test_ranks_may_accumulate_and_sum_later(
    kind: str, ranks: list[tuple[list[int], list[int], list[int]]]
) -> None:
    triples = [
        (counts(so_far), counts(hard), counts(soft)) for so_far, hard, soft in ranks
    ]
    summed_later = sum(accumulate(kind, *triple, decay=0.25) for triple in triples)
    so_far, hard, soft = (
        np.sum(column, axis=0) for column in zip(*triples, strict=True)
    )
    np.testing.assert_array_equal(
        summed_later, accumulate(kind, so_far, hard, soft, decay=0.25)
    )


@pytest.mark.parametrize(
    ("reference", "now", "change", "share", "shifted"),
    [
        pytest.param(
            [10, 10, 20], [6, 5, 9], 0.1, 0.25, True, id="a third of them by 20 percent"
        ),
        pytest.param(
            [10, 10, 20], [6, 5, 9], 0.1, 0.34, False, id="fewer experts than asked for"
        ),
        pytest.param(
            [10, 10, 20],
            [6, 5, 9],
            0.2,
            0.25,
            False,
            id="exactly the change is not more",
        ),
        pytest.param(
            [100, 100, 100, 100],
            [112, 96, 96, 96],
            0.1,
            0.25,
            True,
            id="exactly the share is enough",
        ),
        pytest.param(
            [1, 2, 3],
            [10, 20, 30],
            0.0,
            0.01,
            False,
            id="a longer window with the same frequencies",
        ),
        pytest.param(
            [0, 5, 5, 0], [1, 500, 500, 0], 0.1, 0.25, True, id="from none to some"
        ),
        pytest.param(
            [0, 0, 0], [0, 0, 0], 0.0, 0.01, False, id="nothing was ever counted"
        ),
        pytest.param([0, 0, 0], [1, 0, 0], 0.1, 0.25, True, id="the first counts"),
        pytest.param([1, 1, 0], [0, 0, 0], 0.1, 0.5, True, id="the last counts"),
        pytest.param([], [], 0.1, 0.0, False, id="no experts"),
    ],
)
def test_popularity_shifted(
    reference: list[int], now: list[int], change: float, share: float, shifted: bool
) -> None:
    assert (
        has_shifted(counts(reference), counts(now), change=change, share=share)
        is shifted
    )
