"""What is left on local disks when all processes are gone, or all memory: the next start uses it, or the job itself."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_ckpt.events import CheckpointFailed, CheckpointSkipped, Rejoined, StateResumed, WindowPersisted
from moe_ckpt.types import Phase
from tests.elastic import ElasticJob
from tests.references import Outcome, outcome_of, uninterrupted
from tests.training import events_of

TRAINING = ("train.iterations=14",)
CHECKFREQ = ("ckpt.every_iters=3",)
ON_DISK = {
    "checkfreq": CHECKFREQ,
    "gemini": ("ckpt.every_iters=3", "ckpt.disk_every_iters=3"),
    "moevement": ("ckpt.window=2", "ckpt.disk_every_iters=4"),
}


def _end_after(iteration: int, folder: Path, ckpt: str, *overrides: str) -> Path:
    """Kill everything once a window that starts at `iteration` or later is on all disks; return the run folder."""
    with ElasticJob(4, folder, *TRAINING, *overrides, ckpt=ckpt) as job:
        _wait_for_snapshots(job, iteration)
        os.kill(job.agent_pid, signal.SIGKILL)
        job.wait_for_failure()
    return job.run


def _wait_for_snapshots(job: ElasticJob, iteration: int) -> None:
    for rank in range(4):
        job.wait_until(rank, 1)
        job.wait_for(lambda rank=rank: _on_disk(job.run, rank) >= iteration or None, f"snapshots of rank {rank}")


def _on_disk(run: Path, rank: int) -> int:
    return max((event.window_start for event in events_of(run, WindowPersisted, rank)), default=-1)


def _go_on(run: Path, folder: Path, ckpt: str, *overrides: str) -> Outcome:
    with ElasticJob(4, folder, *TRAINING, *overrides, f"run.dir={run}", ckpt=ckpt) as job:
        assert job.run != run
        job.run = run
        return outcome_of(run, job.wait())


@pytest.mark.parametrize("ckpt", ON_DISK)
def test_everything_is_killed_and_the_next_start_goes_on(ckpt: str, tmp_path: Path) -> None:
    run = _end_after(3, tmp_path, ckpt, *ON_DISK[ckpt])
    assert _go_on(run, tmp_path / "next", ckpt, *ON_DISK[ckpt]) == uninterrupted(4, *TRAINING)
    for rank in range(4):
        (resumed,) = events_of(run, StateResumed, rank)
        assert resumed.source == "local disk"
        assert resumed.iteration >= 3


def test_a_node_is_lost_and_all_go_back_to_their_disks(tmp_path: Path) -> None:
    with ElasticJob(4, tmp_path, *TRAINING, *CHECKFREQ, ckpt="checkfreq") as job:
        _wait_for_snapshots(job, 3)
        job.lose_nodes(2)
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *TRAINING)
    (resumed,) = events_of(job.run, StateResumed, 1)
    assert (resumed.source, resumed.iteration) == ("local disk", events_of(job.run, Rejoined, 1)[0].iteration)


def test_a_process_dies_and_all_go_back_to_memory(tmp_path: Path) -> None:
    with ElasticJob(4, tmp_path, *TRAINING, *CHECKFREQ, ckpt="checkfreq") as job:
        job.order(1, Phase.BACKWARD, iteration=8)
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *TRAINING)
    assert [event.iteration for event in events_of(job.run, Rejoined, 0)] == [6]
    assert not events_of(job.run, StateResumed, 0), "memory is nearer than disk"
    assert _on_disk(job.run, 0) >= 9


def _flip_a_byte(rank_folder: Path) -> None:
    buffer = max((rank_folder / "buffers").iterdir(), key=lambda path: path.stat().st_size)
    with buffer.open("r+b") as file:
        file.seek(buffer.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def _cut_in_half(rank_folder: Path) -> None:
    buffer = max((rank_folder / "buffers").iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(buffer, buffer.stat().st_size // 2)


def _cut_an_entry(rank_folder: Path) -> None:
    for entry in (rank_folder / "index").glob("snapshot-*"):
        os.truncate(entry, entry.stat().st_size // 2)


@pytest.mark.parametrize("damage", [_flip_a_byte, _cut_in_half, _cut_an_entry, shutil.rmtree])
def test_what_is_damaged_on_disk_is_not_used(damage: Callable[[Path], None], tmp_path: Path) -> None:
    """Whole checkpoints are the next step down."""
    overrides = (*CHECKFREQ, "ckpt.durable_every_iters=2", "ckpt.async_save=false")
    run = _end_after(3, tmp_path, "checkfreq", *overrides)
    damage(run / "snapshots" / "rank0002")
    assert _go_on(run, tmp_path / "next", "checkfreq", *overrides) == uninterrupted(4, *TRAINING)
    (resumed,) = events_of(run, StateResumed, 0)
    assert "checkpoints" in resumed.source


def test_snapshots_of_another_run_are_not_used(tmp_path: Path) -> None:
    run = _end_after(3, tmp_path, "checkfreq", *CHECKFREQ)
    with ElasticJob(4, tmp_path / "other", *TRAINING, *CHECKFREQ, ckpt="checkfreq") as job:
        job.wait_for(lambda: (job.run / "run.json").exists() or None, "a run folder")
        os.kill(job.agent_pid, signal.SIGKILL)
        job.wait_for_failure()
    shutil.rmtree(job.run / "snapshots", ignore_errors=True)
    shutil.copytree(run / "snapshots", job.run / "snapshots")
    before = sorted(path.name for path in (job.run / "snapshots").rglob("*"))
    overrides = (*TRAINING, *CHECKFREQ, f"run.dir={job.run}")
    with ElasticJob(4, tmp_path / "next", *overrides, ckpt="checkfreq") as again:
        said = again.wait_for_failure()
    assert said.count("error: no usable checkpoint or snapshot on disk") == 1, said
    assert "local disk: got snapshots up to iteration (rank 0: " in said
    assert "a copy of rank 0's memory cannot be used: " in said
    assert sorted(path.name for path in (job.run / "snapshots").rglob("*")) == before


def test_another_number_of_ranks_goes_on_from_a_checkpoint_and_says_why(tmp_path: Path) -> None:
    """A rank's snapshots are pieces of a layout; a whole checkpoint fits any."""
    run = _end_after(3, tmp_path, "checkfreq", *CHECKFREQ)
    fewer = (*TRAINING, *CHECKFREQ, f"run.dir={run}")
    with ElasticJob(2, tmp_path / "fewer", *fewer, ckpt="checkfreq") as job:
        said = job.wait_for_failure()
    assert "no usable checkpoint or snapshot on disk" in said
    assert "local disk: got snapshots up to iteration (rank 0: " in said
    assert "layout" in said

    with_checkpoints = (*CHECKFREQ, "ckpt.durable_every_iters=2", "ckpt.async_save=false")
    other = _end_after(6, tmp_path / "other", "checkfreq", *with_checkpoints)
    overrides = (*TRAINING, *with_checkpoints, f"run.dir={other}")
    with ElasticJob(2, tmp_path / "fewer-with", *overrides, ckpt="checkfreq") as job:
        job.run = other
        job.wait()
    (resumed,) = events_of(other, StateResumed, 1)
    assert "checkpoints" in resumed.source
    assert any(reason.startswith("local disk: got snapshots") for reason in resumed.passed_over)


def test_a_disk_without_room_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    with ElasticJob(4, tmp_path, *TRAINING, *CHECKFREQ, "ckpt.disk_budget_bytes=1000", ckpt="checkfreq") as job:
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *TRAINING)
    failed = events_of(job.run, CheckpointFailed, 0)
    assert "wanted at most ckpt.disk_budget_bytes=1000" in failed[0].reason
    assert not events_of(job.run, WindowPersisted, 0)
    assert not events_of(job.run, CheckpointSkipped, 0)


def test_a_run_that_is_not_to_resume_is_refused_where_snapshots_are(tmp_path: Path) -> None:
    run = _end_after(3, tmp_path, "checkfreq", *CHECKFREQ)
    again = ("train.resume=never", f"run.dir={run}")
    with ElasticJob(4, tmp_path / "next", *TRAINING, *CHECKFREQ, *again, ckpt="checkfreq") as job:
        said = job.wait_for_failure()
    assert said.count("error: train.resume: got 'never', wanted auto, or a new run.dir: there are snapshots") == 1
