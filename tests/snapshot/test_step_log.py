"""The step log: covered iterations, dropped iterations, and size."""

from __future__ import annotations

import pytest
import torch

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.snapshot.step_log import StepLog, StepRecord, window_steps
from moe_ckpt.types import ReadyGradients
from tests.snapshot.samples import pool, snapshot_of


def record(iteration: int, tied_gradient: torch.Tensor | None = None) -> StepRecord:
    gradients = ReadyGradients(
        overflows=(False,), total_norm=float(iteration), loss_scale=1.0
    )
    return StepRecord(
        iteration=iteration, gradients=gradients, tied_gradient=tied_gradient
    )


def started(iteration: int) -> dict[str, torch.Tensor]:
    return {
        "rng": torch.full((16,), iteration, dtype=torch.uint8),
        "lr": torch.tensor([0.1], dtype=torch.float64),
    }


def log_of(first: int, last: int) -> StepLog:
    """Return the log that training leaves after iteration `last`.

    The start of the next iteration is logged, too.
    """
    log = StepLog()
    for iteration in range(first, last + 1):
        log.log_start(iteration, started(iteration))
        log.add(record(iteration))
    log.log_start(last + 1, started(last + 1))
    return log


@pytest.mark.parametrize(
    ("first", "last"), [(3, 6), (4, 6), (6, 6), (7, 6), (2, None), (8, None), (9, None)]
)
def test_a_log_reaches_as_far_as_all_can_run_again(
    first: int, last: int | None
) -> None:
    assert log_of(3, 6).reaches(first) == last


def test_the_steps_of_a_window() -> None:
    window = [snapshot_of(pool(), (4, slot, 3)) for slot in range(3)]
    assert window_steps(window) == ["step-5", "step-6"]
    assert window_steps(window[:1]) == ["start-5"]


def test_both_start_and_record_are_needed() -> None:
    log = log_of(1, 3)
    log.drop_up_to(2)
    log.log_start(2, started(2))
    reached = [log.reaches(2)]
    log.add(record(2))
    log.add(record(1))
    assert [*reached, log.reaches(2), log.reaches(1)] == [1, 3, None]


def test_a_replay_leads_to_starts_that_are_not_logged() -> None:
    log = StepLog()
    log.log_start(4, started(4))
    for iteration in (4, 5, 6):
        log.add(record(iteration))
    assert (log.reaches(4), log.reaches(5)) == (6, None)


def test_the_last_entry_of_an_iteration_is_returned() -> None:
    log = log_of(3, 6)
    assert log.record(4).gradients.total_norm == 4.0
    assert log.start(7)["rng"].tolist() == [7] * 16
    log.log_start(4, {"rng": torch.zeros(2)})
    newer = record(4, tied_gradient=torch.ones(3))
    log.add(newer)
    assert log.start(4).keys() == {"rng"}
    assert log.record(4) is newer


def test_old_iterations_and_those_after_a_rollback_are_dropped() -> None:
    log = log_of(3, 6)
    log.drop_up_to(4)
    for get in (log.start, log.record):
        with pytest.raises(CheckpointLoadError):
            get(4)
    log.drop_up_to(2)
    assert log.reaches(5) == 6
    log.drop_after(5)
    assert log.reaches(5) == 5
    assert not log.has_start(6)
    log.drop_up_to(9)
    assert log.size_bytes == 0


def test_an_iteration_that_is_missing_is_named_with_those_that_are_there() -> None:
    log = log_of(3, 4)
    for get, missing, present in (
        (log.start, 9, "3, 4, 5"),
        (log.record, 5, "3, 4"),
        (StepLog().record, 1, ""),
    ):
        with pytest.raises(
            CheckpointLoadError,
            match=rf"^step log: no iteration {missing}, got \[{present}\]$",
        ):
            get(missing)


def test_the_size_is_that_of_all_tensors() -> None:
    log = StepLog()
    log.log_start(1, started(1))
    sizes = [log.size_bytes]
    tied = torch.ones(5, dtype=torch.bfloat16)
    for each in (record(1), record(1, tied), record(2, torch.ones(3)), record(2)):
        log.add(each)
        sizes.append(log.size_bytes)
    log.drop_up_to(1)
    assert [*sizes, log.size_bytes] == [24, 24, 34, 46, 34, 0]
