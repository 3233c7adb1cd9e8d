"""Expected shares of lost time: terms by hand, and the choice against a full search."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.policies.window_cost import (
    JobCost,
    WindowSize,
    alone_share,
    cheapest_window,
    shortest_pause,
    window_terms,
)

JOB = JobCost(
    iteration_s=1.0,
    overlap_s=1.0,
    per_snapshot_s=0.01,
    per_byte_s=0.0,
    host_bytes_per_s=100.0,
    peer_bytes_per_s=100.0,
    replay_share=1.0,
    mtbf_s=1000.0,
)


def size(
    num_slots: int = 2, slot_bytes: int = 50, most_pause_iters: int = 8
) -> WindowSize:
    return WindowSize(
        slot_bytes=(slot_bytes,) * num_slots,
        window_bytes=num_slots * slot_bytes,
        least_pause_iters=0,
        most_pause_iters=most_pause_iters,
    )


@pytest.mark.parametrize(
    ("window", "job", "pause_iters", "snapshot_share", "replay_share"),
    [
        pytest.param(size(), JOB, 8, 0.002, 0.007, id="as documented"),
        pytest.param(size(), JOB, 0, 0.01, 0.003, id="without a pause"),
        pytest.param(
            size(), replace(JOB, per_byte_s=1e-4), 8, 0.003, 0.007, id="each byte costs"
        ),
        pytest.param(
            size(slot_bytes=150),
            JOB,
            0,
            0.51,
            0.003,
            id="the step waits for host memory",
        ),
        pytest.param(
            size(slot_bytes=150),
            replace(JOB, host_bytes_per_s=1e9),
            0,
            0.51,
            0.003,
            id="and for peers",
        ),
        pytest.param(
            size(slot_bytes=150),
            replace(JOB, host_bytes_per_s=1e9),
            1,
            0.02 / 3,
            0.0035,
            id="or a pause",
        ),
        pytest.param(
            size(),
            replace(JOB, replay_share=0.5),
            8,
            0.002,
            0.0035,
            id="a stage replays faster",
        ),
    ],
)
def test_terms(
    window: WindowSize,
    job: JobCost,
    pause_iters: int,
    snapshot_share: float,
    replay_share: float,
) -> None:
    terms = window_terms(window, job, pause_iters)
    assert (terms.snapshot_share, terms.replay_share) == pytest.approx(
        (snapshot_share, replay_share)
    )
    assert terms.lost_share == terms.snapshot_share + terms.replay_share


@pytest.mark.parametrize(
    ("num_micro_batches", "num_stages", "share"),
    [(2, 2, 2 / 3), (32, 8, 32 / 39), (4, 1, 1.0)],
)
def test_a_stage_by_itself_has_no_bubbles(
    num_micro_batches: int, num_stages: int, share: float
) -> None:
    assert alone_share(num_micro_batches, num_stages) == share


@given(
    sizes=st.lists(
        st.builds(size, st.integers(1, 6), st.integers(1, 300), st.integers(0, 30)),
        min_size=1,
        max_size=4,
    ),
    job=st.builds(
        replace,
        st.just(JOB),
        per_snapshot_s=st.floats(0.0, 0.5),
        per_byte_s=st.floats(0.0, 0.01),
        host_bytes_per_s=st.floats(10.0, 1000.0),
        peer_bytes_per_s=st.floats(10.0, 1000.0),
        mtbf_s=st.floats(10.0, 1e5),
    ),
    overhead=st.floats(0.001, 0.5),
)
def test_the_choice_is_the_best_of_all(
    sizes: list[WindowSize], job: JobCost, overhead: float
) -> None:
    everything = [
        window_terms(each, job, pause)
        for each in sizes
        for pause in range(each.most_pause_iters + 1)
    ]
    allowed = [terms for terms in everything if terms.snapshot_share <= overhead]
    found = cheapest_window(sizes, job, overhead=overhead)
    if allowed:
        assert found.snapshot_share <= overhead
        assert found.lost_share == min(terms.lost_share for terms in allowed)
    else:
        assert found.snapshot_share == min(terms.snapshot_share for terms in everything)


def test_a_window_beyond_the_cap_is_not_chosen_although_it_loses_less() -> None:
    large, small = (
        size(1, slot_bytes=150, most_pause_iters=0),
        size(2, most_pause_iters=0),
    )
    job = replace(JOB, mtbf_s=2.0)
    assert (
        window_terms(large, job, 0).lost_share < window_terms(small, job, 0).lost_share
    )
    assert cheapest_window([large, small], job, overhead=0.03).num_slots == 2
    assert cheapest_window([large, small], job, overhead=0.6).num_slots == 1


@pytest.mark.parametrize(
    ("added_s", "overhead", "pause_iters"),
    [
        pytest.param(0.05, 0.05, 0, id="within the cap already"),
        pytest.param(0.05, 0.01, 8, id="ten iterations in all"),
        pytest.param(0.5, 0.01, 20, id="the longest where none is enough"),
    ],
)
def test_the_shortest_pause_within_a_cap(
    added_s: float, overhead: float, pause_iters: int
) -> None:
    job = replace(JOB, per_snapshot_s=added_s)
    assert (
        shortest_pause(size(most_pause_iters=20), job, overhead=overhead) == pause_iters
    )
