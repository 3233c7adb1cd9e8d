"""ckpt.capture=mirror with ranks that are threads.

Servers compute the states of training from captured gradients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.config import InMemoryConfig
from moe_ckpt.events import GradientsLost, GradientsSent, Rejoined, SnapshotTaken
from moe_ckpt.types import Phase
from tests.harness.threads.history import Follower
from tests.harness.threads.job import Fault, ThreadJob, uninterrupted
from tests.harness.threads.model import Shape
from tests.policies.profiles import config


def mirrored(**settings: Any) -> InMemoryConfig:
    return config(
        "flowcheck",
        capture="mirror",
        mirror_interface="lo",
        **{"max_lag_iters": 0, **settings},
    )


@pytest.mark.parametrize(
    "shape",
    [Shape(pp=1, dp=4), Shape(tied=True), Shape(pp=1, dp=3, ep=3, skips=2)],
    ids=["one stage", "stages, tied", "experts spread, skipping"],
)
def test_servers_hold_what_training_has_and_training_sends_none_of_it(
    shape: Shape, tmp_path: Path
) -> None:
    job = ThreadJob(tmp_path, mirrored(), shape)
    follower = Follower(job)
    job.observers.append(follower)
    assert job.run() == uninterrupted(shape, 8)
    follower.compare()
    assert follower.compared >= 2 * shape.world_size
    for rank in job.ranks:
        assert [event.iteration for event in job.events(SnapshotTaken, rank)] == [0], (
            "one snapshot, at the start"
        )
        model = job.models[rank]
        tapped = [
            weight
            for weight in model.owned
            if not weight.is_sharded or weight is model.tied_weight()
        ]
        buffers = sum(buffer.nbytes for buffer in model.buffers.values())
        gradients = 4 * sum(weight.master.numel() for weight in tapped)
        assert [event.size_bytes for event in job.events(GradientsSent, rank)] == [
            buffers + (0 if iteration <= shape.skips else gradients)
            for iteration in range(1, 9)
        ]


@pytest.mark.parametrize("loses_memory", [False, True])
def test_a_killed_rank_goes_back_to_captured_states(
    loses_memory: bool, tmp_path: Path
) -> None:
    faults = [
        Fault(rank=1, phase=Phase.BACKWARD, iteration=4, loses_memory=loses_memory),
        Fault(rank=0, phase=Phase.STEP, iteration=7),
    ]
    job = ThreadJob(tmp_path, mirrored(), Shape(), faults=faults, iterations=9)
    assert job.run() == uninterrupted(Shape(), 9)
    assert all(job.events(Rejoined, rank)[0].iteration in (2, 3) for rank in job.ranks)
    if not loses_memory:
        assert all(len(job.events(SnapshotTaken, rank)) == 1 for rank in job.ranks)


def test_an_iteration_that_captures_lack_costs_a_snapshot(tmp_path: Path) -> None:
    """In stage 1, no frame of iteration 3 reaches a port.

    Operation 0 is the mark, so operation 3 belongs to iteration 3.
    """
    job = ThreadJob(tmp_path, mirrored(), Shape(), iterations=9)
    job.wire.is_lost = lambda stage, operation: (stage, operation) == (1, 3)
    follower = Follower(job)
    job.observers.append(follower)
    assert job.run() == uninterrupted(Shape(), 9)
    follower.compare()
    for rank in job.ranks:
        assert [event.iteration for event in job.events(SnapshotTaken, rank)] == [0, 4]
        assert [event.iteration for event in job.events(GradientsLost, rank)] == [4]
    assert "incomplete capture" in job.events(GradientsLost, 2)[0].reason
    assert "another rank" in job.events(GradientsLost, 0)[0].reason


def test_without_a_mirror_port_every_iteration_is_a_snapshot(tmp_path: Path) -> None:
    job = ThreadJob(tmp_path, mirrored(), Shape(), iterations=3)
    job.wire.is_lost = lambda *_: True
    assert job.run() == uninterrupted(Shape(), 3)
    assert (
        "wanted a mirror port of their switch" in job.events(GradientsLost, 0)[0].reason
    )
