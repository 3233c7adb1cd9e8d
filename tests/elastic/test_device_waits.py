"""Points that a device has not reached: late ones are waits for other ranks, unless they are later than any wait."""

from __future__ import annotations

import threading

from moe_ckpt.elastic.device_waits import DeviceWaits
from tests.elastic.workers import wait_until


class Point:
    """A point in the work of a device, which the test lets it reach."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.reach, self.query = self._reached.set, self._reached.is_set


def test_the_oldest_unreached_point_decides() -> None:
    said: list[bool] = []
    waits = DeviceWaits(said.append, limit_s=60.0, late_s=0.05)
    points = [Point(), Point()]
    waits.add(None)
    for point in points:
        waits.add(point)
    assert wait_until(lambda: said == [True])
    points[0].reach()
    points[1].reach()
    assert wait_until(lambda: said == [True, False])


def test_points_of_a_generation_that_is_over_do_not_count() -> None:
    said: list[bool] = []
    waits = DeviceWaits(said.append, limit_s=60.0, late_s=0.05)
    waits.add(Point())
    assert wait_until(lambda: said == [True])
    waits.clear()
    assert said == [True, False]


def test_a_device_that_hangs_is_no_wait_for_others_after_the_limit() -> None:
    said: list[bool] = []
    waits = DeviceWaits(said.append, limit_s=0.3, late_s=0.05)
    waits.add(Point())
    assert wait_until(lambda: said == [True, False])
