"""gemini and checkfreq under faults: all ranks go back to one snapshot, exactly.

Ranks that live keep their processes.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path
from signal import SIGSTOP
from typing import Any

import pytest

from moe_ckpt.elastic.status_page import RAISE_NUMBER
from moe_ckpt.events import IntervalChosen, SnapshotTaken, WindowPersisted
from moe_ckpt.megatron.operators import RankOperators
from moe_ckpt.snapshot.token_bucket import BURST_S
from moe_ckpt.types import Phase
from tests.harness.jobs.campaign import (
    HANGS_END_SOON,
    Fault,
    Point,
    all_go_back,
    call_is_a_point,
    copies_fail,
    kill_a_daemon,
    lose_nodes,
    stretches_of,
    survive,
)
from tests.harness.jobs.training import events_of
from tests.scenarios import (
    BIAS_EVALUATED_OFTEN,
    FP16_SKIPPING,
    THIRTY_SIX,
    TIED,
    UNSHARDED,
)

RANKS = range(4)
EVERY_3 = ("ckpt.every_iters=3",)


def loading_is_a_point_and_copies_fail() -> None:
    """Let a rank enter RECOVERY once more when the rank loads a snapshot.

    No copy of a snapshot of iteration 18 arrives.
    """
    call_is_a_point(RankOperators, "load", Phase.RECOVERY)
    copies_fail("snapshot-18-")


def test_gemini_goes_back_to_memory_or_peers_or_a_checkpoint(tmp_path: Path) -> None:
    first, again = Point(2, Phase.STEP, 2), Point(1, Phase.RECOVERY)
    hangs = Point(3, Phase.JOIN, number=SIGSTOP)
    lost: dict[str, Any] = {"then": lose_nodes, "fetched": True}
    lost_for_good: dict[str, Any] = {
        "then": lose_nodes,
        "replaying": (),
        "resumed": "iter_0000024",
    }
    faults = [
        all_go_back(
            "in the first iteration", 0, Point(2, Phase.BACKWARD, 1), replaying=()
        ),
        all_go_back(
            "while it loads the first snapshot",
            0,
            first,
            Point(2, Phase.RECOVERY, skip=1),
        ),
        all_go_back("as an iteration begins", 3, Point(0, Phase.FORWARD, 6)),
        all_go_back(
            "before a snapshot, an ECC error",
            6,
            Point(3, Phase.SNAPSHOT, 9, number=RAISE_NUMBER),
        ),
        all_go_back("between update and gather", 9, Point(0, Phase.STEP, 12, skip=1)),
        all_go_back("between iterations", 12, Point(3, Phase.BETWEEN, 14)),
        all_go_back(
            "a daemon", 15, Point(0, Phase.REDUCE, 17), kills=[], then=kill_a_daemon
        ),
        all_go_back(
            "again while all go back", 15, Point(1, Phase.BACKWARD, 18), hangs, again
        ),
        all_go_back(
            "a node without the newest copy",
            15,
            Point(0, Phase.REDUCE, 20),
            kills=[2],
            **lost,
        ),
        all_go_back(
            "two nodes", (15, 21), Point(3, Phase.REDUCE, 23), kills=[1, 2], **lost
        ),
        all_go_back(
            "all copies of a rank",
            24,
            Point(3, Phase.REDUCE, 26),
            kills=[0, 1],
            **lost_for_good,
        ),
        all_go_back("in the last iteration", 27, Point(2, Phase.BACKWARD, 30)),
    ]
    training = ("train.iterations=30", *FP16_SKIPPING, *TIED, *UNSHARDED)
    settings = (
        *EVERY_3,
        "ckpt.durable_every_iters=8",
        "ckpt.async_save=false",
        HANGS_END_SOON,
    )
    setup = loading_is_a_point_and_copies_fail
    survive(tmp_path, faults, *training, ckpt="gemini", settings=settings, setup=setup)


def test_checkfreq_goes_back_to_memory_or_local_disks(tmp_path: Path) -> None:
    def on_disk(name: str, to: Collection[int], at: Point, ranks: list[int]) -> Fault:
        return all_go_back(
            name, to, at, kills=ranks, then=lose_nodes, resumed="local disk"
        )

    while_all_go_back = (
        Point(3, Phase.JOIN, number=RAISE_NUMBER),
        Point(2, Phase.RECOVERY, number=SIGSTOP),
    )
    faults = [
        all_go_back("before the first snapshot", 0, Point(2, Phase.STEP, 2)),
        all_go_back(
            "in backward, memory is newer than disks",
            3,
            Point(1, Phase.BACKWARD, 6),
            *while_all_go_back,
        ),
        on_disk("a node", (3, 6), Point(0, Phase.REDUCE, 9), [2]),
        all_go_back("as an iteration begins", (6, 9), Point(3, Phase.FORWARD, 12)),
        on_disk("every node", range(9, 15), Point(1, Phase.REDUCE, 15), [0, 1, 2, 3]),
        all_go_back(
            "a daemon",
            range(9, 19),
            Point(0, Phase.SNAPSHOT, 18),
            kills=[],
            then=kill_a_daemon,
        ),
        all_go_back(
            "an ECC error",
            range(9, 22),
            Point(2, Phase.BETWEEN, 21, number=RAISE_NUMBER),
        ),
    ]
    settings = (*EVERY_3, HANGS_END_SOON)
    job = survive(
        tmp_path, faults, *BIAS_EVALUATED_OFTEN, ckpt="checkfreq", settings=settings
    )
    assert all(events_of(job.run, WindowPersisted, rank) for rank in RANKS)


@pytest.mark.full
def test_two_nodes_are_lost_of_three_copies(tmp_path: Path) -> None:
    node = functools.partial(all_go_back, kills=[1, 2], then=lose_nodes, fetched=True)
    faults = [node("two nodes", (3, 6), Point(3, Phase.REDUCE, 8))]
    settings = (*EVERY_3, "ckpt.replicas=2")
    survive(tmp_path, faults, "train.iterations=10", ckpt="gemini", settings=settings)


def test_the_interval_is_chosen_by_measurements_and_kept(tmp_path: Path) -> None:
    """Snapshots come every two iterations until the costs of three snapshots are known.

    Copies continue under bandwidth caps.
    """
    host, peers = 40e6, 30e6
    caps = (f"ckpt.max_bytes_per_s.host={host}", f"ckpt.max_bytes_per_s.peers={peers}")
    auto = ("ckpt.profile_iters=2", "ckpt.mtbf_s=0.2", *caps)
    faults = [
        all_go_back(
            "once the interval is chosen", range(10, 18), Point(2, Phase.BACKWARD, 18)
        )
    ]
    job = survive(tmp_path, faults, *THIRTY_SIX, ckpt="gemini", settings=auto)
    chosen = [events_of(job.run, IntervalChosen, rank) for rank in RANKS]
    assert chosen[0][0].iteration == 10
    assert all(
        event.snapshot_cost_s >= 0 and event.iteration_s > 0 for event in chosen[0]
    )
    assert chosen[0] == chosen[1] == chosen[3], "all ranks decide alike"
    assert all(event.copy_bytes_per_s <= peers for event in chosen[0])
    before = [
        event
        for event in events_of(job.run, SnapshotTaken, 1)
        if 0 < event.iteration < 18
    ]
    assert before
    assert all(event.size_bytes <= host * (event.copy_s + BURST_S) for event in before)
    rejoined = stretches_of(job.run, 0)[1].rejoined
    assert rejoined
    assert rejoined.iteration in [event.iteration for event in chosen[0]], (
        "what was measured before a fault counts"
    )
