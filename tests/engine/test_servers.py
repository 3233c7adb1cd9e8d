"""ckpt=flowcheck with ranks that are threads.

Servers compute the states of training from gradients, bit for bit. `ThreadJob` compares
every rank's digest after every iteration. `Follower` compares the servers' states with
the models.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.events import (
    GradientsLost,
    GradientsSent,
    LossNotFinite,
    Rejoined,
    ServersWorked,
    SnapshotTaken,
)
from moe_ckpt.snapshot.blobs import BlobFolder, held_path
from moe_ckpt.snapshot.folder_contents import read_kept
from moe_ckpt.types import Phase
from tests.engine.covering import fault_of, rows_of, shape_of
from tests.engine.damage import answer_copies, drop_snapshots, flip_a_bit_of
from tests.harness.threads.history import Follower
from tests.harness.threads.job import MOMENTS, Fault, ThreadJob, exact, uninterrupted
from tests.harness.threads.model import PAIR, Shape
from tests.policies.profiles import config

AXES: dict[str, Sequence[Any]] = {
    "shape": [
        PAIR,
        Shape(pp=3, dp=1),
        Shape(pp=1, dp=2),
        Shape(ep=2),
        Shape(tied=True),
    ],
    "skips": [0, 3],
    "max_lag_iters": [0, 1, 3],
    "phase": MOMENTS,
    "iteration": [1, 2, 6],
    "dead": ["first", "last", "all"],
    "loses_memory": [False, True],
}


_NUM_BY_DEFAULT = 10  # these rows hold each value of each axis


def made(
    folder: Path,
    *faults: Fault,
    shape: Shape = PAIR,
    iterations: int = 8,
    settles: bool = False,
    **settings: Any,
) -> ThreadJob:
    """Return a job whose servers may not lag, unless `settings` allow a lag.

    With `settles`, servers complete an iteration before the next iteration begins.
    """
    policy = config("flowcheck", **{"max_lag_iters": 0} | settings)
    return ThreadJob(
        folder, policy, shape, iterations=iterations, faults=faults, settles=settles
    )


# copies of a rank's state are on one other node: a loss of all nodes leaves nothing
ROWS = rows_of(
    AXES, lambda row: not (row.get("loses_memory") and row.get("dead") == "all")
)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id=(
                f"{row.shape.pp}x{row.shape.dp} {row.dead} {row.phase[0].name} of"
                f" {row.iteration}"
            ),
            marks=() if number < _NUM_BY_DEFAULT else pytest.mark.full,
        )
        for number, row in enumerate(ROWS)
    ],
)
def test_a_recovered_job_ends_as_without_faults(row: Any, tmp_path: Path) -> None:
    exact(
        made(
            tmp_path,
            fault_of(row, row.iteration),
            shape=shape_of(row),
            max_lag_iters=row.max_lag_iters,
        )
    )


def test_rows_that_always_run_hold_every_value() -> None:
    for axis, values in AXES.items():
        assert {getattr(row, axis) for row in ROWS[:_NUM_BY_DEFAULT]} == set(values), (
            axis
        )


@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(ep=2, skips=2)],
    ids=["sharded", "experts spread, skipping"],
)
def test_servers_hold_what_training_has_after_every_iteration(
    shape: Shape, tmp_path: Path
) -> None:
    job = made(tmp_path, shape=shape)
    follower = Follower(job)
    job.observers.append(follower)
    job.run()
    follower.compare()
    assert follower.compared >= 2 * job.shape.world_size, (
        "on its own node's server, and on another's"
    )
    for rank in job.ranks:
        assert [event.iteration for event in job.events(SnapshotTaken, rank)] == [0], (
            "one snapshot, at the start"
        )
        worked = job.events(ServersWorked, rank)
        assert [event.iteration for event in worked] == list(
            range(1, len(worked) + 1)
        ), "in order, and none twice"
        assert len(worked) >= 6
        assert all(
            event.after_s > 0 and event.busy_s > 0 and event.iteration_s > 0
            for event in worked
        )
        sent = job.events(GradientsSent, rank)
        assert [event.iteration for event in sent] == list(range(1, 9))
        masters = sum(weight.master.numel() for weight in job.models[rank].owned)
        buffers = sum(buffer.nbytes for buffer in job.models[rank].buffers.values())
        assert [event.size_bytes for event in sent] == [
            buffers + (0 if iteration <= shape.skips else 4 * masters)
            for iteration in range(1, 9)
        ]


def test_no_more_than_the_last_states_are_kept_anywhere(tmp_path: Path) -> None:
    job = made(tmp_path, iterations=12)
    job.run()
    for holder in job.ranks:
        assert not job.rank_memory(holder).snapshots.windows(), (
            "training's own memory is empty again"
        )
        for owner in job.ranks:
            kept = read_kept(BlobFolder(held_path(job.memory(holder), owner)))
            assert {state.header.iteration for state in kept.snapshots} <= {10, 11, 12}
            assert len(kept.snapshots) <= 3


def test_ranks_go_on_from_servers_without_another_snapshot(tmp_path: Path) -> None:
    faults = [
        Fault(rank=1, phase=Phase.BACKWARD, iteration=4),
        Fault(rank=0, phase=Phase.STEP, iteration=7),
    ]
    job = exact(made(tmp_path, *faults, iterations=9))
    for rank in job.ranks:
        assert [event.iteration for event in job.events(SnapshotTaken, rank)] == [0]
        assert [event.iteration in (2, 3) for event in job.events(Rejoined, rank)][
            :1
        ] == [True]


def test_the_server_of_a_ranks_own_node_is_enough(tmp_path: Path) -> None:
    """While all ranks are dead, each state disappears from other nodes' servers."""

    def keep_only_own(job: ThreadJob) -> None:
        for rank in job.ranks:
            drop_snapshots(held_path(job.memory(1 - rank), rank), lambda _: True)

    fault = Fault(
        rank=0,
        phase=Phase.FORWARD,
        iteration=5,
        also=(1,),
        before_restart=keep_only_own,
    )
    job = exact(made(tmp_path, fault, settles=True))
    for rank in job.ranks:
        (rejoined,) = job.events(Rejoined, rank)
        assert rejoined.iteration == 4
        assert rejoined.fetched_bytes == 0


