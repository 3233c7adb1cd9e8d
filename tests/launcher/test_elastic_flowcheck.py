"""flowcheck under faults: all ranks go back exactly to the servers' newest state.

The newest state is that of the newest iteration that every checkpoint server has made.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from signal import SIGSTOP

import pytest

from moe_ckpt.elastic.status_page import RAISE_NUMBER
from moe_ckpt.events import GradientsLost, SnapshotTaken
from moe_ckpt.types import Phase
from tests.harness.jobs.campaign import (
    HANGS_END_SOON,
    Point,
    all_go_back,
    kill_a_daemon,
    lose_nodes,
    stretches_of,
    survive,
)
from tests.launcher.exact_rows import LAYOUTS, Row, job_of, name_of, rows
from tests.scenarios import BIAS, FP16_SKIPPING_AT_FIRST, TIED

RANKS = range(4)
WAITING = "ckpt.max_lag_iters=0"


def newest(iteration: int, lag_iters: int = 2) -> range:
    """Return the iterations that all servers may have when a fault strikes.

    Args:
        iteration: The iteration of the fault.
        lag_iters: The number of iterations by which servers may lag.
    """
    return range(max(0, iteration - 1 - lag_iters), iteration + 1)


def test_flowcheck_goes_back_to_its_servers(tmp_path: Path) -> None:
    again = (Point(1, Phase.JOIN, number=RAISE_NUMBER), Point(3, Phase.RECOVERY))
    faults = [
        all_go_back(
            "in the first iteration", 0, Point(2, Phase.FORWARD, 1), replaying=()
        ),
        all_go_back(
            "between update and gather", newest(4, 1), Point(0, Phase.STEP, 4, skip=1)
        ),
        all_go_back(
            "a node",
            newest(6, 1),
            Point(0, Phase.REDUCE, 6),
            kills=[2],
            then=lose_nodes,
            fetched=True,
        ),
        all_go_back(
            "with a server",
            range(10),
            Point(1, Phase.BACKWARD, 9),
            kills=[1],
            then=kill_a_daemon,
        ),
        all_go_back(
            "a rank hangs",
            range(8, 12),
            Point(2, Phase.BETWEEN, 11, number=SIGSTOP),
            *again,
        ),
        all_go_back("before a snapshot", range(8, 14), Point(0, Phase.SNAPSHOT, 13)),
    ]
    training = (
        "train.iterations=15",
        *FP16_SKIPPING_AT_FIRST,
        *TIED,
        *BIAS,
        "train.clip_grad=0.1",
    )
    job = survive(
        tmp_path,
        faults,
        *training,
        ckpt="flowcheck",
        settings=(WAITING, HANGS_END_SOON),
    )
    for rank in range(4):
        events = [
            event
            for stretch in stretches_of(job.run, rank)[:4]
            for event in stretch.events
        ]
        assert not any(isinstance(event, GradientsLost) for event in events)
        taken = [
            event.iteration for event in events if isinstance(event, SnapshotTaken)
        ]
        assert set(taken) == {0}, "then only gradients"


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
    """Return whether a job of this row runs like its reference under supervisors.

    Other jobs differ or hang before a fault, under every policy with supervisors. A job
    of one rank computes with another number of threads than its reference. If one stage
    has no experts and the optimizer is not sharded, a rank that builds its model alone
    makes no optimizer for experts, and the norms never meet. With expert parallelism,
    the digests of such a rank lack the learning rate of the empty optimizer for
    experts.
    """
    has_dense_stage = row["first layer"] == "dense" and LAYOUTS[row["layout"]].pp > 1
    return row["layout"] != "PP1" and not (
        has_dense_stage and (row["optimizer"] == "whole" or row["layout"] == "PP2")
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("row", "phase"),
    [
        pytest.param(row, phase, id=f"{phase}: {name_of(row)}")
        for row, phase in zip(
            filter(_can_be_supervised, rows()), cycle(_POINTS), strict=False
        )
    ],
)
def test_a_killed_rank_goes_back_exactly_in_every_kind_of_training(
    row: Row, phase: str, tmp_path: Path
) -> None:
    job = job_of(row)
    last = job.world_size - 1
    faults = [
        all_go_back(
            "first", newest(4), _POINTS[phase](last, 4), world_size=job.world_size
        ),
        all_go_back(
            "second", newest(6), _POINTS[phase](0, 6), world_size=job.world_size
        ),
    ]
    survive(
        tmp_path, faults, *job.training, world_size=job.world_size, ckpt="flowcheck"
    )
