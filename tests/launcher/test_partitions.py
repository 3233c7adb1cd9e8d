"""Network partitions and lost hosts: a job continues bit for bit, or can be resumed.

A job that cannot continue ends with an error, and the next start resumes. Each row
prints a line of the table in docs/guarantees.md: run `pytest --full -s` with this file,
as root.
"""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from moe_ckpt.events import Rejoined, StateResumed
from scripts import hosts
from tests.harness.jobs.hosts_job import HostsJob, network_of
from tests.harness.jobs.references import outcome_of, uninterrupted
from tests.harness.jobs.training import events_of
from tests.scenarios import PP2

pytestmark = pytest.mark.full

TWO = (*PP2, "parallel.ep=1", "train.iterations=60")
FOUR = (*PP2, "train.iterations=40")
WINDOW = ("ckpt=moevement", "ckpt.window=2")
AT = 20


def row(what: str, happened: str, seconds: float) -> None:
    print(f"\n| {what} | {happened} | {seconds:.1f} | yes |")


def require_the_same(job: HostsJob, world_size: int, training: tuple[str, ...]) -> None:
    assert outcome_of(job.run, job.result()) == uninterrupted(world_size, *training)


def repairs(job: HostsJob) -> str:
    """Describe the repairs in which rank 0 took part."""
    classes = [kind for event in events_of(job.run, Rejoined) for kind in event.classes]
    return (
        f"all ranks met again ({', '.join(classes)})" if classes else "training waited"
    )


@pytest.mark.parametrize(
    ("link", "seconds"),
    [("cut", 2.0), ("cut", 20.0), ("deaf", 2.0), ("deaf", 20.0), ("10mbit", 10.0)],
)
def test_a_job_goes_on_after_its_link_came_back(
    link: str, seconds: float, tmp_path: Path
) -> None:
    """`runtime.operation_s` is 15 s, so the longer cuts end a generation.

    No process dies.
    """
    with network_of(2):
        job = HostsJob(2, tmp_path, *WINDOW, *TWO)
        job.wait_for_iteration(AT)
        since_unix_s = time.time()
        hosts.set_link(1, link)
        time.sleep(seconds)
        hosts.set_link(1, hosts.UP)
        require_the_same(job, 2, TWO)
    row(f"{link}, {seconds:g} s", repairs(job), job.longest_pause_s(since_unix_s))


@pytest.mark.parametrize("seconds", [8.0, 25.0])
def test_a_host_that_froze_comes_back_and_changes_nothing(
    seconds: float, tmp_path: Path
) -> None:
    """One pause exceeds `runtime.heartbeat_s`, the other one `runtime.operation_s`.

    After `runtime.operation_s` the other ranks have given up the frozen host.
    """
    with network_of(2):
        job = HostsJob(2, tmp_path, *WINDOW, *TWO)
        job.wait_for_iteration(AT)
        since_unix_s = time.time()
        job.signal(signal.SIGSTOP, 1)
        time.sleep(seconds)
        job.signal(signal.SIGCONT, 1)
        require_the_same(job, 2, TWO)
    row(
        f"all processes of a host stopped, {seconds:g} s",
        repairs(job),
        job.longest_pause_s(since_unix_s),
    )


@pytest.mark.parametrize("link", ["cut", "deaf"])
def test_a_link_that_stays_cut_ends_the_job_which_starts_again(
    link: str, tmp_path: Path
) -> None:
    """Both ranks save their windows.

    The rank that is cut off saves without the store, once the store has been silent for
    `runtime.join_s`.
    """
    with network_of(2):
        job = HostsJob(2, tmp_path, *WINDOW, *TWO)
        job.wait_for_iteration(AT)
        since_s = time.monotonic()
        hosts.set_link(1, link)
        assert job.end() != 0
        seconds = time.monotonic() - since_s
        said = job.said()
        assert re.search(r"rank 1: iteration \d+ is on disk", said), said
        assert (
            "error: rank 1: the store of the job at 10.77.0.1:" in said
            or "worker ends: the store of the job at" in said
        ), said
        hosts.set_link(1, hosts.UP)
        again = HostsJob(2, tmp_path, *WINDOW, *TWO)
        require_the_same(again, 2, TWO)
    [resumed] = events_of(job.run, StateResumed)
    assert (resumed.source, resumed.iteration >= AT - 4) == ("local disk", True)
    row(
        f"{link}, for good",
        f"error; the next start went on from iteration {resumed.iteration}",
        seconds,
    )


def test_two_hosts_lost_at_once_end_the_job_which_goes_on_from_disk(
    tmp_path: Path,
) -> None:
    """With one replica, the second host held the only copies of the first host."""
    settings = (*WINDOW, "ckpt.replicas=1", "ckpt.disk_every_iters=4")
    with network_of(4):
        job = HostsJob(4, tmp_path, *settings, *FOUR)
        job.wait_for_iteration(AT)
        since_s = time.monotonic()
        job.lose(1, 2)
        assert job.end() != 0
        seconds = time.monotonic() - since_s
        again = HostsJob(4, tmp_path, *settings, *FOUR)
        require_the_same(again, 4, FOUR)
    (resumed,) = events_of(job.run, StateResumed)
    assert (resumed.source, resumed.iteration > 0) == ("local disk", True)
    row(
        "two hosts lost at once",
        f"error; the next start went on from iteration {resumed.iteration}",
        seconds,
    )
