"""Any rank may die at any moment: the others stay, what is lost is rebuilt, and the run ends as if nothing had been.

Compared with the uninterrupted run, bit for bit: the digest of every rank's state, every loss, the evaluation. Real
guards and trainers, real signals. Dropout is on throughout.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSEGV, SIGSTOP, SIGTERM, SIGUSR1
from typing import cast

import pytest

from moe_ckpt.adapters.megatron_operators import RankOperators
from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.events import (
    CheckpointSaved,
    GenerationEnded,
    Rejoined,
    ReplayDiffered,
    StageRecovered,
    StateResumed,
    TrainerStarted,
)
from moe_ckpt.runtime.session import Session
from moe_ckpt.store import replicate
from moe_ckpt.store.link import Link
from moe_ckpt.types import Phase
from tests.elastic import ElasticJob
from tests.references import outcome_of, uninterrupted
from tests.training import events_of

FORWARD, BACKWARD, REDUCE, STEP = Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.STEP
SNAPSHOT, BETWEEN, JOIN, RECOVERY = Phase.SNAPSHOT, Phase.BETWEEN, Phase.JOIN, Phase.RECOVERY
PP2 = ("parallel.pp=2",)
BIAS = ("model.moe_balancing=bias", "model.moe_score_function=sigmoid")
PP4 = ("parallel.pp=4", "model.num_layers=4")
FP16_SKIPPING = ("precision=fp16", "precision.initial_loss_scale=262144.0", "precision.loss_scale_hysteresis=1")


@dataclass(frozen=True, kw_only=True)
class Death:
    """A rank sends itself a signal as it enters `phase` of `iteration`, for the (skip + 1)th time, in its `life`."""

    rank: int
    phase: Phase
    iteration: int
    number: signal.Signals = SIGKILL
    skip: int = 0
    life: int = 0

    def order(self, job: ElasticJob) -> None:
        job.order(self.rank, self.phase, iteration=self.iteration, skip=self.skip, number=self.number, life=self.life)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job of 2 stages, unless overrides say other, and who dies in it, at least 4 iterations before its end."""

    deaths: tuple[Death, ...] = (Death(rank=1, phase=BACKWARD, iteration=4), Death(rank=2, phase=STEP, iteration=6))
    world: int = 4
    overrides: tuple[str, ...] = ()
    ckpt: tuple[str, ...] = ("ckpt.window=2",)
    iterations: int = 10
    num_stages: int = 2

    @property
    def training(self) -> tuple[str, ...]:
        return (f"train.iterations={self.iterations}", *self.overrides)

    def stage(self, rank: int) -> int:
        return rank * self.num_stages // self.world


def _deaths_at(phase: Phase, skip: int = 0) -> tuple[Death, ...]:
    return tuple(Death(rank=r, phase=phase, iteration=i, skip=skip) for r, i in ((0, 4), (3, 6)))


