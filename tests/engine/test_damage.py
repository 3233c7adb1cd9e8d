"""Damaged memory is refused by name, and the next best source is used.

Copies that fail stop nothing. Rank 1, the second of two stages, loses its state in
iteration 11. The windows of iterations 1 to 3, 4 to 6 and 7 to 9 are complete by then.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.engine.rank_memory import RankMemory
from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.events import (
    CheckpointFailed,
    CheckpointSkipped,
    SnapshotTaken,
    StageRecovered,
)
from moe_ckpt.faults.schedule import StateLoss
from moe_ckpt.snapshot.boundary_log import Direction
from moe_ckpt.snapshot.codec import Snapshot
from moe_ckpt.snapshot.windows import Window
from tests.engine.damage import let_copies_fail
from tests.harness.threads.job import ThreadJob, exact
from tests.harness.threads.model import PAIR
from tests.harness.threads.stops import At
from tests.policies.profiles import config
from tests.waits import WAIT_S


def job_of(
    folder: Path,
    iteration: int = 11,
    phase: str = "forward",
    stage: int = 1,
    **settings: Any,
) -> ThreadJob:
    """Return a job of 12 iterations with one loss of state."""
    losses = [StateLoss(iteration=iteration, stage=stage, phase=phase)]
    return ThreadJob(
        folder,
        config("moevement", **{"window": 3} | settings),
        PAIR,
        iterations=12,
        losses=losses,
    )


def recovered_from(job: ThreadJob, rank: int = 1) -> list[int]:
    return [event.window_start for event in job.events(StageRecovered, rank)]


def _newest(memory: RankMemory) -> Window:
    return memory.snapshots.windows()[0]


def flip_a_byte(memory: RankMemory) -> None:
    snapshot = _newest(memory).snapshots[1]
    snapshot.payload[snapshot.header.payload_bytes // 2] ^= 1


def repeat_a_slot(memory: RankMemory) -> None:
    first, second, _ = _newest(memory).snapshots
    object.__setattr__(second, "header", replace(second.header, full=first.header.full))


def make_foreign(memory: RankMemory) -> None:
    snapshot = _newest(memory).snapshots[2]
    identity = replace(snapshot.header.identity, run_id="another")
    object.__setattr__(snapshot, "header", replace(snapshot.header, identity=identity))


@pytest.mark.parametrize(
    ("inflict", "reason"),
    [
        (flip_a_byte, "rank 1's snapshot of iteration 8 .*checksum"),
        (make_foreign, "iteration 9 .*another"),
        (repeat_a_slot, "whole 2 times, wanted once in a window"),
    ],
)
def test_a_damaged_window_is_refused_and_an_older_one_used(
    inflict: Callable[[RankMemory], None], reason: str, tmp_path: Path
) -> None:
    job = job_of(tmp_path, keep_windows=2)
    job.upsets[1, 11] = lambda _: inflict(job.rank_memory(1))
    exact(job)
    (skipped,) = job.events(CheckpointSkipped, 1)
    assert re.search("window.*7", skipped.source)
    assert re.search(reason, skipped.reason), skipped.reason
    assert recovered_from(job) == [4]


def test_with_nothing_left_the_error_says_what_was_looked_for(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    job.upsets[1, 11] = lambda _: flip_a_byte(job.rank_memory(1))
    wanted = r"stages \[1\] cannot be rebuilt at iteration 10: looked for a compl"
    with pytest.raises(CheckpointLoadError, match=wanted):
        job.run()


def _flip_a_byte_of_the_boundary_log(memory: RankMemory) -> None:
    assert memory.boundary is not None
    memory.boundary.sent(9, Direction.ACTIVATION)[0][5] ^= 1


def _have_no_memory_for_the_boundary_log(memory: RankMemory) -> None:
    """Refuse memory for one tensor in the boundary log of the current iteration."""
    buffers = memory.buffers[0]
    acquire = buffers.acquire

    def refuse_once(nbytes: int) -> Any:
        buffers.acquire = acquire  # type: ignore[method-assign]
        raise CheckpointSaveError(f"no memory for {nbytes} bytes")

    buffers.acquire = refuse_once  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("at", "inflict"),
    [(11, _flip_a_byte_of_the_boundary_log), (9, _have_no_memory_for_the_boundary_log)],
)
def test_a_gap_in_boundary_logs_rolls_all_back(
    at: int, inflict: Callable[[RankMemory], None], tmp_path: Path
) -> None:
    job = job_of(tmp_path, window=4)  # windows 1 to 4 and 5 to 8
    job.upsets[0, at] = lambda _: inflict(job.rank_memory(0))
    exact(job)
    assert [event.first_stage for event in job.events(StageRecovered)] == [0]


def test_only_what_the_plan_takes_is_read(tmp_path: Path) -> None:
    """The intact stage serves iterations 8 to 10.

    The recovery spends no time on windows and older logs of the intact stage.
    """
    job = job_of(tmp_path, keep_windows=2)

    def inflict(memory: RankMemory) -> None:
        flip_a_byte(memory)
        assert memory.boundary is not None
        for tensor in memory.boundary.sent(7, Direction.ACTIVATION):
            tensor[5] ^= 1

    job.upsets[0, 11] = lambda _: inflict(job.rank_memory(0))
    exact(job)
    assert not job.events(CheckpointSkipped, 0)
    assert (recovered_from(job, 0), recovered_from(job, 1)) == ([], [7])


def test_a_snapshot_that_fails_stops_nothing_and_no_rank_keeps_its_window(
    tmp_path: Path,
) -> None:
    job = job_of(tmp_path, iteration=8, phase="step", stage=0)
    job.on_worker.append(
        lambda rank, _: let_copies_fail(job.models[rank], 6, 6) if rank == 1 else None
    )
    exact(job)
    (failure,) = job.events(CheckpointFailed, 1)
    assert (failure.iteration, "out of memory" in failure.reason) == (5, True)
    assert recovered_from(job, 0) == [1], (
        "the window of 4 to 6 is complete on rank 0 only"
    )


@pytest.mark.parametrize("policy", ["gemini", "checkfreq"])
def test_a_snapshot_may_be_hashed_after_its_window_was_dropped(
    policy: str, tmp_path: Path
) -> None:
    """Rank 1's snapshot cannot be copied, so all ranks drop the window.

    Only afterwards rank 0 publishes its own snapshot of the window.
    """
    job = ThreadJob(tmp_path, config(policy, every_iters=2), PAIR, iterations=8)
    all_dropped = threading.Event()
    late: list[int] = []

    def publish_late() -> None:
        publisher = job.rank_memory(0).publisher
        assert publisher is not None
        publish = publisher.add_snapshot

        def add_snapshot(snapshot: Snapshot, *rest: Any) -> None:
            if snapshot.header.iteration == 4 and not late:
                late.append(4)
                assert all_dropped.wait(WAIT_S)
            publish(snapshot, *rest)

        publisher.add_snapshot = add_snapshot  # type: ignore[method-assign]

    job.upsets[0, 2] = lambda _: publish_late()
    job.on_worker.append(
        lambda rank, _: let_copies_fail(job.models[rank], 3, 3) if rank == 1 else None
    )
    At(job, 5, all_dropped.set, settles=False)
    exact(job)
    assert late == [4]
    assert [event.iteration for event in job.events(CheckpointFailed, 1)] == [4]
    assert 6 in [event.iteration for event in job.events(SnapshotTaken, 0)]


def test_a_snapshot_that_fails_ends_a_strict_job(tmp_path: Path) -> None:
    job = job_of(tmp_path, strict=True)
    job.on_worker.append(
        lambda rank, _: let_copies_fail(job.models[rank], 6, 6) if rank == 1 else None
    )
    with pytest.raises(
        CheckpointSaveError, match="a snapshot is not complete on every rank"
    ):
        job.run()


def test_logs_end_although_no_window_is_ever_complete(tmp_path: Path) -> None:
    """Logs that no longer lead from the initial snapshot to the state are dropped."""

    def logged_after(iterations: int) -> list[int]:
        folder = tmp_path / str(iterations)
        job = ThreadJob(
            folder, config("moevement", window=2), PAIR, iterations=iterations
        )
        job.on_worker.append(
            lambda rank, _: (
                let_copies_fail(job.models[rank], 2, 999) if rank == 1 else None
            )
        )
        job.run()
        boundary = job.rank_memory(1).boundary
        assert boundary is not None
        return [boundary.size_bytes, job.rank_memory(1).steps.size_bytes]

    assert logged_after(24) == logged_after(30)


def call_first(owner: object, name: str, act: Callable[[], object]) -> None:
    """Call `act` before each call of a method of one object."""
    method = getattr(owner, name)

    def act_and_call() -> Any:
        act()
        return method()

    setattr(owner, name, act_and_call)


@pytest.mark.parametrize(
    ("phase", "number", "again"), [("forward", 5, 5), ("between", 6, 6)]
)
def test_a_snapshot_that_the_loss_tears_is_taken_again(
    phase: str, number: int, again: int, tmp_path: Path
) -> None:
    """Rank 1's copy waits until the rank's state is lost.

    The recovery from a second loss starts from the same snapshot, taken again.
    """
    losses = [
        StateLoss(iteration=5, stage=1, phase=phase),
        StateLoss(iteration=again, stage=1, phase="step"),
    ]
    job = ThreadJob(tmp_path, config("moevement", window=1), PAIR, losses=losses)

    def hold(rank: int, _: object) -> None:
        if rank != 1:
            return
        model, goes_on = job.models[1], threading.Event()
        take, num_taken = model.pieces, 0

        def pieces(*arguments: Any) -> Any:
            nonlocal num_taken
            num_taken += 1
            if num_taken == 1:
                call_first(job.rank_memory(1).engine, "uncapped", goes_on.set)
            if num_taken == number:
                # until the engine, without its cap, drops the capture in progress, or
                # the captured state is gone
                assert goes_on.wait(WAIT_S)
            return take(*arguments)

        model.pieces = pieces  # type: ignore[method-assign]
        call_first(model, "wipe", goes_on.set)

    job.on_worker.append(hold)
    exact(job)
    assert recovered_from(job) == [number - 2, number - 1]
