"""Snapshots on local disks when all processes are gone: the next start goes on from them."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from signal import SIGKILL

from moe_ckpt.events import StateResumed, WindowPersisted
from tests.elastic_job import ElasticJob
from tests.references import outcome_of, uninterrupted
from tests.training import events_of


def _written(run: Path, rank: int) -> list[WindowPersisted] | None:
    return [event for event in events_of(run, WindowPersisted, rank) if event.window_start >= 3] or None


def test_the_next_start_goes_on_from_local_disks(tmp_path: Path) -> None:
    run, training, settings = tmp_path / "run", ("train.iterations=24",), ("ckpt.every_iters=3",)

    def start(number: int, *more: str) -> ElasticJob:
        overrides = (*training, *settings, f"run.dir={run}", *more)
        job = ElasticJob(4, tmp_path / f"start{number}", *overrides, ckpt="checkfreq", timeout_s=150.0)
        job.run = run
        return job

    with start(1) as job:
        for rank in range(4):
            job.wait_until(rank, 3)
            job.wait_for(functools.partial(_written, run, rank), f"a snapshot of rank {rank} on its disk")
        os.kill(job.agent_pid, SIGKILL)
        job.wait_for_failure()
    with start(2, "train.resume=never") as job:
        said = job.wait_for_failure()
    assert said.count("error: train.resume: got 'never', wanted auto, or a new run.dir: there are snapshots") == 1
    with start(3) as job:
        result = job.wait()
    resumed = [event for rank in range(4) for event in events_of(run, StateResumed, rank)]
    assert [event.source for event in resumed] == ["local disk"] * 4
    assert resumed[0].iteration >= 3
    assert outcome_of(run, result) == uninterrupted(4, *training)
