"""Points that a device has not reached: late ones are waits for other ranks, unless they are later than any wait."""

from __future__ import annotations

from moe_ckpt.elastic.device_waits import DeviceWaits
from tests.elastic.workers import DevicePoint, wait_until


def test_the_oldest_unreached_point_decides() -> None:
    said: list[bool] = []
    waits = DeviceWaits(said.append, limit_s=60.0, late_s=0.05)
    points = [DevicePoint(), DevicePoint()]
    waits.add(None)
    for point in points:
        waits.add(point)
    assert wait_until(lambda: said == [True])
    points[0].reached.set()
    points[1].reached.set()
    assert wait_until(lambda: said == [True, False])


def test_points_of_a_generation_that_is_over_do_not_count() -> None:
    said: list[bool] = []
    waits = DeviceWaits(said.append, limit_s=60.0, late_s=0.05)
    waits.add(DevicePoint())
    assert wait_until(lambda: said == [True])
    waits.clear()
    assert said == [True, False]


def test_a_device_that_hangs_is_no_wait_for_others_after_the_limit() -> None:
    said: list[bool] = []
    waits = DeviceWaits(said.append, limit_s=0.3, late_s=0.05)
    waits.add(DevicePoint())
    assert wait_until(lambda: said == [True, False])
