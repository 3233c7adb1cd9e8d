"""Snapshots and logs of a real job take the bytes that the formulas say.

The bytes do not grow over time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_ckpt.events import CheckpointFailed, HostMemoryUsed, SnapshotTaken
from tests.harness.jobs.training import events_of, train


@pytest.fixture(scope="module")
def ten_windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run two stages for ten windows of three snapshots; return the run folder."""
    folder = tmp_path_factory.mktemp("job")
    train(
        2,
        folder,
        "parallel.pp=2",
        "train.iterations=30",
        "ckpt=moevement",
        "ckpt.window=3",
    )
    return folder


def test_snapshots_are_reported_beside_dense_ones(ten_windows: Path) -> None:
    base, *sparse = events_of(ten_windows, SnapshotTaken)
    assert base.size_bytes == base.dense_bytes
    assert all(taken.size_bytes < 0.75 * taken.dense_bytes for taken in sparse)
    assert [(taken.iteration, taken.slot) for taken in sparse[:4]] == [
        (1, 0),
        (2, 1),
        (3, 2),
        (4, 0),
    ]


def test_host_memory_is_reused_and_does_not_grow(ten_windows: Path) -> None:
    used = events_of(ten_windows, HostMemoryUsed)
    assert len(used) == 10
    assert len({memory.allocated_bytes for memory in used[4:]}) == 1


def test_logs_end_with_the_window_that_needs_them(ten_windows: Path) -> None:
    used = events_of(ten_windows, HostMemoryUsed)[1:]
    # micro-batches x tokens x sequences x hidden x bf16, sent downstream
    per_iteration = 4 * (16 * 2 * 32 * 2)
    # three iterations after the window's start
    assert {memory.boundary_log_bytes for memory in used} == {3 * per_iteration}


def test_a_budget_is_respected(tmp_path: Path) -> None:
    train(1, tmp_path / "free", "train.iterations=8", "ckpt=moevement", "ckpt.window=2")
    budget = (
        max(
            memory.allocated_bytes
            for memory in events_of(tmp_path / "free", HostMemoryUsed)
        )
        * 5
        // 4
    )
    tight = (f"ckpt.memory_budget_bytes={budget}", "ckpt.window=2")
    train(1, tmp_path / "tight", "train.iterations=8", "ckpt=moevement", *tight)
    assert (
        max(
            memory.allocated_bytes
            for memory in events_of(tmp_path / "tight", HostMemoryUsed)
        )
        <= budget
    )
    assert not events_of(tmp_path / "tight", CheckpointFailed)
