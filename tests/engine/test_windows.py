"""ckpt=moevement with ranks that are threads: recoveries are exact, bit for bit.

Each recovery ends in the state of the job without faults. `ThreadJob` compares every
rank's digest after every iteration, so the error of a wrong state names the iteration
and the number of earlier faults. Rows of `ROWS` cover every pair of settings.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.engine.session import Session
from moe_ckpt.errors import ConfigError, NothingLeftError, PeersLostError
from moe_ckpt.events import (
    CheckpointSkipped,
    CopiesRestored,
    Event,
    Rejoined,
    ReplayDiffered,
    SnapshotTaken,
    StageRecovered,
    WindowChosen,
    WindowReplicated,
    read_events,
)
from moe_ckpt.policies.moevement import SparseWindows
from moe_ckpt.policies.window_sizes import WindowSizes
from moe_ckpt.snapshot.blob_keys import step_key
from moe_ckpt.snapshot.blobs import BlobFolder, held_path, own_path
from moe_ckpt.snapshot.codec import SnapshotHeader
from moe_ckpt.snapshot.token_bucket import BURST_S
from moe_ckpt.types import Phase
from tests.engine.covering import fault_of, rows_of, shape_of
from tests.engine.damage import answer_copies, flip_a_bit, rewrite_headers
from tests.harness.threads.job import (
    MOMENTS,
    Fault,
    Observer,
    ThreadJob,
    exact,
    stay_in_the_vote,
    uninterrupted,
)
from tests.harness.threads.model import MICRO_BATCHES, PAIR, PIPE, Model, Shape
from tests.policies.profiles import config
from tests.small_disk import small_disk
from tests.waits import WAIT_S

AXES: dict[str, Sequence[Any]] = {
    "shape": [
        PAIR,
        PIPE,
        Shape(pp=1, dp=2),
        Shape(ep=2),
        Shape(pp=2, dp=1, tied=True),
        Shape(tied=True),
    ],
    "skips": [0, 3],
    "window": [1, 2, 3, "auto"],
    "phase": MOMENTS,
    "dead": ["first", "last", "a stage", "all"],
    "loses_memory": [False, True],
    "boundary_log": [True, False],
    "keep_windows": [1, 2],
    "pause_iters": ["auto", 1, 3],
    "recovery": ["replay", "gradients"],
}


def _is_possible(row: Mapping[str, Any]) -> bool:
    """Return whether a row leaves copies: only one other node has a node's copies."""
    return not (row.get("loses_memory") and row.get("dead") in ("a stage", "all"))


ROWS = rows_of(AXES, _is_possible)


class _PageIterations(Observer):
    """Records the iteration in each rank's page as all ranks continue from a state."""

    def __init__(self, job: ThreadJob) -> None:
        self.job, self.found = job, list[tuple[int, int]]()

    def started(self, iteration: int, rank: int, model: Model) -> None:
        self.found.append((iteration, self.job.pages[rank].iteration))


def test_an_error_after_a_recovery_counts_for_its_iteration(tmp_path: Path) -> None:
    """A replacement may fail before its first iteration.

    Then the replacement fails in the same iteration as the worker before.
    """
    job = ThreadJob(
        tmp_path,
        config("moevement", window=2),
        PAIR,
        faults=[Fault(rank=1, phase=Phase.REDUCE, iteration=6)],
    )
    seen = _PageIterations(job)
    job.observers.append(seen)
    job.run()
    assert sorted(seen.found) == [(0, 0), (0, 0), (5, 5), (5, 5)]


def test_rows_cover_every_pair() -> None:
    for (first, values), (second, others) in itertools.combinations(AXES.items(), 2):
        covered = {(getattr(row, first), getattr(row, second)) for row in ROWS}
        for pair in itertools.product(values, others):
            assert pair in covered or not _is_possible(
                dict(zip((first, second), pair, strict=True))
            )


