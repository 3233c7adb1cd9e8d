"""ckpt=moevement with ranks that are threads: each recovery ends in the state of the job without faults, bit for bit.

`ThreadJob` compares every rank's digest after every iteration, so a wrong state is named by the iteration and by the
number of faults before it. Rows of `ROWS` cover every pair of settings.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from allpairspy import AllPairs

from moe_ckpt.engine.session import Session
from moe_ckpt.errors import NothingLeftError, PeersLostError
from moe_ckpt.events import CheckpointSkipped, Rejoined, StageRecovered
from moe_ckpt.snapshot.blobs import BlobFolder, held_path
from moe_ckpt.snapshot.codec import SnapshotHeader
from moe_ckpt.types import Phase, ReadyGradients
from tests.engine.configs import config
from tests.engine.copies import answer_copies
from tests.engine.damage import flip_a_bit, rewrite_headers
from tests.engine.job import MOMENTS, Fault, ThreadJob, uninterrupted
from tests.engine.model import MICRO_BATCHES, Shape

PAIR, PIPE = Shape(pp=2, dp=1), Shape(pp=3, dp=1)

AXES: dict[str, Sequence[Any]] = {
    "shape": [PAIR, PIPE, Shape(pp=1, dp=2), Shape(ep=2), Shape(pp=2, dp=1, tied=True), Shape(tied=True)],
    "skips": [0, 3],
    "window": [1, 2, 3, "auto"],
    "phase": MOMENTS,
    "dead": ["first", "last", "a stage", "all"],
    "loses_memory": [False, True],
    "boundary_log": [True, False],
    "keep_windows": [1, 2],
    "pause_iters": ["auto", 1, 3],
}


@dataclass(frozen=True)
class Row:
    """A job, and the fault in its sixth iteration."""

    shape: Shape
    skips: int
    window: int | str
    phase: tuple[Phase, int]
    dead: str
    loses_memory: bool
    boundary_log: bool
    keep_windows: int
    pause_iters: int | str

    def victims(self) -> tuple[int, ...]:
        ranks = range(self.shape.world_size)
        last_stage = tuple(ranks[-self.shape.dp :])
        return {"first": (0,), "last": (ranks[-1],), "a stage": last_stage, "all": tuple(ranks)}[self.dead]


def _is_possible(row: Sequence[Any]) -> bool:
    """A node that is lost leaves copies of its memory on another node only."""
    named = dict(zip(AXES, row, strict=False))
    return not (named.get("loses_memory") and named.get("dead") in ("a stage", "all"))


ROWS = [Row(*row) for row in AllPairs(list(AXES.values()), filter_func=_is_possible)]


def test_rows_cover_every_pair() -> None:
    for (first, values), (second, others) in itertools.combinations(AXES.items(), 2):
        covered = {(getattr(row, first), getattr(row, second)) for row in ROWS}
        for pair in itertools.product(values, others):
            assert pair in covered or not _is_possible(
                [dict(zip((first, second), pair, strict=True)).get(a) for a in AXES]
            )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.shape.pp}x{row.shape.dp} {row.dead} {row.phase[0].name}")
def test_a_recovered_job_ends_as_without_faults(row: Row, tmp_path: Path) -> None:
    shape = Shape(**{**vars(row.shape), "skips": row.skips})
    settings = {name: getattr(row, name) for name in ("window", "pause_iters", "boundary_log", "keep_windows")}
    first, *others = row.victims()
    phase, skip = row.phase
    fault = Fault(rank=first, phase=phase, iteration=6, skip=skip, also=tuple(others), loses_memory=row.loses_memory)
    job = ThreadJob(tmp_path, config("moevement", profile_iters=2, **settings), shape, faults=[fault])
    assert job.run() == uninterrupted(shape, 8)


def rejoined(job: ThreadJob, generation: int = 2) -> list[Rejoined]:
    """Return the event of each rank with which it entered a generation."""
    return [next(e for e in job.events(Rejoined, rank) if e.generation == generation) for rank in job.ranks]


def replayed(job: ThreadJob) -> dict[int, int]:
    """Return the iterations that each replaying rank ran again, over all faults."""
    of_each = {rank: sum(event.executed_iters for event in job.events(Rejoined, rank)) for rank in job.ranks}
    return {rank: iters for rank, iters in of_each.items() if iters}


@pytest.mark.parametrize(
    ("shape", "dead", "replaying"),
    [
        pytest.param(PIPE, (1,), {1}, id="a stage in the middle"),
        pytest.param(PIPE, (0, 1), {0, 1}, id="neighbours, jointly"),
        pytest.param(PIPE, (0, 2), {0, 2}, id="stages apart, in parallel"),
        pytest.param(Shape(), (3,), {2, 3}, id="one rank of a stage: its peers replay with it"),
    ],
)
def test_only_stages_of_dead_ranks_replay(
    shape: Shape, dead: tuple[int, ...], replaying: set[int], tmp_path: Path
) -> None:
    fault = Fault(rank=dead[0], phase=Phase.REDUCE, iteration=6, also=dead[1:])
    job = ThreadJob(tmp_path, config("moevement", window=3), shape, faults=[fault])
    job.run()
    assert replayed(job) == dict.fromkeys(replaying, 4), "from the window of iterations 1 to 3 up to 5"
    assert [event.iteration for event in rejoined(job)] == [5] * shape.world_size
    assert {rank for rank in job.ranks if job.events(StageRecovered, rank)} == replaying


@pytest.mark.parametrize(
    ("shape", "moment", "dead", "replaying"),
    [
        pytest.param(PIPE, "backward 1", 2, {0: 4, 2: 4}, id="nothing is replayed yet"),
        pytest.param(PIPE, "backward 3", 2, {0: 2, 2: 4}, id="between two snapshots"),
        pytest.param(PIPE, f"forward {4 * MICRO_BATCHES}", 2, {0: 1, 2: 4}, id="between two micro-batches"),
        pytest.param(Shape(pp=3), "backward 3", 4, {0: 2, 1: 2, 4: 4, 5: 4}, id="two ranks a stage"),
        pytest.param(PIPE, "step 3", 2, {0: 4, 2: 4}, id="in the middle of an update"),
        pytest.param(PIPE, "backward 3", 1, {0: 4, 1: 4}, id="a neighbour: both start over, jointly"),
    ],
)
def test_a_replay_goes_on_while_another_stage_fails(
    shape: Shape, moment: str, dead: int, replaying: dict[int, int], tmp_path: Path
) -> None:
    """Rank 0 replays iterations 2 to 5, and another stage's rank dies as it begins that forward, backward or step."""
    faults = [Fault(rank=0, phase=Phase.REDUCE, iteration=6), Fault(rank=dead, phase=Phase.DONE)]
    job = ThreadJob(tmp_path, config("moevement", window=3), shape, faults=faults)
    kind, number = moment.split()

    def arm(rank: int, _: Session) -> None:
        if rank != 0 or len(job.struck) != 1:
            return
        model, numbers = job.models[0], itertools.count(1)

        def reach(*_: object) -> None:
            if next(numbers) == int(number):
                job.kill(dead)
                raise PeersLostError("in place of the next exchange with other ranks")
            if kind != "step":
                model.arm(kind, reach)

        if kind == "step":
            model.adam.register_step_post_hook(reach)
        else:
            model.arm(kind, reach)

    job.on_worker.append(arm)
    assert job.run() == uninterrupted(shape, 8)
    assert replayed(job) == replaying


