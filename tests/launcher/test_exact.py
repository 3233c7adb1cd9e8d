"""The first promise: a run with faults ends bit for bit as the uninterrupted run does.

A run loses its state, or is killed. The tests compare the loss of every iteration, the
evaluation, and the digest of every rank's parameters, master weights, moments, step
counts, buffers, loss scaler, schedule and generators. Dropout is on throughout. Jobs
that live on when their ranks are killed are tested in tests/launcher/test_elastic.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_ckpt.events import (
    CheckpointSkipped,
    IterationCommitted,
    StateLost,
    StateResumed,
)
from tests.harness.gloo.ranks import RankFailedError
from tests.harness.jobs.references import outcome_of, uninterrupted
from tests.harness.jobs.training import Kill, events_of, losing, train
from tests.launcher.exact_rows import (
    ITERATIONS_AFTER_THE_LAST_LOSS,
    TRAINING,
    WINDOW_OF_ALL_OPERATORS,
    Job,
    Row,
    job_of,
    name_of,
    pairs_of,
    possible_pairs,
    resumed_rows,
    rows,
)
from tests.scenarios import FP16_SKIPPING_AT_FIRST, PP2, UNSHARDED


def test_rows_hold_every_possible_pair_of_settings() -> None:
    assert possible_pairs() == {pair for row in rows() for pair in pairs_of(row)}


def test_resumed_rows_hold_every_setting_of_a_training() -> None:
    held = {value for row in resumed_rows() for value in row.items()}
    assert held >= {
        (axis, value) for axis, values in TRAINING.items() for value in values
    }


JOBS = {
    **{name_of(row): job_of(row) for row in rows()},
    "window of all operators": WINDOW_OF_ALL_OPERATORS,
}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_recovered_run_equals_the_uninterrupted_one(job: Job, tmp_path: Path) -> None:
    result = train(
        job.world_size, tmp_path, *losing(*job.lost), *job.snapshots, *job.training
    )

    losses = [
        loss
        for rank in range(job.world_size)
        for loss in events_of(tmp_path, StateLost, rank)
    ]
    lost = [(loss.iteration, loss.phase) for loss in losses]
    assert set(lost) == {(iteration, phase) for iteration, _, phase, *_ in job.lost}
    assert result["iteration"] == job.lost[-1][0] + ITERATIONS_AFTER_THE_LAST_LOSS
    skipped = {event.skipped for event in events_of(tmp_path, IterationCommitted)}
    assert skipped == (
        {True, False} if set(FP16_SKIPPING_AT_FIRST) <= set(job.training) else {False}
    )
    assert outcome_of(tmp_path, result) == uninterrupted(job.world_size, *job.training)


# --- a killed run resumes from a checkpoint on disk


@pytest.mark.parametrize("row", resumed_rows(), ids=name_of)
def test_resumed_run_equals_the_uninterrupted_one(row: Row, tmp_path: Path) -> None:
    job = job_of(row)
    dense = ("ckpt=dense", "ckpt.every_iters=3", *job.training)
    kill = Kill(ranks=tuple(range(job.world_size)), iteration=5, phase="start")
    with pytest.raises(RankFailedError, match="died"):
        train(job.world_size, tmp_path, *dense, kill=kill)

    result = train(job.world_size, tmp_path, *dense)

    assert [event.iteration for event in events_of(tmp_path, StateResumed)] == [3]
    assert outcome_of(tmp_path, result) == uninterrupted(job.world_size, *job.training)


@pytest.mark.parametrize("optimizer", [(), UNSHARDED], ids=["sharded", "not sharded"])
def test_a_run_resumes_exactly_before_its_first_update(
    optimizer: tuple[str, ...], tmp_path: Path
) -> None:
    training = (*PP2, *FP16_SKIPPING_AT_FIRST, *optimizer, "train.lr_decay_iters=6")
    saving = ("ckpt=dense", "ckpt.async_save=true", *training)
    train(2, tmp_path, *saving, "train.iterations=1")
    assert [event.skipped for event in events_of(tmp_path, IterationCommitted)] == [
        True
    ]

    result = train(2, tmp_path, *saving, "train.iterations=6")

    assert [event.iteration for event in events_of(tmp_path, StateResumed)] == [1]
    assert not events_of(tmp_path, IterationCommitted)[-1].skipped
    assert outcome_of(tmp_path, result) == uninterrupted(
        2, *training, "train.iterations=6"
    )


@pytest.mark.parametrize(
    ("ranks", "iteration", "phase", "resumes_after"),
    [
        ((0, 1), 1, "gradients", None),  # before any save: from the beginning
        ((0, 1), 4, "while-saving", 2),
        ((0, 1), 5, "after-save", 5),
        pytest.param((0,), 4, "while-saving", 2, marks=pytest.mark.full),
        ((1,), 3, "gradients", 2),
    ],
)
def test_killed_run_resumes_exactly(
    ranks: tuple[int, ...],
    iteration: int,
    phase: str,
    resumes_after: int | None,
    tmp_path: Path,
) -> None:
    training = (*PP2, "train.iterations=5")
    dense = ("ckpt=dense", "ckpt.every_iters=2", *training)
    with pytest.raises(RankFailedError, match="died"):
        train(
            2,
            tmp_path,
            *dense,
            kill=Kill(ranks=ranks, iteration=iteration, phase=phase),
        )

    result = train(2, tmp_path, *dense)

    resumed = [event.iteration for event in events_of(tmp_path, StateResumed)]
    assert resumed == ([resumes_after] if resumes_after else [])
    assert result["faults_survived"] == 1
    expected, found = uninterrupted(2, *training), outcome_of(tmp_path, result)
    assert (found.digest_per_rank, found.eval_loss) == (
        expected.digest_per_rank,
        expected.eval_loss,
    )
    # the run died between the save and the event of this iteration
    unlogged = {iteration} if phase == "after-save" else set()
    assert found.losses == {
        i: loss for i, loss in expected.losses.items() if i not in unlogged
    }
    torn = [event.source for event in events_of(tmp_path, CheckpointSkipped)]
    assert [Path(source).name for source in torn] == (
        ["iter_0000004"] if phase == "while-saving" else []
    )
