"""Megatron-LM's own loop, attached: a spare node takes the ranks of a lost node.

The script reads RANK and WORLD_SIZE in a worker that has waited without a rank. Only a
whole job has such a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from moe_ckpt.elastic.process_failure import FaultClass
from moe_ckpt.events import Rejoined, WorkerStarted
from scripts.fetch_megatron_lm import FOLDER
from tests.harness.jobs.agents_job import AgentsJob
from tests.harness.jobs.attached_jobs import ARGUMENTS, EXAMPLE
from tests.harness.jobs.training import events_of
from tests.ports import held_port

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not FOLDER.exists(),
        reason=".venv/bin/python scripts/fetch_megatron_lm.py has not run",
    ),
]
AT = 6


def program(run: Path) -> Sequence[str]:
    settings = (
        "replicas=1",
        "window=2",
        "runtime.spare_nodes=1",
        "runtime.progress_s=300",
        "runtime.operation_s=400",
        "runtime.join_s=900",
        f"run.dir={run}",
    )
    attached = ("-m", "moe_ckpt.run", "--ckpt", "moevement")
    chosen = [word for setting in settings for word in ("--set", setting)]
    return (*attached, *chosen, "--", str(EXAMPLE), *ARGUMENTS, "--train-iters", "30")


def test_a_spare_node_takes_the_ranks_of_a_lost_node(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes have two ranks each. A job without a loss has the same digest."""
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    digests: list[str] = []
    workers: list[int] = []
    for name in ("whole", "lost"):
        (tmp_path / name).mkdir()
        meeting = ("--master-addr=127.0.0.1", f"--master-port={held_port(stack)}")
        job = AgentsJob(
            stack,
            tmp_path / name,
            2,
            meeting,
            num_spares=1,
            program=program,
            ranks_per_node=2,
        )
        for _ in range(3):
            job.start_agent()
        job.wait_for_iteration(AT)
        if name == "lost":
            workers = [job.worker(rank).pid for rank in (0, 1)]
            job.lose(3)
        job.statuses()
        digests.append(job.result()["digest"])
    assert digests[0] == digests[1]
    assert [
        events_of(job.run, WorkerStarted, rank)[-1].pid for rank in (0, 1)
    ] == workers
    [event] = events_of(job.run, Rejoined)
    assert event.classes == [FaultClass.NODE]
