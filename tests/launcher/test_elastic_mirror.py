"""ckpt.capture=mirror in whole jobs: servers make every state bit for bit.

The servers read the frames of gloo's own connections. No engine test has gloo, TCP and
Megatron's buffers together. On one machine the loopback interface is the mirror port.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from moe_ckpt.errors import ConfigError
from moe_ckpt.events import GradientsLost, GradientsSent, SnapshotTaken
from moe_ckpt.flowcheck.mirror.port import MirrorPort
from moe_ckpt.types import Phase
from scripts import hosts, run_on_hosts
from tests.harness.jobs.campaign import Point, all_go_back, lose_nodes, survive
from tests.harness.jobs.captured_states import (
    UNSHARDED,
    compare_states,
    mirror_of,
    note_states,
)
from tests.harness.jobs.references import outcome_of, uninterrupted
from tests.harness.jobs.training import events_of, fast
from tests.scenarios import ROOT, TIED

JOB = ROOT / "tests" / "harness" / "jobs" / "mirrored_job.py"


def require_port(interface: str) -> None:
    try:
        MirrorPort(interface).close()
    except ConfigError as error:
        pytest.skip(str(error))


def test_servers_make_every_state_from_frames(tmp_path: Path) -> None:
    require_port("lo")
    training = ("train.iterations=5", "parallel.ep=1", UNSHARDED)
    faults = [
        all_go_back(
            "in backward", range(2, 4), Point(1, Phase.BACKWARD, 4), world_size=2
        )
    ]
    noted = functools.partial(note_states, tmp_path)
    job = survive(
        tmp_path,
        faults,
        *training,
        world_size=2,
        ckpt="flowcheck",
        settings=mirror_of("lo"),
        setup=noted,
    )
    compare_states(tmp_path, range(1, 3), world_size=2, num_servers=2)
    for rank in range(2):
        assert not events_of(job.run, GradientsLost, rank)
        assert {
            event.iteration for event in events_of(job.run, SnapshotTaken, rank)
        } == {0}
        assert all(
            event.size_bytes < 10_000
            for event in events_of(job.run, GradientsSent, rank)
        ), "buffers only"


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.pp=1", "parallel.ep=1"),
        ("parallel.pp=1", "parallel.ep=2"),
        ("parallel.pp=2", "parallel.ep=1", *TIED),
        ("parallel.pp=2", "parallel.ep=2"),
    ],
    ids=["DP4", "DP4 EP2", "PP2 DP2 tied", "PP2 DP2 EP2"],
)
def test_servers_follow_every_layout_through_faults(
    layout: tuple[str, ...], tmp_path: Path
) -> None:
    """With EP=2 and DP=2, experts have no traffic: ranks tap experts' gradients."""
    require_port("lo")
    training = ("train.iterations=10", UNSHARDED, *layout)
    faults = [
        all_go_back(
            "while gradients are reduced", range(2, 5), Point(2, Phase.REDUCE, 4)
        ),
        all_go_back(
            "a node",
            range(5, 8),
            Point(0, Phase.STEP, 7),
            kills=[3],
            then=lose_nodes,
            fetched=True,
        ),
    ]
    noted = functools.partial(note_states, tmp_path)
    job = survive(
        tmp_path,
        faults,
        *training,
        ckpt="flowcheck",
        settings=mirror_of("lo"),
        setup=noted,
    )
    compare_states(tmp_path, range(1, 3), world_size=4, num_servers=2)
    assert not events_of(job.run, GradientsLost)


@pytest.mark.full
def test_a_job_with_lost_frames_takes_snapshots_and_ends_exactly(
    tmp_path: Path,
) -> None:
    require_port("lo")
    training = ("train.iterations=20", UNSHARDED, "parallel.pp=1", "parallel.ep=1")
    settings = (*mirror_of("lo"), "ckpt.capture_loss=0.01")
    job = survive(tmp_path, [], *training, ckpt="flowcheck", settings=settings)
    lost = events_of(job.run, GradientsLost)
    assert lost
    assert all(
        "another rank" in event.reason or "incomplete capture" in event.reason
        for event in lost
    )


@pytest.mark.full
@pytest.mark.parametrize("pp", [1, 2])
def test_servers_on_hosts_follow_a_hundred_iterations(pp: int, tmp_path: Path) -> None:
    """Four hosts have an address and a mirror port each.

    A rank is killed at iteration 60.
    """
    reason = hosts.why_impossible() or (
        "there are hosts already" if hosts.is_up() else None
    )
    if reason:
        pytest.skip(reason)
    training = ("train.iterations=100", f"parallel.pp={pp}", "parallel.ep=1", UNSHARDED)
    fault = ("fault=at", "fault.at=[{iteration: 60, phase: backward, rank: 2}]")
    where = (
        f"run.dir={tmp_path / 'run'}",
        "run.digest_every_iters=1",
        "parallel.ranks_per_node=1",
    )
    overrides = fast(
        "ckpt=flowcheck", *mirror_of(hosts.INTERFACE), *training, *fault, *where
    )
    hosts.up(4)
    try:
        assert run_on_hosts.run(4, 1, [str(JOB), str(tmp_path), *overrides]) == 0
    finally:
        hosts.down()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert outcome_of(tmp_path / "run", result) == uninterrupted(4, *training)
    compare_states(tmp_path, range(1, 59), world_size=4, num_servers=2)
    assert not events_of(tmp_path / "run", GradientsLost)