@pytest.mark.parametrize(
    "row",
    ROWS,
    ids=lambda row: f"{row.shape.pp}x{row.shape.dp} {row.dead} {row.phase[0].name}",
)
def test_a_recovered_job_ends_as_without_faults(row: Any, tmp_path: Path) -> None:
    settings = {
        name: getattr(row, name)
        for name in (
            "window",
            "pause_iters",
            "boundary_log",
            "keep_windows",
            "recovery",
        )
    }
    exact(
        made(
            tmp_path,
            fault_of(row, iteration=6),
            shape=shape_of(row),
            profile_iters=2,
            **settings,
        )
    )


AT_REDUCE = Fault(rank=1, phase=Phase.REDUCE, iteration=6)


def rejoined(job: ThreadJob, generation: int = 2) -> list[Rejoined]:
    """Return the event with which each rank entered a generation."""
    return [
        next(e for e in job.events(Rejoined, rank) if e.generation == generation)
        for rank in job.ranks
    ]


def of_last_generation(job: ThreadJob, rank: int) -> list[Event]:
    events = [logged.event for logged in read_events(job.event_path(rank))]
    return events[
        max(
            number for number, event in enumerate(events) if isinstance(event, Rejoined)
        ) :
    ]


def replayed(job: ThreadJob) -> dict[int, int]:
    """Return the number of iterations that each replaying rank ran again in all."""
    of_each = {
        rank: sum(event.executed_iters for event in job.events(Rejoined, rank))
        for rank in job.ranks
    }
    return {rank: iters for rank, iters in of_each.items() if iters}


def measured_replay_s(job: ThreadJob, rank: int) -> float | None:
    """Return the seconds in which a rank's stage replays an iteration by itself.

    None if the stage has not replayed by itself.
    """
    return job.in_memory(rank).parts.meter.replayed_iteration_s()


def made(
    folder: Path,
    *faults: Fault,
    shape: Shape = PIPE,
    iterations: int = 8,
    **settings: Any,
) -> ThreadJob:
    """Return a job, with windows of two slots unless `settings` has others."""
    return ThreadJob(
        folder,
        config("moevement", **{"window": 2} | settings),
        shape,
        iterations=iterations,
        faults=faults,
    )


@pytest.mark.parametrize(
    ("shape", "dead", "boundary_log", "replaying", "back_to"),
    [
        pytest.param(PIPE, (1,), True, {1}, 5, id="a stage in the middle"),
        pytest.param(PIPE, (0, 1), True, {0, 1}, 5, id="neighbours, jointly"),
        pytest.param(PIPE, (0, 2), True, {0, 2}, 5, id="stages apart, in parallel"),
        pytest.param(
            Shape(),
            (3,),
            True,
            {2, 3},
            5,
            id="one rank of a stage: its peers replay with it",
        ),
        pytest.param(
            PIPE, (1,), False, {0, 1, 2}, 5, id="all stages without boundary logs"
        ),
        pytest.param(
            PIPE,
            (0, 1, 2),
            True,
            {0, 1, 2},
            3,
            id="no survivors: to the end of the newest window",
        ),
    ],
)
def test_only_stages_of_dead_ranks_replay(
    shape: Shape,
    dead: tuple[int, ...],
    boundary_log: bool,
    replaying: set[int],
    back_to: int,
    tmp_path: Path,
) -> None:
    fault = Fault(rank=dead[0], phase=Phase.REDUCE, iteration=6, also=dead[1:])
    job = exact(made(tmp_path, fault, shape=shape, window=3, boundary_log=boundary_log))
    assert replayed(job) == dict.fromkeys(replaying, back_to - 1), (
        "from the window of iterations 1 to 3"
    )
    assert [event.iteration for event in rejoined(job)] == [back_to] * shape.world_size
    recovered = {rank: job.events(StageRecovered, rank) for rank in job.ranks}
    assert {rank for rank in job.ranks if recovered[rank]} == replaying
    alone = {
        rank
        for rank in replaying
        if recovered[rank][0].first_stage == recovered[rank][0].last_stage
    }
    assert {rank for rank in job.ranks if measured_replay_s(job, rank)} == alone, (
        "others wait for each other"
    )