ONE_BY_ONE = {
    # each phase, on rank 0 and on the last
    "as an iteration begins": Case(deaths=_deaths_at(FORWARD)),
    "in forward": Case(deaths=_deaths_at(FORWARD, skip=2)),
    "in backward": Case(deaths=_deaths_at(BACKWARD)),
    "while gradients are reduced": Case(deaths=_deaths_at(REDUCE)),
    "after the vote": Case(deaths=_deaths_at(STEP)),
    "between update and gather": Case(deaths=_deaths_at(STEP, skip=1)),
    "as a snapshot is taken": Case(deaths=_deaths_at(SNAPSHOT)),
    "between iterations": Case(deaths=_deaths_at(BETWEEN)),
    # moments
    "before the first window": Case(
        deaths=(Death(rank=1, phase=FORWARD, iteration=1), Death(rank=3, phase=STEP, iteration=2)),
        ckpt=("ckpt.window=4",),
    ),
    "in the last iteration": Case(
        deaths=(Death(rank=2, phase=BACKWARD, iteration=10), Death(rank=0, phase=BETWEEN, iteration=10))
    ),
    "in the last evaluation": Case(deaths=(Death(rank=3, phase=FORWARD, iteration=10, skip=3),)),
    "as digests are exchanged": Case(deaths=(Death(rank=1, phase=Phase.DONE, iteration=10),)),
    # ways to die
    "SEGV and TERM": Case(
        deaths=(
            Death(rank=2, phase=BACKWARD, iteration=4, number=SIGSEGV),
            Death(rank=0, phase=FORWARD, iteration=6, number=SIGTERM),
        )
    ),
    "a process stands still": Case(deaths=(Death(rank=3, phase=BACKWARD, iteration=4, number=SIGSTOP),)),
    "a thread hangs": Case(
        deaths=(Death(rank=1, phase=FORWARD, iteration=4, number=SIGUSR1, skip=1),),
        ckpt=("ckpt.window=2", "runtime.progress_s=4"),
    ),
    # layouts
    "PP 2, DP 1": Case(
        world=2,
        overrides=PP2,
        deaths=(Death(rank=0, phase=STEP, iteration=4), Death(rank=1, phase=BACKWARD, iteration=6)),
    ),
    "PP 4, a stage in the middle": Case(
        overrides=PP4,
        num_stages=4,
        deaths=(Death(rank=1, phase=BACKWARD, iteration=4), Death(rank=2, phase=REDUCE, iteration=6)),
    ),
    "DP 4": Case(
        world=8,
        overrides=("train.global_batch_size=16",),
        deaths=(Death(rank=6, phase=BACKWARD, iteration=4),),
    ),
    # windows
    "W 1": Case(ckpt=("ckpt.window=1",)),
    "W 3": Case(ckpt=("ckpt.window=3",)),
    "W chosen by the policy": Case(ckpt=("ckpt.profile_iters=2",)),
    "no copies": Case(ckpt=("ckpt.window=2", "ckpt.replicas=0")),
    "W 8, again before the next window": Case(
        ckpt=("ckpt.window=8",),
        iterations=20,
        deaths=(Death(rank=2, phase=BACKWARD, iteration=16), Death(rank=2, phase=BACKWARD, iteration=16, life=1)),
    ),
    # arithmetic and models
    "fp16 with skipped steps": Case(overrides=FP16_SKIPPING),
    "optimizer not sharded": Case(overrides=("train.distributed_optimizer=false",)),
    "tied embeddings": Case(overrides=("model.tied_embeddings=true",)),
    "tied embeddings, before anything is kept": Case(
        overrides=("model.tied_embeddings=true",), deaths=(Death(rank=1, phase=FORWARD, iteration=1),)
    ),
    "tied embeddings, optimizer not sharded": Case(
        overrides=("model.tied_embeddings=true", "train.distributed_optimizer=false")
    ),
    "aux-loss-free bias, evaluated in between": Case(overrides=(*BIAS, "train.eval_every_iters=2")),
    "aux-loss-free bias, while gradients are reduced": Case(overrides=BIAS, deaths=_deaths_at(REDUCE)),
}


@pytest.mark.parametrize("case", ONE_BY_ONE.values(), ids=ONE_BY_ONE.keys())
def test_ranks_die_one_by_one(case: Case, tmp_path: Path) -> None:
    with ElasticJob(case.world, tmp_path, *case.training, *case.ckpt) as job:
        for death in case.deaths:
            death.order(job)
        result = job.wait()

    assert job.orders_obeyed == len(case.deaths)
    assert result["faults_survived"] == len(case.deaths)
    assert outcome_of(job.run, result) == uninterrupted(case.world, *case.training)
    died = [death.rank for death in case.deaths]
    for rank in range(case.world):
        assert len(events_of(job.run, TrainerStarted, rank)) == 1 + died.count(rank)
        for rejoined in events_of(job.run, Rejoined, rank):
            (dead,) = _dead_ranks(rejoined)
            assert dead == died[rejoined.generation - 2]
            assert rejoined.executed_iters == 0 or case.stage(rank) == case.stage(dead), rejoined
    replaying = {case.stage(death.rank) for death in case.deaths if death.iteration > 1}  # else all start over
    assert _replaying(job) == {rank for rank in range(case.world) if case.stage(rank) in replaying}


def _dead_ranks(rejoined: Rejoined) -> list[int]:
    return [int(found[1]) for death in rejoined.deaths if (found := re.match(r"rank (\d+) \(pid \d+\)", death))]


