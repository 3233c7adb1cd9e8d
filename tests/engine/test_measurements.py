"""Seconds that a snapshot adds to training.

A snapshot stops training, and slows down the iterations in which the snapshot is
copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moe_ckpt.engine.measurements import Measurements
from moe_ckpt.types import ENOUGH_WINDOWS


class Loop:
    """Iterations of given durations, on a simulated clock."""

    def __init__(self, warm_up_s: float = 9.0) -> None:
        self.now_s = 0.0
        self.meter = Measurements(0, lambda: self.now_s)
        for _ in range(2):
            self.iterate(warm_up_s, quiet=True)

    def iterate(self, seconds: float, *, quiet: bool) -> None:
        self.meter.iteration_started(is_quiet=quiet)
        self.now_s += seconds
        self.meter.iteration_finished()

    def snapshot(
        self,
        *,
        stall_s: float,
        busy_s: float,
        wait_s: float = 0.0,
        sizes: Sequence[int] = (),
    ) -> None:
        self.meter.snapshot_began()
        with self.meter.stalling():
            self.now_s += stall_s
        for size_bytes in sizes:
            self.meter.copied(size_bytes, 1.0)
        with self.meter.waiting():
            self.now_s += wait_s
        self.iterate(busy_s, quiet=False)
        self.iterate(1.0, quiet=True)


@pytest.mark.parametrize(
    ("stall_s", "busy_s", "expected"),
    [
        pytest.param(0.25, (1.5, 1.5, 1.5), 0.75, id="stops and slows down"),
        pytest.param(0.0, (1.0, 1.0, 4.0), 1.0, id="the average"),
        pytest.param(
            0.0, (0.5, 0.5, 0.5), 0.0, id="noise makes nothing cheaper than free"
        ),
    ],
)
def test_a_snapshot_costs_stalls_and_slower_steps(
    stall_s: float, busy_s: tuple[float, ...], expected: float
) -> None:
    loop = Loop()
    loop.iterate(1.0, quiet=True)
    for seconds in busy_s:
        assert loop.meter.snapshot_cost_s() is None, "too few have been measured"
        loop.snapshot(stall_s=stall_s, busy_s=seconds)
    loop.meter.snapshot_began()
    assert loop.meter.snapshot_cost_s() == expected


def test_nothing_is_known_while_no_iteration_was_quiet() -> None:
    loop = Loop()
    for _ in range(5):
        loop.meter.snapshot_began()
        loop.iterate(2.0, quiet=False)
    assert loop.meter.snapshot_cost_s() is None
    assert (loop.meter.iteration_s(), loop.meter.iters_since_quiet) == (2.0, 5)
    loop.iterate(2.0, quiet=True)
    assert loop.meter.iters_since_quiet == 0


@pytest.mark.parametrize("forgotten", [True, False])
def test_a_forgotten_snapshot_does_not_count(forgotten: bool) -> None:
    loop = Loop()
    loop.iterate(1.0, quiet=True)
    loop.snapshot(stall_s=30.0, busy_s=1.0)
    if forgotten:
        loop.meter.drop_snapshot()
    for _ in range(3):
        loop.snapshot(stall_s=2.0, busy_s=1.0)
    loop.meter.snapshot_began()
    assert loop.meter.snapshot_cost_s() == (2.0 if forgotten else 9.0)


def test_the_first_iterations_of_a_process_do_not_count() -> None:
    loop = Loop(warm_up_s=50.0)
    assert loop.meter.iteration_s() == 0.0
    loop.iterate(1.0, quiet=True)
    assert loop.meter.iteration_s() == 1.0


def test_pauses_belong_to_no_iteration() -> None:
    loop = Loop()
    loop.meter.iteration_started(is_quiet=True)
    loop.now_s += 1.0
    loop.meter.paused()
    loop.now_s += 5.0
    loop.meter.resumed()
    loop.now_s += 1.0
    loop.meter.iteration_finished()
    assert loop.meter.iteration_s() == 2.0


def test_bubbles_have_room_for_copies() -> None:
    meter = Loop().meter
    meter.bubbles_s.append(1.0)
    assert meter.bubble_bytes() == 0.0, "it is not known how fast copies are"
    meter.copy_rates.extend([10.0, 1000.0, 20.0])
    meter.bubbles_s.extend([2.0, 50.0])
    assert meter.bubble_bytes() == 40.0


def test_waits_for_copies_are_no_part_of_what_snapshots_add() -> None:
    loop = Loop()
    loop.iterate(1.0, quiet=True)
    assert loop.meter.added.fit(100) is None, "nothing has been measured"
    for _ in range(ENOUGH_WINDOWS):
        assert not loop.meter.added.is_settled
        loop.snapshot(stall_s=0.25, busy_s=1.5, wait_s=4.0, sizes=(30, 20))
    loop.meter.snapshot_began()
    assert loop.meter.snapshot_cost_s() == 4.75
    assert loop.meter.added.is_settled
    assert loop.meter.added.fit(100) == (0.0, 1.5)  # 50 bytes added 0.75 s


def test_replays_are_measured_by_the_iteration() -> None:
    meter = Measurements(0)
    assert meter.replayed_iteration_s() is None
    for num_iters, seconds in ((0, 9.0), (4, 2.0), (2, 3.0), (1, 0.75)):
        meter.replayed(num_iters, seconds)
    assert meter.replayed_iteration_s() == 0.75