@pytest.mark.parametrize(
    ("shape", "moment", "dead", "replaying"),
    [
        pytest.param(PIPE, "backward 1", 2, {0: 4, 2: 4}, id="nothing is replayed yet"),
        pytest.param(PIPE, "backward 3", 2, {0: 2, 2: 4}, id="between two snapshots"),
        pytest.param(
            PIPE,
            f"forward {4 * MICRO_BATCHES}",
            2,
            {0: 1, 2: 4},
            id="between two micro-batches",
        ),
        pytest.param(
            Shape(pp=3),
            "backward 3",
            4,
            {0: 2, 1: 2, 4: 4, 5: 4},
            id="two ranks a stage",
        ),
        pytest.param(PIPE, "step 3", 2, {0: 4, 2: 4}, id="in the middle of an update"),
        pytest.param(
            PIPE,
            "backward 3",
            1,
            {0: 4, 1: 4},
            id="a neighbour: both start over, jointly",
        ),
    ],
)
def test_a_replay_goes_on_while_another_stage_fails(
    shape: Shape, moment: str, dead: int, replaying: dict[int, int], tmp_path: Path
) -> None:
    """Rank 0 replays iterations 2 to 5, and a rank of another stage dies meanwhile.

    The other rank dies at the forward, backward or step of rank 0 that `moment` names.
    """
    faults = [
        Fault(rank=0, phase=Phase.REDUCE, iteration=6),
        Fault(rank=dead, phase=Phase.DONE),
    ]
    job = made(tmp_path, *faults, shape=shape, window=3)
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
    assert replayed(exact(job)) == replaying


def test_a_step_without_its_gather_is_finished_by_the_recovery(tmp_path: Path) -> None:
    """Rank 3 dies after both ranks of stage 0 have taken the step of iteration 6.

    The two ranks lack each other's weights.
    """
    job = made(tmp_path, Fault(rank=3, phase=Phase.DONE), shape=Shape())

    def cut_off(model: Model) -> None:
        def gather() -> None:
            del model.gather
            job.kill(3)
            raise PeersLostError("in place of the exchange")

        model.gather = gather  # type: ignore[method-assign]

    job.upsets[0, 6] = cut_off
    assert set(replayed(exact(job))) == {2, 3}


def test_a_rollback_that_is_cut_off_leaves_no_state_to_compare(tmp_path: Path) -> None:
    """Without a boundary log, all stages replay, and must reach their former states.

    After another death, no stage has a whole state to compare with.
    """
    faults = [
        Fault(rank=2, phase=Phase.REDUCE, iteration=6),
        Fault(rank=2, phase=Phase.DONE),
    ]
    job = made(tmp_path, *faults, window=3, boundary_log=False)
    replayed_by_rank_0: list[int] = []

    def note(iteration: int) -> None:
        replayed_by_rank_0.append(iteration)
        if replayed_by_rank_0 == [2, 3]:
            job.kill(2)
            raise PeersLostError("in place of the next exchange with other ranks")

    job.upsets[0, 1] = lambda model: setattr(model, "on_replay", note)
    exact(job)
    assert replayed_by_rank_0 == [2, 3, 2, 3], (
        "to the end of the newest window: no rank has iteration 5 any more"
    )
    assert not [
        event for rank in job.ranks for event in job.events(ReplayDiffered, rank)
    ]


def test_a_second_replay_that_is_cut_off_goes_on_from_its_own_state(
    tmp_path: Path,
) -> None:
    """Rank 1 is corrupt, and replays together with its lost peer.

    Rank 4 dies in the second replay.
    """
    faults = [
        Fault(rank=0, phase=Phase.REDUCE, iteration=6),
        Fault(rank=4, phase=Phase.DONE),
    ]
    job = made(tmp_path, *faults, shape=Shape(pp=3), window=3)
    job.checks_digests = False
    replayed_by_rank_1: list[int] = []

    def cut_off() -> None:
        job.kill(4)
        raise PeersLostError("in place of the next exchange with other ranks")

    def corrupt(model: Model) -> None:
        def replay(iteration: int) -> None:
            replayed_by_rank_1.append(iteration)
            if replayed_by_rank_1 == [2, 3, 4, 5, 2]:
                model.arm("forward", cut_off)

        model.owned[0].master.data.add_(1.0)
        model.on_replay = replay

    job.upsets[1, 5] = corrupt
    assert job.run() == uninterrupted(job.shape, job.iterations)
    assert replayed_by_rank_1 == [2, 3, 4, 5, 2, 3, 4, 5], (
        "iteration 2 of the second replay is not repeated"
    )


