"""ckpt=moevement under faults: lost state is rebuilt, and ranks that live stay.

The run ends as if no fault had happened. The jobs have real supervisors, workers and
replica daemons, and a list of faults each (tests/harness/jobs/campaign.py). The tests
compare a job with the uninterrupted run bit for bit, after every iteration and
recovery. Dropout is on throughout.

With W = 2, a recovery to iteration t is followed by a snapshot of the whole state after
t, and by the windows t+1..t+2, t+3..t+4 and so on. Every rank has a window once the
gradients of the iteration after the window are complete. So a rank that dies in
iteration t+4, before its update, goes back to t+3 and runs two iterations again. If
every rank dies, all ranks go back to the end of a window.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from signal import SIGSTOP, SIGTERM
from typing import Any

import pytest

from moe_ckpt.elastic.status_page import RAISE_NUMBER
from moe_ckpt.events import Rejoined, SnapshotTaken, StageRecovered, WindowReplicated
from moe_ckpt.types import Phase
from tests.engine.damage import flip_a_bit
from tests.harness.jobs.campaign import (
    HANGS_END_SOON,
    Fault,
    Moment,
    Point,
    copies_fail,
    kill_a_daemon,
    lose_nodes,
    stretches_of,
    survive,
)
from tests.harness.jobs.elastic_job import ElasticJob
from tests.harness.jobs.training import events_of
from tests.replication.certificates import Authority
from tests.scenarios import BIAS_EVALUATED_OFTEN, PP4, THIRTY_SIX

BUILD, JOIN, RECOVERY, DONE = Phase.BUILD, Phase.JOIN, Phase.RECOVERY, Phase.DONE
FORWARD, BACKWARD, REDUCE, STEP = (
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.REDUCE,
    Phase.STEP,
)
SNAPSHOT, BETWEEN = Phase.SNAPSHOT, Phase.BETWEEN


def fault(
    name: str,
    *at: Point,
    back_to: int | Collection[int],
    executed: int | Mapping[int, int] | None,
    dp: int = 2,
    **more: Any,
) -> Fault:
    """Return a fault after which only the stages of the dead ranks replay.

    Args:
        name: Name of the fault.
        *at: Points of the fault.
        back_to: Iteration from which all ranks continue, or the possible iterations.
        executed: Iterations that each replaying rank runs again, or a number by rank;
            None: not checked.
        dp: Number of ranks that train a stage.
        **more: Other fields of `Fault`.
    """
    described = Fault(
        name=name, at=at, back_to=back_to, executed=executed, replaying=None, **more
    )
    stages = {rank // dp for rank in described.dead} if back_to else set()
    return replace(
        described,
        replaying=[stage * dp + rank for stage in stages for rank in range(dp)],
    )


def test_a_rank_dies_in_each_phase(tmp_path: Path) -> None:
    # rank 1 may have its gradients ready before it notices the death
    voting: dict[str, Any] = {
        "kills": [3],
        "then": _kill_once_others_wait,
        "back_to": (29, 30),
    }
    faults = [
        fault("as ranks join", Point(1, JOIN), back_to=0, executed=0),
        fault(
            "before the first iteration", Point(1, FORWARD, 1), back_to=0, executed=0
        ),
        fault("before the first window", Point(3, STEP, 2), back_to=2, executed=2),
        fault(
            "as an iteration begins, TERM",
            Point(0, FORWARD, 6, number=SIGTERM),
            back_to=5,
            executed=2,
        ),
        fault("in forward", Point(3, FORWARD, 9, skip=2), back_to=8, executed=2),
        fault(
            "in backward, an ECC error",
            Point(2, BACKWARD, 12, number=RAISE_NUMBER),
            back_to=11,
            executed=2,
        ),
        fault(
            "again before the next window",
            Point(2, BACKWARD, 12),
            back_to=11,
            executed=None,
        ),
        fault(
            "as gradients are reduced, too",
            Point(1, REDUCE, 15, number=RAISE_NUMBER),
            back_to=14,
            executed=2,
        ),
        fault(
            "after the vote, too",
            Point(0, STEP, 17, number=RAISE_NUMBER),
            back_to=17,
            executed=2,
        ),
        fault(
            "between update and gather",
            Point(3, STEP, 20, skip=1),
            back_to=20,
            executed=2,
        ),
        fault("before a snapshot", Point(2, SNAPSHOT, 23), back_to=23, executed=2),
        fault("between iterations", Point(1, BETWEEN, 26), back_to=26, executed=2),
        fault(
            "while others wait for a vote",
            Point(1, Moment.VOTE, 30),
            executed=None,
            **voting,
        ),
        fault(
            "every rank",
            Point(3, REDUCE, 33),
            kills=(0, 1, 2, 3),
            back_to=(31, 32),
            executed=1,
        ),
        fault(
            "in the last iteration", Point(2, BACKWARD, 36), back_to=35, executed=None
        ),
        fault(
            "in the last evaluation",
            Point(3, FORWARD, 36, skip=3),
            back_to=36,
            executed=1,
        ),
        fault("as digests are exchanged", Point(1, DONE), back_to=36, executed=1),
    ]
    job = survive(tmp_path, faults, *THIRTY_SIX, settings=["ckpt.window=2"])
    # at some of these moments, both ranks of a stage wait for the other stage
    assert any(
        event.kept_groups
        for rank in range(4)
        for event in events_of(job.run, Rejoined, rank)
    )


@pytest.mark.full
def test_ranks_that_communicate_through_host_memory_die(tmp_path: Path) -> None:
    """Covers `runtime.backend=staged`, the path of several ranks on one GPU.

    The copies of this backend are clones here.
    """
    faults = [
        fault("as ranks join", Point(1, JOIN), back_to=0, executed=0),
        fault("before the first window", Point(3, STEP, 2), back_to=2, executed=2),
        fault("in forward", Point(3, FORWARD, 6, skip=2), back_to=5, executed=2),
        fault("in backward", Point(2, BACKWARD, 9), back_to=8, executed=2),
        fault("as gradients are reduced", Point(1, REDUCE, 12), back_to=11, executed=2),
        fault("after the vote", Point(0, STEP, 14), back_to=14, executed=2),
        fault(
            "between update and gather",
            Point(3, STEP, 17, skip=1),
            back_to=17,
            executed=2,
        ),
        fault(
            "both ranks of a stage",
            Point(3, REDUCE, 21),
            kills=[2, 3],
            back_to=20,
            executed=2,
        ),
        fault(
            "every rank",
            Point(3, REDUCE, 25),
            kills=(0, 1, 2, 3),
            back_to=(23, 24),
            executed=1,
        ),
        fault(
            "in backward, held",
            Point(2, BACKWARD, 28),
            back_to=27,
            executed=2,
            kills=[2],
        ),
    ]
    settings = ["ckpt.window=2", "runtime.backend=staged"]
    survive(tmp_path, faults, "train.iterations=30", settings=settings)


def _kill_once_others_wait(job: ElasticJob, ranks: Sequence[int]) -> None:
    """Kill ranks as soon as all ranks but rank 1 wait for rank 1.

    A rank that just passes through a collective operation does not wait.
    """
    pages = [job.page(rank) for rank in (0, 2, 3)]
    looks: list[list[float]] = []

    def stand_still() -> bool | None:
        looks.append([page.progress_s if page.waiting else 0.0 for page in pages])
        return (
            len(looks) >= 50 and all(looks[-1]) and looks[-50:] == [looks[-1]] * 50
        ) or None

    job.wait_for(stand_still, "all others to wait for rank 1")
    job.kill(*ranks)


def _kill_until_rank_1_has_left(job: ElasticJob, ranks: Sequence[int]) -> None:
    """Kill ranks; return once rank 1 has left the generation.

    From then on rank 1 sends no logs.
    """
    generation = job.page(1).generation
    job.kill(*ranks)
    job.wait_for(
        lambda: job.page(1).generation > generation or None,
        "rank 1 to leave the generation",
    )


def test_a_rank_dies_while_a_recovery_goes_on(tmp_path: Path) -> None:
    """Covers W = 3, router biases without gradients, and frequent evaluations.

    Evaluations come between iterations. Three ranks hang.
    """
    replayed = functools.partial(Point, phase=RECOVERY, skip=2)
    hangs = functools.partial(Point, 2, number=SIGSTOP)
    five_times = [Point(2, RECOVERY, skip=number % 4) for number in range(5)]
    faults = [
        fault(
            "the bias of routers",
            Point(0, REDUCE, 5, number=SIGSTOP),
            back_to=4,
            executed=3,
        ),
        fault(
            "again while it is replayed",
            hangs(BACKWARD, 9),
            replayed(2),
            back_to=8,
            executed=3,
        ),
        fault(
            "another rank of the stage",
            Point(2, BACKWARD, 13),
            replayed(3),
            back_to=12,
            executed=3,
        ),
        fault(
            "a neighbour as it sends logs",
            hangs(STEP, 16),
            replayed(2),
            kills=[0],
            back_to=16,
            executed=3,
        ),
        fault(
            "as it builds and joins",
            Point(1, REDUCE, 21),
            Point(1, BUILD),
            Point(1, JOIN),
            back_to=20,
            executed=3,
        ),
        fault(
            "five times in a row",
            Point(2, BACKWARD, 25),
            *five_times,
            back_to=24,
            executed=3,
        ),
        fault(
            "both ranks of a stage",
            Point(3, REDUCE, 29),
            kills=[2, 3],
            back_to=28,
            executed=3,
        ),
        fault(
            "after the last iteration", Point(0, BETWEEN, 30), back_to=30, executed=2
        ),
    ]
    survive(
        tmp_path,
        faults,
        *BIAS_EVALUATED_OFTEN,
        settings=["ckpt.window=3", HANGS_END_SOON],
    )


def test_stages_are_lost_alone_together_and_with_their_nodes(tmp_path: Path) -> None:
    stages = functools.partial(fault, dp=1, executed=2)
    lost = {"then": lose_nodes, "fetched": True}
    faults = [
        stages("in the middle", Point(1, BACKWARD, 4), back_to=3),
        stages("another in the middle", Point(2, REDUCE, 7), back_to=6),
        stages(
            "neighbours, replayed jointly",
            Point(2, REDUCE, 10),
            kills=[1, 2],
            back_to=9,
        ),
        stages(
            "not neighbours, in parallel",
            Point(2, REDUCE, 13),
            kills=[0, 2],
            back_to=12,
        ),
        replace(
            stages("all", Point(3, REDUCE, 16), kills=[0, 1, 2, 3], back_to=14),
            executed=1,
        ),
        replace(
            stages(
                "far away",
                Point(0, BACKWARD, 18),
                Point(0, RECOVERY, skip=2),
                kills=[3],
                back_to=17,
            ),
            executed={0: 1, 3: 2},  # stage 0 continues its replay
            # otherwise rank 0 would still receive the logs of the next iteration
            then=_kill_until_rank_1_has_left,
        ),
        stages(
            "a node of two stages",
            Point(3, BACKWARD, 21),
            kills=[2, 3],
            back_to=20,
            **lost,
        ),
        stages("what it got back", Point(2, BACKWARD, 24), back_to=23),
        stages(
            "the other node", Point(0, FORWARD, 27), kills=[0, 1], back_to=26, **lost
        ),
    ]
    settings = ["ckpt.window=2", "parallel.ranks_per_node=2", "ckpt.replicas=1"]
    job = survive(tmp_path, faults, *PP4, "train.iterations=30", settings=settings)
    for rank in range(4):
        events = stretches_of(job.run, rank)[-1].events
        taken = [event for event in events if isinstance(event, SnapshotTaken)]
        for window in (
            event for event in events if isinstance(event, WindowReplicated)
        ):
            parts = [
                event.size_bytes
                for event in taken
                if event.window_start == window.window_start
            ]
            assert (window.size_bytes, window.num_peers) == (sum(parts), 1)
            assert 0 < window.seconds <= window.span_s
            assert window.ago_s >= 0


def test_host_memory_is_lost_or_damaged(tmp_path: Path) -> None:
    lost: dict[str, Any] = {"then": lose_nodes, "fetched": True}
    one_lost: dict[str, Any] = {"then": lambda job, _: (job.lose_nodes(1), job.kill(3))}
    damaged: dict[str, Any] = {"then": _damage_and_kill, "fetched": True}
    needless: dict[str, Any] = {"then": _damage_a_needless_copy, "fetched": True}
    unknown: dict[str, Any] = {"replaying": None, "executed": None}
    while_copied = [
        Point(1, BACKWARD, 29),
        Point(1, Moment.VOTE, 29),
        Point(1, Moment.COPYING),
    ]
    faults = [
        fault(
            "a node in the first iteration",
            Point(3, BACKWARD, 1),
            kills=[1, 3],
            **one_lost,
            back_to=0,
            executed=0,
        ),
        fault("a node", Point(2, FORWARD, 4), kills=[2], back_to=3, executed=2, **lost),
        fault(
            "a rank that got its memory back",
            Point(2, BACKWARD, 7),
            back_to=6,
            executed=2,
        ),
        fault(
            "two nodes, not neighbours",
            Point(3, BACKWARD, 10),
            kills=[1, 3],
            back_to=9,
            executed=2,
            **lost,
        ),
        fault(
            "a rank with damaged memory",
            Point(2, BACKWARD, 13),
            kills=[2],
            **damaged,
            back_to=12,
            executed=2,
        ),
        fault(
            "a replica daemon",
            Point(0, FORWARD, 16),
            kills=[],
            then=kill_a_daemon,
            back_to=15,
            executed=0,
        ),
        fault(
            "a node whose copies it has",
            Point(2, BACKWARD, 19),
            kills=[2],
            back_to=18,
            executed=2,
            **lost,
        ),
        fault(
            "a rank while its newest window has no copies",
            Point(3, BACKWARD, 23),
            back_to=22,
            executed=None,
        ),
        # stage 1 replays, too, if it has just recovered from its newest window
        Fault(
            name="a node right after",
            at=[Point(0, FORWARD, 23)],
            kills=[0],
            back_to=22,
            **unknown,
            **lost,
        ),
        fault(
            "a needless copy damaged",
            Point(1, BACKWARD, 26),
            kills=[1],
            **needless,
            back_to=25,
            executed=2,
        ),
        fault(
            "a node while its copies change",
            *while_copied,
            kills=[1],
            back_to=28,
            executed=0,
            **lost,
        ),
        fault(
            "a node after the vote",
            Point(3, STEP, 32),
            kills=[3],
            back_to=32,
            executed=3,
            **lost,
        ),
    ]
    setup = functools.partial(copies_fail, "snapshot-21-", "snapshot-22-")
    job = survive(
        tmp_path, faults, *THIRTY_SIX, settings=["ckpt.window=2"], setup=setup
    )
    said = job.said()
    assert "checksum" in said
    assert "done without: fetching step-" in said
    starts = [event.window_start for event in events_of(job.run, StageRecovered, 1)]
    assert 19 in starts, "the window without copies was preferred"


def _damage_and_kill(job: ElasticJob, ranks: Sequence[int]) -> None:
    flip_a_bit(Path(job.worker(2).memory) / "own")
    job.kill(*ranks)


def _damage_a_needless_copy(job: ElasticJob, ranks: Sequence[int]) -> None:
    index = Path(job.worker(0).memory) / "held" / "rank0001" / "index"
    # this copy is needless: the replay of the previous step leads to the start of this
    # step, and other ranks share the record of this step
    newest = max(
        index.glob("step-*.blob"), key=lambda path: int(path.stem.removeprefix("step-"))
    )
    newest.write_bytes(b"garbage")
    job.lose_nodes(*ranks)


@pytest.mark.full
def test_a_job_of_which_nothing_is_left_fails_once(tmp_path: Path) -> None:
    with ElasticJob(
        4, tmp_path, "train.iterations=200", "ckpt.window=2", "ckpt.replicas=1"
    ) as job:
        job.wait_until(2, 4, FORWARD)
        job.lose_nodes(2, 3)  # together with the only copy
        said = job.wait_for_failure()
    assert said.count("error: ") == 1, said
    assert "cannot be rebuilt at iteration" in said


@pytest.mark.full
def test_a_lost_node_gets_its_state_back_over_tls(tmp_path: Path) -> None:
    """All nodes are this machine, with one certificate."""
    tls = Authority(tmp_path / "certificates").config_of("node")
    faults = [
        fault(
            "a node",
            Point(2, FORWARD, 5),
            kills=[2],
            then=lose_nodes,
            fetched=True,
            back_to=4,
            executed=None,
        ),
        fault("what it got back", Point(2, BACKWARD, 8), back_to=7, executed=None),
    ]
    paths = [
        f"ckpt.tls.{name}={getattr(tls, name)}"
        for name in ("certificate", "key", "authority")
    ]
    survive(
        tmp_path / "job",
        faults,
        "train.iterations=10",
        settings=["ckpt.window=2", *paths],
    )