def _replaying(job: ElasticJob) -> set[int]:
    """Return the ranks that have loaded a snapshot; no other has executed an iteration twice."""
    ranks = range(job.world_size)
    executed = {rank for rank in ranks if any(event.executed_iters for event in events_of(job.run, Rejoined, rank))}
    loaded = {rank for rank in ranks if events_of(job.run, StageRecovered, rank)}
    assert executed <= loaded
    return loaded


def _check_survived(job: ElasticJob, training: tuple[str, ...], *, dead: set[int], replaying: set[int]) -> None:
    """Wait for the job, whose dead ranks have died at least once each."""
    result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(job.world_size, *training)
    assert _replaying(job) == replaying
    for rank in set(range(job.world_size)) - dead:
        assert len(events_of(job.run, TrainerStarted, rank)) == 1
        ended = [event.generation for event in events_of(job.run, GenerationEnded, rank)]
        assert ended[0] == 1
        assert ended == sorted(set(ended))
    for rank in dead:
        assert len(events_of(job.run, TrainerStarted, rank)) > 1


@pytest.mark.parametrize(
    ("layout", "ranks", "replaying"),
    [
        pytest.param((), (2, 3), {2, 3}, id="both ranks of a stage"),
        pytest.param(PP4, (1, 2), {1, 2}, id="neighbouring stages, jointly"),
        pytest.param(PP4, (0, 2), {0, 2}, id="separate stages, in parallel"),
        pytest.param((), (0, 1, 2, 3), {0, 1, 2, 3}, id="every rank"),
        pytest.param(BIAS, (2, 3), {2, 3}, id="both ranks of a stage, aux-loss-free bias"),
    ],
)
def test_ranks_die_together(
    layout: tuple[str, ...], ranks: tuple[int, ...], replaying: set[int], tmp_path: Path
) -> None:
    """The last of them as it reduces gradients: the others wait for it."""
    training = ("train.iterations=10", *layout)
    with ElasticJob(4, tmp_path, *training, "ckpt.window=2") as job:
        job.hold(ranks[-1], REDUCE, iteration=5)
        job.kill(*ranks)
        _check_survived(job, training, dead=set(ranks), replaying=replaying)


@pytest.mark.parametrize(
    ("ranks_per_node", "ranks", "replaying"),
    [
        pytest.param(1, (2,), {2, 3}, id="one"),
        pytest.param(1, (1, 3), {0, 1, 2, 3}, id="two, not neighbours"),
        pytest.param(2, (2, 3), {2, 3}, id="one with a whole stage"),
    ],
)
def test_nodes_are_lost_with_their_memory(
    ranks_per_node: int, ranks: tuple[int, ...], replaying: set[int], tmp_path: Path
) -> None:
    training = ("train.iterations=12",)
    nodes = f"parallel.ranks_per_node={ranks_per_node}"
    with ElasticJob(4, tmp_path, *training, "ckpt.window=2", "ckpt.replicas=1", nodes) as job:
        job.wait_until(ranks[0], 6, FORWARD)
        job.lose_nodes(*ranks)
        job.order(ranks[0], BACKWARD, iteration=8, life=1)  # what it got back is kept, and copied, as its own was
        _check_survived(job, training, dead=set(ranks), replaying=replaying)
    assert job.orders_obeyed == 1


def test_a_node_is_lost_right_after_a_recovery_from_a_window_that_nobody_had_copied_yet(tmp_path: Path) -> None:
    training = (*PP2, "train.iterations=12")
    with ElasticJob(4, tmp_path, *training, "ckpt.window=2", setup=_never_copy_the_windows_at_three_and_four) as job:
        job.hold(3, BACKWARD, iteration=5)  # all have the window of 3 and 4, and nobody knows yet that it has no copies
        job.order(0, FORWARD, number=SIGSTOP)
        job.kill(3)
        job.wait_for(lambda: job.orders_obeyed == 2 or None, "the recovery")
        job.lose_nodes(0)
        result = job.wait()
    assert result["faults_survived"] == 2
    replays = [event.window_start for event in events_of(job.run, StageRecovered, 0)]
    assert replays == [1], "what had copies was kept"
    assert outcome_of(job.run, result) == uninterrupted(4, *training)