def test_a_stage_is_rebuilt_from_a_window_before_a_long_pause(tmp_path: Path) -> None:
    fault = Fault(rank=1, phase=Phase.BACKWARD, iteration=15)
    job = exact(
        made(tmp_path, fault, iterations=18, window=1, pause_iters=14, profile_iters=2)
    )
    assert replayed(job) == {1: 13}, (
        "from the window of iteration 1 to the end of the fourteenth"
    )


def test_logs_of_an_old_window_outlive_a_recovery(tmp_path: Path) -> None:
    """The window of iteration 0 is the only window on two nodes at both faults.

    First rank 1 dies, and then the node of rank 1 is lost. The window of 12 slots is
    incomplete at the first fault. The snapshot of iteration 10, which begins the next
    generation, does not reach peers before the second fault.
    """
    first = Fault(rank=1, phase=Phase.BACKWARD, iteration=11)
    second = Fault(rank=1, phase=Phase.REDUCE, iteration=11, loses_memory=True)
    shape = Shape(pp=2, dp=1, experts=12)
    job = made(
        tmp_path, first, second, shape=shape, iterations=13, window=12, profile_iters=2
    )

    def is_held(key: str) -> bool:
        return len(job.struck) == 1 and key.startswith("snapshot-10-")

    job.on_worker.append(
        lambda rank, _: answer_copies(job.clients[rank], is_held, Future)
    )
    assert replayed(exact(job)) == {1: 20}, (
        "twice from the window of iteration 0 to iteration 10"
    )


class _CopiesEnd(Observer):
    """Lets an iteration end only after all copies that have been requested by then."""

    def __init__(self, job: ThreadJob, iteration: int) -> None:
        self._job, self._iteration = job, iteration

    def committed(self, iteration: int, rank: int, model: Model) -> None:
        client = self._job.clients[rank]
        assert client is not None
        if iteration == self._iteration:
            client.copy([]).result(WAIT_S)


@pytest.mark.parametrize("arrives", [True, False])
def test_a_rank_logs_when_peers_hold_its_windows_again(
    arrives: bool, tmp_path: Path
) -> None:
    """All ranks go back to the snapshot of iteration 4, and the next one is that of 8.

    The lost rank held the copies of rank 0. Where these copies do not arrive again,
    rank 0 has copies once the next snapshot is kept.
    """
    job = ThreadJob(
        tmp_path,
        config("gemini", every_iters=4),
        PIPE,
        iterations=10,
        faults=[replace(AT_REDUCE, loses_memory=True)],
    )

    def is_held(key: str) -> bool:
        return bool(job.struck) and key.startswith("snapshot-4-") and not arrives

    job.on_worker.append(
        lambda rank, _: answer_copies(job.clients[rank], is_held, Future)
    )
    job.observers.append(_CopiesEnd(job, 5))
    exact(job)
    events = [entry.event for entry in read_events(job.event_path(0))]
    told = (WindowReplicated, Rejoined, CopiesRestored)
    since = [type(event) for event in events if isinstance(event, told)]
    since = since[since.index(Rejoined) + 1 :]
    first, second = since
    assert {first, second} == {CopiesRestored, WindowReplicated}
    assert (first is CopiesRestored) == arrives


def test_windows_go_on_after_a_fault(tmp_path: Path) -> None:
    """A generation begins with the window that follows the kept window.

    A second fault that comes soon changes nothing.
    """
    first = Fault(rank=1, phase=Phase.REDUCE, iteration=12)
    second = Fault(rank=2, phase=Phase.BACKWARD, iteration=13)
    job = exact(
        made(
            tmp_path,
            first,
            second,
            iterations=40,
            window="auto",
            pause_iters=3,
            profile_iters=2,
        )
    )
    kept_since = job.events(StageRecovered, 2)[-1].window_start
    for rank in job.ranks:
        events = of_last_generation(job, rank)
        chosen = next(event for event in events if isinstance(event, WindowChosen))
        taken = next(event for event in events if isinstance(event, SnapshotTaken))
        assert (chosen.iteration, taken.slot, taken.num_slots) == (
            12,
            0,
            chosen.num_slots,
        )
        assert taken.window_start in (
            12,
            kept_since + chosen.num_slots + chosen.pause_iters,
        )


