"""Scheduled faults: when they fire, that they fire once, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import ConfigError
from moe_ckpt.faults import PHASES, FaultSchedule, StateLoss


def loss(iteration: int = 7, stage: int = 1, phase: str = "backward", dp_rank: int | None = None) -> StateLoss:
    return StateLoss(iteration=iteration, stage=stage, phase=phase, dp_rank=dp_rank)


LOSSES = st.builds(
    loss,
    iteration=st.integers(1, 4),
    stage=st.integers(0, 2),
    phase=st.sampled_from(PHASES),
    dp_rank=st.one_of(st.none(), st.integers(0, 1)),
)


def test_a_loss_fires_at_its_iteration_and_phase() -> None:
    schedule = FaultSchedule([loss(stage=2), loss(phase="step"), loss(stage=0), loss(iteration=8)])
    assert schedule.due(6, "backward") == ()
    assert schedule.due(7, "forward") == ()
    assert schedule.due(7, "backward") == (loss(stage=2), loss(stage=0))
    assert schedule.due(7, "step") == (loss(phase="step"),)


def test_an_iteration_that_runs_again_is_spared() -> None:
    schedule = FaultSchedule([loss(), loss(iteration=8)])
    assert schedule.due(7, "backward") == (loss(),)
    assert schedule.due(7, "backward") == ()
    assert schedule.due(8, "backward") == (loss(iteration=8),)


@given(losses=st.lists(LOSSES, max_size=10))
def test_every_loss_fires_once(losses: list[StateLoss]) -> None:
    schedule = FaultSchedule(losses)
    asked = [(iteration, phase) for iteration in range(1, 5) for phase in PHASES]
    fired = [fault for iteration, phase in asked for fault in schedule.due(iteration, phase)]
    assert fired == sorted(losses, key=lambda fault: asked.index((fault.iteration, fault.phase)))
    assert not any(schedule.due(iteration, phase) for iteration, phase in asked)


@pytest.mark.parametrize(
    ("field", "got", "message"),
    [
        ("iteration", 0, "got 0, wanted at least 1"),
        ("stage", -1, "got -1, wanted at least 0"),
        ("phase", "backwards", "got 'backwards', wanted one of forward, backward, step, between"),
        ("dp_rank", -1, "got -1, wanted at least 0"),
    ],
)
def test_a_loss_that_cannot_be_is_refused(field: str, got: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^fault\.at: {field}: {message}$"):
        loss(**{field: got})


def test_the_least_of_everything_is_a_loss() -> None:
    least = loss(iteration=1, stage=0, dp_rank=0)
    assert (least.iteration, least.stage, least.dp_rank) == (1, 0, 0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (loss(stage=2), r"stage: got 2, wanted between 0 and 1, the stages of the job"),
        (loss(dp_rank=4), r"dp_rank: got 4, wanted between 0 and 3, the data-parallel ranks of the job"),
    ],
)
def test_a_loss_that_the_job_has_no_rank_for_is_refused(bad: StateLoss, message: str) -> None:
    schedule = FaultSchedule([loss(), bad])
    with pytest.raises(ConfigError, match=rf"^fault\.at: {message}$"):
        schedule.check_fit(num_stages=2, dp=4)
    schedule.due(7, "backward")
    with pytest.raises(ConfigError):
        schedule.check_fit(num_stages=2, dp=4)


def test_losses_of_the_last_stage_and_rank_fit() -> None:
    FaultSchedule([loss(stage=1, dp_rank=3), loss(stage=0, dp_rank=None)]).check_fit(num_stages=2, dp=4)
    FaultSchedule([]).check_fit(num_stages=1, dp=1)
