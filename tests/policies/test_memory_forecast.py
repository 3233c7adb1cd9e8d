"""The forecast of host memory, and the check that shared memory has room."""

from __future__ import annotations

import pytest

from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.memory_forecast import (
    MemoryForecast,
    SharedUse,
    forecast,
    require_room,
)

WINDOWS = {"window_bytes": 1000, "period_iters": 5, "dense_bytes": 700}
LOGS = {"log_bytes_per_iteration": 10, "step_log_bytes_per_iteration": 3}


def test_a_forecast_counts_the_logs_of_all_windows_and_of_this_iteration() -> None:
    assert forecast(keep_windows=2, **WINDOWS, **LOGS) == MemoryForecast(
        snapshots_bytes=3000,
        boundary_log_bytes=160,
        step_log_bytes=48,
        copies_bytes=0,
        total_bytes=3208,
        double_buffered_dense_bytes=1400,
    )


def test_copies_for_others_take_as_much_as_the_largest_of_them() -> None:
    wanted = forecast(
        keep_windows=1, num_copies=2, largest_window_bytes=1500, **WINDOWS, **LOGS
    )
    assert wanted.copies_bytes == 2 * (2 * 1500 + 11 * 3)
    assert wanted.total_bytes == 2000 + 110 + 33 + wanted.copies_bytes


def test_an_audit_needs_one_more_window_and_the_logs_since_the_audit_before() -> None:
    audited = forecast(
        keep_windows=2,
        num_copies=1,
        largest_window_bytes=1000,
        audit_every_iters=20,
        **WINDOWS,
        **LOGS,
    )
    assert audited.snapshots_bytes == 4000
    assert audited.step_log_bytes == 36 * 3
    assert audited.copies_bytes == 4000 + 36 * 3


def test_a_forecast_is_readable() -> None:
    mib = 1 << 20
    lines = MemoryForecast(
        snapshots_bytes=28 * mib,
        boundary_log_bytes=3 * mib // 2,
        step_log_bytes=mib // 4,
        copies_bytes=7 * mib,
        total_bytes=30 * mib,
        double_buffered_dense_bytes=24 * mib,
    ).lines()
    assert lines == [
        "snapshots, persisted and in flight            28.0 MiB",
        "boundary logs                                  1.5 MiB",
        "step logs and gradients                        0.2 MiB",
        "copies for other ranks                         7.0 MiB",
        "total                                         30.0 MiB",
        "for comparison, two dense checkpoints         24.0 MiB",
    ]


def use(memory: str, free: int, held: int, needed: int) -> SharedUse:
    return SharedUse(
        memory=memory, free_bytes=free, held_bytes=held, needed_bytes=needed
    )


@pytest.mark.parametrize(
    "uses",
    [
        [use("a", 100, 0, 100)],
        [use("a", 100, 0, 100), use("b", 100, 0, 100)],
        [use("a", 100, 0, 50), use("a", 100, 0, 50)],
        [use("a", 60, 20, 50), use("a", 60, 20, 50)],
        [use("a", 0, 100, 100)],
    ],
    ids=[
        "exactly",
        "two nodes",
        "shared",
        "held by ranks of the same job",
        "all of it held",
    ],
)
def test_ranks_have_room(uses: list[SharedUse]) -> None:
    require_room(uses)


@pytest.mark.parametrize(
    ("uses", "got"),
    [
        (
            [use("a", 99, 0, 100)],
            "got 99 bytes for ranks 0, of which 99 are free, wanted the 100 that",
        ),
        (
            [use("a", 100, 0, 60), use("a", 100, 0, 60)],
            "got 100 bytes for ranks 0, 1, of which 100",
        ),
        (
            [use("a", 100, 0, 60), use("b", 100, 0, 60), use("a", 100, 0, 60)],
            "for ranks 0, 2, of",
        ),
        (
            [use("a", 59, 20, 50), use("a", 60, 20, 50)],
            "got 99 bytes for ranks 0, 1, of which 59",
        ),
    ],
    ids=["alone", "together", "one of two nodes", "held by ranks of the same job"],
)
def test_ranks_without_room_are_one_error(uses: list[SharedUse], got: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^runtime.shared_memory: .*{got}.*ckpt=none"
    ):
        require_room(uses)
