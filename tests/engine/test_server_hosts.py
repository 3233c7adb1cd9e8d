"""ckpt.servers=hosts with ranks that are threads.

States are on machines that train nothing, and outlive the loss of such machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.errors import ConfigError
from moe_ckpt.events import (
    GradientsLost,
    GradientsSent,
    Rejoined,
    ServersChanged,
    SnapshotTaken,
)
from moe_ckpt.snapshot.blobs import BlobFolder, held_path
from moe_ckpt.snapshot.folder_contents import FolderContents, read_kept
from moe_ckpt.types import Phase
from tests.harness.threads.job import Fault, ThreadJob, exact
from tests.harness.threads.model import PAIR, Shape
from tests.harness.threads.stops import At
from tests.policies.profiles import config


def made(
    folder: Path,
    *faults: Fault,
    shape: Shape = PAIR,
    iterations: int = 9,
    **settings: Any,
) -> ThreadJob:
    policy = config(
        "flowcheck",
        **{"max_lag_iters": 0, "servers": "hosts", "server_wait_s": 0.0} | settings,
    )
    return ThreadJob(folder, policy, shape, iterations=iterations, faults=faults)


def kept_on(job: ThreadJob, started: int) -> Mapping[int, FolderContents]:
    """Return the contents of a server for each rank.

    Args:
        job: The job.
        started: Number of the server in the order of starts, from 1.
    """
    assert job.hosts is not None
    return {
        rank: read_kept(BlobFolder(held_path(job.hosts.memory(started), rank)))
        for rank in job.ranks
    }


def states_on(job: ThreadJob, started: int) -> Mapping[int, set[int]]:
    """Return the iterations of each rank's states on a server.

    Args:
        job: The job.
        started: Number of the server in the order of starts, from 1.
    """
    kept = kept_on(job, started)
    return {
        rank: {state.header.iteration for state in each.snapshots}
        for rank, each in kept.items()
    }


@pytest.mark.parametrize("capture", ["tap", "mirror"])
@pytest.mark.parametrize("loses_memory", [False, True])
def test_a_killed_rank_takes_its_state_from_a_server_that_trains_nothing(
    capture: str, loses_memory: bool, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "capture": capture,
        "mirror_interface": "e0" if capture == "mirror" else None,
    }
    newest_of_all: list[int] = []

    def note_states(job: ThreadJob) -> None:
        # a state is of no use before the server has the start of the next iteration
        starts = [
            {number - 1 for number in each.starts} for each in kept_on(job, 1).values()
        ]
        newest_of_all.append(
            max(set.intersection(*states_on(job, 1).values(), *starts))
        )

    faults = [
        Fault(
            rank=1,
            phase=Phase.BACKWARD,
            iteration=4,
            loses_memory=loses_memory,
            before_restart=note_states,
        ),
        Fault(
            rank=0, phase=Phase.STEP, iteration=7, also=(1,), loses_memory=loses_memory
        ),
    ]
    job = exact(made(tmp_path, *faults, shape=Shape(pp=1, dp=2), **settings))
    for rank in job.ranks:
        first, second = job.events(Rejoined, rank)
        assert (first.iteration, second.iteration) in [
            (a, b) for a in (2, 3) for b in (5, 6, 7)
        ]
        assert first.iteration >= newest_of_all[0], (
            "servers may have completed one more since"
        )
        assert second.fetched_bytes > 0, "no training node has any state"
        assert not job.events(GradientsLost, rank)
        assert not [*(job.memory(rank) / "held").glob("*")], "training nodes hold none"
    assert all(max(states) >= 8 for states in states_on(job, 1).values()), (
        "the last one may be under way"
    )


def test_states_of_each_rank_are_on_two_of_three_servers(tmp_path: Path) -> None:
    job = exact(made(tmp_path, server_hosts=3, shape=Shape(pp=2, dp=2)))
    held = [
        {rank for rank, states in states_on(job, started).items() if states}
        for started in (1, 2, 3)
    ]
    assert held == [{0, 2, 3}, {0, 1, 3}, {1, 2}]


def test_a_lost_server_is_replaced_and_gets_a_whole_snapshot(tmp_path: Path) -> None:
    """Training continues without a rollback, because all ranks have their states.

    Then a rank dies, and finds its state on the new server.
    """
    job = made(
        tmp_path,
        Fault(rank=1, phase=Phase.FORWARD, iteration=8, loses_memory=True),
        server_wait_s=20.0,
    )

    def replace() -> None:
        assert job.hosts is not None
        job.hosts.end(0)
        # as the first rank that misses the server does; otherwise the successor would
        # be a spare
        job.hosts.numbers.lose(0)
        job.hosts.start()

    At(job, 3, replace, settles=False)
    exact(job)
    for rank in job.ranks:
        taken = [event.iteration for event in job.events(SnapshotTaken, rank)]
        assert len(taken) == 2
        assert taken[1] in (4, 5)
        (rejoined,) = job.events(Rejoined, rank)
        assert rejoined.iteration in (6, 7)
    assert all(max(states) >= 8 for states in states_on(job, 2).values()), (
        "the last one may be under way"
    )


def test_training_nodes_take_over_when_all_servers_are_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"capture": "mirror", "mirror_interface": "e0"}
    fault = Fault(rank=1, phase=Phase.FORWARD, iteration=8, loses_memory=True)
    job = made(tmp_path, fault, shape=Shape(pp=1, dp=2), **settings)
    At(job, 3, lambda: job.hosts and job.hosts.end(0), settles=False)
    exact(job)
    assert "all checkpoint servers are gone" in caplog.text
    for rank in job.ranks:
        assert [
            event.iteration in (4, 5) for event in job.events(GradientsLost, rank)
        ] == [True]
        assert [event.addresses == "" for event in job.events(ServersChanged, rank)][
            :2
        ] == [False, True]
        sizes = {
            event.iteration: event.size_bytes
            for event in job.events(GradientsSent, rank)
        }
        assert sizes[max(sizes)] > sizes[min(sizes)], (
            "training nodes capture nothing: they receive gradients"
        )
        (rejoined,) = job.events(Rejoined, rank)
        assert rejoined.iteration in (6, 7), "from another training node"


def test_the_other_server_takes_over_the_ranks_of_a_lost_one(tmp_path: Path) -> None:
    job = made(
        tmp_path,
        Fault(rank=0, phase=Phase.FORWARD, iteration=8, loses_memory=True),
        server_hosts=2,
        replicas=0,
    )
    At(job, 3, lambda: job.hosts and job.hosts.end(0), settles=False)
    exact(job)
    assert job.events(Rejoined, 0)[0].iteration in (6, 7)
    assert all(max(states) >= 8 for states in states_on(job, 2).values()), (
        "the last one may be under way"
    )


def test_a_job_whose_servers_do_not_come_says_so(tmp_path: Path) -> None:
    job = made(tmp_path)
    assert job.hosts is not None
    job.hosts.numbers.num_servers = 0  # none is started
    job.hosts.join_s = 0.2
    with pytest.raises(
        ConfigError,
        match=(
            r"ckpt.server_hosts: got 0 servers in runtime.join_s=.* seconds, wanted 1"
        ),
    ):
        job.run()


def test_a_server_that_holds_a_rank_no_more_drops_its_states(tmp_path: Path) -> None:
    """Rank 0 moves to server 1 when server 0 is lost.

    Rank 0 moves back to the successor of server 0, which starts later, after a fault.
    """
    fault = Fault(
        rank=1,
        phase=Phase.FORWARD,
        iteration=7,
        before_restart=lambda job: job.hosts and job.hosts.start(),
    )
    job = made(tmp_path, fault, server_hosts=2, replicas=0)
    At(job, 3, lambda: job.hosts and job.hosts.end(0), settles=False)
    exact(job)
    assert job.events(Rejoined, 0)[0].iteration in (5, 6), "from server 1"
    assert not states_on(job, 2)[0], (
        "they may be states that all ranks have left, by the next fault"
    )
    assert max(states_on(job, 2)[1]) >= 8
    assert max(states_on(job, 3)[0]) >= 8
