"""Snapshots on local disks when all processes are gone: the next start goes on from them, unless they are unusable."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_ckpt.events import CheckpointFailed, CheckpointSkipped, StateResumed, WindowPersisted
from moe_ckpt.types import Phase
from tests.restarts import Restarts, on_disks

TRAINING = ("train.iterations=24",)
CHECKFREQ = ("ckpt.every_iters=3",)
DURABLE = ("ckpt.durable_every_iters=2", "ckpt.async_save=false", "ckpt.keep=9")
NO_ROOM = "ckpt.disk_budget_bytes=1000"


def _flip_a_byte(rank_folder: Path) -> None:
    for buffer in (rank_folder / "buffers").iterdir():
        with buffer.open("r+b") as file:
            file.seek(buffer.stat().st_size // 2)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))


def _cut_in_half(rank_folder: Path) -> None:
    for buffer in (rank_folder / "buffers").iterdir():
        os.truncate(buffer, buffer.stat().st_size // 2)


def _cut_entries(rank_folder: Path) -> None:
    for entry in (rank_folder / "index").glob("snapshot-*"):
        os.truncate(entry, entry.stat().st_size // 2)


def _be_of_run(run: Path, run_id: str) -> str:
    """Give the run another identity; return the one it had."""
    described = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(described | {"run_id": run_id}))
    return described["run_id"]


def _files(run: Path) -> list[str]:
    return sorted(str(path) for path in (run / "snapshots").rglob("*"))


def test_checkfreq_starts_again_and_again(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, *TRAINING, ckpt="checkfreq", settings=CHECKFREQ)

    first = restarts.start(NO_ROOM, until=lambda job: job.wait_until(0, 7, Phase.FORWARD))
    assert f"wanted at most {NO_ROOM}" in first.of(CheckpointFailed)[0].reason
    assert not first.of(WindowPersisted)
    assert restarts.start(until=on_disks(3)).resumed is None, "a disk without room has nothing"

    assert "train.resume: got 'never', wanted auto, or a new run.dir: there are snapshots" in restarts.fail(
        "train.resume=never"
    )
    before, run_id = _files(restarts.run), _be_of_run(restarts.run, "another")
    said = restarts.fail()
    assert "error: no usable checkpoint or snapshot on disk" in said
    assert "local disk: got snapshots up to iteration (rank 0: " in said
    assert "a copy of rank 0's memory cannot be used: " in said
    assert _files(restarts.run) == before
    _be_of_run(restarts.run, run_id)
    said = restarts.fail(world_size=2)
    assert "no usable checkpoint or snapshot on disk" in said
    assert "layout" in said

    again = restarts.start(*DURABLE, until=on_disks(9))
    assert again.resumed
    assert again.resumed[0] == "local disk"
    assert again.resumed[1] in (3, 6)
    _flip_a_byte(restarts.snapshots(2))
    damaged = restarts.start(*DURABLE, until=on_disks(12))
    assert damaged.resumed
    assert damaged.resumed[0].startswith("iter_")
    fewer = restarts.start(*DURABLE, world_size=2, is_exact=False)
    assert fewer.resumed
    assert fewer.resumed[0].startswith("iter_")
    assert any(reason.startswith("local disk: got snapshots") for reason in fewer.of(StateResumed, 1)[0].passed_over)


@pytest.mark.full
@pytest.mark.parametrize("damage", [_cut_in_half, _cut_entries, shutil.rmtree])
def test_damaged_snapshots_are_not_used(damage: Callable[[Path], None], tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, *TRAINING, ckpt="checkfreq", settings=(*CHECKFREQ, *DURABLE))
    restarts.start(until=on_disks(3))
    damage(restarts.snapshots(2))
    again = restarts.start()
    assert again.resumed
    assert again.resumed[0].startswith("iter_")


@pytest.mark.full
@pytest.mark.parametrize(
    ("ckpt", "settings"),
    [
        ("moevement", ("ckpt.window=2", "ckpt.disk_every_iters=4")),
        ("gemini", ("ckpt.every_iters=3", "ckpt.disk_every_iters=3")),
    ],
)
def test_the_next_start_goes_on_from_local_disks(ckpt: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, *TRAINING, ckpt=ckpt, settings=settings)
    restarts.start(until=on_disks(3))
    again = restarts.start()
    assert again.resumed
    assert again.resumed[0] == "local disk"
    assert again.resumed[1] >= 3
    assert not again.of(CheckpointSkipped)