def test_windows_are_computed_once_while_profiles_stay(tmp_path: Path) -> None:
    """In a large job, the computation takes seconds on each rank.

    A survivor keeps the windows, and a new process computes its own windows.
    """
    fault = Fault(rank=1, phase=Phase.REDUCE, iteration=6)
    job = exact(made(tmp_path, fault, shape=PAIR, window="auto", profile_iters=2))
    sizes: dict[int, list[WindowSizes]] = {}
    for rank, policies in job.policies.items():
        assert len(policies) == 2, "two generations"
        sizes[rank] = [
            policy.sizes for policy in policies if isinstance(policy, SparseWindows)
        ]
    assert [first is second for first, second in sizes.values()] == [
        rank != fault.rank for rank in job.ranks
    ]


@pytest.mark.parametrize("goes_to_disk", [False, True])
def test_a_state_that_all_ranks_keep_is_not_taken_again(
    goes_to_disk: bool, tmp_path: Path
) -> None:
    """All ranks go back to a snapshot, twice.

    Without local disks, the ranks continue without a new snapshot of the same state.
    """
    faults = [
        Fault(rank=1, phase=Phase.REDUCE, iteration=iteration) for iteration in (8, 9)
    ]
    settings = config("gemini", every_iters=3, disk_every_iters=3 * goes_to_disk)
    job = exact(ThreadJob(tmp_path, settings, PAIR, iterations=11, faults=faults))
    (back_to,) = {event.iteration for event in rejoined(job, 3)}
    assert back_to in (3, 6), (
        "the next snapshot begins once all ranks have that of iteration 3"
    )
    for rank in job.ranks:
        taken = next(
            event
            for event in of_last_generation(job, rank)
            if isinstance(event, SnapshotTaken)
        )
        assert taken.iteration == (back_to if goes_to_disk else back_to + 3)


@pytest.mark.parametrize(
    ("phase", "skip", "iteration", "executed"),
    [
        (Phase.REDUCE, 0, 4, 1),  # before the vote: no rank commits the iteration
        # after the vote: survivors finish the step, and the dead stage replays the step
        (Phase.STEP, 0, 5, 2),
        (Phase.STEP, 1, 5, 0),  # the window of 4 and 5 was kept
    ],
)
def test_the_vote_decides_where_all_go(
    phase: Phase, skip: int, iteration: int, executed: int, tmp_path: Path
) -> None:
    job = exact(
        made(tmp_path, Fault(rank=1, phase=phase, skip=skip, iteration=5), shape=PAIR)
    )
    assert [event.iteration for event in rejoined(job)] == [iteration, iteration]
    if not skip:
        assert replayed(job) == {1: executed}


def test_a_rank_votes_once_its_peers_hold_the_step(tmp_path: Path) -> None:
    """A rank may die with its node after the vote.

    Without the step on peers, the rank could not reach the iteration of other ranks.
    """
    job = made(tmp_path, shape=PAIR, iterations=4)
    job.sends_slowly = True
    votes: set[tuple[int, int]] = set()
    missing: list[tuple[int, str]] = []

    def look_before_votes(rank: int, _: object) -> None:
        ranks, page = job.all_ranks[rank], job.pages[rank]
        barrier = ranks.barrier

        def look_and_meet() -> None:
            if page.phase is Phase.REDUCE:
                votes.add((rank, page.iteration))
                held = set(BlobFolder(held_path(job.memory(1 - rank), rank)).keys())
                missing.extend((rank, key) for key in {f"step-{page.iteration}"} - held)
            barrier()

        ranks.barrier = look_and_meet  # type: ignore[method-assign]

    job.on_worker.append(look_before_votes)
    exact(job)
    assert votes == {(rank, iteration) for rank in (0, 1) for iteration in range(1, 5)}
    assert missing == []


