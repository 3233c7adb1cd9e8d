"""Shared memory that has no room left: ranks are replaced all the same, and end bit for bit.

The memory of all ranks is one small tmpfs, which a stranger fills to the last page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.types import Phase
from tests.engine.job import Fault, ThreadJob, exact
from tests.engine.model import PAIR
from tests.engine.small_disk import small_disk
from tests.engine.stops import At
from tests.policies.profiles import config

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
    deaths = [Fault(rank=0, phase=Phase.BACKWARD, iteration=6, also=also), Fault(rank=1, phase=Phase.STEP, iteration=7)]
    with small_disk(tmp_path / "memory") as memory:
        job = ThreadJob(tmp_path, config(policy, **settings), PAIR, faults=deaths)
        At(job, FULL_AT, memory.fill_to_the_last_page)
        exact(job)