def _never_copy_the_windows_at_three_and_four() -> None:
    put = replicate._Peer._put

    def put_others(self: replicate._Peer, link: Link, key: str) -> None:
        if key.startswith(("snapshot-3-", "snapshot-4-")):  # the latter: everything, after the recovery
            raise CheckpointSaveError("a test lets this copy fail")
        put(self, link, key)

    replicate._Peer._put = put_others


@pytest.mark.parametrize(
    ("replicas", "ranks"), [pytest.param(0, (2,), id="no copies"), pytest.param(1, (2, 3), id="with the only copy")]
)
def test_nothing_is_left_of_a_rank_and_the_job_says_so(replicas: int, ranks: tuple[int, ...], tmp_path: Path) -> None:
    with ElasticJob(4, tmp_path, "train.iterations=200", "ckpt.window=2", f"ckpt.replicas={replicas}") as job:
        job.wait_until(ranks[0], 6, FORWARD)
        job.lose_nodes(*ranks)
        said = job.wait_for_failure()
    assert said.count("error: ") == 1, said
    assert "cannot be rebuilt at iteration" in said


def test_without_copies_a_lost_node_takes_all_back_to_the_newest_checkpoint_on_disk(tmp_path: Path) -> None:
    training = ("train.iterations=12",)
    durable = ("ckpt.replicas=0", "ckpt.durable_every_iters=4", "ckpt.async_save=false")
    with ElasticJob(4, tmp_path, *training, "ckpt.window=2", *durable) as job:
        job.wait_until(2, 6, FORWARD)
        job.lose_nodes(2)
        job.order(3, BACKWARD, iteration=8)
        result = job.wait()
    assert job.orders_obeyed == 1
    assert outcome_of(job.run, result) == uninterrupted(4, *training)
    assert [event.iteration for event in events_of(job.run, StateResumed, 0)] == [4]


def test_a_node_is_lost_before_the_first_iteration_is_done(tmp_path: Path) -> None:
    training = ("train.iterations=4",)
    with ElasticJob(4, tmp_path, *training, "ckpt.window=2") as job:
        job.hold(3, BACKWARD)
        job.lose_nodes(1)
        job.kill(3)
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *training)


def test_what_a_dead_rank_had_is_damaged_and_comes_from_its_copy(tmp_path: Path) -> None:
    with _recovering_job(tmp_path) as job:
        job.hold(2, BACKWARD, iteration=6)
        for buffer in (Path(job.trainer(2).memory) / "own" / "buffers").iterdir():
            _flip_a_bit(buffer)
        job.kill(2)
        _check_survived(job, RECOVERING, dead={2}, replaying={2, 3})
    assert "checksum" in job.said()


def test_a_keeper_that_dies_is_replaced_and_keeps_copies_again(tmp_path: Path) -> None:
    training = ("train.iterations=16",)
    with ElasticJob(4, tmp_path, *training, "ckpt.window=2") as job:
        job.wait_until(2, 3)
        os.kill(job.keeper_pid(3), SIGKILL)
        job.wait_until(2, 8)
        job.lose_nodes(2)
        _check_survived(job, training, dead={2}, replaying={2, 3})


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_rank_dies_while_a_durable_checkpoint_is_written(asynchronous: str, tmp_path: Path) -> None:
    training = ("train.iterations=12",)
    durable = ("ckpt.durable_every_iters=4", f"ckpt.async_save={asynchronous}")
    with ElasticJob(4, tmp_path, *training, "ckpt.window=2", *durable) as job:
        directory = job.run / "checkpoints" / "iter_0000004"
        job.wait_for(lambda: directory.exists() or None, "a checkpoint that is being written")
        job.kill(1)
        _check_survived(job, training, dead={1}, replaying={0, 1})
    assert {event.iteration for event in events_of(job.run, CheckpointSaved, 0)} >= {8, 12}


def test_a_bit_that_flips_in_a_rank_that_lives_is_told_with_rank_and_operator(tmp_path: Path) -> None:
    with ElasticJob(4, tmp_path, "train.iterations=200", "ckpt.window=3", setup=_flip_a_weight_of_rank_three) as job:
        job.order(2, BACKWARD, iteration=6)
        said = job.wait_for_failure()
    assert said.count("error: rank 3: replaying to iteration 5 gave another state of layer 1 than the rank had") == 1
    assert [event.operators for event in events_of(job.run, ReplayDiffered, 3)] == [["layer 1"]]