def test_a_stage_is_rebuilt_from_a_window_before_a_long_pause(tmp_path: Path) -> None:
    fault = Fault(rank=1, phase=Phase.BACKWARD, iteration=15)
    settings = config("moevement", window=1, pause_iters=14, profile_iters=2)
    job = ThreadJob(tmp_path, settings, PIPE, iterations=18, faults=[fault])
    assert job.run() == uninterrupted(PIPE, 18)
    assert replayed(job) == {1: 13}, "from the window of iteration 1 to the end of the fourteenth"


def test_logs_of_an_old_window_outlive_a_recovery(tmp_path: Path) -> None:
    """The base of iteration 0 is the only window on two nodes when rank 1 dies, and still when its node is lost.

    The window of 12 slots is incomplete at the first fault, and the snapshot of iteration 10, which begins the next
    generation, does not reach peers before the second.
    """
    shape = Shape(pp=2, dp=1, experts=12)
    faults = [
        Fault(rank=1, phase=Phase.BACKWARD, iteration=11),
        Fault(rank=1, phase=Phase.REDUCE, iteration=11, loses_memory=True),
    ]
    job = ThreadJob(tmp_path, config("moevement", window=12, profile_iters=2), shape, iterations=13, faults=faults)

    def is_held(key: str) -> bool:
        return len(job.struck) == 1 and key.startswith("snapshot-10-")

    job.on_worker.append(lambda _, session: answer_copies(session, is_held, Future))
    assert job.run() == uninterrupted(shape, 13)
    assert replayed(job) == {1: 20}, "twice from the window of iteration 0 to iteration 10"


