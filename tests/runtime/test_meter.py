"""What a snapshot adds to training: by stopping it, and by slowing down the iterations in which it is copied."""

from __future__ import annotations

import pytest

from moe_ckpt.runtime.meter import Meter


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Loop:
    """Iterations that take as long as they are told to."""

    def __init__(self, warm_up_s: float = 9.0) -> None:
        self.clock = Clock()
        self.meter = Meter(0, self.clock)
        for _ in range(2):
            self.iterate(warm_up_s, quiet=True)

    def iterate(self, seconds: float, *, quiet: bool) -> None:
        self.meter.iteration_started(is_quiet=quiet)
        self.clock.now_s += seconds
        self.meter.iteration_finished()

    def stall(self, seconds: float) -> None:
        with self.meter.stalling():
            self.clock.now_s += seconds

    def snapshot(self, *, stall_s: float, busy_s: float) -> None:
        self.meter.snapshot_began()
        self.stall(stall_s)
        self.iterate(busy_s, quiet=False)
        self.iterate(1.0, quiet=True)


def test_a_snapshot_costs_what_it_stops_and_what_it_slows_down() -> None:
    loop = Loop()
    loop.iterate(1.0, quiet=True)
    for _ in range(3):
        assert loop.meter.snapshot_cost_s() is None, "too few have been measured"
        loop.snapshot(stall_s=0.25, busy_s=1.5)
    loop.meter.snapshot_began()
    assert loop.meter.snapshot_cost_s() == 0.75


def test_it_costs_the_average() -> None:
    loop = Loop()
    loop.iterate(1.0, quiet=True)
    for busy_s in (1.0, 1.0, 4.0):
        loop.snapshot(stall_s=0.0, busy_s=busy_s)
    loop.meter.snapshot_began()
    assert loop.meter.snapshot_cost_s() == 1.0


def test_noise_makes_nothing_cheaper_than_free() -> None:
    loop = Loop()
    loop.iterate(1.0, quiet=True)
    for _ in range(3):
        loop.snapshot(stall_s=0.0, busy_s=0.5)
    loop.meter.snapshot_began()
    assert loop.meter.snapshot_cost_s() == 0.0


def test_nothing_is_known_while_no_iteration_was_quiet() -> None:
    loop = Loop()
    for _ in range(5):
        loop.meter.snapshot_began()
        loop.iterate(2.0, quiet=False)
    assert loop.meter.snapshot_cost_s() is None
    assert loop.meter.iteration_s() == 2.0


@pytest.mark.parametrize("forgotten", [True, False])
def test_what_comes_once_does_not_count(forgotten: bool) -> None:
    loop = Loop()
    loop.iterate(1.0, quiet=True)
    loop.snapshot(stall_s=30.0, busy_s=1.0)
    if forgotten:
        loop.meter.forget_snapshot()
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
    loop.clock.now_s += 1.0
    loop.meter.paused()
    loop.clock.now_s += 5.0
    loop.meter.resumed()
    loop.clock.now_s += 1.0
    loop.meter.iteration_finished()
    assert loop.meter.iteration_s() == 2.0


def test_it_is_known_how_long_nothing_was_quiet() -> None:
    loop = Loop()
    for _ in range(3):
        loop.iterate(1.0, quiet=False)
    assert loop.meter.iters_since_quiet() == 3
    loop.iterate(1.0, quiet=True)
    assert loop.meter.iters_since_quiet() == 0


def test_bubbles_have_room_for_what_is_copied_in_them() -> None:
    meter = Loop().meter
    meter.bubbles_s.append(1.0)
    assert meter.bubble_bytes() == 0.0, "it is not known how fast copies are"
    meter.copy_rates.extend([10.0, 1000.0, 20.0])
    meter.bubbles_s.extend([2.0, 50.0])
    assert meter.bubble_bytes() == 40.0