def test_a_rank_whose_vote_a_death_cuts_off_finishes_the_step(tmp_path: Path) -> None:
    """Rank 2 takes the step, and rank 1 dies before the step.

    Rank 0 has not returned from the vote by then.
    """
    job = made(tmp_path, Fault(rank=1, phase=Phase.STEP, iteration=5))
    stay_in_the_vote(job, 0, iteration=5)
    assert [event.iteration for event in rejoined(exact(job))] == [5, 5, 5]
    assert replayed(job) == {1: 2}


def test_a_lost_node_fetches_its_memory_from_its_peer(tmp_path: Path) -> None:
    faults = [
        Fault(rank=1, phase=Phase.REDUCE, iteration=6, loses_memory=True),
        # fetched memory is kept and copied, as the rank's own memory was
        Fault(rank=1, phase=Phase.BACKWARD, iteration=8),
        Fault(rank=1, phase=Phase.BACKWARD, iteration=10, loses_memory=True),
    ]
    job = exact(made(tmp_path, *faults, iterations=11))
    fetched = [
        [event.fetched_bytes > 0 for event in job.events(Rejoined, rank)]
        for rank in (0, 2)
    ]
    assert fetched == [[True, False, True]] * 2
    assert set(replayed(job)) == {1}


def test_each_rank_may_be_lost_in_turn(tmp_path: Path) -> None:
    faults = [
        Fault(rank=rank, phase=Phase.REDUCE, iteration=4 + rank, loses_memory=True)
        for rank in range(4)
    ]
    exact(made(tmp_path, *faults, shape=Shape(), iterations=9))


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(
            Fault(rank=0, phase=Phase.RECOVERY), id="another rank, in the recovery"
        ),
        pytest.param(
            Fault(rank=1, phase=Phase.RECOVERY), id="the new worker, in the recovery"
        ),
        pytest.param(Fault(rank=0, phase=Phase.JOIN), id="another rank, before it"),
        pytest.param(
            Fault(rank=0, phase=Phase.RECOVERY, loses_memory=True),
            id="another node, in the recovery",
        ),
        pytest.param(
            Fault(rank=0, phase=Phase.FORWARD, loses_memory=True),
            id="another node, right after it",
        ),
    ],
)
def test_a_second_fault_comes_with_the_recovery(second: Fault, tmp_path: Path) -> None:
    exact(
        made(tmp_path, AT_REDUCE, second, Fault(rank=1, phase=Phase.STEP, iteration=7))
    )


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.REDUCE, Phase.STEP])
@pytest.mark.parametrize(
    "shape", [PAIR, Shape(pp=2, dp=1, tied=True)], ids=["plain", "tied"]
)
def test_a_rank_dies_in_the_first_iteration(
    shape: Shape, phase: Phase, tmp_path: Path
) -> None:
    exact(made(tmp_path, Fault(rank=1, phase=phase, iteration=1), shape=shape))


def test_a_rank_dies_in_the_last_iteration_and_after_it(tmp_path: Path) -> None:
    in_the_last = Fault(rank=0, phase=Phase.BACKWARD, iteration=8)
    exact(made(tmp_path, in_the_last, Fault(rank=1, phase=Phase.DONE), shape=PAIR))


@pytest.mark.parametrize(
    ("replicas", "lost"),
    [
        pytest.param(0, (1,), id="no copies"),
        pytest.param(1, (1, 2), id="with the only copy"),
    ],
)
def test_a_job_ends_where_nothing_is_left_of_a_rank(
    replicas: int, lost: tuple[int, ...], tmp_path: Path
) -> None:
    fault = Fault(
        rank=lost[0], phase=Phase.REDUCE, iteration=6, also=lost[1:], loses_memory=True
    )
    with pytest.raises(NothingLeftError, match="cannot be rebuilt"):
        made(tmp_path, fault, replicas=replicas).run()


def test_damage_in_all_copies_is_an_error(tmp_path: Path) -> None:
    def damage(job: ThreadJob) -> None:
        flip_a_bit(job.memory(1) / "own")
        flip_a_bit(job.memory(2) / "held" / "rank0001")

    with pytest.raises(NothingLeftError):
        made(tmp_path, replace(AT_REDUCE, before_restart=damage)).run()


