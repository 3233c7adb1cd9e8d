"""Loops that are not the launcher's: a spare node takes the ranks of a lost node.

Megatron-LM's own loop, attached, reads RANK and WORLD_SIZE in a worker that has waited
without a rank; a program of one's own builds its model there. Only a whole job has such
a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from tests.scenarios import ROOT

pytestmark = pytest.mark.full
AT = 6
OWN_LOOP = Path(__file__).with_name("own_loop_with_spares.py")


def megatron_lm(run: Path) -> Sequence[str]:
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


def own_loop(run: Path) -> Sequence[str]:
    return (str(OWN_LOOP), str(run))


@pytest.mark.parametrize(
    ("program", "sources", "ranks_per_node"),
    [
        pytest.param(
            megatron_lm,
            FOLDER,
            2,
            marks=pytest.mark.skipif(
                not FOLDER.exists(),
                reason=".venv/bin/python scripts/fetch_megatron_lm.py has not run",
            ),
        ),
        pytest.param(own_loop, ROOT, 1),
    ],
    ids=["megatron_lm", "own_loop"],
)
def test_a_spare_node_takes_the_ranks_of_a_lost_node(
    program: Callable[[Path], Sequence[str]],
    sources: Path,
    ranks_per_node: int,
    tmp_path: Path,
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job without a loss has the same digest."""
    monkeypatch.setenv("PYTHONPATH", str(sources))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    digests: list[str] = []
    workers: list[int] = []
    kept = range(ranks_per_node)
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
            ranks_per_node=ranks_per_node,
        )
        for _ in range(3):
            job.start_agent()
        job.wait_for_iteration(AT)
        if name == "lost":
            workers = [job.worker(rank).pid for rank in kept]
            job.lose(2 * ranks_per_node - 1)
        job.statuses()
        digests.append(job.result()["digest"])
    assert digests[0] == digests[1]
    assert [events_of(job.run, WorkerStarted, rank)[-1].pid for rank in kept] == workers
    [event] = events_of(job.run, Rejoined)
    assert event.classes == [FaultClass.NODE]
