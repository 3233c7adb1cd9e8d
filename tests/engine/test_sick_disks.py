"""Disks that are full, read-only or stopped while a job saves: a clear line, exact training, nothing lost, then saves.

The disk of rank 1 fails after iteration 3, and is mended after iteration 8: a tmpfs, and a writer that stands still.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.events import CheckpointFailed, CheckpointSaved, StateResumed, WindowPersisted
from tests.engine.job import StoppedError, ThreadJob, exact, uninterrupted
from tests.engine.model import PAIR, Model
from tests.engine.small_disk import SmallDisk, small_disk
from tests.policies.profiles import config

BROKEN_AT, MENDED_AT, ITERATIONS = 3, 8, 12
WAIT_S = 20.0
DISK = Path("snapshots", "rank0001")
CHECKPOINTS = Path("checkpoints")


@dataclass(frozen=True, kw_only=True)
class Sickness:
    """A way of a disk to fail, and back; `says` is in the reason of the failed saves."""

    break_it: Callable[[SmallDisk], object]
    mend_it: Callable[[SmallDisk], object]
    says: str


FULL = Sickness(break_it=SmallDisk.fill, mend_it=SmallDisk.empty, says="No space left on device")
READ_ONLY = Sickness(break_it=SmallDisk.forbid_writes, mend_it=SmallDisk.allow_writes, says="Read-only file system")
SICKNESSES = pytest.mark.parametrize("sickness", [FULL, READ_ONLY], ids=["full", "read-only"])
SAVING: dict[str, dict[str, Any]] = {
    "moevement": {"window": 1, "pause_iters": 1, "disk_every_iters": 2},
    "checkfreq": {"every_iters": 2},
}
# a full disk that holds two snapshots of checkfreq drops the older one, and has room
CASES = pytest.mark.parametrize(
    ("policy", "sickness"),
    [("moevement", FULL), ("moevement", READ_ONLY), ("checkfreq", READ_ONLY)],
    ids=["moevement-full", "moevement-read-only", "checkfreq-read-only"],
)


class _At:
    """Acts once after an iteration, while no rank saves or trains; `ends` lets the job end there."""

    def __init__(self, job: ThreadJob, iteration: int, act: Callable[[], object], *, ends: bool = False) -> None:
        self._job = job
        self._iteration = iteration
        self._act = act
        self._ends = ends
        self._all_are_here = threading.Barrier(job.shape.world_size)

    def started(self, iteration: int, rank: int, model: Model) -> None:
        """Nothing to do."""

    def committed(self, iteration: int, rank: int, model: Model) -> None:
        if iteration != self._iteration:
            return
        self._job.settle(rank)
        if self._all_are_here.wait(WAIT_S) == 0:
            self._act()
        self._all_are_here.wait(WAIT_S)
        if self._ends:
            raise StoppedError


def job_in(folder: Path, policy: str, **settings: Any) -> ThreadJob:
    return ThreadJob(
        folder, config(policy, **{**SAVING[policy], **settings}), PAIR, iterations=ITERATIONS, settles=True
    )


def breaks_down(job: ThreadJob, disk: SmallDisk, sickness: Sickness) -> None:
    job.observers.append(_At(job, BROKEN_AT, lambda: sickness.break_it(disk)))


def is_mended(job: ThreadJob, disk: SmallDisk, sickness: Sickness, *, ends: bool = False) -> None:
    job.observers.append(_At(job, MENDED_AT, lambda: sickness.mend_it(disk), ends=ends))


def starts_again(job: ThreadJob) -> list[tuple[str, int]]:
    """Start the job again once all memory is gone, and let it come to its end; return the load of each rank."""
    shutil.rmtree(job.folder / "memory")
    before = [len(job.events(StateResumed, rank)) for rank in job.ranks]
    again = ThreadJob(job.folder, job.config, job.shape, iterations=ITERATIONS)
    assert again.run().digests == uninterrupted(job.shape, ITERATIONS).digests
    loads = [event for rank in again.ranks for event in again.events(StateResumed, rank)[before[rank] :]]
    return [(load.source.rpartition("/")[2], load.iteration) for load in loads]


@CASES
def test_training_goes_on_and_saves_again_once_the_disk_is_mended(
    policy: str, sickness: Sickness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / DISK) as disk:
        job = job_in(tmp_path, policy)
        breaks_down(job, disk, sickness)
        is_mended(job, disk, sickness)
        exact(job)
        failed = job.events(CheckpointFailed, 1)
        assert failed
        assert all(BROKEN_AT <= event.iteration <= MENDED_AT and sickness.says in event.reason for event in failed)
        assert not job.events(CheckpointFailed, 0), "its disk is another"
        lines = [record.message for record in caplog.records if "not on disk, training goes on" in record.message]
        assert len(lines) == len(failed)
        assert all(sickness.says in line and str(disk.path) in line for line in lines)
        written = [[event.window_start for event in job.events(WindowPersisted, rank)] for rank in job.ranks]
        assert all(min(starts) <= BROKEN_AT and max(starts) > MENDED_AT for starts in written)
        [(source, iteration), another] = starts_again(job)
    assert (source, another) == ("local disk", (source, iteration))
    assert iteration > MENDED_AT


@CASES
def test_a_state_that_was_saved_before_outlives_a_sick_disk(policy: str, sickness: Sickness, tmp_path: Path) -> None:
    """The job ends while only the healthy disk has newer states: all ranks go on from the newest that both have."""
    with small_disk(tmp_path / DISK) as disk:
        job = job_in(tmp_path, policy)
        breaks_down(job, disk, sickness)
        is_mended(job, disk, sickness, ends=True)
        with pytest.raises(StoppedError):
            job.run()
        assert job.events(CheckpointFailed, 1)
        [(source, iteration), another] = starts_again(job)
    assert (source, another) == ("local disk", (source, iteration))
    assert 0 < iteration <= BROKEN_AT


@SICKNESSES
def test_whole_checkpoints_go_on_once_their_disk_is_mended(
    sickness: Sickness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / CHECKPOINTS) as disk:
        job = job_in(tmp_path, "moevement", disk_every_iters=0, durable_every_iters=2)
        breaks_down(job, disk, sickness)
        is_mended(job, disk, sickness)
        exact(job)
        failed = [job.events(CheckpointFailed, rank) for rank in job.ranks]
        assert [event.iteration for event in failed[0]] == [4, 6, 8]
        assert failed[0] == failed[1], "all ranks have the reason"
        assert all(sickness.says in event.reason for event in failed[0])
        assert [event.iteration for event in job.events(CheckpointSaved)] == [2, 10, 12]
        assert starts_again(job) == [("iter_0000012", 12)] * 2


def test_disks_that_fail_in_turn_keep_a_state_that_both_have(tmp_path: Path) -> None:
    """Rank 1 lacks the window that rank 0 wrote last, and rank 0 the two after it: the first of all serves."""
    with small_disk(tmp_path / "snapshots" / "rank0000") as first, small_disk(tmp_path / DISK) as second:
        job = job_in(tmp_path, "moevement")
        turns = ((3, second.forbid_writes), (5, second.allow_writes), (5, first.forbid_writes))
        job.observers.extend(_At(job, iteration, act) for iteration, act in turns)
        job.observers.append(_At(job, MENDED_AT, first.allow_writes, ends=True))
        with pytest.raises(StoppedError):
            job.run()
        failed = [[event.iteration for event in job.events(CheckpointFailed, rank)] for rank in job.ranks]
        assert failed == [[5, 7], [3]]
        [(source, iteration), another] = starts_again(job)
    assert (source, another) == ("local disk", (source, iteration))
    assert 0 < iteration < BROKEN_AT


def test_training_goes_on_while_the_writer_stands_still(tmp_path: Path) -> None:
    """It waits for the writer for `copy_s`, half a second here, before each window for the disk."""
    job = ThreadJob(tmp_path, config("moevement", **SAVING["moevement"]), PAIR, iterations=ITERATIONS)
    goes_on, stands_still = threading.Event(), threading.Event()

    def stop_writer() -> None:
        sparse = job.sessions[1].sparse
        assert sparse is not None
        assert sparse.stores.publisher is not None
        sparse.stores.publisher._copy_s = 0.5
        job._daemons[1]._door._disk_thread.submit(lambda: (stands_still.set(), goes_on.wait(WAIT_S)))
        assert stands_still.wait(WAIT_S)

    job.observers.append(_At(job, BROKEN_AT, stop_writer))
    job.observers.append(_Unsettled(job, MENDED_AT, goes_on.set))
    exact(job)
    reasons = {event.reason for event in job.events(CheckpointFailed, 1)}
    assert reasons == {"not on disk after 0.5 s"}
    assert max(event.window_start for event in job.events(WindowPersisted, 1)) > BROKEN_AT
    [(source, iteration), another] = starts_again(job)
    assert (source, another) == ("local disk", (source, iteration))
    assert iteration > BROKEN_AT


class _Unsettled(_At):
    """Acts without waiting for writes in progress."""

    def committed(self, iteration: int, rank: int, model: Model) -> None:
        if iteration == self._iteration and self._all_are_here.wait(WAIT_S) == 0:
            self._act()
