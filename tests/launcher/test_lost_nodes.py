"""A spare node takes the ranks of a lost node, and no other process ends.

Hosts are network namespaces: all processes of a host are killed at once, its link is
cut, or it freezes. Only real agents, supervisors, stores and connections between hosts
decide what others notice of a lost host. Each row prints a line of the table in
docs/guarantees.md: run `pytest --full -s` with this file, as root.
"""

from __future__ import annotations

import os
import random
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from moe_ckpt.elastic.process_failure import FaultClass
from moe_ckpt.elastic.supervisor import REQUEUE
from moe_ckpt.events import Rejoined, StateResumed, WorkerStarted
from moe_ckpt.types import Phase
from scripts import hosts
from tests.harness.jobs.chaos import ENDURING, PHASES, Used, require_level
from tests.harness.jobs.hosts_job import network_of
from tests.harness.jobs.references import outcome_of, uninterrupted
from tests.harness.jobs.spare_hosts_job import SpareHostsJob
from tests.harness.jobs.training import events_of
from tests.scenarios import PP2, PP4

TWO = (*PP2, "parallel.ep=1", "train.iterations=60")
LONG = (*PP2, "parallel.ep=1", "train.iterations=120")
WINDOW = ("ckpt=moevement", "ckpt.window=2", "ckpt.replicas=1")
AT = 20


def row(what: str, job: SpareHostsJob) -> None:
    found = max(event.detect_s for event in events_of(job.run, Rejoined))
    print(f"\n| {what} | {found:.2f} | {job.longest_pause_s():.1f} |")


def require_kept_processes(job: SpareHostsJob, workers: dict[int, int]) -> None:
    """Check that no worker of these ranks was started after the given ones.

    Args:
        job: The job.
        workers: The pids of workers by rank.
    """
    for rank, pid in workers.items():
        assert events_of(job.run, WorkerStarted, rank)[-1].pid == pid, rank


def require_local_recovery(job: SpareHostsJob, workers: dict[int, int]) -> None:
    """Check that healthy ranks kept their processes and ran no iteration again.

    Args:
        job: The job, whose training has ended.
        workers: The pids of the workers on healthy hosts, by rank.
    """
    require_kept_processes(job, workers)
    for rank in workers:
        committed = job.committed(rank)
        assert committed == sorted(set(committed)), rank
        assert (
            sum(event.executed_iters for event in events_of(job.run, Rejoined, rank))
            == 0
        ), rank


def test_a_spare_host_takes_the_rank_of_a_host_whose_processes_are_killed(
    tmp_path: Path, stack: ExitStack
) -> None:
    stack.enter_context(network_of(3))
    job = SpareHostsJob(stack, tmp_path, 2, 1, *WINDOW, *TWO)
    job.wait_for_iteration(AT)
    lost = job.stop_at(1, Phase.BACKWARD, AT + 4)
    workers = job.workers(without=lost)
    job.lose(lost)
    assert outcome_of(job.run, job.result()) == uninterrupted(2, *TWO)
    assert [job.status(host) for host in (0, 2)] == [0, 0]
    require_local_recovery(job, workers)
    [event] = events_of(job.run, Rejoined, 0)
    assert event.classes == [FaultClass.NODE]
    row("all processes of a host are killed in backward; 2 + 1 hosts", job)


