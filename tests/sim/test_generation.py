"""A stretch of training: the ends of iterations, and the windows kept by then."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.sim.generation import Generation, Kept, Moment
from moe_ckpt.sim.policies import plan_saving
from moe_ckpt.sim.saving import Saving
from moe_ckpt.sim.snapshot_pattern import NOTHING
from tests.sim.setups import ckpt, cluster, setup

SETUP = setup(machines=cluster(copy_bytes_per_s=2000.0, disk_bytes_per_s=1e4))
LOCAL = plan_saving(
    ckpt("ckpt=moevement", "ckpt.window=3", "ckpt.durable_every_iters=4"), SETUP
)
TWO = plan_saving(ckpt("ckpt=moevement", "ckpt.window=3", "ckpt.keep_windows=2"), SETUP)


def generation(
    saving: Saving, *, start: int = 0, carried: tuple[Kept, ...] = ()
) -> Generation:
    return Generation(
        SETUP.costs, saving, saving.settled, start=start, since_s=100.0, carried=carried
    )


def after(iterations: int, into_s: float = 5.0) -> Moment:
    return Moment(iterations=iterations, into_s=into_s, ready=False)


@given(start=st.integers(0, 50), iterations=st.integers(0, 200))
def test_time_is_iterations_stalls_and_saves(start: int, iterations: int) -> None:
    of = generation(LOCAL, start=start)
    stalls_s = sum(
        snapshot.stall_s for snapshot in LOCAL.settled.snapshots(0, iterations - 1)
    )
    num_saved = sum(
        iteration % 4 == 0 for iteration in range(start + 1, start + iterations + 1)
    )
    assert LOCAL.durable is not None
    expected = 10.0 * iterations + stalls_s + num_saved * LOCAL.durable.stall_s
    assert of.elapsed_s(iterations) == pytest.approx(expected)
    assert LOCAL.overhead_s > 0


@given(at_s=st.floats(100.0, 5000.0))
def test_a_moment_is_after_what_was_done_and_before_the_next(at_s: float) -> None:
    of = generation(LOCAL)
    moment = of.moment(at_s)
    assert 100.0 + of.elapsed_s(moment.iterations) + moment.into_s == pytest.approx(
        at_s
    )
    assert 0 <= moment.into_s <= of.iteration_s(moment.iterations + 1)
    first = of.first_commit_after(at_s)
    assert 100.0 + of.elapsed_s(first) >= at_s
    assert first == 1 or 100.0 + of.elapsed_s(first - 1) < at_s


def test_a_window_is_kept_when_the_iteration_after_it_is_done() -> None:
    """The window is kept even sooner: once that iteration has complete gradients."""
    moments = [
        *map(after, (0, 1, 3, 4, 6, 7)),
        Moment(iterations=3, into_s=9.9, ready=True),
    ]
    spans = [
        [(window.start, window.end) for window in generation(LOCAL).kept(moment)]
        for moment in moments
    ]
    assert spans == [
        [(0, 0)],
        [(0, 0)],
        [(0, 0)],
        [(1, 3)],
        [(1, 3)],
        [(4, 6)],
        [(1, 3)],
    ]


def test_a_kept_window_is_replicated_after_the_time_of_a_copy() -> None:
    copied_s = LOCAL.kept_bytes / LOCAL.kept_bytes_per_s
    of = replace(
        generation(LOCAL, start=16, carried=(Kept(start=10, end=12),)), pattern=NOTHING
    )
    moments = [of.moment(of.since_s + copied_s + late_s) for late_s in (-0.1, 0.1)]
    assert [of.is_replicated(moment) for moment in moments] == [False, True]
    assert not replace(of, carried=()).is_replicated(after(99)), "there was no window"
    assert generation(LOCAL).is_replicated(after(0, 0.0)), (
        "training begins once the base is kept"
    )


def test_several_windows_are_kept_and_those_from_before_until_then() -> None:
    before = (Kept(start=10, end=12), Kept(start=13, end=15))
    of = generation(TWO, start=16, carried=before)
    spans = [
        [(window.start, window.end) for window in of.kept(after(done))]
        for done in (0, 1, 4, 8)
    ]
    assert spans == [
        [(10, 12), (13, 15)],
        [(13, 15), (16, 16)],
        [(16, 16), (17, 19)],
        [(17, 19), (20, 22)],
    ]


def test_a_snapshot_that_is_taken_again_replaces_the_one_from_before() -> None:
    """Servers begin with the carried state, which ranks hold only once.

    That holds even before all ranks have agreed on the new snapshot.
    """
    of = setup()
    saving = plan_saving(ckpt("ckpt=flowcheck", "ckpt.replicas=1"), of)
    before = (Kept(start=4, end=4), Kept(start=5, end=5))
    again = Generation(
        of.costs, saving, saving.settled, start=5, since_s=100.0, carried=before[1:]
    )
    assert again.kept(after(0)) == before[1:]
    assert replace(again, carried=before).kept(after(0)) == before
