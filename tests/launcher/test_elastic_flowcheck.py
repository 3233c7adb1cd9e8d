"""flowcheck under faults: all ranks go back to the newest iteration that every checkpoint server has made, exactly."""

from __future__ import annotations

import os
from itertools import cycle
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest

from moe_ckpt.events import GradientsLost, Rejoined, SnapshotTaken
from moe_ckpt.megatron.operators import RankOperators
from moe_ckpt.types import Phase
from tests.campaign import Fault, Point, all_go_back, call_is_a_point, lose_nodes, survive
from tests.elastic_job import ElasticJob
from tests.exact_rows import LAYOUTS, Row, job_of, name_of, rows
from tests.references import uninterrupted
from tests.scenarios import BIAS, FP16_SKIPPING, FP16_SKIPPING_AT_FIRST, TIED, UNSHARDED
from tests.training import events_of

RANKS = range(4)
WAITING = "ckpt.max_lag_iters=0"


def loading_is_a_point() -> None:
    """Let a rank enter RECOVERY once more when it loads a snapshot."""
    call_is_a_point(RankOperators, "load", Phase.RECOVERY)


def newest(iteration: int, lag_iters: int = 2) -> range:
    """The iterations that all servers may have when a fault strikes in `iteration`."""
    return range(max(0, iteration - 1 - lag_iters), iteration + 1)


def test_flowcheck_goes_back_to_its_servers(tmp_path: Path) -> None:
    faults = [
        all_go_back("in the first iteration", 0, Point(2, Phase.BACKWARD, 1), replaying=()),
        all_go_back("between update and gather", newest(4, 1), Point(0, Phase.STEP, 4, skip=1)),
        all_go_back("a node", newest(6, 1), Point(0, Phase.REDUCE, 6), kills=[2], then=lose_nodes, fetched=True),
    ]
    training = ("train.iterations=8", *FP16_SKIPPING_AT_FIRST, *TIED, *BIAS, "train.clip_grad=0.1")
    job = survive(tmp_path, faults, *training, ckpt="flowcheck", settings=(WAITING,))
    for rank in RANKS:
        assert not events_of(job.run, GradientsLost, rank)
        assert {event.iteration for event in events_of(job.run, SnapshotTaken, rank)} == {0}, "then only gradients"


@pytest.mark.full
def test_flowcheck_lives_through_a_fault_in_each_phase(tmp_path: Path) -> None:
    again = Point(1, Phase.RECOVERY)
    faults = [
        all_go_back("in the first iteration", 0, Point(2, Phase.BACKWARD, 1), replaying=()),
        all_go_back("as an iteration begins", newest(4), Point(0, Phase.FORWARD, 4)),
        all_go_back("in backward", newest(6), Point(3, Phase.BACKWARD, 6)),
        all_go_back("while gradients are reduced", newest(8), Point(1, Phase.REDUCE, 8)),
        all_go_back("between update and gather", newest(10), Point(0, Phase.STEP, 10, skip=1)),
        all_go_back("while gradients are handed over", newest(12), Point(2, Phase.SNAPSHOT, 12)),
        all_go_back("between iterations", newest(14), Point(3, Phase.BETWEEN, 14)),
        all_go_back("again while all go back", newest(16), Point(1, Phase.BACKWARD, 16), again),
        all_go_back("a node", newest(19), Point(0, Phase.REDUCE, 19), kills=[2], then=lose_nodes, fetched=True),
        all_go_back("two of a stage", newest(22), Point(2, Phase.REDUCE, 22), kills=[2, 3]),
    ]
    training = ("train.iterations=24", *FP16_SKIPPING, *TIED, *UNSHARDED)
    survive(tmp_path, faults, *training, ckpt="flowcheck", setup=loading_is_a_point)


