"""moc and moetion under faults: snapshots of all experts lose nothing.

Snapshots of some experts lose tokens. tests/engine/test_partial_recovery.py proves that
each expert is then in the state of its snapshot, and how many tokens are lost.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from signal import SIGSTOP

from moe_ckpt.elastic.status_page import RAISE_NUMBER
from moe_ckpt.events import CapacityBoosted, ExpertsChosen, SnapshotTaken, TokensLost
from moe_ckpt.types import Phase
from tests.harness.jobs.campaign import (
    HANGS_END_SOON,
    Point,
    Stretch,
    all_go_back,
    kill_a_daemon,
    lose_nodes,
    stretches_of,
    survive,
)
from tests.harness.jobs.training import events_of
from tests.scenarios import THIRTY_SIX

RANKS = range(4)
EVERY_3 = ("ckpt.every_iters=3", "ckpt.disk_every_iters=3")
LIMITED = ("model.moe_capacity_factor=1.0", "train.sequence_length=64")


def test_moetion_with_all_experts_loses_nothing(tmp_path: Path) -> None:
    """Peers make the snapshots of experts from gradients.

    The state of a lost node comes from these snapshots.
    """
    again = (Point(2, Phase.RECOVERY), Point(1, Phase.JOIN))
    faults = [
        all_go_back(
            "an ECC error at once",
            0,
            Point(1, Phase.FORWARD, 1, number=RAISE_NUMBER),
            replaying=(),
        ),
        all_go_back(
            "a rank hangs", range(1, 6), Point(2, Phase.SNAPSHOT, 5, number=SIGSTOP)
        ),
        all_go_back(
            "between update and gather", range(4, 8), Point(0, Phase.STEP, 8, skip=1)
        ),
        all_go_back(
            "again while all go back",
            range(8, 12),
            Point(2, Phase.BACKWARD, 12),
            *again,
        ),
        all_go_back(
            "a node",
            range(11, 16),
            Point(0, Phase.REDUCE, 16),
            kills=[3],
            then=lose_nodes,
            fetched=True,
        ),
        all_go_back(
            "a daemon",
            range(11, 20),
            Point(0, Phase.BETWEEN, 19),
            kills=[],
            then=kill_a_daemon,
        ),
        all_go_back(
            "two of a stage", range(15, 22), Point(2, Phase.REDUCE, 22), kills=[2, 3]
        ),
    ]
    settings = (
        "ckpt.experts=4",
        "ckpt.remote_experts=4",
        "ckpt.bubble_copies=false",
        HANGS_END_SOON,
    )
    training = ("train.iterations=24", "precision=fp32")
    job = survive(tmp_path, faults, *training, ckpt="moetion", settings=settings)
    assert all(
        event.plt == 0.0
        for rank in RANKS
        for event in events_of(job.run, TokensLost, rank)
    )
    assert "got a state with checksum" not in job.said()
    chosen = events_of(job.run, ExpertsChosen, 2)
    assert any(event.by_gradient == [[0, 1, 2, 3]] for event in chosen)
    assert not any(
        event.bubble_bytes
        for rank in RANKS
        for event in events_of(job.run, SnapshotTaken, rank)
    )


def test_moc_with_all_experts_loses_nothing(tmp_path: Path) -> None:
    again = (Point(3, Phase.RECOVERY, number=RAISE_NUMBER), Point(1, Phase.JOIN))
    faults = [
        all_go_back(
            "a rank hangs", range(5), Point(2, Phase.FORWARD, 5, number=SIGSTOP), *again
        ),
        all_go_back(
            "a daemon",
            range(11),
            Point(0, Phase.STEP, 10),
            kills=[],
            then=kill_a_daemon,
        ),
        all_go_back(
            "a node",
            range(16),
            Point(0, Phase.SNAPSHOT, 15),
            kills=[2],
            then=lose_nodes,
        ),
        all_go_back(
            "a node between iterations",
            range(21),
            Point(0, Phase.BETWEEN, 20),
            kills=[2],
            then=lose_nodes,
        ),
    ]
    often = ("ckpt.every_iters=2", "ckpt.disk_every_iters=2")
    settings = ("ckpt.k_snapshot=4", "ckpt.k_persist=4", *often, HANGS_END_SOON)
    survive(tmp_path, faults, *THIRTY_SIX, ckpt="moc", settings=settings)


def _chosen(stretch: Stretch) -> list[ExpertsChosen]:
    return [event for event in stretch.events if isinstance(event, ExpertsChosen)]


def test_moc_loses_what_came_since_experts_were_saved(tmp_path: Path) -> None:
    """A rank that loses its memory has its experts from storage.

    All other ranks have their experts from memory.

    The faults cost too many tokens, so the number of experts in a snapshot doubles:
    losses that were known before a fault still count.
    """
    faults = [
        all_go_back("a process", 6, Point(2, Phase.BACKWARD, 9)),
        all_go_back("again, with twice the experts", 12, Point(0, Phase.REDUCE, 15)),
        all_go_back(
            "a node",
            (12, 15, 18),
            Point(0, Phase.REDUCE, 21),
            kills=[3],
            then=lose_nodes,
        ),
    ]
    settings = ("ckpt.k_snapshot=1", "ckpt.k_persist=1", *EVERY_3)
    job = survive(
        tmp_path,
        faults,
        "train.iterations=24",
        ckpt="moc",
        settings=settings,
        is_exact=False,
    )
    for rank in RANKS:
        first, second, _, last = (
            _chosen(stretch) for stretch in stretches_of(job.run, rank)
        )
        assert [len(chosen[-1].memory[0]) for chosen in (first, second)] == [1, 2]
        assert max(len(event.memory[0]) for event in last[1:]) == 4
        assert sum(events_of(job.run, TokensLost, rank)[0].lost_by_layer)
    sizes = [event.size_bytes for event in events_of(job.run, SnapshotTaken, 0)]
    assert max(sizes[1:3]) < sizes[0], "partial"


def test_moetion_makes_up_for_lost_tokens_with_capacity(tmp_path: Path) -> None:
    """Peers bring back the experts that a lost node had sent to peers.

    The tokens that are left to make up survive the next fault.
    """
    faults = [
        all_go_back("a process", 6, Point(2, Phase.BACKWARD, 9)),
        all_go_back("before all is made up", 12, Point(1, Phase.BACKWARD, 15)),
        all_go_back(
            "a node",
            (15, 18),
            Point(0, Phase.REDUCE, 21),
            kills=[3],
            then=lose_nodes,
            fetched=True,
        ),
    ]
    settings = ("ckpt.experts=2", "ckpt.remote_experts=1", "ckpt.every_iters=3")
    training = ("train.iterations=24", *LIMITED)
    job = survive(
        tmp_path, faults, *training, ckpt="moetion", settings=settings, is_exact=False
    )
    for rank in RANKS:
        check_boost(job.run, rank)
    stages = [
        [event.deficit for event in events_of(job.run, CapacityBoosted, rank)]
        for rank in RANKS
    ]
    assert stages[0] == stages[1]
    assert stages[2] == stages[3], "all ranks of a stage agree on what is left"
    assert any(
        event.bubble_bytes
        for rank in RANKS
        for event in events_of(job.run, SnapshotTaken, rank)
    )
    assert all(
        event.bubble_bytes <= event.size_bytes
        for event in events_of(job.run, SnapshotTaken, 0)
    )


def check_boost(run: Path, global_rank: int) -> None:
    """Check the capacity of experts that have lost tokens.

    These experts get more capacity from the next iteration on, until all lost tokens
    are made up.
    """
    _, first, second, _ = stretches_of(run, global_rank)
    for stretch in (first, second):
        assert stretch.rejoined
        (lost,) = (event for event in stretch.recovery if isinstance(event, TokensLost))
        boosted = [
            event for event in stretch.events if isinstance(event, CapacityBoosted)
        ]
        left = [sum(map(sum, event.deficit)) for event in boosted]
        assert boosted[0].iteration == stretch.rejoined.iteration + 1
        assert all(later <= earlier for earlier, later in itertools.pairwise(left))
        assert max(boosted[0].capacity[0]) > min(boosted[0].capacity[0])
        if stretch is first:
            assert 0 < left[0] < sum(lost.lost_by_layer)
            before = {
                event.iteration: sum(map(sum, event.deficit)) for event in boosted
            }[12]
            assert before > 0
        else:
            assert left[0] > sum(lost.lost_by_layer), "some of the first fault"
