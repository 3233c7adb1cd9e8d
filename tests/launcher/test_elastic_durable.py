"""Whole checkpoints under supervisors: written while training goes on, through deaths, the end of all, and bad disks.

Writers wait at gates, named pipes that they open before they write: the test decides when they go on.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemWriter

from moe_ckpt.durable.checkpoint_folder import MARKER, is_committed, read_manifest, verify_files
from moe_ckpt.events import CheckpointFailed, CheckpointSaved, CheckpointSkipped
from moe_ckpt.types import Phase
from tests.campaign import Point, all_go_back, call_is_a_point, survive
from tests.elastic_job import ElasticJob
from tests.restarts import Restarts, checkpoint_name, checkpoint_of
from tests.training import events_of

TRAINING = ("train.iterations=24",)
DURABLE = ("ckpt.durable_every_iters=4", "ckpt.keep=9")
EVERY_3 = ("ckpt.every_iters=3",)
RANKS = range(4)


class Gate:
    """Where each rank's first write of one iteration's checkpoint waits until the test opens it."""

    def __init__(self, folder: Path, iteration: int) -> None:
        self.iteration = iteration
        self._folder = folder / f"gate{iteration}"
        self._folder.mkdir()
        self._pipe = -1
        os.mkfifo(self._folder / "gate")

    def pass_once(self, rank: str) -> None:
        """Wait here, in a writer of this rank."""
        try:
            (self._folder / f"held{rank}").touch(exist_ok=False)
        except FileExistsError:
            return
        (self._folder / "gate").open("rb").close()
        (self._folder / f"passed{rank}").touch()

    def is_waited_for(self) -> bool:
        """Note that the calling rank's training thread waits for its writer; return whether all ranks' do."""
        held = self._folder / f"held{os.environ['RANK']}"
        if held.exists():
            (self._folder / f"waits{os.environ['RANK']}").touch()
        return all((self._folder / f"waits{rank}").exists() for rank in RANKS)

    def open(self) -> None:
        self._pipe = os.open(self._folder / "gate", os.O_RDWR)  # stays open: no reader waits for a writer again

    def wait_for_writers(self, job: ElasticJob) -> None:
        self._wait_for_files("held", job, RANKS)

    def wait_for_leftovers(self, job: ElasticJob, ranks: Iterable[int]) -> None:
        self._wait_for_files("passed", job, ranks)

    def _wait_for_files(self, name: str, job: ElasticJob, ranks: Iterable[int]) -> None:
        for path in [self._folder / f"{name}{rank}" for rank in ranks]:
            job.wait_for(lambda path=path: path.exists() or None, path.name)


def hold_writers(gates: Sequence[Gate], full_at: int = 0) -> None:
    """Let writers pass these gates. At iteration `full_at` the disk of rank 2 is full.

    A rank enters DONE when all training threads wait for the writers at the last gate.
    """
    write_data = FileSystemWriter.write_data

    def held(self: FileSystemWriter, *arguments: Any) -> Any:
        rank, path = os.environ["RANK"], Path(self.path)
        for gate in gates:
            if path.name == checkpoint_name(gate.iteration):
                gate.pass_once(rank)
        if path.name == checkpoint_name(full_at) and rank == "2":
            for number in range(9):
                (path / f"__2_{number}.distcp").symlink_to("/dev/full")
        return write_data(self, *arguments)

    FileSystemWriter.write_data = held  # type: ignore[method-assign]
    call_is_a_point(futures, "wait", Phase.DONE, when=lambda *_: bool(gates) and gates[-1].is_waited_for())


def test_ranks_die_while_checkpoints_are_written(tmp_path: Path) -> None:
    """Writers that a death leaves behind hold nothing up, and what they write later is in no checkpoint."""
    four, eight = Gate(tmp_path, 4), Gate(tmp_path, 8)
    setup = functools.partial(hold_writers, [four, eight], full_at=16)

    def while_they_write(job: ElasticJob, ranks: Sequence[int]) -> None:
        four.wait_for_writers(job)
        assert not is_committed(job.run / "checkpoints" / checkpoint_name(4)), "training has gone on meanwhile"
        job.kill(*ranks)

    def leftovers_end(gate: Gate, others: Sequence[int], job: ElasticJob, ranks: Sequence[int]) -> None:
        gate.open()
        gate.wait_for_leftovers(job, others)
        job.kill(*ranks)

    leftovers_of_four = functools.partial(leftovers_end, four, [0, 2, 3])
    leftovers_of_eight = functools.partial(leftovers_end, eight, [0, 1])
    faults = [
        all_go_back("while others write", 3, Point(1, Phase.REDUCE, 6), kills=[1], then=while_they_write),
        all_go_back("while leftovers end", 3, Point(1, Phase.REDUCE, 6), kills=[1], then=leftovers_of_four),
        all_go_back("while all wait for a checkpoint", 9, Point(3, Phase.DONE)),
        all_go_back("while its leftovers end", 12, Point(2, Phase.REDUCE, 15), kills=[2], then=leftovers_of_eight),
    ]
    job = survive(tmp_path, faults, *TRAINING, ckpt="gemini", settings=(*DURABLE, *EVERY_3), setup=setup)
    saved = [[event.iteration for event in events_of(job.run, CheckpointSaved, rank)] for rank in RANKS]
    failed = [[event.iteration for event in events_of(job.run, CheckpointFailed, rank)] for rank in RANKS]
    assert saved == [[4, 20, 24]] * 4
    assert [set(of_rank) for of_rank in failed] == [{4, 12, 16}, {4, 12, 16}, {4, 12, 16}, {4, 12, 16}]
    reasons = {event.iteration: event.reason for event in events_of(job.run, CheckpointFailed, 0)}
    assert all("still writes a checkpoint that was abandoned" in reasons[iteration] for iteration in (4, 12))
    assert "No space left on device" in reasons[16]
    for iteration in saved[0]:
        directory = job.run / "checkpoints" / checkpoint_name(iteration)
        verify_files(directory, read_manifest(directory).files)


def _largest_file(checkpoint: Path) -> Path:
    return max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)


def _flip_a_byte(checkpoint: Path) -> None:
    content = bytearray(_largest_file(checkpoint).read_bytes())
    content[len(content) // 2] ^= 0xFF
    _largest_file(checkpoint).write_bytes(content)


def _be_of_another_run(checkpoint: Path) -> None:
    manifest = (checkpoint / MARKER).read_text()
    run_id = json.loads(manifest)["identity"]["run_id"]
    (checkpoint / MARKER).write_text(manifest.replace(run_id, "0" * len(run_id)))


@pytest.mark.full
@pytest.mark.parametrize(("ckpt", "settings"), [("gemini", EVERY_3), ("moevement", ("ckpt.window=2",))])
def test_a_run_starts_again_from_its_newest_usable_checkpoint(
    ckpt: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    gate = Gate(tmp_path, 8)
    restarts = Restarts(tmp_path, *TRAINING, ckpt=ckpt, settings=(*DURABLE, *settings))
    first = restarts.start(until=gate.wait_for_writers, setup=functools.partial(hold_writers, [gate]))
    assert first.resumed is None

    torn = restarts.start(until=checkpoint_of(12))
    assert torn.resumed == ("iter_0000004", 4)
    assert "iter_0000008: no COMMITTED.json: the save was not finished" in torn.said

    whole = restarts.start(until=checkpoint_of(16))
    assert whole.resumed == ("iter_0000012", 12)

    _flip_a_byte(restarts.checkpoint(16))
    _be_of_another_run(restarts.checkpoint(12))
    last = restarts.start()
    assert last.resumed == ("iter_0000008", 8)
    damaged, foreign = last.of(CheckpointSkipped)
    assert (Path(damaged.source).name, Path(foreign.source).name) == ("iter_0000016", "iter_0000012")
    assert "CRC-32" in damaged.reason
    assert "saved by run" in foreign.reason
    source = restarts.checkpoint(8)
    assert f"all ranks go on from {source} at iteration 8; passed over: " in last.said
    assert damaged.reason in last.said


@pytest.mark.full
@pytest.mark.parametrize("ckpt", ["gemini", "checkfreq"])
def test_strict_ends_the_job_when_the_disk_is_full(ckpt: str, tmp_path: Path) -> None:
    setup = functools.partial(hold_writers, [], full_at=4)
    settings = (*TRAINING, *DURABLE, *EVERY_3, "ckpt.strict=true")
    with ElasticJob(4, tmp_path, *settings, ckpt=ckpt, setup=setup) as job:
        said = job.wait_for_failure()
    assert said.count("error: ") == 1, said
    assert "No space left on device" in said