def _flip_a_weight_of_rank_three() -> None:
    """Let rank 3 have another weight from iteration 5 on, as a bit that flips in memory would."""
    step_committed = Session.step_committed

    def flipping(session: Session, iteration: int) -> None:
        step_committed(session, iteration)
        if (iteration, os.environ["RANK"]) == (5, "3"):
            assert session.sparse is not None
            assert session.sparse.recovery is not None
            operators = cast("RankOperators", session.sparse.recovery._operators)
            operators.parameters[0].weights()[0] += 1.0

    Session.step_committed = flipping  # type: ignore[method-assign]


def _flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))


RECOVERING = ("train.iterations=10",)


def _recovering_job(folder: Path, *overrides: str) -> ElasticJob:
    return ElasticJob(4, folder, *RECOVERING, "ckpt.window=3", *overrides)


def test_a_rank_dies_again_while_it_is_replayed(tmp_path: Path) -> None:
    with _recovering_job(tmp_path) as job:
        job.order(2, BACKWARD, iteration=5)
        job.order(2, RECOVERY, skip=2, life=1)
        _check_survived(job, RECOVERING, dead={2}, replaying={2, 3})
    assert job.orders_obeyed == 2


def test_another_rank_of_the_stage_dies_while_it_is_replayed(tmp_path: Path) -> None:
    with _recovering_job(tmp_path) as job:
        job.wait_until(3, 2)
        job.order(3, RECOVERY, skip=2)
        job.order(2, BACKWARD, iteration=5)
        _check_survived(job, RECOVERING, dead={2, 3}, replaying={2, 3})
    assert job.orders_obeyed == 2


def test_a_neighbour_dies_while_it_sends_logs(tmp_path: Path) -> None:
    with _recovering_job(tmp_path) as job:
        job.order(2, BACKWARD, iteration=5)
        held = job.hold(2, RECOVERY, skip=2, life=1)
        job.kill(0)
        os.kill(held, SIGCONT)
        _check_survived(job, RECOVERING, dead={0, 2}, replaying={0, 1, 2, 3})


def test_a_rank_dies_that_waits_for_the_recovery_of_others(tmp_path: Path) -> None:
    training = (*RECOVERING, *PP4)
    with _recovering_job(tmp_path, *PP4) as job:
        job.order(0, BACKWARD, iteration=5)
        held = job.hold(0, RECOVERY, skip=2, life=1)
        job.kill(3)
        os.kill(held, SIGCONT)
        _check_survived(job, training, dead={0, 3}, replaying={0, 3})


def test_ten_deaths_in_a_row_during_recovery(tmp_path: Path) -> None:
    with _recovering_job(tmp_path) as job:
        job.order(2, BACKWARD, iteration=5)
        for life in range(1, 11):
            job.order(2, RECOVERY, skip=life % 4, life=life)
        _check_survived(job, RECOVERING, dead={2}, replaying={2, 3})
    assert job.orders_obeyed == 11


@pytest.mark.parametrize("phase", [Phase.BUILD, JOIN, RECOVERY])
def test_a_rank_dies_before_the_job_has_begun(phase: Phase, tmp_path: Path) -> None:
    training = ("train.iterations=3",)
    with ElasticJob(4, tmp_path, *training, "ckpt.window=2") as job:
        if phase is Phase.BUILD:
            job.kill(1)
        else:
            job.order(1, phase)
        job.trainer(1, life=1)
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *training)
    assert [len(events_of(job.run, TrainerStarted, rank)) for rank in (0, 2, 3)] == [1, 1, 1]
    assert result["faults_survived"] == 1


def test_a_replacement_dies_as_it_joins(tmp_path: Path) -> None:
    with _recovering_job(tmp_path) as job:
        job.order(1, REDUCE, iteration=5)
        job.order(1, JOIN, life=1)
        _check_survived(job, RECOVERING, dead={1}, replaying={0, 1})
    assert job.orders_obeyed == 2
