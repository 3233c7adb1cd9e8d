"""gemini and checkfreq under faults: ranks that live keep their processes, all go back to one snapshot, exactly."""

from __future__ import annotations

import mmap
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.adapters.megatron_operators import RankOperators
from moe_ckpt.events import IntervalChosen, IterationCommitted, Rejoined, StageRecovered, TrainerStarted
from moe_ckpt.types import Phase
from tests.elastic import Death, ElasticJob
from tests.references import outcome_of, uninterrupted
from tests.scenarios import BIAS, FP16_SKIPPING, PP4
from tests.training import events_of

EVERY_3 = ("ckpt.every_iters=3",)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job of 2 stages, unless overrides say other, who dies in it, and where all ranks go back to each time."""

    deaths: tuple[Death, ...] = (Death(rank=1, phase=Phase.BACKWARD, iteration=5),)
    back_to: tuple[int | None, ...] = (3,)
    world: int = 4
    overrides: tuple[str, ...] = ()
    ckpt: tuple[str, ...] = EVERY_3
    policies: tuple[str, ...] = ("gemini", "checkfreq")
    iterations: int = 10

    @property
    def training(self) -> tuple[str, ...]:
        return (f"train.iterations={self.iterations}", *self.overrides)


def _at(phase: Phase, skip: int = 0) -> Case:
    """Death of rank 0 with one iteration since the snapshot, then of rank 3 with two."""
    deaths = (Death(rank=0, phase=phase, iteration=5, skip=skip), Death(rank=3, phase=phase, iteration=9, skip=skip))
    return Case(deaths=deaths, back_to=(3, 6))


CASES = {
    "as an iteration begins": _at(Phase.FORWARD),
    "in backward": _at(Phase.BACKWARD),
    "while gradients are reduced": _at(Phase.REDUCE),
    "between update and gather": _at(Phase.STEP, skip=1),
    "between iterations": _at(Phase.BETWEEN),
    "in the first iteration": Case(deaths=(Death(rank=2, phase=Phase.BACKWARD, iteration=1),), back_to=(None,)),
    "before the first snapshot after the start": Case(
        deaths=(Death(rank=2, phase=Phase.STEP, iteration=2),), back_to=(0,)
    ),
    "in the last iteration": Case(deaths=(Death(rank=2, phase=Phase.BACKWARD, iteration=10),), back_to=(9,)),
    "a process stands still": Case(deaths=(Death(rank=3, phase=Phase.BACKWARD, iteration=5, number=signal.SIGSTOP),)),
    "again while all go back": Case(
        deaths=(
            Death(rank=1, phase=Phase.BACKWARD, iteration=5),
            Death(rank=1, phase=Phase.RECOVERY, iteration=-1, life=1),
        ),
        back_to=(3, 3),
    ),
    "a snapshot of every iteration": Case(
        ckpt=("ckpt.every_iters=1",), deaths=(Death(rank=1, phase=Phase.BACKWARD, iteration=6),), back_to=(5,)
    ),
    "no copies": Case(ckpt=(*EVERY_3, "ckpt.replicas=0"), policies=("gemini",)),
    "PP 4": Case(overrides=PP4),
    "one stage": Case(world=2, overrides=("parallel.pp=1",)),
    "DP 4": Case(world=8, overrides=("train.global_batch_size=16",)),
    "fp16 with skipped steps": Case(overrides=FP16_SKIPPING),
    "tied embeddings, optimizer not sharded": Case(
        overrides=("model.tied_embeddings=true", "train.distributed_optimizer=false")
    ),
    "aux-loss-free bias": Case(
        overrides=(*BIAS, "train.eval_every_iters=2"),
        deaths=(Death(rank=1, phase=Phase.REDUCE, iteration=5),),
    ),
}


@pytest.mark.parametrize(
    ("policy", "case"),
    [pytest.param(policy, case, id=f"{policy}, {name}") for name, case in CASES.items() for policy in case.policies],
)
def test_a_rank_dies_and_all_go_back(policy: str, case: Case, tmp_path: Path) -> None:
    with ElasticJob(case.world, tmp_path, *case.training, *case.ckpt, ckpt=policy) as job:
        for death in case.deaths:
            death.order(job)
        result = job.wait()
    assert job.orders_obeyed == result["faults_survived"] == len(case.deaths)
    assert outcome_of(job.run, result) == uninterrupted(case.world, *case.training)
    for rank in range(case.world):
        died = [death for death in case.deaths if death.rank == rank]
        assert len(events_of(job.run, TrainerStarted, rank)) == 1 + len(died)
        went_back = [event.iteration for event in events_of(job.run, StageRecovered, rank)]
        wanted = [iteration for iteration in case.back_to if iteration is not None]
        assert went_back[-1:] == wanted[-1:]
        assert set(went_back) <= set(wanted)


def test_a_rank_dies_while_it_loads_the_first_snapshot(tmp_path: Path) -> None:
    """Then no rank has state, nor anything newer than the start; yet the others' weights are not the start's."""
    training = ("train.iterations=9",)
    rarely = ("ckpt.every_iters=50",)
    with ElasticJob(4, tmp_path, *training, *rarely, ckpt="gemini", setup=_die_once_while_loading) as job:
        job.order(1, Phase.BACKWARD, iteration=7)
        result = job.wait()
    assert result["faults_survived"] == 2
    assert outcome_of(job.run, result) == uninterrupted(4, *training)
    assert [event.iteration for event in events_of(job.run, StageRecovered, 0)][-1] == 0


def _die_once_while_loading() -> None:
    """Let rank 2 die as it loads a snapshot, in its first life."""
    has_died, load = mmap.mmap(-1, 1), RankOperators.load

    def load_or_die(self: RankOperators, *arguments: Any) -> None:
        if os.environ["RANK"] == "2" and not has_died[0]:
            has_died[0] = 1
            os.kill(os.getpid(), signal.SIGKILL)
        load(self, *arguments)

    RankOperators.load = load_or_die  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("replicas", "ranks"),
    [pytest.param(1, (2,), id="one"), pytest.param(1, (1, 2), id="two"), pytest.param(2, (1, 2), id="two, 2 copies")],
)
def test_nodes_are_lost_with_their_memory(replicas: int, ranks: tuple[int, ...], tmp_path: Path) -> None:
    training = ("train.iterations=12",)
    with ElasticJob(4, tmp_path, *training, *EVERY_3, f"ckpt.replicas={replicas}", ckpt="gemini") as job:
        job.wait_until(ranks[0], 8, Phase.FORWARD)
        job.lose_nodes(*ranks)
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *training)
    assert any(event.fetched_bytes for event in events_of(job.run, Rejoined, 0))


def test_all_copies_are_gone_and_the_job_says_so(tmp_path: Path) -> None:
    with ElasticJob(4, tmp_path, "train.iterations=200", *EVERY_3, ckpt="gemini") as job:
        job.wait_until(0, 8, Phase.FORWARD)
        job.lose_nodes(0, 1)
        said = job.wait_for_failure()
    assert said.count("error: ") == 1, said
    assert "cannot be rebuilt" in said


def test_all_copies_are_gone_and_all_go_back_to_disk(tmp_path: Path) -> None:
    training, durable = ("train.iterations=12",), ("ckpt.durable_every_iters=4", "ckpt.async_save=false")
    with ElasticJob(4, tmp_path, *training, *EVERY_3, *durable, ckpt="gemini") as job:
        job.wait_until(0, 8, Phase.FORWARD)
        job.lose_nodes(0, 1)
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *training)
    assert [event.iteration for event in events_of(job.run, Rejoined, 0)] == [4]


def test_the_interval_is_chosen_by_what_was_measured_and_kept_over_a_fault(tmp_path: Path) -> None:
    training = ("train.iterations=40",)
    auto = ("ckpt.profile_iters=3", "ckpt.mtbf_s=0.2")
    with ElasticJob(4, tmp_path, *training, *auto, ckpt="gemini") as job:
        job.order(2, Phase.BACKWARD, iteration=26)
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *training)
    chosen = [events_of(job.run, IntervalChosen, rank) for rank in range(4)]
    assert chosen[0][0].iteration == 15, "once three snapshots have been measured"
    assert all(event.snapshot_cost_s >= 0 and event.iteration_s > 0 for event in chosen[0])
    assert chosen[0] == chosen[1] == chosen[3], "all ranks decide alike"
    (again,) = (event.iteration for event in events_of(job.run, Rejoined, 0))
    assert again in [event.iteration for event in chosen[0]], "what was measured before a fault still counts"
    committed = [event.iteration for event in events_of(job.run, IterationCommitted, 0)]
    assert committed.count(again + 1) == (1 if again == 25 else 2)