@pytest.mark.parametrize(
    ("phase", "skip", "iteration", "executed"),
    [
        (Phase.REDUCE, 0, 4, 1),  # before the vote: the iteration comes to nothing
        (Phase.STEP, 0, 5, 2),  # after it: survivors finish the step, and the dead stage replays it
        (Phase.STEP, 1, 5, 0),  # its window of 4 and 5 was confirmed
    ],
)
def test_the_vote_decides_to_which_iteration_all_come(
    phase: Phase, skip: int, iteration: int, executed: int, tmp_path: Path
) -> None:
    job = ThreadJob(
        tmp_path, config("moevement", window=2), PAIR, faults=[Fault(rank=1, phase=phase, skip=skip, iteration=5)]
    )
    job.run()
    assert [event.iteration for event in rejoined(job)] == [iteration, iteration]
    if not skip:
        assert replayed(job) == {1: executed}


def test_a_rank_votes_once_its_peers_hold_the_step(tmp_path: Path) -> None:
    """Else a rank that dies with its node after the vote could not be brought to the iteration that others come to."""
    job = ThreadJob(tmp_path, config("moevement", window=2), PAIR, iterations=4)
    job.sends_slowly = True
    missing: list[tuple[int, str]] = []

    def look_before_votes(rank: int, session: Session) -> None:
        prepare = session._state.prepare

        def look_and_prepare(gradients: ReadyGradients) -> None:
            iteration = job.pages[rank].iteration
            held = set(BlobFolder(held_path(job.memory(1 - rank), rank)).keys())
            missing.extend((rank, key) for key in {f"start-{iteration}", f"record-{iteration}"} - held)
            prepare(gradients)

        session._state.prepare = look_and_prepare

    job.on_worker.append(look_before_votes)
    assert job.run() == uninterrupted(PAIR, 4)
    assert missing == []


def test_a_rank_whose_vote_a_death_cuts_off_finishes_the_step(tmp_path: Path) -> None:
    """Rank 2 takes the step, rank 1 dies before it, and rank 0 has not returned from the vote by then."""
    fault = Fault(rank=1, phase=Phase.STEP, iteration=5)
    job = ThreadJob(tmp_path, config("moevement", window=2), PIPE, faults=[fault])

    def stay_in_the_vote(rank: int, session: Session) -> None:
        vote = session._ranks.barrier

        def wait_for_the_cut() -> None:
            vote()
            if job.pages[rank].iteration == 5:
                vote()

        if rank == 0:
            session._ranks.barrier = wait_for_the_cut  # type: ignore[method-assign]

    job.on_worker.append(stay_in_the_vote)
    assert job.run() == uninterrupted(PIPE, 8)
    assert [event.iteration for event in rejoined(job)] == [5, 5, 5]
    assert replayed(job) == {1: 2}