@pytest.mark.full
def test_all_nodes_with_a_state_are_lost_and_a_checkpoint_is_left(tmp_path: Path) -> None:
    lost = Fault(
        name="both servers of a rank",
        at=[Point(3, Phase.REDUCE, 7)],
        kills=[0, 1],
        then=lose_nodes,
        back_to=6,
        replaying=(),
        executed=0,
        resumed="iter_0000006",
    )
    settings = (WAITING, "ckpt.durable_every_iters=3", "ckpt.async_save=false")
    survive(tmp_path, [lost], "train.iterations=9", ckpt="flowcheck", settings=settings)


@pytest.mark.full
def test_a_server_is_killed_beside_a_rank(tmp_path: Path) -> None:
    """Its successor finds the states that it has made; those that it had still to make are counted as lost."""
    training = ("train.iterations=14", *FP16_SKIPPING)
    with ElasticJob(4, tmp_path, *training, ckpt="flowcheck", timeout_s=150) as job:
        held = job.hold(1, Phase.BACKWARD, iteration=6)
        daemon = job.daemon_pid(3)
        os.kill(daemon, SIGSTOP)
        os.kill(daemon, SIGKILL)
        os.kill(held, SIGKILL)
        result = job.wait()
    assert result["digest_per_rank"] == uninterrupted(4, *training).digest_per_rank
    went_back = [event.iteration for event in events_of(job.run, Rejoined, 0)]
    assert all(iteration in newest(6) for iteration in went_back), went_back


@pytest.mark.full
def test_only_a_server_is_killed(tmp_path: Path) -> None:
    training = ("train.iterations=14",)
    with ElasticJob(4, tmp_path, *training, ckpt="flowcheck", timeout_s=150) as job:
        held = job.hold(1, Phase.BACKWARD, iteration=6)
        os.kill(job.daemon_pid(2), SIGKILL)
        os.kill(held, SIGCONT)
        result = job.wait()
    assert result["digest_per_rank"] == uninterrupted(4, *training).digest_per_rank
    assert all(event.iteration >= 3 for event in events_of(job.run, Rejoined, 0))


# --- rows of the exactness matrix: every pair of settings of a training

_POINTS = {
    "forward": lambda rank, it: Point(rank, Phase.FORWARD, it),
    "backward": lambda rank, it: Point(rank, Phase.BACKWARD, it),
    "reduce": lambda rank, it: Point(rank, Phase.REDUCE, it),
    "step": lambda rank, it: Point(rank, Phase.STEP, it, skip=1),
    "snapshot": lambda rank, it: Point(rank, Phase.SNAPSHOT, it),
    "between": lambda rank, it: Point(rank, Phase.BETWEEN, it),
}


def _can_be_supervised(row: Row) -> bool:
    """Leave out jobs that differ or hang before a fault under every policy with supervisors.

    A job of one rank computes with other thread counts than its reference. Where one stage has no experts and the
    optimizer is whole, a rank that builds its model alone makes no optimizer for experts, and norms do not meet.
    """
    has_dense_stage = row["first layer"] == "dense" and LAYOUTS[row["layout"]].pp > 1
    return row["layout"] != "PP1" and not (has_dense_stage and row["optimizer"] == "whole")


@pytest.mark.full
@pytest.mark.parametrize(
    ("row", "phase"),
    [
        pytest.param(row, phase, id=f"{phase}: {name_of(row)}")
        for row, phase in zip(filter(_can_be_supervised, rows()), cycle(_POINTS), strict=False)
    ],
)
def test_a_killed_rank_goes_back_exactly_in_every_kind_of_training(row: Row, phase: str, tmp_path: Path) -> None:
    job = job_of(row)
    last = job.world_size - 1
    faults = [
        all_go_back("first", newest(4), _POINTS[phase](last, 4), world_size=job.world_size),
        all_go_back("second", newest(7), _POINTS[phase](0, 7), world_size=job.world_size),
    ]
    survive(tmp_path, faults, *job.training, world_size=job.world_size, ckpt="flowcheck")