@pytest.mark.full
def test_a_host_whose_link_is_cut_for_good_is_replaced_after_node_s(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Nothing closes: only signs of life, which stay away, show the loss."""
    stack.enter_context(network_of(3))
    job = SpareHostsJob(stack, tmp_path, 2, 1, *WINDOW, *TWO)
    job.wait_for_iteration(AT)
    workers = job.workers(without=1)
    hosts.set_link(1, hosts.CUT)
    assert outcome_of(job.run, job.result()) == uninterrupted(2, *TWO)
    assert [job.status(host) for host in (0, 2)] == [0, 0]
    require_local_recovery(job, workers)
    assert "no sign of life for runtime.node_s=10 seconds" in job.said()
    row("a link is cut for good; 2 + 1 hosts", job)


@pytest.mark.full
def test_a_host_that_froze_for_long_waits_as_a_spare_one_and_is_used_again(
    tmp_path: Path, stack: ExitStack
) -> None:
    stack.enter_context(network_of(3))
    job = SpareHostsJob(stack, tmp_path, 2, 1, *WINDOW, *LONG)
    job.wait_for_iteration(AT)
    workers = job.workers(without=1)
    job.signal(signal.SIGSTOP, 1)
    job.wait_for(lambda: job.host_of(1) == 2, "the spare host")
    job.signal(signal.SIGCONT, 1)
    job.wait_for(lambda: "was given up as node 1" in job.said(), "the host's end")
    since = job.committed(0)[-1]
    job.wait_for_iteration(since + 5)
    job.lose(2)
    assert outcome_of(job.run, job.result()) == uninterrupted(2, *LONG)
    require_local_recovery(job, workers)
    assert [job.status(host) for host in (0, 1)] == [0, 0]
    row("a host freezes and thaws, then its successor is killed; 2 + 1 hosts", job)


@pytest.mark.full
def test_a_host_may_be_lost_in_any_phase_and_in_a_recovery(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Six hosts in a row, each replaced by one of six spare hosts."""
    phases = (Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.STEP, Phase.SNAPSHOT)
    stack.enter_context(network_of(8))
    job = SpareHostsJob(stack, tmp_path, 2, 6, *WINDOW, *TWO)
    job.wait_for_iteration(4)
    workers = job.workers(without=1)
    for number, phase in enumerate(phases):
        job.lose(job.stop_at(1, phase, 8 * number + 10))
        job.wait_for_recovery(number + 1)
    require_local_recovery(job, workers)
    # the recovery after the death of a worker on a host that stays
    with job.stopping(1, Phase.RECOVERY) as lost:
        os.kill(job.worker(0).pid, signal.SIGKILL)
    job.lose(lost)
    assert outcome_of(job.run, job.result()) == uninterrupted(2, *TWO)
    row("six hosts, one in each phase and one in a recovery; 2 + 6 hosts", job)


@pytest.mark.full
@pytest.mark.parametrize(
    ("policy", "training"),
    [
        (WINDOW, PP4),
        (("ckpt=gemini",), PP2),
        (("ckpt=flowcheck",), PP2),
        (("ckpt=moc", "ckpt.k_snapshot=4", "ckpt.k_persist=4"), PP2),
        (("ckpt=moetion", "ckpt.experts=4", "ckpt.remote_experts=4"), PP2),
        (("ckpt=checkfreq", "ckpt.every_iters=2"), PP2),
    ],
    ids=["moevement", "gemini", "flowcheck", "moc", "moetion", "checkfreq"],
)
def test_one_of_four_hosts_is_replaced(
    policy: tuple[str, ...],
    training: tuple[str, ...],
    tmp_path: Path,
    stack: ExitStack,
) -> None:
    """checkfreq copies nothing to other hosts, whose disks are one folder here."""
    training = (*training, "train.iterations=40")
    stack.enter_context(network_of(5))
    job = SpareHostsJob(stack, tmp_path, 4, 1, *policy, *training)
    job.wait_for_iteration(8)
    lost = job.stop_at(2, Phase.BACKWARD, 14)
    workers = job.workers(without=lost)
    job.lose(lost)
    assert outcome_of(job.run, job.result()) == uninterrupted(4, *training)
    if policy == WINDOW:
        require_local_recovery(job, workers)
    else:
        require_kept_processes(job, workers)
    assert [job.status(host) for host in (0, 1, 3, 4)] == [0] * 4
    # an agent that waited in vain for the lost one. The agent with the store may leave
    # the barrier before another one has read its answer: torch's DistNetworkError
    assert "torch.distributed.DistStoreError" not in job.said()
    if policy[0] == "ckpt=checkfreq":
        [event] = events_of(job.run, StateResumed)
        assert (event.source, event.iteration >= 8) == ("local disk", True)
    row(f"a host is killed in backward; 4 + 1 hosts, {policy[0]}, {training[0]}", job)


@pytest.mark.full
def test_where_both_holders_of_a_window_are_lost_the_job_goes_on_from_disk(
    tmp_path: Path, stack: ExitStack
) -> None:
    training = (*PP2, "train.iterations=40")
    stack.enter_context(network_of(6))
    job = SpareHostsJob(
        stack, tmp_path, 4, 2, *WINDOW, "ckpt.disk_every_iters=4", *training
    )
    job.wait_for_iteration(8)
    job.stop_at(2, Phase.BACKWARD, 14)
    job.lose(2, 3)
    assert outcome_of(job.run, job.result()) == uninterrupted(4, *training)
    [event] = events_of(job.run, StateResumed)
    assert (event.source, event.iteration >= 8) == ("local disk", True)
    row("both holders of a window, from disk; 4 + 2 hosts", job)


@pytest.mark.chaos
@pytest.mark.timeout(1500)
def test_fifty_lost_hosts_cost_the_others_nothing_that_stays(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Each lost host is started again, and is a spare host later."""
    losses, chosen = 50, random.Random(5)
    training = (*PP2, "parallel.ep=1", "train.iterations=3000")
    stack.enter_context(network_of(5))
    job = SpareHostsJob(
        stack, tmp_path, 2, 3, *WINDOW, *ENDURING, *training, timeout_s=1400
    )
    job.wait_for_iteration(4)
    workers, used = job.workers(without=1), []
    started: list[int] = []
    for loss in range(losses):
        if len(started) >= 2:
            job.wait_for_spare(started[-2])
        watched = job.worker(0)
        used.append([Used.by(pid) for pid in (watched.pid, watched.supervisor_pid)])
        lost = job.stop_at(1, chosen.choice(PHASES))
        job.lose(lost)
        job.start(lost)
        started.append(lost)
        job.wait_for_recovery(loss + 1)
    assert outcome_of(job.run, job.result()) == uninterrupted(2, *training)
    require_local_recovery(job, workers)
    require_level(used)


@pytest.mark.full
def test_without_a_spare_the_job_saves_and_waits_and_goes_on_with_a_later_host(
    tmp_path: Path, stack: ExitStack
) -> None:
    """The spare host is lost first, then a host that trains; both come back."""
    stack.enter_context(network_of(3))
    job = SpareHostsJob(stack, tmp_path, 2, 1, *WINDOW, *LONG, "runtime.node_s=3")
    job.wait_for_iteration(AT)
    workers = job.workers(without=1)
    job.lose(2)
    job.lose(job.stop_at(1, Phase.STEP, AT + 10))
    job.wait_for(
        lambda: "no spare node has taken them: windows go to disk" in job.said(),
        "the save",
    )
    job.start(1)
    assert outcome_of(job.run, job.result()) == uninterrupted(2, *LONG)
    require_local_recovery(job, workers)
    assert [job.status(host) for host in (0, 1)] == [0, 0]


@pytest.mark.full
def test_a_job_that_gets_no_spare_host_in_time_can_be_started_again(
    tmp_path: Path, stack: ExitStack
) -> None:
    """The windows of the lost rank are on disk, too: their holder has saved them."""
    limits = ("runtime.node_s=3", "runtime.progress_s=10", "runtime.form_s=10")
    settings = (*WINDOW, *LONG, *limits, "runtime.join_s=25", "runtime.health_s=5")
    stack.enter_context(network_of(3))
    job = SpareHostsJob(stack, tmp_path, 2, 1, *settings)
    job.wait_for_iteration(AT)
    job.lose(2)
    job.lose(job.stop_at(1, Phase.FORWARD, AT + 10))
    assert job.status(0) == 1
    said = job.said()
    assert f"exitcode  : {REQUEUE}" in said
    assert "no spare node has taken the missing ranks. The job can be started" in said
    again = SpareHostsJob(stack, tmp_path / "again", 2, 1, *settings, run=job.run)
    assert outcome_of(again.run, again.result()) == uninterrupted(2, *LONG)
    [resumed] = events_of(again.run, StateResumed)
    assert (resumed.source, resumed.iteration >= AT + 5) == ("local disk", True)
