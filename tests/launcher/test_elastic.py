"""ckpt=moevement under faults: ranks that live stay, lost state is rebuilt, and the run ends as if nothing had been.

Jobs of real supervisors, workers and replica daemons, each with a list of faults (tests/campaign.py), compared with the
uninterrupted run bit for bit, after every iteration and recovery. Dropout is on throughout.

With W = 2 a recovery to iteration t is followed by a snapshot of the whole state after t and by the windows t+1..t+2,
t+3..t+4 and so on; every rank has a window once the gradients of the iteration after it are complete. So a rank that
dies in iteration t+4, before its update, goes back to t+3 and runs two iterations again. Where every rank dies, all go
back to the end of a window.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL, SIGSTOP, SIGTERM, SIGUSR1
from typing import Any, cast

import pytest

from moe_ckpt.elastic.status_page import RAISE_NUMBER
from moe_ckpt.engine.session import Session
from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.events import (
    CheckpointSaved,
    IterationCommitted,
    Rejoined,
    ReplayDiffered,
    StageRecovered,
)
from moe_ckpt.megatron.operators import RankOperators
from moe_ckpt.replication import sender
from moe_ckpt.replication.connection import Connection
from moe_ckpt.types import Phase
from tests.campaign import Fault, Moment, Point, lose_nodes, survive
from tests.elastic_job import ElasticJob
from tests.scenarios import BIAS, FP16_SKIPPING, PP2, PP4, TIED, UNSHARDED
from tests.training import events_of

pytestmark = pytest.mark.timeout(330)

BUILD, JOIN, RECOVERY, DONE = Phase.BUILD, Phase.JOIN, Phase.RECOVERY, Phase.DONE
FORWARD, BACKWARD, REDUCE, STEP = Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.STEP
SNAPSHOT, BETWEEN = Phase.SNAPSHOT, Phase.BETWEEN
FORTY = ("train.iterations=40",)


def fault(
    name: str,
    *at: Point,
    back_to: int | Collection[int],
    executed: int | Mapping[int, int] | None,
    dp: int = 2,
    **more: Any,
) -> Fault:
    """Return a fault after which the stages of the dead ranks replay, and no others; `dp` ranks train a stage."""
    described = Fault(name=name, at=at, back_to=back_to, executed=executed, replaying=None, **more)
    stages = {rank // dp for rank in described.dead} if back_to else set()
    return replace(described, replaying=[stage * dp + rank for stage in stages for rank in range(dp)])


def test_a_rank_dies_in_each_phase(tmp_path: Path) -> None:
    faults = [
        fault("as ranks join", Point(1, JOIN), back_to=0, executed=0),
        fault("before the first iteration", Point(1, FORWARD, 1), back_to=0, executed=0),
        fault("before the first window", Point(3, STEP, 2), back_to=2, executed=2),
        fault("as an iteration begins, TERM", Point(0, FORWARD, 6, number=SIGTERM), back_to=5, executed=2),
        fault("in forward", Point(3, FORWARD, 9, skip=2), back_to=8, executed=2),
        fault("in backward, an ECC error", Point(2, BACKWARD, 12, number=RAISE_NUMBER), back_to=11, executed=2),
        fault("again before the next window", Point(2, BACKWARD, 12), back_to=11, executed=None),
        fault("as gradients are reduced", Point(1, REDUCE, 15), back_to=14, executed=2),
        fault("after the vote", Point(0, STEP, 17), back_to=17, executed=2),
        fault("between update and gather", Point(3, STEP, 20, skip=1), back_to=20, executed=2),
        fault("before a snapshot", Point(2, SNAPSHOT, 23), back_to=23, executed=2),
        fault("between iterations", Point(1, BETWEEN, 26), back_to=26, executed=2),
        fault(
            "while others wait for a vote",
            Point(1, Moment.VOTE, 30),
            kills=[3],
            then=_kill_once_others_wait,
            back_to=(29, 30),  # rank 1 may have its gradients ready before it notices the death
            executed=None,
        ),
        fault("every rank", Point(3, REDUCE, 33), kills=(0, 1, 2, 3), back_to=(31, 32), executed=1),
        fault("in the last iteration", Point(2, BACKWARD, 40), back_to=39, executed=None),
        fault("in the last evaluation", Point(3, FORWARD, 40, skip=3), back_to=40, executed=1),
        fault("as digests are exchanged", Point(1, DONE), back_to=40, executed=1),
    ]
    survive(tmp_path, faults, *FORTY, settings=["ckpt.window=2"])


def _kill_once_others_wait(job: ElasticJob, ranks: Sequence[int]) -> None:
    """Kill ranks as soon as all but rank 1 wait for it, and do not just pass through a collective operation."""
    pages = [job.page(rank) for rank in (0, 2, 3)]
    looks: list[list[float]] = []

    def stand_still() -> bool | None:
        looks.append([page.progress_s if page.waiting else 0.0 for page in pages])
        return (len(looks) >= 50 and all(looks[-1]) and looks[-50:] == [looks[-1]] * 50) or None

    job.wait_for(stand_still, "all others to wait for rank 1")
    job.kill(*ranks)


def test_a_rank_dies_while_a_recovery_goes_on(tmp_path: Path) -> None:
    """With W = 3, router biases that have no gradients, and evaluations between iterations."""
    replayed = functools.partial(Point, phase=RECOVERY, skip=2)
    faults = [
        fault("the bias of routers", Point(0, REDUCE, 5), back_to=4, executed=3),
        fault("again while it is replayed", Point(2, BACKWARD, 9), replayed(2), back_to=8, executed=3),
        fault("another rank of the stage", Point(2, BACKWARD, 13), replayed(3), back_to=12, executed=3),
        fault("a neighbour as it sends logs", Point(2, STEP, 16), replayed(2), kills=[0], back_to=16, executed=3),
        fault(
            "as it is built and joins", Point(1, REDUCE, 21), Point(1, BUILD), Point(1, JOIN), back_to=20, executed=3
        ),
        fault(
            "five times in a row",
            Point(2, BACKWARD, 25),
            *(Point(2, RECOVERY, skip=number % 4) for number in range(5)),
            back_to=24,
            executed=3,
        ),
        fault("both ranks of a stage", Point(3, REDUCE, 29), kills=[2, 3], back_to=28, executed=3),
        fault("after the last iteration", Point(0, BETWEEN, 30), back_to=30, executed=2),
    ]
    training = ("train.iterations=30", *BIAS, "train.eval_every_iters=2")
    survive(tmp_path, faults, *training, settings=["ckpt.window=3"])


def test_stages_are_lost_alone_together_and_with_their_nodes(tmp_path: Path) -> None:
    stages = functools.partial(fault, dp=1, executed=2)
    lost = {"then": lose_nodes, "fetched": True}
    faults = [
        stages("in the middle", Point(1, BACKWARD, 4), back_to=3),
        stages("another in the middle", Point(2, REDUCE, 7), back_to=6),
        stages("neighbours, replayed jointly", Point(2, REDUCE, 10), kills=[1, 2], back_to=9),
        stages("not neighbours, in parallel", Point(2, REDUCE, 13), kills=[0, 2], back_to=12),
        replace(stages("all", Point(3, REDUCE, 16), kills=[0, 1, 2, 3], back_to=14), executed=1),
        replace(
            stages("far away", Point(0, BACKWARD, 18), Point(0, RECOVERY, skip=2), kills=[3], back_to=17),
            executed={0: 1, 3: 2},  # stage 0 goes on with its replay
        ),
        stages("a node of two stages", Point(3, BACKWARD, 21), kills=[2, 3], back_to=20, **lost),
        stages("what it got back", Point(2, BACKWARD, 24), back_to=23),
        stages("the other node", Point(0, FORWARD, 27), kills=[0, 1], back_to=26, **lost),
    ]
    settings = ["ckpt.window=2", "parallel.ranks_per_node=2", "ckpt.replicas=1"]
    survive(tmp_path, faults, *PP4, "train.iterations=30", settings=settings)


def test_host_memory_is_lost_or_damaged(tmp_path: Path) -> None:
    lost = {"then": lose_nodes, "fetched": True}
    faults = [
        fault(
            "a node before the first iteration is done",
            Point(3, BACKWARD, 1),
            kills=[1, 3],
            then=lambda job, _: (job.lose_nodes(1), job.kill(3)),
            back_to=0,
            executed=0,
        ),
        fault("a node", Point(2, FORWARD, 4), kills=[2], back_to=3, executed=2, **lost),
        fault("a rank that got its memory back", Point(2, BACKWARD, 7), back_to=6, executed=2),
        fault("two nodes, not neighbours", Point(3, BACKWARD, 10), kills=[1, 3], back_to=9, executed=2, **lost),
        fault(
            "a rank whose memory is damaged",
            Point(2, BACKWARD, 13),
            kills=[2],
            then=_damage_and_kill,
            fetched=True,
            back_to=12,
            executed=2,
        ),
        fault("a replica daemon", Point(0, FORWARD, 16), kills=[], then=_kill_daemon_of_rank_3, back_to=15, executed=0),
        fault("a node whose copies it has", Point(2, BACKWARD, 19), kills=[2], back_to=18, executed=2, **lost),
        fault("a rank while its newest window has no copies", Point(3, BACKWARD, 23), back_to=22, executed=None),
        Fault(
            name="a node right after that",
            at=[Point(0, FORWARD, 23)],
            kills=[0],
            then=lose_nodes,
            fetched=True,
            back_to=22,
            replaying=None,  # stage 1, too, where it has just recovered from its newest window
            executed=None,
        ),
        fault(
            "a node, with a needless copy damaged",
            Point(1, BACKWARD, 26),
            kills=[1],
            then=_damage_a_needless_copy,
            fetched=True,
            back_to=25,
            executed=2,
        ),
        fault(
            "a node while its copies change",
            Point(1, BACKWARD, 29),
            Point(1, Moment.VOTE, 29),
            Point(1, Moment.COPYING),
            kills=[1],
            back_to=28,
            executed=0,
            **lost,
        ),
        fault("a node after the vote", Point(3, STEP, 32), kills=[3], back_to=32, executed=3, **lost),
    ]
    job = survive(tmp_path, faults, *FORTY, settings=["ckpt.window=2"], setup=_copy_no_window_at_21_and_22)
    said = job.said()
    assert "checksum" in said
    assert "done without: fetching record-" in said
    starts = [event.window_start for event in events_of(job.run, StageRecovered, 1)]
    assert 19 in starts, "the window without copies was preferred"


def _damage_and_kill(job: ElasticJob, ranks: Sequence[int]) -> None:
    for buffer in (Path(job.worker(2).memory) / "own" / "buffers").iterdir():
        _flip_a_bit(buffer)
    job.kill(*ranks)


def _kill_daemon_of_rank_3(job: ElasticJob, _: Sequence[int]) -> None:
    """Also wait until other ranks have left the generation: until then the rank that stands still must not go on."""
    generation = job.page(1).generation
    os.kill(job.daemon_pid(3), SIGKILL)
    job.wait_for(lambda: job.page(1).generation > generation or None, "the end of the generation")


def _damage_a_needless_copy(job: ElasticJob, ranks: Sequence[int]) -> None:
    index = Path(job.worker(0).memory) / "held" / "rank0001" / "index"
    oldest = min(index.glob("record-*.blob"), key=lambda path: int(path.stem.removeprefix("record-")))
    oldest.write_bytes(b"garbage")
    job.lose_nodes(*ranks)


def _copy_no_window_at_21_and_22() -> None:
    put = sender._Lane._put

    def put_others(self: sender._Lane, link: Connection, key: str) -> None:
        if key.startswith(("snapshot-21-", "snapshot-22-")):
            raise CheckpointSaveError("a test lets this copy fail")
        put(self, link, key)

    sender._Lane._put = put_others


def _flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))


MODELS = {
    "all of them, W by the policy": ((*FP16_SKIPPING, *TIED, *UNSHARDED), ("ckpt.profile_iters=2",)),
    "fp16 with skipped steps, W 1": ((*FP16_SKIPPING,), ("ckpt.window=1",)),
    "tied embeddings": (TIED, ("ckpt.window=2",)),
    "optimizer not sharded": (UNSHARDED, ("ckpt.window=3",)),
    "no copies, W 8": ((), ("ckpt.window=8", "ckpt.replicas=0")),
    "PP 2, DP 1": (PP2, ("ckpt.window=2",)),
    "DP 4": (("train.global_batch_size=16",), ("ckpt.window=2",)),
}
WORLD_SIZES = {"PP 2, DP 1": 2, "DP 4": 8}


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_models_windows_and_layouts(name: str, tmp_path: Path) -> None:
    (model, settings), world_size = MODELS[name], WORLD_SIZES.get(name, 4)
    dies = functools.partial(fault, dp=world_size // 2, executed=None)
    last = world_size - 1
    faults = [
        dies("as all begin", Point(1, RECOVERY), back_to=0),
        dies("before anything is kept", Point(1, FORWARD, 1), back_to=0),
        dies("in backward", Point(0, BACKWARD, 4), back_to=3),
        dies("between update and gather", Point(last, STEP, 7, skip=1), back_to=7),
        dies("one of each stage", Point(last, REDUCE, 11), kills=[0, last], back_to=(9, 10)),
    ]
    job = survive(
        tmp_path, faults, *model, "train.iterations=14", world_size=world_size, settings=settings, timeout_s=320.0
    )
    skipped = [event.iteration for event in events_of(job.run, IterationCommitted) if event.skipped]
    assert bool(skipped) == (set(FP16_SKIPPING) <= set(model))


def test_a_process_stands_still_and_a_thread_hangs(tmp_path: Path) -> None:
    faults = [
        fault("stands still", Point(1, BACKWARD, 4, number=SIGSTOP), back_to=3, executed=2, dp=1),
        fault("hangs", Point(0, FORWARD, 7, skip=1, number=SIGUSR1), back_to=6, executed=2, dp=1),
    ]
    settings = ["ckpt.window=2", "runtime.heartbeat_s=5", "runtime.progress_s=6"]
    job = survive(tmp_path, faults, *PP2, "train.iterations=8", world_size=2, settings=settings)
    (stopped,), (hung,) = (event.deaths for event in events_of(job.run, Rejoined, 0))
    assert "no heartbeat for runtime.heartbeat_s=5" in stopped
    assert "no progress for runtime.progress_s=6" in hung


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [True, False])
def test_without_copies_a_lost_node_leads_back_to_disk(asynchronous: bool, tmp_path: Path) -> None:
    """A checkpoint that is written in the background has not been committed as the next iteration begins."""
    dies = functools.partial(fault, dp=1, executed=2)
    newest = 16 if asynchronous else 20
    faults = [
        dies("by its own memory", Point(0, BACKWARD, 4), back_to=3),
        replace(dies("as a checkpoint is written", Point(1, FORWARD, 9), kills=[1], back_to=8), executed=None),
        replace(dies("before a checkpoint is written", Point(0, SNAPSHOT, 12), kills=[1], back_to=12), executed=3),
        Fault(
            name="a node",
            at=[Point(1, BETWEEN, 20)],
            kills=[1],
            then=lose_nodes,
            back_to=newest,
            resumed=f"iter_{newest:07}",
            replaying=(),
            executed=0,
        ),
        dies("after that", Point(1, BACKWARD, 24), back_to=23),
    ]
    durable = ["ckpt.durable_every_iters=4", f"ckpt.async_save={str(asynchronous).lower()}"]
    settings = ["ckpt.window=2", "ckpt.replicas=0", *durable]
    job = survive(tmp_path, faults, *PP2, "train.iterations=26", world_size=2, settings=settings)
    assert {event.iteration for event in events_of(job.run, CheckpointSaved, 0)} >= {4, newest, 24}


@pytest.mark.parametrize(
    ("replicas", "ranks"),
    [pytest.param(1, (2, 3), id="with the only copy"), pytest.param(0, (2,), id="no copies", marks=pytest.mark.full)],
)
def test_a_job_of_which_nothing_is_left_fails_once(replicas: int, ranks: tuple[int, ...], tmp_path: Path) -> None:
    with ElasticJob(4, tmp_path, "train.iterations=200", "ckpt.window=2", f"ckpt.replicas={replicas}") as job:
        job.wait_until(ranks[0], 4, FORWARD)
        job.lose_nodes(*ranks)
        said = job.wait_for_failure()
    assert said.count("error: ") == 1, said
    assert "cannot be rebuilt at iteration" in said


def test_a_bit_that_flips_in_a_living_rank_is_found_by_replay(tmp_path: Path) -> None:
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