def test_a_lost_node_gets_its_state_from_another_nodes_server(tmp_path: Path) -> None:
    fault = Fault(rank=0, phase=Phase.REDUCE, iteration=5, loses_memory=True)
    job = exact(made(tmp_path, fault))
    state_bytes = sum(
        tensor.nbytes
        for _, tensor, _ in job.models[0].pieces(
            range(len(job.models[0].operators)), ()
        )
    )
    (rejoined,) = job.events(Rejoined, 0)
    assert state_bytes <= rejoined.fetched_bytes < 2 * state_bytes + 20_000, (
        "one state of one rank"
    )


def test_gradients_that_do_not_arrive_cost_a_snapshot_of_every_rank(
    tmp_path: Path,
) -> None:
    """Rank 1 cannot send the gradients of iteration 3.

    All ranks take a snapshot of a later iteration, and continue with gradients.
    """
    job = made(tmp_path, iterations=9)
    job.on_worker.append(
        lambda rank, _: _lose_update_of(3, job, rank) if rank == 1 else None
    )
    follower = Follower(job)
    job.observers.append(follower)
    exact(job)
    follower.compare()
    for rank in job.ranks:
        assert [event.iteration for event in job.events(SnapshotTaken, rank)] == [0, 4]
        assert [event.iteration for event in job.events(GradientsLost, rank)] == [4]
        assert [event.iteration for event in job.events(GradientsSent, rank)] == [
            1,
            2,
            3,
            5,
            6,
            7,
            8,
            9,
        ]
    assert "a test lets this copy fail" in job.events(GradientsLost, 1)[0].reason


def _lose_update_of(iteration: int, job: ThreadJob, rank: int) -> None:
    """Let the copy of this iteration's update fail, once."""

    def fail() -> Future[None]:
        failed: Future[None] = Future()
        failed.set_exception(CheckpointSaveError("a test lets this copy fail"))
        return failed

    answer_copies(
        job.clients[rank],
        lambda key: key.startswith(f"update-snapshot-{iteration}-"),
        fail,
    )


def test_servers_that_lag_too_far_are_passed_over(tmp_path: Path) -> None:
    job = made(tmp_path, iterations=9, max_lag_iters=1)
    held: list[Future[None]] = []

    def hold() -> Future[None]:
        held.append(Future())
        return held[0]

    def hold_updates(rank: int, _: object) -> None:
        if rank == 1:
            answer_copies(
                job.clients[rank],
                lambda key: key.startswith("update-snapshot-3-"),
                hold,
            )

    job.on_worker.append(hold_updates)
    exact(job)
    assert held, "the update of iteration 3 was held back"
    first = job.events(GradientsLost, 0)[0]
    assert first.iteration <= 5, (
        "earlier where a busy machine's servers lag by themselves"
    )
    assert any(
        "lags by 2 iterations" in job.events(GradientsLost, rank)[0].reason
        for rank in job.ranks
    )


def test_a_damaged_state_on_the_own_server_is_replaced_by_the_peers(
    tmp_path: Path,
) -> None:
    def damage(job: ThreadJob) -> None:
        # states must be whole: a server that takes a step would seal the damage
        flip_a_bit_of(held_path(job.memory(0), 0), lambda _: True)

    fault = Fault(rank=0, phase=Phase.FORWARD, iteration=6, before_restart=damage)
    # otherwise the own server could complete a state after the damage
    job = exact(made(tmp_path, fault, settles=True))
    assert job.events(Rejoined, 0)[0].fetched_bytes > 0


def test_states_that_all_ranks_have_left_are_dropped_by_servers(tmp_path: Path) -> None:
    """All ranks go back to memory, and after an infinite loss to the checkpoint at 4.

    Then one more rank dies.
    """
    faults = [
        Fault(rank=1, phase=Phase.FORWARD, iteration=7),
        Fault(rank=0, phase=Phase.FORWARD, iteration=5),
    ]
    job = made(tmp_path, *faults, iterations=9, durable_every_iters=4, keep=3)
    job.on_worker.append(
        lambda *_: job.diverging.update({7: 1}) if len(job.struck) == 1 else None
    )
    assert job.run().digests == uninterrupted(PAIR, 9).digests
    assert [
        (event.iteration, event.action[-1]) for event in job.events(LossNotFinite)
    ] == [(7, "4")]
    first, second = (event.iteration for event in job.events(Rejoined, 1))
    assert first in (5, 6)
    assert second == 4, "not the states of 5 and 6, which the infinite loss came from"
