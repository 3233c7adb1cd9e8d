"""State that is lost in living processes: `engine.stage_recovery` with thread ranks, loss by scheduled loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.events import ReplayDiffered, StageRecovered, StateLost
from moe_ckpt.faults.schedule import StateLoss
from tests.engine.job import ThreadJob, exact
from tests.engine.model import PIPE, Shape
from tests.policies.profiles import config


def lost(*losses: tuple[int, int, str], dp_rank: int | None = None) -> list[StateLoss]:
    """Return losses of (iteration, stage, phase)."""
    return [StateLoss(iteration=i, stage=stage, phase=phase, dp_rank=dp_rank) for i, stage, phase in losses]


@pytest.mark.parametrize(
    ("shape", "losses"),
    [
        pytest.param(PIPE, lost((5, 1, "forward")), id="forward"),
        pytest.param(PIPE, lost((5, 1, "backward")), id="backward"),
        pytest.param(PIPE, lost((5, 1, "step")), id="step"),
        pytest.param(PIPE, lost((5, 1, "between")), id="between iterations"),
        pytest.param(PIPE, lost((5, 0, "step"), (5, 1, "step")), id="neighbours at once"),
        pytest.param(PIPE, lost((5, 0, "forward"), (5, 2, "backward")), id="both ends at once"),
        pytest.param(PIPE, lost((5, 0, "step"), (5, 1, "between"), (6, 2, "forward")), id="one after the other"),
        pytest.param(PIPE, lost((5, 0, "step"), (5, 1, "between")), id="then a neighbour, by what was logged again"),
        pytest.param(PIPE, lost((4, 1, "step"), (4, 1, "between"), (5, 1, "forward")), id="one stage again and again"),
        pytest.param(Shape(), lost((5, 1, "forward"), dp_rank=0), id="one rank of a stage"),
        pytest.param(Shape(ep=2, skips=2), lost((5, 0, "backward")), id="experts spread over ranks, skipped steps"),
        pytest.param(Shape(tied=True), lost((5, 0, "step"), (6, 1, "forward")), id="tied embeddings"),
        pytest.param(Shape(pp=1), lost((5, 0, "backward")), id="one stage"),
    ],
)
@pytest.mark.parametrize("window", [1, 3])
def test_a_lost_state_is_rebuilt(shape: Shape, losses: list[StateLoss], window: int, tmp_path: Path) -> None:
    job = exact(ThreadJob(tmp_path, config("moevement", window=window), shape, losses=losses))
    struck = {(event.iteration, event.phase, rank) for rank in job.ranks for event in job.events(StateLost, rank)}
    assert struck == {
        (loss.iteration, loss.phase, rank)
        for loss in losses
        for rank in job.ranks
        if shape.stage_of(rank) == loss.stage and loss.dp_rank in (None, rank % shape.dp)
    }
    recoveries = [len(job.events(StageRecovered, rank)) for rank in job.ranks]
    assert recoveries == [sum(loss.stage == shape.stage_of(rank) for loss in losses) for rank in job.ranks]


@pytest.mark.parametrize("settings", [{"boundary_log": False}, {"keep_windows": 2}, {"popularity": "soft"}])
def test_a_lost_state_is_rebuilt_with_other_settings(settings: dict[str, object], tmp_path: Path) -> None:
    job = exact(ThreadJob(tmp_path, config("moevement", window=3, **settings), PIPE, losses=lost((5, 1, "forward"))))
    replaying = {event.first_stage for event in job.events(StageRecovered, 1)}
    assert replaying == ({0} if "boundary_log" in settings else {1})


def test_a_replay_that_differs_from_a_healthy_rank_is_an_error(tmp_path: Path) -> None:
    """Without a boundary log healthy stages replay as well, and must come out as they were."""

    job = ThreadJob(tmp_path, config("moevement", window=3, boundary_log=False), PIPE, losses=lost((6, 1, "forward")))
    job.checks_digests = False
    job.upsets[0, 5] = lambda model: model.owned[0].master.data.add_(1.0)  # after the window of iterations 1 to 3
    with pytest.raises(CheckpointLoadError, match="replaying to iteration 5 gave another state"):
        job.run()
    assert job.events(ReplayDiffered, 0)
