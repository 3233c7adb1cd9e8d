"""Disks that are full, read-only or stopped while a job saves.

The job logs a clear line, trains exactly and loses nothing. Once the disk is mended,
the job saves again. The disk of rank 1 fails after iteration 3, and is mended after
iteration 8. The tests use a tmpfs, or a writer that stands still.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.events import CheckpointFailed, CheckpointSaved, WindowPersisted
from moe_ckpt.snapshot.blobs import BlobFolder, own_path
from moe_ckpt.types import Phase
from tests.engine.damage import flip_a_bit_of, let_writes_fail, snapshots_in
from tests.harness.threads.job import Fault, ThreadJob, exact
from tests.harness.threads.model import PAIR
from tests.harness.threads.stops import At, StoppedError, started_again
from tests.policies.profiles import config
from tests.small_disk import SmallDisk, small_disk

BROKEN_AT, MENDED_AT, ITERATIONS = 3, 8, 12
DEATH = Fault(rank=0, phase=Phase.BACKWARD, iteration=6)
DISK = Path("snapshots", "rank0001")
CHECKPOINTS = Path("checkpoints")


@dataclass(frozen=True, kw_only=True)
class Sickness:
    """A way in which a disk fails and is mended."""

    break_it: Callable[[SmallDisk], object]

    mend_it: Callable[[SmallDisk], object]

    says: str
    """Text in the reason of failed saves."""


FULL = Sickness(
    break_it=SmallDisk.fill, mend_it=SmallDisk.empty, says="No space left on device"
)
READ_ONLY = Sickness(
    break_it=SmallDisk.forbid_writes,
    mend_it=SmallDisk.allow_writes,
    says="Read-only file system",
)
SICKNESSES = pytest.mark.parametrize(
    "sickness", [FULL, READ_ONLY], ids=["full", "read-only"]
)
SAVING: dict[str, dict[str, Any]] = {
    "moevement": {"window": 1, "pause_iters": 1, "disk_every_iters": 2},
    "checkfreq": {"every_iters": 2},
}
# no case of checkfreq on a full disk: of two snapshots there, checkfreq drops the older
# one, and the disk has room
CASES = pytest.mark.parametrize(
    ("policy", "sickness"),
    [("moevement", FULL), ("moevement", READ_ONLY), ("checkfreq", READ_ONLY)],
    ids=["moevement-full", "moevement-read-only", "checkfreq-read-only"],
)


def job_in(
    folder: Path, policy: str, faults: Sequence[Fault] = (), **settings: Any
) -> ThreadJob:
    configured = config(policy, **{**SAVING[policy], **settings})
    return ThreadJob(
        folder, configured, PAIR, iterations=ITERATIONS, settles=True, faults=faults
    )


@CASES
def test_training_goes_on_and_saves_again_once_the_disk_is_mended(
    policy: str, sickness: Sickness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / DISK) as disk:
        job = job_in(tmp_path, policy)
        At(job, BROKEN_AT, lambda: sickness.break_it(disk))
        At(job, MENDED_AT, lambda: sickness.mend_it(disk))
        exact(job)
        failed = job.events(CheckpointFailed, 1)
        assert failed
        assert all(
            BROKEN_AT <= event.iteration <= MENDED_AT and sickness.says in event.reason
            for event in failed
        )
        assert not job.events(CheckpointFailed, 0), "its disk is another"
        lines = [
            record.message
            for record in caplog.records
            if "not on disk, training goes on" in record.message
        ]
        assert len(lines) == len(failed)
        assert all(sickness.says in line and str(disk.path) in line for line in lines)
        written = [
            [event.window_start for event in job.events(WindowPersisted, rank)]
            for rank in job.ranks
        ]
        assert all(
            min(starts) <= BROKEN_AT and max(starts) > MENDED_AT for starts in written
        )
        [(source, iteration), another] = started_again(job)
    assert (source, another) == ("local disk", (source, iteration))
    assert iteration > MENDED_AT


@CASES
def test_a_state_that_was_saved_before_outlives_a_sick_disk(
    policy: str, sickness: Sickness, tmp_path: Path
) -> None:
    """The job ends while only the healthy disk has newer states.

    All ranks continue from the newest state that both disks have.
    """
    with small_disk(tmp_path / DISK) as disk:
        job = job_in(tmp_path, policy)
        At(job, BROKEN_AT, lambda: sickness.break_it(disk))
        At(job, MENDED_AT, lambda: sickness.mend_it(disk), ends=True)
        with pytest.raises(StoppedError):
            job.run()
        assert job.events(CheckpointFailed, 1)
        [(source, iteration), another] = started_again(job)
    assert (source, another) == ("local disk", (source, iteration))
    assert 0 < iteration <= BROKEN_AT


@SICKNESSES
def test_whole_checkpoints_go_on_once_their_disk_is_mended(
    sickness: Sickness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / CHECKPOINTS) as disk:
        job = job_in(tmp_path, "moevement", disk_every_iters=0, durable_every_iters=2)
        At(job, BROKEN_AT, lambda: sickness.break_it(disk))
        At(job, MENDED_AT, lambda: sickness.mend_it(disk))
        exact(job)
        failed = [job.events(CheckpointFailed, rank) for rank in job.ranks]
        assert [event.iteration for event in failed[0]] == [4, 6, 8]
        assert failed[0] == failed[1], "all ranks have the reason"
        assert all(sickness.says in event.reason for event in failed[0])
        assert [event.iteration for event in job.events(CheckpointSaved)] == [2, 10, 12]
        assert started_again(job) == [("iter_0000012", 12)] * 2


def test_disks_that_fail_in_turn_keep_a_state_that_both_have(tmp_path: Path) -> None:
    """Rank 1 lacks rank 0's last window, and rank 0 lacks the two windows after it.

    All ranks continue from the first window of all.
    """
    with (
        small_disk(tmp_path / "snapshots" / "rank0000") as first,
        small_disk(tmp_path / DISK) as second,
    ):
        job = job_in(tmp_path, "moevement")
        turns = (
            (3, second.forbid_writes),
            (5, second.allow_writes),
            (5, first.forbid_writes),
        )
        for iteration, act in turns:
            At(job, iteration, act)
        At(job, MENDED_AT, first.allow_writes, ends=True)
        with pytest.raises(StoppedError):
            job.run()
        failed = [
            [event.iteration for event in job.events(CheckpointFailed, rank)]
            for rank in job.ranks
        ]
        assert failed == [[5, 7], [3]]
        [(source, iteration), another] = started_again(job)
    assert (source, another) == ("local disk", (source, iteration))
    assert 0 < iteration < BROKEN_AT


def writer_that_stands_still(
    job: ThreadJob, stack: ExitStack, *, since: int, until: int
) -> None:
    """Let the writer of rank 1 read a pipe from one iteration to another.

    The pipe lies where the writer looks for blobs that are on disk already.
    """
    blob = job.folder / "another disk" / "index" / "snapshot-0-0-0.blob"
    blob.parent.mkdir(parents=True)
    os.mkfifo(blob)
    goes_on = ExitStack()
    stack.enter_context(goes_on)

    def stop_writer() -> None:
        client = job.clients[1]
        assert client is not None
        [key, *_] = BlobFolder(own_path(job.memory(1))).keys()
        client.persist([key], [], blob.parents[1], limit_bytes=None)
        # returns once the writer reads
        goes_on.enter_context(blob.open("wb"))

    At(job, since, stop_writer)
    At(job, until, goes_on.close, settles=False)


@pytest.mark.parametrize("policy", ["moevement", "gemini"])
def test_a_slow_disk_gets_its_window_though_later_ones_stay_in_memory(
    policy: str, tmp_path: Path, stack: ExitStack
) -> None:
    """The write of the window for the disk takes as long as two later windows.

    Neither of the later windows goes to disk.
    """
    often: dict[str, Any] = {
        "moevement": {"window": 1, "pause_iters": 1},
        "gemini": {"every_iters": 2},
    }[policy]
    job = ThreadJob(
        tmp_path, config(policy, **often, disk_every_iters=8), PAIR, iterations=18
    )
    writer_that_stands_still(job, stack, since=7, until=13)
    exact(job)
    assert not job.events(CheckpointFailed, 1)
    written = [
        [event.window_start for event in job.events(WindowPersisted, rank)]
        for rank in job.ranks
    ]
    assert written[0] == written[1]
    assert sum(7 < start < 13 for start in written[1]) == 1


def test_training_goes_on_while_the_writer_stands_still(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Before each window for the disk, training waits for the writer for `copy_s`.

    `copy_s` is half a second here.
    """
    job = ThreadJob(
        tmp_path,
        config("moevement", **SAVING["moevement"]),
        PAIR,
        iterations=ITERATIONS,
    )

    def wait_less() -> None:
        publisher = job.rank_memory(1).publisher
        assert publisher is not None
        publisher.waits.copy_s = 0.5

    At(job, BROKEN_AT - 1, wait_less)
    writer_that_stands_still(job, stack, since=BROKEN_AT, until=MENDED_AT)
    exact(job)
    reasons = {event.reason for event in job.events(CheckpointFailed, 1)}
    assert reasons == {"not on disk after 0.5 s"}
    assert (
        max(event.window_start for event in job.events(WindowPersisted, 1)) > BROKEN_AT
    )
    [(source, iteration), another] = started_again(job)
    assert (source, another) == ("local disk", (source, iteration))
    assert iteration > BROKEN_AT


