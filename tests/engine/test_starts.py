"""The next start of a run continues from the run's snapshots on local disks.

The start uses nothing else on the disks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_ckpt.durable.checkpoint_folder import CheckpointFolder
from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError, NothingLeftError
from moe_ckpt.events import CheckpointFailed, StateResumed
from moe_ckpt.types import Phase
from tests.engine.damage import (
    drop_snapshots,
    flip_a_bit,
    let_copies_fail,
    snapshots_in,
)
from tests.harness.threads.job import Fault, ThreadJob, uninterrupted
from tests.harness.threads.model import PAIR
from tests.harness.threads.stops import At, StoppedError, started_again
from tests.policies.profiles import config

POLICIES = {
    "checkfreq": {"every_iters": 2},
    "gemini": {"every_iters": 2, "disk_every_iters": 2},
    "moevement": {"window": 2, "disk_every_iters": 2},
}


def start(
    folder: Path, policy: str, iterations: int, *, run_id: str = "run", **settings: int
) -> ThreadJob:
    """Return a job that continues in a folder after all memory is lost."""
    shutil.rmtree(folder / "memory", ignore_errors=True)
    made = config(policy, **POLICIES[policy] | settings)
    return ThreadJob(
        folder, made, PAIR, iterations=iterations, run_id=run_id, settles=True
    )


def cut_entries(disk: Path, keys: str = "snapshot-*") -> None:
    for entry in (disk / "index").glob(keys):
        entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])


def test_damage_to_the_newest_window_on_a_disk_leaves_the_one_before(
    tmp_path: Path,
) -> None:
    job = start(tmp_path, "moevement", 9, window=1)
    job.run()
    common, newest = sorted(
        {header.window_start for header in snapshots_in(job.disk(1)).values()}
    )
    cut_entries(job.disk(1), f"snapshot-{newest}-*")
    assert started_again(job) == [("local disk", common)] * 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("damage", [None, flip_a_bit, cut_entries, shutil.rmtree])
def test_a_local_disk_is_loaded_unless_it_is_damaged(
    policy: str, damage: Callable[[Path], object] | None, tmp_path: Path
) -> None:
    """The checkpoint of iteration 5 is older than the snapshots on disks."""
    job = start(tmp_path, policy, 9, durable_every_iters=5)
    job.run()
    if damage:
        damage(job.disk(1))
    job = start(tmp_path, policy, 12, durable_every_iters=5)
    assert job.run().digests == uninterrupted(PAIR, 12).digests
    for rank in job.ranks:
        (resumed,) = job.events(StateResumed, rank)
        assert Path(resumed.source).name == ("iter_0000005" if damage else "local disk")
        assert any(
            reason.startswith("local disk: ") for reason in resumed.passed_over
        ) == bool(damage)


def test_snapshots_of_another_run_are_no_start(tmp_path: Path) -> None:
    start(tmp_path, "checkfreq", 5).run()
    with pytest.raises(
        CheckpointLoadError,
        match=r"no usable checkpoint or snapshot on disk.*(?s:.)*local disk: got",
    ):
        start(tmp_path, "checkfreq", 5, run_id="other").run()
    assert (
        start(tmp_path, "checkfreq", 7).run().digests == uninterrupted(PAIR, 7).digests
    )


def test_a_disk_without_room_has_nothing(tmp_path: Path) -> None:
    job = start(tmp_path, "checkfreq", 5, disk_budget_bytes=1000)
    job.run()
    assert (
        "wanted at most ckpt.disk_budget_bytes=1000"
        in job.events(CheckpointFailed)[0].reason
    )
    job = start(tmp_path, "checkfreq", 5)
    assert job.run() == uninterrupted(PAIR, 5)
    assert not job.events(StateResumed)


def test_the_state_before_the_first_iteration_is_a_start(tmp_path: Path) -> None:
    """No other state is on both disks."""
    job = start(tmp_path, "gemini", 8)
    At(job, 3, ends=True)
    with pytest.raises(StoppedError):
        job.run()
    drop_snapshots(job.disk(1), lambda header: header.window_start > 0)
    assert started_again(job) == [("local disk", 0)] * 2


@pytest.mark.parametrize("policy", ["gemini", "moevement"])
def test_a_death_before_the_first_snapshot_repeats_the_start(
    policy: str, tmp_path: Path
) -> None:
    """All ranks have loaded a checkpoint of another run.

    Rank 1 dies before the rank has a snapshot of its own.
    """
    earlier = start(
        tmp_path / "e", "gemini", 4, run_id="earlier", durable_every_iters=4
    )
    earlier.run()
    settings = POLICIES[policy] | {"disk_every_iters": 0}
    job = ThreadJob(
        tmp_path,
        config(policy, **settings),
        PAIR,
        faults=[Fault(rank=1, phase=Phase.DONE)],
    )
    job.start_from = Path(CheckpointFolder(earlier.folder / "checkpoints").directory(4))

    def die(*_: object) -> None:
        job.kill(1)
        raise CheckpointSaveError("no snapshot of a dead rank")

    job.on_worker.append(
        lambda rank, _: (
            setattr(job.models[rank], "pieces", die)
            if rank and not job.struck
            else None
        )
    )
    assert job.run().digests == uninterrupted(PAIR, 8).digests
    assert [event.iteration for event in job.events(StateResumed)] == [4, 4]


def test_a_death_after_the_first_step_repeats_no_start(tmp_path: Path) -> None:
    """Rank 0 has taken the first step, and rank 1 has no snapshot.

    A start that loads nothing would continue from a mixture of states.
    """
    fault = Fault(rank=1, phase=Phase.STEP, iteration=1, skip=1)
    job = ThreadJob(tmp_path, config("gemini", every_iters=2), PAIR, faults=[fault])
    job.on_worker.append(
        lambda rank, _: (
            let_copies_fail(job.models[rank], 1, 9) if rank and not job.struck else None
        )
    )
    with pytest.raises(NothingLeftError):
        job.run()