def test_a_copy_that_cannot_be_fetched_is_not_asked_for_again(tmp_path: Path) -> None:
    """The copy is damaged after its holder has verified it."""
    job = made(tmp_path, replace(AT_REDUCE, loses_memory=True))
    asked: list[int] = []

    def damage(rank: int, holder: int) -> None:
        asked.append(holder)
        flip_a_bit(job.memory(holder) / "held" / f"rank{rank:04d}")

    job.before_fetch = damage
    with pytest.raises(NothingLeftError):
        job.run()
    assert len(asked) == 1


TIED_PIPE = replace(PIPE, tied=True)


def lose_step(job: ThreadJob) -> None:
    """Lose the step by which rank 0's own windows lead to the target.

    No other stage has the step.
    """
    BlobFolder(own_path(job.memory(0))).discard(step_key(AT_REDUCE.iteration - 1))


STEP_IS_LOST = replace(AT_REDUCE, rank=0, before_restart=lose_step)
"""After this fault, rank 0 asks rank 1 for the copy of rank 0's windows."""


def damage_copy(job: ThreadJob, holder: int) -> None:
    flip_a_bit(held_path(job.memory(holder), 0))


def end_holder(job: ThreadJob, holder: int) -> None:
    job.daemons[holder].server.close()


def drop_copies(job: ThreadJob, holder: int) -> None:
    BlobFolder(held_path(job.memory(holder), 0)).clear()


@pytest.mark.parametrize("spoil", [damage_copy, end_holder, drop_copies])
def test_own_windows_stay_where_a_fetch_fails(
    spoil: Callable[[ThreadJob, int], None], tmp_path: Path
) -> None:
    """Rank 0's own windows lead to an earlier iteration, to which all ranks go back."""
    job = made(tmp_path, STEP_IS_LOST, shape=TIED_PIPE, replicas=1)
    asked: list[int] = []

    def spoil_it(_: int, holder: int) -> None:
        asked.append(holder)
        spoil(job, holder)

    job.before_fetch = spoil_it
    exact(job)
    assert asked == [1]
    assert [event.iteration for event in rejoined(job)] == [AT_REDUCE.iteration - 2] * 3


