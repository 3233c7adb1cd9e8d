"""A device that is late at a point counts as waiting for ranks, up to a time limit."""

from __future__ import annotations

import threading

import pytest

from moe_ckpt.elastic.device_waits import MOST_AHEAD, DeviceWaits
from tests.harness.gloo.workers import DevicePoint, wait_until


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


def test_a_host_is_only_so_far_ahead_of_its_device() -> None:
    waits, points, over = (
        DeviceWaits(lambda waits: None, limit_s=60.0),
        [],
        threading.Event(),
    )

    def add() -> None:
        while len(points) < MOST_AHEAD + 4:
            points.append(DevicePoint())
            waits.add(points[-1], over.is_set)

    host = threading.Thread(target=add)
    host.start()
    assert wait_until(lambda: len(points) == MOST_AHEAD + 1)
    for at in range(2):
        points[at].reached.set()
        assert wait_until(lambda at=at: len(points) == MOST_AHEAD + 2 + at)
    over.set()
    host.join()
    assert len(points) == MOST_AHEAD + 4, "a generation that is over keeps no host"


@pytest.mark.parametrize("fails", [True, False])
def test_a_device_that_will_not_be_done_is_told_once(fails: bool) -> None:
    told: list[str] = []
    failures: list[str] = []
    waits = DeviceWaits(
        lambda waits: None,
        lambda: next(iter(failures), None),
        limit_s=60.0 if fails else 0.3,
    )
    waits.begin(told.append)
    waits.add(DevicePoint())
    if fails:
        failures.append("NCCL reports COMM_ERROR")
    wanted = (
        "NCCL reports COMM_ERROR"
        if fails
        else "an operation was not done in runtime.operation_s=0.3 seconds"
    )
    assert wait_until(lambda: told == [wanted])
    waits.clear()
    later: list[str] = []
    waits.begin(later.append)
    waits.add(DevicePoint())
    assert wait_until(lambda: later == [wanted])
    assert told == [wanted]
