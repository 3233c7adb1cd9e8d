"""Whole checkpoints under guards: written while training goes on, through deaths, the end of all, and bad disks.

Writers are held by a pipe that they open before they write, so that what happens meanwhile is up to the test.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemWriter

from moe_ckpt.events import CheckpointFailed, CheckpointSaved, CheckpointSkipped, StateResumed, TrainerStarted
from moe_ckpt.store.disk import is_committed, read_manifest, verify_files
from moe_ckpt.types import Phase
from tests.elastic import ElasticJob
from tests.references import outcome_of, uninterrupted
from tests.training import events_of

TRAINING = ("train.iterations=14",)
DURABLE = ("ckpt.durable_every_iters=4",)
POLICIES = {
    "moevement": ("ckpt.window=2",),
    "gemini": ("ckpt.every_iters=3",),
    "checkfreq": ("ckpt.every_iters=3",),
}
RANKS = range(4)
_MS_RDONLY, _MS_REC, _MS_PRIVATE, _CLONE_NEWNS = 0x1, 0x4000, 0x40000, 0x20000

can_mount = pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode != 0,
    reason="needs a mount of its own: root, with CAP_SYS_ADMIN",
)


class Gate:
    """Where each rank's first write of one iteration's checkpoint waits until the test lets it through."""

    def __init__(self, folder: Path, iteration: int) -> None:
        self.hold = functools.partial(_hold_writers, folder, iteration)
        self._folder = folder
        self._pipe = -1
        os.mkfifo(folder / "gate")

    def wait_for_writers(self, job: ElasticJob) -> None:
        self._wait_for_files("held", job, RANKS)

    def wait_for_those_who_wait(self, job: ElasticJob) -> None:
        """Wait until every training thread waits for its writer."""
        self._wait_for_files("waits", job, RANKS)

    def open(self) -> None:
        self._pipe = os.open(self._folder / "gate", os.O_RDWR)  # and nobody waits for this pipe's other end any more

    def wait_for_leftovers(self, job: ElasticJob, *ranks: int) -> None:
        self._wait_for_files("let", job, ranks)

    def _wait_for_files(self, name: str, job: ElasticJob, ranks: Iterable[int]) -> None:
        for path in [self._folder / f"{name}{rank}" for rank in ranks]:
            job.wait_for(lambda path=path: path.exists() or None, path.name)


def _hold_writers(folder: Path, iteration: int) -> None:
    write_data = FileSystemWriter.write_data

    def held(self: FileSystemWriter, *arguments: Any) -> Any:
        if Path(self.path).name == _name(iteration):
            _hold_once(folder, os.environ["RANK"])
        return write_data(self, *arguments)

    FileSystemWriter.write_data = held  # type: ignore[method-assign]
    wait = futures.wait

    def telling(*arguments: Any, **options: Any) -> Any:
        (folder / f"waits{os.environ['RANK']}").touch()
        return wait(*arguments, **options)

    futures.wait = telling


def _hold_once(folder: Path, rank: str) -> None:
    try:
        (folder / f"held{rank}").touch(exist_ok=False)
    except FileExistsError:
        return
    (folder / "gate").open("rb").close()
    (folder / f"let{rank}").touch()


def _name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def _job(folder: Path, ckpt: str, *overrides: str, setup: Callable[[], None] | None = None) -> ElasticJob:
    training = (*TRAINING, *DURABLE, *POLICIES[ckpt], *overrides)
    return ElasticJob(4, folder, *training, ckpt=ckpt, setup=setup, timeout_s=120.0)


def _saved(run: Path, rank: int = 0) -> list[int]:
    return [event.iteration for event in events_of(run, CheckpointSaved, rank)]


def _failed(run: Path) -> dict[int, str]:
    return {event.iteration: event.reason for event in events_of(run, CheckpointFailed)}


def _assert_whole(run: Path, iteration: int) -> None:
    directory = run / "checkpoints" / _name(iteration)
    verify_files(directory, read_manifest(directory).files)


def _wait_for_checkpoint(job: ElasticJob, iteration: int) -> None:
    directory = job.run / "checkpoints" / _name(iteration)
    job.wait_for(lambda: is_committed(directory) or None, f"the checkpoint of iteration {iteration}")


@pytest.mark.parametrize("ckpt", POLICIES)
def test_training_goes_on_while_a_checkpoint_is_written(ckpt: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path, 4)
    with _job(tmp_path, ckpt, setup=gate.hold) as job:
        gate.wait_for_writers(job)
        for rank in RANKS:
            job.wait_until(rank, 7, Phase.FORWARD)
        assert not is_committed(job.run / "checkpoints" / _name(4))
        gate.open()
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *TRAINING)
    assert [_saved(job.run, rank) for rank in RANKS] == [[4, 8, 12]] * 4
    for iteration in (8, 12):
        _assert_whole(job.run, iteration)


def _wait_for_generation(job: ElasticJob, generation: int, iteration: int) -> None:
    for rank in RANKS:
        page = job.page(rank)
        job.wait_for(
            lambda page=page: (page.generation == generation and page.iteration >= iteration) or None,
            f"iteration {iteration} of rank {rank} in generation {generation}",
        )


@pytest.mark.parametrize(("ckpt", "dead"), [("moevement", 1), ("moevement", 0), ("gemini", 1), ("checkfreq", 1)])
def test_a_rank_dies_while_others_still_write(ckpt: str, dead: int, tmp_path: Path) -> None:
    """Nobody waits for the writers that it leaves behind, and what they write later is in no checkpoint."""
    gate = Gate(tmp_path, 4)
    with _job(tmp_path, ckpt, setup=gate.hold) as job:
        job.order(dead, Phase.BACKWARD, iteration=6)
        gate.wait_for_writers(job)
        _wait_for_generation(job, 2, 7)
        gate.open()
        gate.wait_for_leftovers(job, *set(RANKS) - {dead})
        result = job.wait()
    assert result["faults_survived"] == job.orders_obeyed == 1
    assert outcome_of(job.run, result) == uninterrupted(4, *TRAINING)
    _check_later_saves(job.run, is_repeated=ckpt != "moevement")
    _check_only_died(dead, job.run)


def _check_only_died(dead: int, run: Path) -> None:
    assert [len(events_of(run, TrainerStarted, rank)) for rank in RANKS] == [1 + (rank == dead) for rank in RANKS]


def _check_later_saves(run: Path, *, is_repeated: bool) -> None:
    """Where all ranks went back, the checkpoint was due again, while others still wrote into its directory."""
    saved, failed = _saved(run), _failed(run)
    assert 4 not in saved
    assert saved[-1] == 12
    assert (4 in failed) == is_repeated
    assert all("still writes a checkpoint that was abandoned" in reason for reason in failed.values())
    assert not (run / "checkpoints" / _name(4)).exists(), "what was abandoned is cleaned up"
    _assert_whole(run, 12)


def test_a_rank_dies_while_all_wait_for_a_checkpoint(tmp_path: Path) -> None:
    """The next one is due, and the last is not written: the wait ends with the generation."""
    gate = Gate(tmp_path, 4)
    with _job(tmp_path, "moevement", setup=gate.hold) as job:
        gate.wait_for_those_who_wait(job)
        job.kill(1)
        _wait_for_generation(job, 2, 10)
        gate.open()
        gate.wait_for_leftovers(job, 0, 2, 3)
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *TRAINING)
    _check_only_died(1, job.run)
    assert _saved(job.run) == [12]


def _end(job: ElasticJob) -> None:
    os.kill(job.agent_pid, signal.SIGKILL)
    job.wait_for_failure()
    shutil.rmtree(job.run / "snapshots", ignore_errors=True)  # of checkfreq: local disks are newer


def _end_after(iteration: int, folder: Path, ckpt: str = "moevement") -> Path:
    """Kill everything once this checkpoint is complete; return the run folder."""
    with _job(folder, ckpt, "ckpt.keep=9") as job:
        _wait_for_checkpoint(job, iteration)
        _end(job)
    return job.run


def _go_on(run: Path, folder: Path, ckpt: str = "moevement") -> str:
    """Start the run again, to its end, which is that of the uninterrupted one; return what its processes said."""
    with _job(folder, ckpt, f"run.dir={run}") as job:
        job.run = run
        assert outcome_of(run, job.wait()) == uninterrupted(4, *TRAINING)
        return job.said()


def _resumed(run: Path) -> list[str]:
    return [Path(event.source).name for event in events_of(run, StateResumed)]


@pytest.mark.parametrize("ckpt", POLICIES)
def test_everything_is_killed_while_a_checkpoint_is_written(ckpt: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path, 8)
    with _job(tmp_path, ckpt, setup=gate.hold) as job:
        gate.wait_for_writers(job)
        _end(job)
    said = _go_on(job.run, tmp_path / "next", ckpt)
    assert _resumed(job.run) == [_name(4)]
    assert "iter_0000008: no COMMITTED.json: the save was not finished" in said


def test_everything_is_killed_right_after_a_checkpoint(tmp_path: Path) -> None:
    run = _end_after(8, tmp_path)
    _go_on(run, tmp_path / "next")
    assert _resumed(run) == [_name(8)]


def _largest_file(checkpoint: Path) -> Path:
    return max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)


def _flip_a_byte(checkpoint: Path) -> None:
    content = bytearray(_largest_file(checkpoint).read_bytes())
    content[len(content) // 2] ^= 0xFF
    _largest_file(checkpoint).write_bytes(content)


def _cut_in_half(checkpoint: Path) -> None:
    file = _largest_file(checkpoint)
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("damage", [_flip_a_byte, _cut_in_half])
def test_a_damaged_checkpoint_is_named_and_the_older_one_taken(damage: Callable[[Path], None], tmp_path: Path) -> None:
    run = _end_after(8, tmp_path)
    damage(run / "checkpoints" / _name(8))
    _check_older_one_is_taken(run, tmp_path, "CRC-32")


def test_a_checkpoint_of_another_run_is_named_and_the_older_one_taken(tmp_path: Path) -> None:
    run, other = _end_after(4, tmp_path), _end_after(8, tmp_path / "other")
    mine = run / "checkpoints" / _name(8)
    shutil.rmtree(mine, ignore_errors=True)
    shutil.copytree(other / "checkpoints" / _name(8), mine)
    _check_older_one_is_taken(run, tmp_path, "saved by run")


def _check_older_one_is_taken(run: Path, folder: Path, reason: str) -> None:
    said = _go_on(run, folder / "next")
    assert _resumed(run) == [_name(4)]
    (skipped,) = (event for event in events_of(run, CheckpointSkipped) if reason in event.reason)
    assert Path(skipped.source).name == _name(8)
    assert f"all ranks go on from {skipped.source.replace(_name(8), _name(4))} at iteration 4; passed over: " in said
    assert skipped.reason in said


def _mount_for_the_job(folder: Path, flags: int = 0) -> None:
    """Give this process and its children a small file system of their own."""
    folder.mkdir(parents=True)
    libc = ctypes.CDLL(None, use_errno=True)
    for failed in (
        libc.unshare(_CLONE_NEWNS),
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        libc.mount(b"none", bytes(folder), b"tmpfs", flags, b"size=64m"),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), "a file system of one's own")


def _mount_a_disk_that_is_full_at_iteration_four(checkpoints: Path) -> None:
    _mount_for_the_job(checkpoints)
    write_data = FileSystemWriter.write_data

    def write_on_a_full_disk(self: FileSystemWriter, *arguments: Any) -> Any:
        if Path(self.path).name != _name(4):
            return write_data(self, *arguments)
        with _filled(checkpoints / f"filler{os.environ['RANK']}"):
            return write_data(self, *arguments)

    FileSystemWriter.write_data = write_on_a_full_disk  # type: ignore[method-assign]


@contextlib.contextmanager
def _filled(filler: Path) -> Iterator[None]:
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        filler.unlink()


@can_mount
@pytest.mark.parametrize("ckpt", ["moevement", "gemini"])
def test_the_disk_is_full_while_a_checkpoint_is_written(ckpt: str, tmp_path: Path) -> None:
    setup = functools.partial(_mount_a_disk_that_is_full_at_iteration_four, tmp_path / "run" / "checkpoints")
    with _job(tmp_path, ckpt, setup=setup) as job:
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *TRAINING)
    (failed,) = _failed(job.run).items()
    assert failed[0] == 4
    assert "No space left on device" in failed[1]
    assert [_saved(job.run, rank) for rank in RANKS] == [[8, 12]] * 4


@can_mount
def test_strict_ends_the_job_when_the_disk_is_full(tmp_path: Path) -> None:
    setup = functools.partial(_mount_a_disk_that_is_full_at_iteration_four, tmp_path / "run" / "checkpoints")
    with _job(tmp_path, "moevement", "ckpt.strict=true", setup=setup) as job:
        said = job.wait_for_failure()
    assert said.count("error: ") == 1, said
    assert "No space left on device" in said


@can_mount
def test_the_folder_is_read_only(tmp_path: Path) -> None:
    setup = functools.partial(_mount_for_the_job, tmp_path / "run" / "checkpoints", _MS_RDONLY)
    with _job(tmp_path, "moevement", setup=setup) as job:
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *TRAINING)
    assert list(_failed(job.run)) == [4, 8, 12]
    assert all("Read-only file system" in reason for reason in _failed(job.run).values())
