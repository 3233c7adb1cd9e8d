"""Shared memory without room: one error at the start, and exact replacements later.

Ranks are replaced while the memory is full, bit for bit. The memory of all ranks is one
small tmpfs, which a file that belongs to no rank fills.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.errors import ConfigError
from moe_ckpt.events import IterationCommitted
from moe_ckpt.types import Phase
from tests.harness.threads.job import Fault, ThreadJob, exact, uninterrupted
from tests.harness.threads.model import PAIR, Shape
from tests.harness.threads.stops import At, StoppedError
from tests.policies.profiles import config
from tests.small_disk import small_disk

FULL_AT = 4


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("moevement", {"window": 2, "pause_iters": 0}),
        ("moevement", {"window": 1, "pause_iters": 1, "disk_every_iters": 2}),
        ("gemini", {"every_iters": 2}),
        ("checkfreq", {"every_iters": 2}),
        ("moc", {}),
        ("moetion", {}),
    ],
)
@pytest.mark.parametrize("also", [(), (1,)], ids=["one", "both"])
def test_ranks_are_replaced_while_the_memory_is_full(
    policy: str, settings: dict[str, Any], also: tuple[int, ...], tmp_path: Path
) -> None:
    deaths = [
        Fault(rank=0, phase=Phase.BACKWARD, iteration=6, also=also),
        Fault(rank=1, phase=Phase.STEP, iteration=7),
    ]
    with small_disk(tmp_path / "memory") as memory:
        job = ThreadJob(tmp_path, config(policy, **settings), PAIR, faults=deaths)
        At(job, FULL_AT, memory.fill_to_the_last_page)
        exact(job)


LEFT_BYTES = 80 << 10  # room for small files, but not for the ranks' snapshots


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("moevement", {"window": 2, "pause_iters": 0}),
        ("gemini", {"every_iters": 1}),
        ("moc", {}),
        ("flowcheck", {}),
    ],
)
def test_a_memory_that_is_too_small_is_one_error_before_iteration_1(
    policy: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "memory") as memory:
        memory.fill(left_bytes=LEFT_BYTES)
        job = ThreadJob(
            tmp_path, config(policy, **settings), Shape(pp=2, dp=1, experts=200)
        )
        with pytest.raises(
            ConfigError,
            match=(
                r"^runtime.shared_memory: got \d+ bytes for ranks 0, 1, of which"
                r" \d+ are"
            ),
        ):
            job.run()
        assert job.events(IterationCommitted) == []


def test_windows_may_grow_beyond_a_small_memory(tmp_path: Path) -> None:
    """With window=auto, training begins with windows of one slot.

    Windows get more slots if there is room.
    """
    with small_disk(tmp_path / "memory") as memory:
        memory.fill(left_bytes=8 * LEFT_BYTES)
        exact(
            ThreadJob(
                tmp_path,
                config("moevement", window="auto"),
                Shape(pp=2, dp=1, experts=40),
            )
        )


def test_a_start_from_windows_in_a_full_memory_goes_on(tmp_path: Path) -> None:
    """The second job starts as after torchrun has started all ranks again.

    Room that existing windows take does not count as missing.
    """
    with small_disk(tmp_path / "memory") as memory:
        job = ThreadJob(tmp_path, config("moevement", window=2, pause_iters=0), PAIR)
        At(job, FULL_AT, memory.fill_to_the_last_page, ends=True)
        with pytest.raises(StoppedError):
            job.run()
        again = ThreadJob(tmp_path, job.config, PAIR)
        assert again.run().digests == uninterrupted(PAIR, again.iterations).digests
