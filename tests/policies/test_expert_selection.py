"""Partial snapshots: figures of the paper, properties of small models, brute force."""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain, pairwise, product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.policies.expert_selection import (
    Selection,
    bottleneck_by_k,
    fitting_k,
    limit_per_k,
    most_popular,
    most_unsaved_of,
    next_k,
    sequential_experts,
)

IntArray = npt.NDArray[np.int64]


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        pytest.param(0, [0, 1, 2, 0], id="Figure 4: Expert(1-0, 3-1, 5-2, 7-0)"),
        pytest.param(1, [1, 2, 0, 1], id="Figure 4, next: Expert(1-1, 3-2, 5-0, 7-1)"),
        pytest.param(2, [2, 0, 1, 2], id="the third of three"),
        pytest.param(3, [0, 1, 2, 0], id="once around"),
    ],
)
def test_sequential_selection_is_that_of_the_figure(
    turn: int, expected: list[int]
) -> None:
    chosen = sequential_experts(turn, num_layers=4, num_experts=3, ep=3, k=1)
    assert chosen == tuple((expert,) for expert in expected)


@st.composite
def models(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Draw the numbers of layers, experts and EP ranks, and k, of a small model."""
    ep, num_local = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    return (
        draw(st.integers(1, 5)),
        ep * num_local,
        ep,
        draw(st.integers(1, ep * num_local)),
    )


@given(model=models(), first=st.integers(0, 50))
def test_every_expert_is_taken_in_time(
    model: tuple[int, int, int, int], first: int
) -> None:
    num_layers, num_experts, ep, k = model
    turns = range(first, first + math.ceil(num_experts / k))
    chosen = [
        sequential_experts(
            turn, num_layers=num_layers, num_experts=num_experts, ep=ep, k=k
        )
        for turn in turns
    ]
    for layer in range(num_layers):
        taken = Counter(chain.from_iterable(selection[layer] for selection in chosen))
        assert set(taken) == set(range(num_experts))
        assert num_experts % k or set(taken.values()) == {1}
        assert all(
            selection[layer] == tuple(sorted(set(selection[layer])))
            for selection in chosen
        )
        assert all(len(selection[layer]) == k for selection in chosen)


@given(model=models(), turn=st.integers(0, 50))
def test_ranks_save_as_many_within_one(
    model: tuple[int, int, int, int], turn: int
) -> None:
    num_layers, num_experts, ep, k = model
    chosen = sequential_experts(
        turn, num_layers=num_layers, num_experts=num_experts, ep=ep, k=k
    )
    by_ep_rank = [0] * ep
    for expert in chain.from_iterable(chosen):
        by_ep_rank[expert // (num_experts // ep)] += 1
    assert sum(by_ep_rank) == k * num_layers
    assert max(by_ep_rank) - min(by_ep_rank) <= 1


@given(model=models(), data=st.data())
def test_the_most_popular_are_taken_of_equals_the_lowest(
    model: tuple[int, int, int, int], data: st.DataObject
) -> None:
    num_layers, num_experts, _, k = model
    row = st.lists(st.integers(0, 5), min_size=num_experts, max_size=num_experts)
    unsaved = np.array(
        data.draw(st.lists(row, min_size=num_layers, max_size=num_layers)), np.int64
    )
    counts = data.draw(
        st.lists(st.integers(0, num_experts), min_size=num_layers, max_size=num_layers)
    )
    for num_taken in (counts, [k] * num_layers):
        for layer, taken in enumerate(most_popular(unsaved, num_taken)):
            ranked = sorted(
                range(num_experts),
                key=lambda expert: (-int(unsaved[layer, expert]), expert),
            )
            assert taken == tuple(sorted(ranked[: num_taken[layer]]))


@pytest.mark.parametrize(
    ("selection", "unsaved", "k", "expected"),
    [
        pytest.param(
            ((0, 1),), [[3, 7, 9, 9]], 1, ((1,),), id="only of those in the snapshot"
        ),
        pytest.param(((0, 1, 2, 3),), [[3, 7, 9, 9]], 3, ((1, 2, 3),), id="most first"),
        pytest.param(
            ((0, 1), (2,)),
            [[1, 1, 1, 1]] * 2,
            2,
            ((0, 1), (2,)),
            id="fewer than asked for",
        ),
        pytest.param(
            ((0, 2), (0, 2)),
            [[1, 1, 1, 1]] * 2,
            1,
            ((0,), (2,)),
            id="of equals another rank's",
        ),
        pytest.param(
            ((0, 1), (0, 1)),
            [[1, 1, 1, 1]] * 2,
            1,
            ((0,), (0,)),
            id="of one rank's equals the lowest",
        ),
        pytest.param(
            ((0, 2), (0, 2)),
            [[1, 1, 1, 1], [2, 1, 1, 1]],
            1,
            ((0,), (0,)),
            id="need before balance",
        ),
    ],
)
def test_disks_get_what_they_lack(
    selection: Selection, unsaved: list[list[int]], k: int, expected: Selection
) -> None:
    assert most_unsaved_of(selection, np.array(unsaved, np.int64), k, ep=2) == expected


def persisted(
    model: tuple[int, int, int, int], k_persist: int, *, turns: int
) -> list[Selection]:
    """Return the experts that go to storage in each turn of sequential snapshots."""
    num_layers, num_experts, ep, k = model
    waiting = np.zeros((num_layers, num_experts), np.int64)
    history = []
    for turn in range(turns):
        waiting += 1
        snapshot = sequential_experts(
            turn, num_layers=num_layers, num_experts=num_experts, ep=ep, k=k
        )
        chosen = most_unsaved_of(snapshot, waiting, k_persist, ep=ep)
        for layer, experts in enumerate(chosen):
            waiting[layer, list(experts)] = 0
        history.append(chosen)
    return history


def longest_wait(history: list[Selection], layer: int, expert: int) -> int:
    turns = [
        -1,
        *(turn for turn, chosen in enumerate(history) if expert in chosen[layer]),
        len(history),
    ]
    return max(after - before for before, after in pairwise(turns))


def most_rounds(num_experts: int, k: int, k_persist: int) -> int:
    neighbours = k - 1 if num_experts % k == 0 else min(2 * (k - 1), num_experts - 1)
    return 1 + neighbours // k_persist


def test_every_expert_gets_to_storage_in_time() -> None:
    """The models have up to 8 experts, on one EP rank or on one EP rank per expert."""
    for num_experts in range(1, 9):
        for k, ep in product(range(1, num_experts + 1), {1, num_experts}):
            for k_persist in range(1, k + 1):
                bound = most_rounds(num_experts, k, k_persist) * math.ceil(
                    num_experts / k
                )
                history = persisted((2, num_experts, ep, k), k_persist, turns=3 * bound)
                waits = [
                    longest_wait(history, *layer_and_expert)
                    for layer_and_expert in product(range(2), range(num_experts))
                ]
                assert max(waits) <= bound


def literal_sequential(other: IntArray, expert: IntArray, ep: int, k: int) -> int:
    _, num_layers, num_experts = expert.shape
    sizes = {"num_layers": num_layers, "num_experts": num_experts, "ep": ep, "k": k}
    turns = [sequential_experts(turn, **sizes) for turn in range(num_experts)]
    return max(
        int(own)
        + sum(int(rows[layer, list(taken)].sum()) for layer, taken in enumerate(chosen))
        for own, rows in zip(other, expert, strict=True)
        for chosen in turns
    )


@st.composite
def byte_tables(draw: st.DrawFn) -> tuple[IntArray, IntArray, int]:
    """Draw the bytes that up to 3 ranks copy of a small model.

    Returns:
        The other bytes [ranks], the expert bytes [ranks, layers, experts], and the
        number of EP ranks.
    """
    num_layers, num_experts, ep, _ = draw(models())
    num_ranks = draw(st.integers(1, 3))
    size = num_ranks * num_layers * num_experts
    sizes = draw(st.lists(st.integers(0, 20), min_size=size, max_size=size))
    other = draw(st.lists(st.integers(0, 20), min_size=num_ranks, max_size=num_ranks))
    return (
        np.array(other, np.int64),
        np.array(sizes, np.int64).reshape(num_ranks, num_layers, num_experts),
        ep,
    )


@given(table=byte_tables())
def test_the_bottleneck_is_the_worst_of_all_turns(
    table: tuple[IntArray, IntArray, int],
) -> None:
    other, expert, ep = table
    by_k = bottleneck_by_k(other, expert, ep=ep, sequential=True)
    num_experts = expert.shape[2]
    assert by_k.tolist() == [
        literal_sequential(other, expert, ep, k) for k in range(1, num_experts + 1)
    ]
    of_any = bottleneck_by_k(other, expert, ep=ep, sequential=False)
    assert np.all(of_any >= by_k)
    assert of_any[-1] == by_k[-1] == (other + expert.sum(axis=(1, 2))).max()
    assert of_any[0] == max(
        o + sum(layer.max() for layer in rank)
        for o, rank in zip(other, expert, strict=True)
    )


@pytest.mark.parametrize(
    ("copy_bytes_per_s", "overlap_s", "k"),
    [
        (10.0, 3.0, 2),
        (10.0, 2.5, 2),
        (10.0, 2.4, 1),
        (10.0, 0.1, 1),
        (10.0, 99.0, 4),
        (0.0, 1.0, 1),
    ],
)
def test_the_largest_k_that_forward_and_backward_hide(
    copy_bytes_per_s: float, overlap_s: float, k: int
) -> None:
    bottleneck = np.array([15, 25, 35, 45], np.int64)
    assert (
        fitting_k(bottleneck, copy_bytes_per_s=copy_bytes_per_s, overlap_s=overlap_s)
        == k
    )


def test_a_smaller_k_may_be_the_one_that_does_not_fit() -> None:
    assert (
        fitting_k(np.array([1, 9, 8, 9], np.int64), copy_bytes_per_s=1.0, overlap_s=8.0)
        == 3
    )


@pytest.mark.parametrize(
    ("k", "plt_since", "expected"),
    [
        (1, 0.009, 1),
        (1, 0.01, 1),
        (1, 0.011, 2),
        (4, 0.02, 8),
        (6, 0.02, 8),
        (8, 0.02, 8),
    ],
)
def test_k_is_doubled_where_it_has_cost_too_much(
    k: int, plt_since: float, expected: int
) -> None:
    assert next_k(k, num_experts=8, plt_since=plt_since, limit=0.01) == expected


@pytest.mark.parametrize(
    ("first_k", "num_experts", "shares"),
    [
        (1, 16, 4),
        (2, 16, 3),
        (8, 16, 1),
        (16, 16, 1),
        (3, 8, 2),
        (1, 1, 1),
        (1, 2, 1),
        (1, 9, 4),
    ],
)
def test_every_k_below_all_experts_has_an_equal_share_of_the_limit(
    first_k: int, num_experts: int, shares: int
) -> None:
    assert (
        limit_per_k(0.0375, first_k=first_k, num_experts=num_experts) == 0.0375 / shares
    )
