"""Many faults in one run have no lasting cost, and every recovery succeeds.

The run ends as if no fault had happened.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from moe_ckpt.events import WorkerStarted
from moe_ckpt.types import Phase
from tests.harness.jobs.campaign import Fault, Point, survive
from tests.harness.jobs.chaos import ENDURING, PHASES, Chaos, Used, require_level
from tests.harness.jobs.elastic_job import ElasticJob
from tests.harness.jobs.references import outcome_of, uninterrupted
from tests.harness.jobs.training import events_of
from tests.scenarios import PP2
from tests.waits import JOB_S


@pytest.mark.full
@pytest.mark.parametrize("deaths", [9, 50])
def test_deaths_of_one_rank_cost_the_others_nothing_that_stays(
    deaths: int, tmp_path: Path
) -> None:
    """Measure rank 1 and both supervisors at each death of rank 0.

    Rank 1 lives through all deaths. Supervisors are measured because they fork. One
    more file may be open for a moment. Memory grows a little at first, because
    libraries cache.
    """
    chosen, used = random.Random(4), []

    def measure_and_kill(job: ElasticJob, ranks: Sequence[int]) -> None:
        watched = [
            job.worker(1).pid,
            *(job.worker(rank).supervisor_pid for rank in range(2)),
        ]
        used.append([Used.by(pid) for pid in watched])
        job.kill(*ranks)

    faults = [
        _death(chosen.choice(PHASES), 3 + 2 * death, measure_and_kill)
        for death in range(deaths)
    ]
    training = (*PP2, f"train.iterations={2 * deaths + 4}")
    survive(
        tmp_path,
        faults,
        *training,
        world_size=2,
        settings=ENDURING,
        setup=_cache_little,
    )
    require_level(used)


def _death(
    phase: Phase, iteration: int, then: Callable[[ElasticJob, Sequence[int]], object]
) -> Fault:
    return Fault(
        name=f"{phase.name} of {iteration}",
        at=[Point(0, phase, iteration)],
        kills=[0],
        then=then,
        back_to=iteration if phase >= Phase.STEP else iteration - 1,
        replaying=None,
        executed=None,
    )


def _cache_little() -> None:
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "8"


def _survive_chaos(
    folder: Path, seed: int, *, deaths: int, iterations: int, timeout_s: float = JOB_S
) -> None:
    """Kill until enough processes have died; compare with the uninterrupted job."""
    training = (f"train.iterations={iterations}",)
    with ElasticJob(4, folder, *training, *ENDURING, timeout_s=timeout_s) as job:
        chaos = Chaos(job, seed)
        job.wait_until(0, 3)
        while _num_deaths(job) < deaths and job.page(0).iteration < iterations - 5:
            chaos.inject()
        result = job.wait()
    assert result["faults_survived"] >= deaths, "more iterations are needed for that"
    assert outcome_of(job.run, result) == uninterrupted(4, *training)


def _num_deaths(job: ElasticJob) -> int:
    return sum(
        len(events_of(job.run, WorkerStarted, rank)) - 1
        for rank in range(job.world_size)
    )


@pytest.mark.full
def test_a_hundred_random_faults_end_exactly(tmp_path: Path) -> None:
    _survive_chaos(tmp_path, seed=7, deaths=100, iterations=150)


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(1, 6))
def test_hundreds_of_random_faults_end_exactly(seed: int, tmp_path: Path) -> None:
    _survive_chaos(tmp_path, seed=seed, deaths=300, iterations=450, timeout_s=1100)
