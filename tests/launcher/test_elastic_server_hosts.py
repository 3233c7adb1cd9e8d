"""ckpt.servers=hosts in whole jobs: states on other hosts restore ranks bit for bit.

The hosts of the servers train nothing.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from moe_ckpt.events import GradientsLost, Rejoined, ServersChanged, SnapshotTaken
from scripts import hosts
from tests.harness.jobs.captured_states import UNSHARDED, mirror_of
from tests.harness.jobs.hosts_job import HostsJob, network_of
from tests.harness.jobs.references import outcome_of, uninterrupted
from tests.harness.jobs.training import events_of

pytestmark = pytest.mark.full

TRAINING = ("train.iterations=60", "parallel.pp=1", "parallel.ep=1", UNSHARDED)
ON_HOSTS = ("ckpt=flowcheck", "ckpt.servers=hosts", "ckpt.max_lag_iters=0")
FAULTS = (
    "fault=at",
    (
        "fault.at=[{iteration: 15, phase: backward, rank: 1}, {iteration: 45, phase:"
        " step, rank: 0}]"
    ),
)
LOST_AT = 25


@pytest.mark.parametrize("capture", ["tap", "mirror"])
def test_a_spare_takes_the_place_of_a_lost_server_host(
    capture: str, tmp_path: Path
) -> None:
    """The spare host has the state of rank 0 when rank 0 is killed.

    Before that, rank 1 is killed, and then the server's host is lost.
    """
    captures = mirror_of(hosts.INTERFACE) if capture == "mirror" else ()
    with network_of(4):
        job = HostsJob(
            2, tmp_path, *ON_HOSTS, *captures, *FAULTS, *TRAINING, num_servers=2
        )
        job.wait_for_iteration(LOST_AT)
        before = _server_host(job)
        job.signal(signal.SIGKILL, before)
        assert outcome_of(job.run, job.result()) == uninterrupted(2, *TRAINING)
    first, second = events_of(job.run, Rejoined)
    assert first.iteration in (13, 14)
    assert second.iteration in range(42, 46)
    assert first.fetched_bytes > 0
    assert second.fetched_bytes > 0
    assert {
        event.addresses.partition(":")[0]
        for event in events_of(job.run, ServersChanged)
    } == {
        hosts.address_of(2),
        hosts.address_of(3),
    }
    taken = [event.iteration for event in events_of(job.run, SnapshotTaken)]
    assert [iteration >= LOST_AT for iteration in taken] == [False, True], (
        "one at the start, one for the spare"
    )
    assert "checkpoint server 0 is now at" in job.said()


def test_training_hosts_take_over_once_no_server_host_is_left(tmp_path: Path) -> None:
    with network_of(3):
        job = HostsJob(
            2,
            tmp_path,
            *ON_HOSTS,
            "ckpt.server_wait_s=1",
            *FAULTS,
            *TRAINING,
            num_servers=1,
        )
        job.wait_for_iteration(LOST_AT)
        job.signal(signal.SIGKILL, 2)
        assert outcome_of(job.run, job.result()) == uninterrupted(2, *TRAINING)
    assert len(events_of(job.run, Rejoined)) == 2
    assert len(events_of(job.run, GradientsLost)) == 1
    assert (
        "all checkpoint servers are gone: the training nodes serve themselves from"
        " now on" in job.said()
    )


def _server_host(job: HostsJob) -> int:
    """Return the host of the server that holds states; the other server is a spare."""
    return next(
        host
        for host in (2, 3)
        if f"checkpoint server 0 is at {hosts.address_of(host)}:" in job.said()
    )
