"""Whole checkpoints: only files that the marker describes are loaded.

The marker is written last, and names every file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.collectives import Ranks
from moe_ckpt.durable.checkpoint_folder import (
    MARKER,
    CheckpointFolder,
    is_committed,
    read_manifest,
    seal_files,
)
from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.events import (
    CheckpointFailed,
    CheckpointSaved,
    CheckpointSkipped,
    StateResharded,
    StateResumed,
)
from moe_ckpt.types import CheckpointRef, FileRecord, ParallelLayout, Phase, RunIdentity
from tests.engine.tiers import IDENTITY, LAYOUT, OneFileEach, open_tier
from tests.harness.jobs.training import events_of
from tests.harness.threads.job import Fault, ThreadJob, exact
from tests.harness.threads.model import PAIR
from tests.harness.threads.ranks import run_threads
from tests.policies.profiles import config


def _save(folder: Path, *iterations: int, keep: int = 9) -> None:
    def save(ranks: Ranks) -> None:
        tier = open_tier(folder, OneFileEach(ranks), keep=keep)
        for iteration in iterations:
            tier.save(iteration)

    run_threads(2, save)


def _directory(folder: Path, iteration: int) -> Path:
    return CheckpointFolder(folder).directory(iteration)


def _committed(folder: Path) -> list[int]:
    return sorted(ref.iteration for ref in CheckpointFolder(folder).committed())


def _reasons(function: Callable[[Ranks], object], error: type[Exception]) -> list[str]:
    """Return the reason why the function fails on each of two ranks."""

    def fail(ranks: Ranks) -> str:
        with pytest.raises(error) as failure:
            function(ranks)
        return str(failure.value)

    return run_threads(2, fail)


def test_the_marker_lists_the_files_of_all_ranks_and_unnamed_ones(
    tmp_path: Path,
) -> None:
    _save(tmp_path, 1)
    directory = _directory(tmp_path, 1)
    assert list(read_manifest(directory).files) == seal_files(
        directory, ["metadata", "rank0", "rank1"]
    )
    for rank in range(2):
        (saved,) = events_of(tmp_path, CheckpointSaved, rank)
        assert (saved.iteration, saved.directory, saved.size_bytes) == (
            1,
            str(directory),
            7,
        )


def test_a_file_that_changes_before_the_commit_is_not_accepted(tmp_path: Path) -> None:
    def save_and_load(ranks: Ranks) -> None:
        state = OneFileEach(ranks)
        state.spoils = ranks.rank == 1
        tier = open_tier(tmp_path, state)
        tier.save(1)
        tier.resume(CheckpointRef(iteration=1, directory=str(_directory(tmp_path, 1))))

    assert all(
        "rank1: got 1 bytes with CRC-32" in reason
        for reason in _reasons(save_and_load, CheckpointLoadError)
    )


class OnDiskOfItsOwn(OneFileEach):
    """Each rank has a directory of its own: the ranks share no file system."""

    def start_save(self, directory: Path, iteration: int) -> None:
        own = directory.parent / f"of-rank{self.ranks.rank}"
        own.mkdir()
        super().start_save(directory if self.ranks.rank == 0 else own, iteration)


def test_a_file_that_rank_zero_does_not_see_fails_the_save_everywhere(
    tmp_path: Path,
) -> None:
    reasons = _reasons(
        lambda ranks: open_tier(tmp_path, OnDiskOfItsOwn(ranks)).save(1),
        CheckpointSaveError,
    )
    assert all(
        "iter_0000001: rank1: written, and not there" in reason for reason in reasons
    )
    assert not is_committed(_directory(tmp_path, 1))
    for rank in range(2):
        (failed,) = events_of(tmp_path, CheckpointFailed, rank)
        assert failed.iteration == 1


def test_a_save_is_committed_once_it_is_written_everywhere(tmp_path: Path) -> None:
    def save(ranks: Ranks) -> list[bool]:
        tier = open_tier(tmp_path, OneFileEach(ranks, is_slow=True))
        seen = []
        for step in (
            lambda: tier.save(1),
            lambda: tier.poll(wait=False),
            lambda: tier.poll(wait=True),
        ):
            step()
            seen.append(is_committed(_directory(tmp_path, 1)))
            ranks.barrier()
        return seen

    assert run_threads(2, save) == [[False, False, True]] * 2


def test_an_abandoned_save_is_never_committed(tmp_path: Path) -> None:
    def save(ranks: Ranks) -> list[int]:
        state = OneFileEach(ranks, is_slow=True)
        tier = open_tier(tmp_path, state)
        tier.save(1)
        tier.abandon()
        tier.poll(wait=True)
        return [ref.iteration for ref in tier.committed()]

    assert run_threads(2, save) == [[], []]
    for rank in range(2):
        (skipped,) = events_of(tmp_path, CheckpointSkipped, rank)
        assert skipped.source == str(_directory(tmp_path, 1))
        assert skipped.reason == f"no {MARKER}: the save was not finished"


def test_no_save_starts_while_any_rank_writes_an_abandoned_one(tmp_path: Path) -> None:
    """Files of the abandoned save would get into the directory of the next save."""

    def save(ranks: Ranks) -> None:
        state = OneFileEach(ranks, is_slow=True)
        tier = open_tier(tmp_path, state)
        tier.save(1)
        tier.abandon()
        if ranks.rank == 0:
            state.finish_save(wait=True)
        tier.save(1)

    reasons = _reasons(save, CheckpointSaveError)
    assert reasons == ["rank 1 still writes a checkpoint that was abandoned"] * 2


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_older_checkpoints_are_dropped_and_later_ones_stay(
    keep: int, tmp_path: Path
) -> None:
    """A later checkpoint exists because the checkpoint could not be used.

    A torn checkpoint older than the newest one is useless.
    """
    _save(tmp_path, 9)
    _directory(tmp_path, 1).mkdir()
    _directory(tmp_path, 8).mkdir()
    _save(tmp_path, 2, 3, 4, keep=keep)
    assert _committed(tmp_path) == [*[2, 3, 4][-keep:], 9]
    assert not _directory(tmp_path, 1).exists()
    assert _directory(tmp_path, 8).exists()


def _edit(directory: Path, **changes: Any) -> None:
    marker = json.loads((directory / MARKER).read_text())
    (directory / MARKER).write_text(json.dumps(marker | changes))


def test_a_state_of_another_iteration_than_the_marker_names_is_refused(
    tmp_path: Path,
) -> None:
    _save(tmp_path, 1)
    directory = _directory(tmp_path, 1)
    (directory / "rank0").write_text("2")
    files = seal_files(directory, ["metadata", "rank0", "rank1"])
    _edit(
        directory,
        files=[
            {"name": f.name, "size_bytes": f.size_bytes, "crc32": f.crc32}
            for f in files
        ],
    )
    ref = CheckpointRef(iteration=1, directory=str(directory))
    reasons = _reasons(
        lambda ranks: open_tier(tmp_path, OneFileEach(ranks)).resume(ref),
        CheckpointLoadError,
    )
    assert all("wanted 1" in each for each in reasons), reasons


OTHER_RUN, OTHER_MODEL = (
    replace(IDENTITY, run_id="run-2"),
    replace(IDENTITY, model="f00d"),
)


@pytest.mark.parametrize(
    ("identity", "by_path", "reason"),
    [
        (OTHER_RUN, False, "saved by run run-1, wanted run run-2"),
        (OTHER_RUN, True, None),
        (OTHER_MODEL, False, "saved by model 0123abcd, wanted model f00d"),
        (OTHER_MODEL, True, "saved by model 0123abcd, wanted model f00d"),
    ],
)
def test_a_checkpoint_of_another_run_is_loaded_by_its_path_only(
    identity: RunIdentity, by_path: bool, reason: str | None, tmp_path: Path
) -> None:
    _save(tmp_path, 3)
    directory = _directory(tmp_path, 3)

    def load(ranks: Ranks) -> int:
        tier = open_tier(tmp_path, OneFileEach(ranks), identity)
        if by_path:
            return tier.resume_from(directory)
        tier.resume(CheckpointRef(iteration=3, directory=str(directory)))
        return 3

    if reason:
        assert all(reason in each for each in _reasons(load, CheckpointLoadError))
        return
    assert run_threads(2, load) == [3, 3]
    (resumed,) = events_of(tmp_path, StateResumed, 1)
    assert (resumed.iteration, resumed.source) == (3, str(directory))


def test_a_state_of_another_layout_is_loaded_as_such_and_reported(
    tmp_path: Path,
) -> None:
    _save(tmp_path, 3)
    wanted = ParallelLayout(pp=2, dp=1, ep=1, tp=1)

    def load(ranks: Ranks) -> list[tuple[str, ParallelLayout | None]]:
        state = OneFileEach(ranks)
        tier = open_tier(tmp_path, state, replace(IDENTITY, layout=wanted))
        tier.resume(CheckpointRef(iteration=3, directory=str(_directory(tmp_path, 3))))
        return state.loaded

    assert run_threads(2, load) == [[("iter_0000003", LAYOUT)]] * 2
    (resharded,) = events_of(tmp_path, StateResharded, 1)
    assert (resharded.iteration, resharded.saved_at, resharded.loaded_at) == (
        3,
        str(LAYOUT),
        str(wanted),
    )


def _job(
    folder: Path, *faults: Fault, policy: str = "gemini", **settings: Any
) -> ThreadJob:
    """Return a job with checkpoints after iterations 2, 4 and 6, and without copies."""
    extra = (
        {"every_iters": 3, "replicas": 0}
        if policy == "gemini"
        else {"window": 2, "replicas": 0}
    )
    made = config(policy, **{"durable_every_iters": 2, "keep": 3} | extra | settings)
    return ThreadJob(folder, made, PAIR, iterations=6, faults=faults)


def _all_lost(before_restart: Callable[[ThreadJob], None]) -> Fault:
    both: dict[str, Any] = {"rank": 1, "also": (0,), "loses_memory": True}
    return Fault(
        phase=Phase.BACKWARD, iteration=5, before_restart=before_restart, **both
    )


def _checkpoint(job: ThreadJob, iteration: int) -> Path:
    return _directory(job.folder / "checkpoints", iteration)


def _from_another_run(job: ThreadJob) -> None:
    identity = asdict(replace(job.identity, run_id="other"))
    _edit(_checkpoint(job, 4), identity=identity)


@pytest.mark.parametrize("policy", ["gemini", "moevement"])
@pytest.mark.parametrize(
    ("spoil", "back_to", "reason"),
    [
        (lambda job: None, 4, None),
        (
            lambda job: (_checkpoint(job, 4) / MARKER).unlink(),
            2,
            f"no {MARKER}: the save was not finished",
        ),
        (
            lambda job: (_checkpoint(job, 4) / "rank1").write_bytes(b"damaged"),
            2,
            "CRC-32",
        ),
        (_from_another_run, 2, "saved by run other, wanted run run"),
    ],
    ids=["whole", "torn", "damaged", "another run"],
)
def test_when_all_memory_is_lost_the_newest_usable_one_is_loaded(
    policy: str,
    spoil: Callable[[ThreadJob], None],
    back_to: int,
    reason: str | None,
    tmp_path: Path,
) -> None:
    job = exact(_job(tmp_path, _all_lost(spoil), policy=policy))
    for rank in job.ranks:
        (resumed,) = job.events(StateResumed, rank)
        assert (resumed.iteration, resumed.source) == (
            back_to,
            str(_checkpoint(job, back_to)),
        )
        skipped = [
            event
            for event in job.events(CheckpointSkipped, rank)
            if event.source == str(_checkpoint(job, 4))
        ]
        assert bool(skipped) == (reason is not None)
        assert all(reason is not None and reason in event.reason for event in skipped)


def test_without_a_usable_checkpoint_the_error_says_what_was_tried(
    tmp_path: Path,
) -> None:
    def damage(job: ThreadJob) -> None:
        for iteration in (2, 4):
            (_checkpoint(job, iteration) / "rank1").unlink()

    job = _job(tmp_path, _all_lost(damage))
    with pytest.raises(
        CheckpointLoadError,
        match=r"(?s)no usable checkpoint.*iter_0000004/rank1.*iter_0000002/rank1",
    ):
        job.run()
    assert _checkpoint(job, 4).exists(), "nothing that was saved is removed"


def test_a_save_that_a_fault_cuts_off_is_abandoned(tmp_path: Path) -> None:
    """The save of iteration 2 is in progress when rank 1 dies in iteration 3.

    A save finishes only once the job waits for the save.
    """
    job = _job(
        tmp_path, Fault(rank=1, phase=Phase.BACKWARD, iteration=3), policy="moevement"
    )
    job.saves_slowly = True
    exact(job)
    assert [
        [event.iteration for event in job.events(CheckpointSaved, rank)]
        for rank in job.ranks
    ] == [[4, 6], [4, 6]]
    assert not _checkpoint(job, 2).exists(), "what was abandoned is cleaned up"


def test_a_save_that_fails_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    job = exact(_job(tmp_path))
    assert [
        [event.iteration for event in job.events(CheckpointFailed, rank)]
        for rank in job.ranks
    ] == [[2, 4, 6]] * 2


def test_a_checkpoint_stays_while_its_iteration_is_saved_again(tmp_path: Path) -> None:
    """As after a rollback, iteration 4 is saved again, and the second save fails.

    The third save takes the place of the first and the second.
    """
    _save(tmp_path, 4)

    class NoRoomLeft(OneFileEach):
        def finish_save(self, *, wait: bool) -> Sequence[FileRecord] | None:
            raise CheckpointSaveError(f"no room left, with wait={wait}")

    _reasons(
        lambda ranks: open_tier(tmp_path, NoRoomLeft(ranks)).save(4),
        CheckpointSaveError,
    )
    [kept] = CheckpointFolder(tmp_path).committed()
    assert kept.iteration == 4

    def resume(ranks: Ranks) -> None:
        open_tier(tmp_path, OneFileEach(ranks)).resume(kept)

    run_threads(2, resume)
    _save(tmp_path, 4, keep=1)
    assert [ref.directory for ref in CheckpointFolder(tmp_path).committed()] == [
        str(_directory(tmp_path, 4))
    ]


def test_strict_ends_the_job_when_a_save_fails(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointSaveError, match="Not a directory"):
        _job(tmp_path, strict=True).run()