@pytest.mark.parametrize("when", ["from the start", "after a window of all"])
def test_a_sick_disk_does_not_fill_the_others(when: str, tmp_path: Path) -> None:
    """Rank 1's disk refuses all writes for good.

    A fault begins a generation in which the disk has never taken a window.
    """
    with small_disk(tmp_path / DISK) as disk:
        job = job_in(tmp_path, "moevement", [DEATH])
        if when == "from the start":
            disk.fill()
        else:
            At(job, BROKEN_AT, disk.fill)
        exact(job)
        starts = [
            {header.window_start for header in snapshots_in(job.disk(rank)).values()}
            for rank in job.ranks
        ]
    assert len(starts[0]) == 2
    assert starts[0] & starts[1] == ({min(starts[0])} if starts[1] else set()), (
        "what all disks have stays"
    )


def test_a_disk_that_is_read_only_at_the_next_start_is_read(tmp_path: Path) -> None:
    with small_disk(tmp_path / DISK) as disk:
        job = job_in(tmp_path, "moevement")
        At(job, MENDED_AT, disk.forbid_writes, ends=True)
        with pytest.raises(StoppedError):
            job.run()
        starts = {header.window_start for header in snapshots_in(job.disk(1)).values()}
        assert len(starts) == 2, "one of them is not needed"
        assert started_again(job) == [("local disk", max(starts))] * 2