def test_without_survivors_all_ranks_go_to_the_end_of_the_newest_window(tmp_path: Path) -> None:
    fault = Fault(rank=0, phase=Phase.REDUCE, iteration=6, also=(1, 2))
    job = ThreadJob(tmp_path, config("moevement", window=3), PIPE, faults=[fault])
    assert job.run() == uninterrupted(PIPE, 8)
    assert [event.iteration for event in rejoined(job)] == [3, 3, 3]
    assert replayed(job) == {0: 2, 1: 2, 2: 2}


def test_without_boundary_logs_all_stages_replay(tmp_path: Path) -> None:
    fault = Fault(rank=1, phase=Phase.REDUCE, iteration=6)
    job = ThreadJob(tmp_path, config("moevement", window=3, boundary_log=False), PIPE, faults=[fault])
    job.run()
    assert replayed(job) == {0: 4, 1: 4, 2: 4}


def test_a_lost_node_fetches_its_memory_from_its_peer(tmp_path: Path) -> None:
    faults = [
        Fault(rank=1, phase=Phase.REDUCE, iteration=6, loses_memory=True),
        Fault(rank=1, phase=Phase.BACKWARD, iteration=8),  # fetched memory is kept, and copied, as its own was
        Fault(rank=1, phase=Phase.BACKWARD, iteration=10, loses_memory=True),
    ]
    job = ThreadJob(tmp_path, config("moevement", window=2), PIPE, iterations=11, faults=faults)
    assert job.run() == uninterrupted(PIPE, 11)
    fetched = [[event.fetched_bytes > 0 for event in job.events(Rejoined, rank)] for rank in (0, 2)]
    assert fetched == [[True, False, True]] * 2
    assert set(replayed(job)) == {1}


def test_each_rank_may_be_lost_in_turn(tmp_path: Path) -> None:
    faults = [Fault(rank=rank, phase=Phase.REDUCE, iteration=4 + rank, loses_memory=True) for rank in range(4)]
    job = ThreadJob(tmp_path, config("moevement", window=2), Shape(), iterations=9, faults=faults)
    assert job.run() == uninterrupted(Shape(), 9)


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(Fault(rank=0, phase=Phase.RECOVERY), id="another rank, in the recovery"),
        pytest.param(Fault(rank=1, phase=Phase.RECOVERY), id="the new worker, in the recovery"),
        pytest.param(Fault(rank=0, phase=Phase.JOIN), id="another rank, before it"),
        pytest.param(Fault(rank=0, phase=Phase.RECOVERY, loses_memory=True), id="another node, in the recovery"),
        pytest.param(Fault(rank=0, phase=Phase.FORWARD, loses_memory=True), id="another node, right after it"),
    ],
)
def test_a_second_fault_comes_with_the_recovery(second: Fault, tmp_path: Path) -> None:
    faults = [Fault(rank=1, phase=Phase.REDUCE, iteration=6), second, Fault(rank=1, phase=Phase.STEP, iteration=7)]
    job = ThreadJob(tmp_path, config("moevement", window=2), PIPE, faults=faults)
    assert job.run() == uninterrupted(PIPE, 8)


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.REDUCE, Phase.STEP])
@pytest.mark.parametrize("shape", [PAIR, Shape(pp=2, dp=1, tied=True)], ids=["plain", "tied"])
def test_a_rank_dies_in_the_first_iteration(shape: Shape, phase: Phase, tmp_path: Path) -> None:
    job = ThreadJob(tmp_path, config("moevement", window=2), shape, faults=[Fault(rank=1, phase=phase, iteration=1)])
    assert job.run() == uninterrupted(shape, 8)


