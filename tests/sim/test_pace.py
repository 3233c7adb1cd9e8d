"""The lengths of single iterations beside the mean."""

from __future__ import annotations

from moe_ckpt.sim.pace import EVEN, Pace


def test_an_even_pace_counts_iterations_exactly() -> None:
    assert EVEN.between(3, 10) == 7
    assert isinstance(EVEN.between(3, 10), int), "no rounding, however many there are"


def test_known_iterations_have_their_own_length_and_later_ones_the_mean() -> None:
    pace = Pace([0.5, 2.0])
    assert [pace.between(done, reached) for done, reached in [(0, 1), (1, 2), (0, 5), (1, 3), (2, 4), (2, 2)]] == [
        *(0.5, 2.0, 5.5, 3.0),
        *(2, 0),
    ]
    assert (pace.after(0), pace.after(1), pace.after(2)) == ((0.5, 2.0), (2.0,), ())
