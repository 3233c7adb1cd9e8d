"""A spare node takes the place of a lost node or of a sick node.

The node of rank 0 may be lost, too. A real torchrun has three agents: two nodes train,
and one waits.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from moe_ckpt.events import WorkerStarted
from tests.elastic.etcd_server import EtcdServer
from tests.harness.jobs.agents_job import AgentsJob
from tests.harness.jobs.references import outcome_of, uninterrupted
from tests.harness.jobs.training import events_of
from tests.ports import held_port
from tests.scenarios import PP2

pytestmark = pytest.mark.full

TRAINING = (*PP2, "parallel.ep=1", "train.iterations=60")
WINDOW = ("ckpt=moevement", "ckpt.window=2", "ckpt.replicas=1")
AT = 20


def start_on_etcd(stack: ExitStack, folder: Path, *overrides: str) -> AgentsJob:
    """Start the job's first agent, with an etcd cluster that no node hosts.

    torchrun's rendezvous and the job's store are on the etcd cluster.
    """
    etcd = EtcdServer(stack, folder, "--enable-v2")
    if importlib.util.find_spec("etcd") is None:
        pytest.skip(
            "python-etcd: got none, wanted it for torchrun's etcd-v2 (pip install"
            " 'moe-ckpt[etcd]')"
        )
    rendezvous = ("--rdzv-backend=etcd-v2", f"--rdzv-endpoint={etcd.endpoint}")
    job = AgentsJob(
        stack, folder, 2, rendezvous, f"runtime.etcd={etcd.endpoint}", *overrides
    )
    job.start_agent()
    return job


def start_on_c10d(stack: ExitStack, folder: Path, *overrides: str) -> AgentsJob:
    """Start the job's first agent, which hosts torchrun's rendezvous.

    The supervisor of that agent hosts the job's store.
    """
    port = held_port(stack)
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}")
    job = AgentsJob(stack, folder, 2, rendezvous, *overrides)
    job.start_agent()
    # otherwise another agent could host the rendezvous
    job.wait_for(lambda: _listens(port), "the rendezvous of the first agent")
    return job


def _listens(port: int) -> bool:
    with (
        contextlib.suppress(ConnectionRefusedError),
        socket.create_connection(("127.0.0.1", port)),
    ):
        return True
    return False


def start_static(stack: ExitStack, folder: Path, *overrides: str) -> AgentsJob:
    """Start a job of two nodes and a spare node, with a static rendezvous."""
    port = held_port(stack)
    rendezvous = ("--master-addr=127.0.0.1", f"--master-port={port}")
    job = AgentsJob(stack, folder, 2, rendezvous, *overrides, num_spares=1)
    for _ in range(3):
        job.start_agent()
    job.wait_for_iteration(AT)
    return job


@pytest.mark.parametrize("rank", [0, 1])
def test_with_a_store_on_etcd_a_spare_node_takes_the_ranks_of_any_node(
    rank: int, tmp_path: Path, stack: ExitStack
) -> None:
    """torchrun's own store is on the node of rank 0, and lost with that node."""
    etcd = EtcdServer(stack, tmp_path)
    job = start_static(
        stack, tmp_path, f"runtime.etcd={etcd.endpoint}", *WINDOW, *TRAINING
    )
    others = {each: job.worker(each).pid for each in range(2) if each != rank}
    lost = job.agent_of(rank)
    job.lose(rank)
    assert job.statuses() == [
        -signal.SIGKILL if agent == lost else 0 for agent in job.agents
    ], job.said()
    assert outcome_of(job.run, job.result()) == uninterrupted(2, *TRAINING)
    assert {
        each: events_of(job.run, WorkerStarted, each)[-1].pid for each in others
    } == others


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_spare_node_takes_the_ranks_of_a_node_that_is_told_to_end(
    number: signal.Signals, tmp_path: Path, stack: ExitStack
) -> None:
    """A scheduler drains one node, or a user ends one agent."""
    job = start_static(stack, tmp_path, *WINDOW, *TRAINING)
    worker, drained = job.worker(0).pid, job.agent_of(1)
    os.kill(drained, number)
    statuses = dict(zip(job.agents, job.statuses(), strict=True))
    assert statuses.pop(drained) != 0
    assert set(statuses.values()) == {0}, job.said()
    assert outcome_of(job.run, job.result()) == uninterrupted(2, *TRAINING)
    assert events_of(job.run, WorkerStarted)[-1].pid == worker


def test_without_etcd_all_agents_end_with_the_node_that_has_the_store(
    tmp_path: Path, stack: ExitStack
) -> None:
    """The agent that waits ends, too: nothing will ever call it."""
    job = start_static(stack, tmp_path, *WINDOW, *TRAINING)
    job.lose(0)
    assert job.statuses() == [-signal.SIGKILL, 1, 1], job.said()
    assert "has the job's store, and the job ends with it" in job.said()


def start_training(job: AgentsJob) -> None:
    """Start two more agents; return once two agents train and the third waits."""
    job.start_agent()
    job.wait_for_iteration(1)
    job.start_agent()
    job.wait_for_iteration(AT)


@pytest.mark.parametrize("rank", [0, 1])
def test_any_node_may_be_lost_where_the_store_is_on_etcd(
    rank: int, tmp_path: Path, stack: ExitStack
) -> None:
    """torchrun gives the address of rank 0's node to all ranks.

    Without etcd, the loss of that node ends a job.
    """
    job = start_on_etcd(stack, tmp_path, *WINDOW, *TRAINING)
    start_training(job)
    lost = job.agent_of(rank)
    job.lose(rank)
    assert job.statuses() == [
        -signal.SIGKILL if agent == lost else 0 for agent in job.agents
    ], job.said()
    assert outcome_of(job.run, job.result()) == uninterrupted(2, *TRAINING)


def test_a_sick_node_leaves_its_rank_to_a_spare_one(
    tmp_path: Path, stack: ExitStack
) -> None:
    job = start_on_c10d(
        stack,
        tmp_path,
        *WINDOW,
        *TRAINING,
        'runtime.health="test $RANK != 1"',
        "runtime.sick_place=leave",
    )
    start_training(job)
    sick = job.agent_of(1)
    os.kill(job.worker(1).pid, signal.SIGKILL)
    assert job.statuses() == [1 if agent == sick else 0 for agent in job.agents], (
        job.said()
    )
    said = job.said()
    assert (
        "the place of rank 1, is sick, no worker is started there again:"
        " runtime.health='test $RANK != 1'" in said
    )
    assert "runtime.sick_place=leave: this node leaves the job to a spare one" in said
    assert "not saved within" not in said, (
        "the job's store was there for the last saves"
    )
    assert outcome_of(job.run, job.result()) == uninterrupted(2, *TRAINING)
