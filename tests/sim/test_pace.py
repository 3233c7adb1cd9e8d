"""The lengths of single iterations, relative to the mean."""

from __future__ import annotations

from moe_ckpt.sim.pace import EVEN, Pace


def test_an_even_pace_counts_iterations_exactly() -> None:
    assert EVEN.between(3, 10) == 7
    assert isinstance(EVEN.between(3, 10), int), "no rounding, however many there are"


def test_known_iterations_have_their_own_length_and_later_ones_the_mean() -> None:
    pace = Pace([0.5, 2.0])
    assert [
        pace.between(done, reached)
        for done, reached in [(0, 1), (1, 2), (0, 5), (1, 3), (2, 4), (2, 2)]
    ] == [
        *(0.5, 2.0, 5.5, 3.0),
        *(2, 0),
    ]
    assert (pace.after(0), pace.after(1), pace.after(2)) == ((0.5, 2.0), (2.0,), ())


def test_iterations_that_run_again_have_another_length() -> None:
    pace = Pace([0.5, 2.0]).rerun(3, 0.25)
    assert [pace.length(number) for number in (1, 2, 3, 4)] == [0.125, 0.5, 0.25, 1.0]
    spans = [(0, 1), (0, 3), (1, 5), (2, 3), (3, 5), (4, 4)]
    assert [pace.between(done, reached) for done, reached in spans] == [
        0.125,
        0.875,
        2.75,
        0.25,
        2.0,
        0.0,
    ]
    assert (pace.after(0), pace.after(2), pace.after(3)) == (
        (0.125, 0.5, 0.25),
        (0.25,),
        (),
    )
    assert Pace([0.5] * 4).rerun(2, 0.5).after(1) == (0.25, 0.5, 0.5), (
        "the others keep their own"
    )
    assert EVEN.rerun(9, 1.0).after(0) == EVEN.rerun(0, 0.5).after(0) == ()
    assert isinstance(EVEN.rerun(9, 1.0).between(3, 10), int)