def test_the_older_window_that_a_start_has_loaded_stays_on_all_disks(
    tmp_path: Path,
) -> None:
    """The newest window on rank 1's disk is damaged.

    Rank 1's disk refuses all writes after the start.
    """
    job = job_in(tmp_path, "moevement")
    At(job, MENDED_AT, ends=True)
    with pytest.raises(StoppedError):
        job.run()
    common, newest = sorted(
        {header.window_start for header in snapshots_in(job.disk(1)).values()}
    )
    flip_a_bit_of(job.disk(1), lambda header: header.window_start == newest)
    shutil.rmtree(job.folder / "memory")
    again = job_in(tmp_path, "moevement")

    def take_nothing(_: object) -> None:
        disk = again.rank_memory(1).disk
        assert disk is not None
        let_writes_fail(disk, lambda _: True)

    again.upsets[1, common + 1] = take_nothing
    At(again, ITERATIONS - 1, ends=True)
    with pytest.raises(StoppedError):
        again.run()
    assert again.events(CheckpointFailed, 1)
    assert again.events(WindowPersisted, 0)[-1].window_start > newest
    assert started_again(again) == [("local disk", common)] * 2


def test_a_disk_that_is_read_only_from_the_start_ends_no_job(tmp_path: Path) -> None:
    with small_disk(tmp_path / DISK) as disk:
        disk.forbid_writes()
        job = exact(job_in(tmp_path, "checkfreq", [DEATH]))
    assert job.events(CheckpointFailed, 1)


def test_a_disk_with_input_errors_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder on rank 1's disk can be listed after iteration 3.

    A fault begins a second generation, which cannot list the disk either.
    """
    job = job_in(tmp_path, "moevement", [DEATH])
    broken: list[Path] = []

    def iterdir(
        self: Path, list_folder: Callable[[Path], Iterator[Path]] = Path.iterdir
    ) -> Iterator[Path]:
        if broken and self.is_relative_to(broken[0]):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return list_folder(self)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    At(job, BROKEN_AT, lambda: broken.append(job.disk(1)))
    exact(job)
    assert job.events(CheckpointFailed, 1)
    assert job.events(WindowPersisted, 0)[-1].window_start > MENDED_AT