def test_windows_that_find_no_room_beside_others_take_their_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The memory is full as rank 0 fetches its windows.

    One log line says that other windows of rank 0 are dropped first.
    """
    asked: list[int] = []
    with small_disk(tmp_path / "memory") as memory:

        def fill(_: int, holder: int) -> None:
            asked.append(holder)
            if len(asked) == 1:
                # room for the step that rank 0's own memory lacks
                memory.fill(left_bytes=5 * 4096)

        job = made(tmp_path, STEP_IS_LOST, shape=TIED_PIPE, replicas=1)
        job.before_fetch = fill
        exact(job)
    said = [
        record.message
        for record in caplog.records
        if "are dropped first" in record.message
    ]
    assert len(said) == 1
    assert said[0].startswith(
        "runtime.shared_memory has no room for the windows that rank 0 needs"
    )


def test_the_next_holders_copy_may_lack_the_last_record(tmp_path: Path) -> None:
    """Other ranks share that record with the rank whose memory is lost.

    The record is also shared after a fetch has failed.
    """
    target = AT_REDUCE.iteration - 1

    def lose_record(job: ThreadJob) -> None:
        copies, key = BlobFolder(held_path(job.memory(2), 1)), step_key(target)
        assert key in copies.keys()  # noqa: SIM118 - not a mapping
        copies.discard(key)

    job = made(
        tmp_path,
        replace(AT_REDUCE, loses_memory=True, before_restart=lose_record),
        replicas=2,
    )
    asked: list[int] = []

    def break_first(_: int, holder: int) -> None:
        asked.append(holder)
        if holder == 0:
            job.daemons[holder].server.close()

    job.before_fetch = break_first
    exact(job)
    assert asked == [0, 2]


def test_damage_is_found_while_another_ranks_fetch_fails(tmp_path: Path) -> None:
    """Rank 2, of the same stage as the lost rank 3, drops its window.

    All ranks take stock again once rank 3 has its own window.
    """

    def damage(job: ThreadJob) -> None:
        job.rank_memory(2).snapshots.windows()[0].snapshots[-1].payload[0] ^= 1

    fault = replace(AT_REDUCE, rank=3, loses_memory=True, before_restart=damage)
    job = made(tmp_path, fault, shape=Shape(), replicas=2)
    asked: list[tuple[int, int]] = []

    def lose_first(rank: int, holder: int) -> None:
        asked.append((rank, holder))
        if len(asked) == 1:
            BlobFolder(held_path(job.memory(holder), rank)).clear()

    job.before_fetch = lose_first
    exact(job)
    assert [rank for rank, _ in asked] == [3, 3, 2]
    assert [
        "checksum" in event.reason for event in job.events(CheckpointSkipped, 2)
    ] == [True]


def test_a_copy_of_a_tied_stage_does_without_its_last_record(tmp_path: Path) -> None:
    """The stage in the middle holds the copy, and cannot have that record.

    So all ranks go back by one iteration.
    """

    def lose_record(job: ThreadJob) -> None:
        BlobFolder(held_path(job.memory(1), 0)).discard(
            step_key(AT_REDUCE.iteration - 1)
        )

    fault = replace(AT_REDUCE, rank=0, loses_memory=True, before_restart=lose_record)
    job = exact(made(tmp_path, fault, shape=TIED_PIPE, replicas=1))
    assert [event.iteration for event in rejoined(job)] == [AT_REDUCE.iteration - 2] * 3


def _foreign(
    change: Callable[[SnapshotHeader], SnapshotHeader],
) -> Callable[[Path], None]:
    return lambda folder: rewrite_headers(folder, change)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(flip_a_bit, "checksum", id="damaged"),
        pytest.param(
            _foreign(
                lambda h: replace(h, identity=replace(h.identity, run_id="other"))
            ),
            "run",
            id="run",
        ),
        pytest.param(
            _foreign(lambda h: replace(h, identity=replace(h.identity, model="other"))),
            "model",
            id="model",
        ),
        pytest.param(
            _foreign(lambda h: replace(h, shard=replace(h.shard, global_rank=0))),
            "shard",
            id="rank",
        ),
        pytest.param(
            _foreign(lambda h: replace(h, shard=replace(h.shard, pp_rank=0))),
            "shard",
            id="stage",
        ),
    ],
)
def test_spoilt_memory_comes_from_the_copy(
    spoil: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    fault = replace(AT_REDUCE, before_restart=lambda job: spoil(job.memory(1) / "own"))
    job = exact(made(tmp_path, fault))
    assert [
        event.reason
        for event in job.events(CheckpointSkipped, 1)
        if reason in event.reason
    ]
    assert rejoined(job)[0].fetched_bytes > 0


HOST_BYTES_PER_S = 5e3  # a snapshot has 312 bytes


def test_a_capped_job_recovers_as_without_faults(tmp_path: Path) -> None:
    caps = {
        "window": "auto",
        "profile_iters": 2,
        "max_bytes_per_s": {"host": HOST_BYTES_PER_S},
    }
    job = exact(
        made(
            tmp_path,
            Fault(rank=1, phase=Phase.STEP, iteration=6),
            shape=Shape(),
            **caps,
        )
    )
    taken = [event for event in job.events(SnapshotTaken, 0) if event.iteration < 5]
    assert taken
    assert all(
        event.size_bytes <= HOST_BYTES_PER_S * (event.copy_s + BURST_S)
        for event in taken
    )
    chosen = job.events(WindowChosen, 0)
    assert chosen
    assert all(event.copy_bytes_per_s <= HOST_BYTES_PER_S for event in chosen)


def test_no_survivor_waits_for_copies(tmp_path: Path) -> None:
    job = exact(made(tmp_path, AT_REDUCE))
    memories = [job.rank_memory(rank) for rank in job.ranks]
    assert all(
        each.publisher and each.publisher.waits.interrupt in job.at_end
        for each in memories
    ), "to peers"
    assert all(each.copiers[0].throttle.lift in job.at_end for each in memories), (
        "to host memory"
    )


def test_a_cap_that_lets_no_snapshot_through_in_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"runtime.copy_s: got .*, wanted at least .*at ckpt.max_bytes_per_s.host",
    ):
        made(
            tmp_path, iterations=2, window="auto", max_bytes_per_s={"host": 1e-3}
        ).run()
