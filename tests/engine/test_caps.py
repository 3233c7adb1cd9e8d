"""Jobs under caps on checkpoint traffic: recovered exactly, and refused where no snapshot would ever be complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_ckpt.config import MaxBytesPerS
from moe_ckpt.errors import ConfigError
from moe_ckpt.events import SnapshotTaken, WindowChosen
from moe_ckpt.snapshot.token_bucket import BURST_S
from moe_ckpt.types import Phase
from tests.engine.configs import config
from tests.engine.job import Fault, ThreadJob, uninterrupted
from tests.engine.model import Shape

PIPE = Shape(pp=2, dp=2)
HOST = 5e3  # a snapshot has 312 bytes


def test_a_capped_job_recovers_as_without_faults(tmp_path: Path) -> None:
    caps = MaxBytesPerS(host=HOST, peers=None, disk=None)
    fault = Fault(rank=1, phase=Phase.STEP, iteration=6)
    job = ThreadJob(tmp_path, config("moevement", profile_iters=2, max_bytes_per_s=caps), PIPE, faults=[fault])
    assert job.run() == uninterrupted(PIPE, 8)
    taken = [event for event in job.events(SnapshotTaken, 0) if event.iteration < 5]
    assert taken
    assert all(event.size_bytes <= HOST * (event.copy_s + BURST_S) for event in taken)
    chosen = job.events(WindowChosen, 0)
    assert chosen
    assert all(event.copy_bytes_per_s <= HOST for event in chosen)


def test_a_cap_that_lets_no_snapshot_through_in_time_is_refused(tmp_path: Path) -> None:
    caps = MaxBytesPerS(host=1e-3, peers=None, disk=None)
    job = ThreadJob(tmp_path, config("moevement", max_bytes_per_s=caps), PIPE, iterations=2)
    with pytest.raises(ConfigError, match=r"runtime.copy_s: got .*, wanted at least .*at ckpt.max_bytes_per_s.host"):
        job.run()
