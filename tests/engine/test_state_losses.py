"""State that living processes lose: `engine.stage_recovery` with thread ranks.

A schedule names each loss of state.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from moe_ckpt.config import RECOVERIES, REPLAY
from moe_ckpt.errors import CheckpointLoadError, DataError
from moe_ckpt.events import ReplayDiffered, StageRecovered, StateLost
from moe_ckpt.faults.schedule import StateLoss
from tests.harness.threads.job import ThreadJob, exact, uninterrupted
from tests.harness.threads.model import (
    BOUNDARY_BYTES,
    MICRO_BATCHES,
    PIPE,
    Model,
    Shape,
)
from tests.policies.profiles import config


def lost(*losses: tuple[int, int, str], dp_rank: int | None = None) -> list[StateLoss]:
    """Return losses of state, each from (iteration, stage, phase)."""
    return [
        StateLoss(iteration=i, stage=stage, phase=phase, dp_rank=dp_rank)
        for i, stage, phase in losses
    ]


@pytest.mark.parametrize(
    ("shape", "losses"),
    [
        pytest.param(PIPE, lost((5, 1, "forward")), id="forward"),
        pytest.param(PIPE, lost((5, 1, "backward")), id="backward"),
        pytest.param(PIPE, lost((5, 1, "step")), id="step"),
        pytest.param(PIPE, lost((5, 1, "between")), id="between iterations"),
        pytest.param(
            PIPE, lost((5, 0, "step"), (5, 1, "step")), id="neighbours at once"
        ),
        pytest.param(
            PIPE, lost((5, 0, "forward"), (5, 2, "backward")), id="both ends at once"
        ),
        pytest.param(
            PIPE,
            lost((5, 0, "step"), (5, 1, "between"), (6, 2, "forward")),
            id="one after the other",
        ),
        pytest.param(
            PIPE,
            lost((5, 0, "step"), (5, 1, "between")),
            id="then a neighbour, by what was logged again",
        ),
        pytest.param(
            PIPE,
            lost((4, 1, "step"), (4, 1, "between"), (5, 1, "forward")),
            id="one stage again and again",
        ),
        pytest.param(
            Shape(), lost((5, 1, "forward"), dp_rank=0), id="one rank of a stage"
        ),
        pytest.param(
            Shape(ep=2, skips=2),
            lost((5, 0, "backward")),
            id="experts spread over ranks, skipped steps",
        ),
        pytest.param(
            Shape(tied=True),
            lost((5, 0, "step"), (6, 1, "forward")),
            id="tied embeddings",
        ),
        pytest.param(Shape(pp=1), lost((5, 0, "backward")), id="one stage"),
    ],
)
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("recovery", RECOVERIES)
def test_a_lost_state_is_rebuilt(
    shape: Shape, losses: list[StateLoss], window: int, recovery: str, tmp_path: Path
) -> None:
    settings = config("moevement", window=window, recovery=recovery)
    job = exact(ThreadJob(tmp_path, settings, shape, losses=losses))
    struck = {
        (event.iteration, event.phase, rank)
        for rank in job.ranks
        for event in job.events(StateLost, rank)
    }
    assert struck == {
        (loss.iteration, loss.phase, rank)
        for loss in losses
        for rank in job.ranks
        if shape.stage_of(rank) == loss.stage
        and loss.dp_rank in (None, rank % shape.dp)
    }
    recoveries = [len(job.events(StageRecovered, rank)) for rank in job.ranks]
    assert recoveries == [
        sum(
            loss.stage == shape.stage_of(rank)
            # by gradients, the ranks that have lost nothing keep their state
            and (recovery == REPLAY or loss.dp_rank in (None, rank % shape.dp))
            for loss in losses
        )
        for rank in job.ranks
    ]


@pytest.mark.parametrize(
    "settings", [{"boundary_log": False}, {"keep_windows": 2}, {"popularity": "soft"}]
)
def test_a_lost_state_is_rebuilt_with_other_settings(
    settings: dict[str, object], tmp_path: Path
) -> None:
    job = exact(
        ThreadJob(
            tmp_path,
            config("moevement", window=3, **settings),
            PIPE,
            losses=lost((5, 1, "forward")),
        )
    )
    replaying = {event.first_stage for event in job.events(StageRecovered, 1)}
    assert replaying == ({0} if "boundary_log" in settings else {1})


def job_with_a_corrupt_rank(folder: Path, *, on_divergence: str) -> ThreadJob:
    """Return a job in which rank 0 has a wrong weight from iteration 5 on.

    Then all stages replay to iteration 5. Without a boundary log, healthy stages replay
    as well, and must reach their former states.
    """
    job = ThreadJob(
        folder,
        config("moevement", window=3, boundary_log=False),
        PIPE,
        losses=lost((6, 1, "forward")),
    )
    job.on_divergence = on_divergence
    job.checks_digests = False
    # after the window of iterations 1 to 3
    job.upsets[0, 5] = lambda model: model.owned[0].master.data.add_(1.0)
    return job


def test_a_replay_that_differs_from_a_healthy_rank_can_end_the_job(
    tmp_path: Path,
) -> None:
    job = job_with_a_corrupt_rank(tmp_path, on_divergence="end")
    both = "corrupt memory, or training that is not deterministic"
    with pytest.raises(
        CheckpointLoadError,
        match=f"replaying to iteration 5 gave another state of .*: {both}",
    ):
        job.run()
    (event,) = job.events(ReplayDiffered, 0)
    assert (event.iteration, event.verdict) == (5, "")


def test_a_corrupt_rank_goes_on_from_a_replay_that_repeats_itself(
    tmp_path: Path,
) -> None:
    job = job_with_a_corrupt_rank(tmp_path, on_divergence="window")
    assert job.run() == uninterrupted(PIPE, 8), (
        "the replay leads to the state before the damage"
    )
    (event,) = job.events(ReplayDiffered, 0)
    assert (event.iteration, event.verdict) == (5, "corrupt memory")
    assert event.operators
    assert not [
        event
        for rank in job.ranks
        if rank
        for event in job.events(ReplayDiffered, rank)
    ]


def test_replays_that_differ_from_each_other_show_a_kernel_that_does(
    tmp_path: Path,
) -> None:
    job = ThreadJob(
        tmp_path,
        config("moevement", window=3, boundary_log=False),
        PIPE,
        losses=lost((6, 1, "forward")),
    )
    job.checks_digests = False
    noise = itertools.count(1)

    def replay_with_noise(model: Model) -> None:
        model.on_replay = lambda iteration: (
            iteration == 5 and model.owned[0].master.data.add_(1e-3 * next(noise))
        )

    job.upsets[0, 1] = replay_with_noise
    assert job.run() != uninterrupted(PIPE, 8), "the job goes on, from another state"
    (event,) = job.events(ReplayDiffered, 0)
    assert event.verdict == "training that is not deterministic"


def test_a_replay_over_other_samples_ends_the_job_and_is_no_corrupt_memory(
    tmp_path: Path,
) -> None:
    """Rank 1, of the lost stage, reads other samples; no rank waits for rank 1."""
    job = job_with_a_corrupt_rank(tmp_path, on_divergence="window")
    job.upsets[1, 1] = lambda model: setattr(
        model, "on_replay", lambda _: setattr(model, "reads_others", True)
    )
    with pytest.raises(DataError, match=r"^data: other samples"):
        job.run()
    assert not [
        event for rank in job.ranks for event in job.events(ReplayDiffered, rank)
    ]


def test_logs_cross_from_host_to_host_a_micro_batch_at_a_time(tmp_path: Path) -> None:
    """As one tensor, an iteration's logs would need device memory beside training."""
    job = ThreadJob(
        tmp_path, config("moevement", window=3), PIPE, losses=lost((6, 1, "forward"))
    )
    assert job.run() == uninterrupted(PIPE, 8)
    sent = job.sent_between_hosts[0]
    logs = [tensor for tensor in sent if tensor.dtype == torch.uint8]
    assert 2 * len(logs) == MICRO_BATCHES * (len(sent) - len(logs)) > 0, (
        "a count and all sizes an iteration"
    )
    assert {tensor.nbytes for tensor in logs} == {BOUNDARY_BYTES}
