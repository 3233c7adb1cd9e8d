"""With `runtime.standby`, processes that were forked beforehand train on, bit for bit.

Only a job shows that such a process, forked in the middle of training, has nothing of
the worker beside which it waited.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from signal import SIGKILL

import pytest

from moe_ckpt.linux import children_of, start_ticks
from tests.harness.jobs.elastic_job import ElasticJob
from tests.harness.jobs.references import outcome_of, uninterrupted
from tests.scenarios import PP2

TRAINING = (*PP2, "train.iterations=30", "train.lr_decay_iters=24")


@pytest.mark.parametrize("ckpt", ["moevement", "gemini"])
def test_waiting_processes_replace_workers_that_die(ckpt: str, tmp_path: Path) -> None:
    settings = (*TRAINING, "run.digest_every_iters=1", "runtime.standby=true")
    with ElasticJob(2, tmp_path, *settings, ckpt=ckpt) as job:
        for rank, incarnation in ((0, 0), (1, 0), (0, 1)):
            worker = job.worker(rank, incarnation)
            waiting = job.wait_for(
                functools.partial(_waiting_beside, worker.supervisor_pid),
                f"a process that waits for rank {rank}",
            )
            assert waiting != worker.pid
            os.kill(worker.pid, SIGKILL)
            assert job.worker(rank, incarnation + 1).pid == waiting
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(2, *TRAINING)


def _waiting_beside(supervisor_pid: int) -> int | None:
    """Return the newest child of a supervisor that has a worker and a daemon, too."""
    children = children_of(supervisor_pid)
    return max(children, key=start_ticks) if len(children) > 2 else None