def test_a_rank_dies_in_the_last_iteration_and_after_it(tmp_path: Path) -> None:
    faults = [Fault(rank=0, phase=Phase.BACKWARD, iteration=8), Fault(rank=1, phase=Phase.DONE)]
    job = ThreadJob(tmp_path, config("moevement", window=2), PAIR, faults=faults)
    assert job.run() == uninterrupted(PAIR, 8)


@pytest.mark.parametrize(
    ("replicas", "lost"), [pytest.param(0, (1,), id="no copies"), pytest.param(1, (1, 2), id="with the only copy")]
)
def test_a_job_ends_where_nothing_is_left_of_a_rank(replicas: int, lost: tuple[int, ...], tmp_path: Path) -> None:
    fault = Fault(rank=lost[0], phase=Phase.REDUCE, iteration=6, also=lost[1:], loses_memory=True)
    job = ThreadJob(tmp_path, config("moevement", window=2, replicas=replicas), PIPE, faults=[fault])
    with pytest.raises(NothingLeftError, match="cannot be rebuilt"):
        job.run()


def _damage_own(job: ThreadJob) -> None:
    flip_a_bit(job.memory(1) / "own")


def _damage_both(job: ThreadJob) -> None:
    _damage_own(job)
    flip_a_bit(job.memory(2) / "held" / "rank0001")


def test_damaged_memory_comes_from_the_copy(tmp_path: Path) -> None:
    fault = Fault(rank=1, phase=Phase.REDUCE, iteration=6, before_restart=_damage_own)
    job = ThreadJob(tmp_path, config("moevement", window=2), PIPE, faults=[fault])
    assert job.run() == uninterrupted(PIPE, 8)
    assert [event.reason for event in job.events(CheckpointSkipped, 1) if "checksum" in event.reason]
    assert rejoined(job)[0].fetched_bytes > 0


def test_damage_in_all_copies_is_an_error(tmp_path: Path) -> None:
    fault = Fault(rank=1, phase=Phase.REDUCE, iteration=6, before_restart=_damage_both)
    job = ThreadJob(tmp_path, config("moevement", window=2), PIPE, faults=[fault])
    with pytest.raises(NothingLeftError):
        job.run()


def test_a_copy_that_cannot_be_fetched_is_not_asked_for_again(tmp_path: Path) -> None:
    """It is damaged after its holder has verified it."""
    fault = Fault(rank=1, phase=Phase.REDUCE, iteration=6, loses_memory=True)
    job = ThreadJob(tmp_path, config("moevement", window=2), PIPE, faults=[fault])
    asked: list[int] = []

    def damage(rank: int, holder: int) -> None:
        asked.append(holder)
        flip_a_bit(job.memory(holder) / "held" / f"rank{rank:04d}")

    job.before_fetch = damage
    with pytest.raises(NothingLeftError):
        job.run()
    assert len(asked) == 1


@pytest.mark.parametrize(
    "foreign",
    [
        pytest.param(lambda h: replace(h, identity=replace(h.identity, run_id="other")), id="another run"),
        pytest.param(lambda h: replace(h, identity=replace(h.identity, model="other")), id="another model"),
        pytest.param(lambda h: replace(h, shard=replace(h.shard, global_rank=0)), id="another rank"),
        pytest.param(lambda h: replace(h, shard=replace(h.shard, pp_rank=0)), id="another stage"),
    ],
)
def test_foreign_snapshots_are_not_loaded(foreign: Callable[[SnapshotHeader], SnapshotHeader], tmp_path: Path) -> None:
    def make_foreign(job: ThreadJob) -> None:
        rewrite_headers(job.memory(1) / "own", foreign)

    fault = Fault(rank=1, phase=Phase.REDUCE, iteration=6, before_restart=make_foreign)
    job = ThreadJob(tmp_path, config("moevement", window=2), PIPE, faults=[fault])
    assert job.run() == uninterrupted(PIPE, 8)
    assert job.events(CheckpointSkipped, 1)
    assert rejoined(job)[0].fetched_bytes > 0
