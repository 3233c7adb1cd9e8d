"""Jobs of a model (modelled.py) go on, after faults at any moment, as if nothing had happened; or nothing was left."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.recovery.plan import RecoveryPlan
from moe_ckpt.recovery.target import Target
from tests.recovery.modelled import Job


def run(random: Random) -> Counter[str]:
    """Let a job live through some generations, and return what happened how often."""
    job, outcomes = Job(random), Counter[str]()
    for _ in range(random.randint(1, 5)):
        job.train(random.randint(0, 8))
        job.stop()
        job.kill()
        torn = True
        while torn:
            try:
                target, plan = job.plan()
            except CheckpointLoadError:
                assert job.has_nothing_left()
                return outcomes + Counter(["nothing is left"])
            torn = random.random() < 0.4
            job.recover(target, plan, torn=torn)
            outcomes.update(outcomes_of(target, plan))
            outcomes["torn"] += torn
            if torn and random.random() < 0.7:
                job.kill()
        job.assert_as_without_faults()
        outcomes["as without faults"] += 1
    return outcomes


def outcomes_of(target: Target | None, plan: RecoveryPlan) -> list[str]:
    if target is None:
        return ["from nothing"]
    rolling = {stage for rollback in plan.rollbacks for stage in rollback.segment.stages}
    names = {
        "nothing is lost": not target.lost_stages,
        "only the lost": target.lost_stages == rolling and 0 < len(rolling) < plan.num_stages,
        "some healthy": target.lost_stages < rolling and len(rolling) < plan.num_stages,
        "all, which were not lost": len(rolling) == plan.num_stages > len(target.lost_stages),
        "apart": len(plan.rollbacks) > 1,
        "finishing": bool(target.finishing_stages - rolling),
        "fetches": bool(plan.fetches),
        "goes on with a replay": any(rollback.resumed_at is not None for rollback in plan.rollbacks),
        "ends earlier": plan.target_iteration < target.iteration,
    }
    return [name for name, is_so in names.items() if is_so]


@pytest.mark.parametrize(("num_jobs", "least"), [(600, 3), pytest.param(2000, 50, marks=pytest.mark.full)])
def test_jobs_with_all_kinds_of_faults_go_on_as_if_there_were_none(num_jobs: int, least: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(num_jobs):
        outcomes.update(run(Random(seed)))
    assert len(outcomes) == 13, outcomes
    assert min(outcomes.values()) > least, outcomes
