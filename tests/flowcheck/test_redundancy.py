"""Equation (2) of FlowCheck, against the paper's numbers and a capture with losses."""

from __future__ import annotations

import pytest

from moe_ckpt.flowcheck.mirror.frames import segment_of
from moe_ckpt.sim.capture_redundancy import failure_probability
from tests.flowcheck.captured import BUCKETS, NUM_RANKS, frames, wanted, watch


@pytest.mark.parametrize(
    ("captures", "at_most", "at_least"), [(2, 4.1e-3, 3.9e-3), (3, 6.1e-12, 5.9e-12)]
)
def test_the_papers_example(captures: int, at_most: float, at_least: float) -> None:
    """Section 6.2 has 4e-3 and 6e-12 for 16 million packets on 8 ranks."""
    found = failure_probability(packets=16e6, ranks=8, captures=captures, loss=1e-9)
    assert at_least <= found <= at_most


def test_one_capture_is_never_enough_and_nothing_lost_is_always() -> None:
    assert failure_probability(packets=10, ranks=4, captures=1, loss=0.0) == 1.0
    assert failure_probability(packets=10, ranks=4, captures=2, loss=0.0) == 0.0
    assert failure_probability(packets=10, ranks=4, captures=2, loss=1.0) == 1.0


def test_more_captures_lose_less() -> None:
    found = [
        failure_probability(packets=1e4, ranks=8, captures=captures, loss=1e-3)
        for captures in range(1, 9)
    ]
    assert found == sorted(found, reverse=True)
    assert found[1] > 0.9 > 0.02 > found[2]


def _failed_share(captures: int, loss: float) -> float:
    """Return the share of rounds in which the first iteration is incomplete.

    Each capture loses segments independently of other captures.
    """
    rounds, failed = 300, 0
    segments = [segment_of(frame) for frame in frames()]
    for seed in range(rounds):
        failed += watch(segments, captures, loss, seed).sums(wanted(0)) is None
    return failed / rounds


def test_measured_losses_are_near_the_equation() -> None:
    """A loss between operations has more effect than in the equation."""
    loss, packets = 0.01, 3 * 2 * len(BUCKETS)
    two, three = (_failed_share(captures, loss) for captures in (2, 3))
    expected = failure_probability(
        packets=packets, ranks=NUM_RANKS, captures=2, loss=loss
    )
    assert expected / 3 < two < 6 * expected
    assert three < two / 2
