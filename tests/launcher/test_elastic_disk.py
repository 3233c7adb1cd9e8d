"""Snapshots on local disks outlive all processes, and the next start loads them."""

from __future__ import annotations

import functools
import os
import re
import shutil
from pathlib import Path
from signal import SIGKILL, SIGSTOP, SIGTERM

from moe_ckpt.events import CourseChanged, StateResumed, WindowPersisted
from moe_ckpt.types import Phase
from tests.harness.jobs.elastic_job import ElasticJob
from tests.harness.jobs.references import outcome_of, uninterrupted
from tests.harness.jobs.training import events_of
from tests.scenarios import PP2

TRAINING = (*PP2, "train.iterations=24")


def _written(run: Path, rank: int) -> list[WindowPersisted] | None:
    return [
        event
        for event in events_of(run, WindowPersisted, rank)
        if event.window_start >= 3
    ] or None


def test_the_next_start_goes_on_from_local_disks(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def start(number: int, *more: str) -> ElasticJob:
        overrides = (*TRAINING, "ckpt.every_iters=3", f"run.dir={run}", *more)
        job = ElasticJob(2, tmp_path / f"start{number}", *overrides, ckpt="checkfreq")
        job.run = run
        return job

    with start(1) as job:
        for rank in range(2):
            job.wait_until(rank, 3)
            job.wait_for(
                functools.partial(_written, run, rank),
                f"a snapshot of rank {rank} on its disk",
            )
        os.kill(job.agent_pid, SIGKILL)
        job.wait_for_failure()
    with start(2, "train.resume=never") as job:
        said = job.wait_for_failure()
    assert (
        said.count(
            "error: train.resume: got 'never', wanted auto, or a new run.dir: there are"
            " snapshots"
        )
        == 1
    )
    with start(3, "train.lr=0.001", "data.seed=5") as job:
        said = job.wait_for_failure()
    assert (
        said.count(
            "\n  train.lr: got 0.001, wanted 0.005\n  data.seed: got 5, wanted 1234\n"
        )
        == 1
    ), said
    with start(4) as job:
        result = job.wait()
    resumed = [
        event for rank in range(2) for event in events_of(run, StateResumed, rank)
    ]
    assert [event.source for event in resumed] == ["local disk"] * 2
    assert resumed[0].iteration >= 3
    assert outcome_of(run, result) == uninterrupted(2, *TRAINING)


def test_a_job_stopped_with_notice_goes_on_where_it_was_safe_to_kill(
    tmp_path: Path,
) -> None:
    """One worker stands still: supervisors bring its window to disk without the worker.

    A start without these disks is an error, because no other state is left. The next
    start trains for longer. That start replays the window, and continues under the
    schedule of the first start.
    """
    run = tmp_path / "run"

    def start(number: int, *more: str) -> ElasticJob:
        job = ElasticJob(
            2,
            tmp_path / f"start{number}",
            *TRAINING,
            "ckpt.window=2",
            f"run.dir={run}",
            *more,
        )
        job.run = run
        return job

    with start(1) as job:
        job.wait_until(1, 9, Phase.FORWARD)
        job.kill(1, number=SIGSTOP)
        os.kill(job.worker(0).supervisor_pid, SIGTERM)
        said = job.wait_for_failure()
    [safe] = re.findall(
        r"safe to kill at iteration (\d+): all 2 ranks have it on disk", said
    )
    assert int(safe) >= 6
    (run / "snapshots").rename(tmp_path / "away")
    with start(3) as job:
        gone = (
            f"saved windows on local disks as it was stopped at iteration {safe}, and"
            " no state of it is on disk"
        )
        assert gone in job.wait_for_failure()
    shutil.rmtree(run / "snapshots", ignore_errors=True)
    (tmp_path / "away").rename(run / "snapshots")
    with start(2, "train.iterations=30") as job:
        result = job.wait()
    resumed = [
        event for rank in range(2) for event in events_of(run, StateResumed, rank)
    ]
    assert [(event.source, event.iteration) for event in resumed] == [
        ("local disk", int(safe))
    ] * 2
    longer = uninterrupted(2, *PP2, "train.iterations=30", "train.lr_decay_iters=24")
    assert outcome_of(run, result) == longer
    assert [event.kept for event in events_of(run, CourseChanged)] == [
        [
            "lr_decay_steps 24 (this start would have 30)",
            "wd_incr_steps 24 (this start would have 30)",
        ]
    ]
