"""The ranks that one of torchrun's processes supervises, in a job with spare nodes.

    wait until the machine is a node --> supervise a rank of the node --> the job's end
       ^                                          |
       +---- another machine is the node now -----+

Owns: this loop, the record of the lost machine's death, and the worker that waits
beside the process. Must not: find out which node the machine is
(`elastic.standing_by` does). `elastic.machines` explains machines and nodes.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from moe_ckpt.agent import agent_pid
from moe_ckpt.config import require
from moe_ckpt.elastic.checked_store import CheckedStore
from moe_ckpt.elastic.generations import FENCED, STORE_LOST, Generations
from moe_ckpt.elastic.job_store import answer_exit_barrier, has_static_agents
from moe_ckpt.elastic.machine_calls import Call
from moe_ckpt.elastic.machine_watcher import WatcherProcess
from moe_ckpt.elastic.machines import MachineBoard
from moe_ckpt.elastic.process_failure import Death, FaultClass, ranks_in_words
from moe_ckpt.elastic.standing_by import OwnMachine
from moe_ckpt.elastic.supervisor import Supervisor, complain
from moe_ckpt.elastic.torchrun_variables import Launch, export_launch
from moe_ckpt.elastic.waiting_worker import WaitingWorker
from moe_ckpt.elastic_worker import Worker, open_part, run_one_worker
from moe_ckpt.errors import StoreLostError
from moe_ckpt.job_config import JobConfig
from moe_ckpt.run_folder import read_run_folder
from moe_ckpt.supervised_rank import SupervisedRank, describe_rank, host_of, open_memory
from moe_ckpt.types import Phase

_FAILED = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenNode:
    """A node that this machine is."""

    machine: OwnMachine
    """This machine."""

    launch: Launch
    """This process's position in the job."""

    call: Call
    """Why this machine is the node."""

    waiting: WaitingWorker | None
    """A process that waits for the rank; None: there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Order:
    """What a waiting process needs to become a worker of a rank."""

    node: int
    """The node of the rank."""

    num_nodes: int
    """Number of nodes that train."""

    incarnation: int
    """The incarnation of the rank."""

    memory: str
    """The rank's folder in shared memory."""

    folder: str
    """The run folder."""


def run_with_spares(
    job: JobConfig,
    launch: Launch,
    supervise: Callable[[TakenNode], Supervisor],
    start_waiting: Callable[[], WaitingWorker],
) -> int:
    """Supervise a rank of the node that this machine is, while it is one.

    Args:
        job: The settings.
        launch: This process's position, as torchrun has given it.
        supervise: Returns the supervisor of a rank.
        start_waiting: Starts a process that waits for a rank.

    Returns:
        The exit status.

    Raises:
        ConfigError: The rendezvous is not static, or a setting cannot work.
        StoreLostError: The store is gone while this machine is a spare one.
    """
    wanted = (
        "static (--node-rank, --master-addr, --master-port) with runtime.spare_nodes:"
        " other agents start all ranks again when a node comes back"
    )
    require(has_static_agents(), "torchrun --rdzv-backend", "another one", wanted)
    machine = _own_machine(job, launch)
    if launch.global_rank == 0 and not job.runtime.etcd:
        limit = 'has the job\'s store, and the job ends with it (runtime.etcd: "")'
        complain(f"runtime.spare_nodes: node 0, {socket.gethostname()}, {limit}")
    is_first, host = launch.local_rank == 0, socket.gethostname()
    waiting = None
    if machine.stands_by():
        waiting = start_waiting()
        if is_first:
            complain(f"{host} is a spare node, and waits")
    while True:
        call = machine.wait_for_node()
        if call.node is None:
            if waiting:
                waiting.end()
            return call.status
        taken = TakenNode(
            machine=machine,
            launch=machine.position(call.node),
            call=call,
            waiting=waiting,
        )
        export_launch(taken.launch)
        try:
            supervisor = supervise(taken)
            status = supervisor.run()
        except Exception:
            # otherwise spare nodes would take the node, one after another, for the same
            # error
            with contextlib.suppress(StoreLostError):
                machine.end_job(_FAILED)
            raise
        # FENCED: another machine is the node now. STORE_LOST: nothing can be recorded
        if status == FENCED:
            if is_first:
                given_up = f"was given up as node {call.node}, and waits as a spare one"
                complain(f"{host} {given_up}")
            waiting = start_waiting()
            continue
        if status != STORE_LOST and not supervisor.has_left:
            machine.end_job(status)
        return status


def begin_waiting(
    job: JobConfig, launch: Launch, work: Callable[[Worker], int], order: str
) -> int:
    """Become a worker, in a process that has waited, and return the exit status.

    Args:
        job: The settings.
        launch: The supervisor's position, as torchrun has given it.
        work: As in `run_elastic`.
        order: The JSON form of an `_Order`.
    """
    given = msgspec.json.decode(order, type=_Order)
    here = launch.as_node(given.node, given.num_nodes)
    export_launch(here)
    supervised = describe_rank(
        job,
        here,
        host=lambda: host_of(job, launch),
        folder=lambda: read_run_folder(Path(given.folder)),
        memory=Path(given.memory),
    )
    return run_one_worker(work, Worker(job, supervised, given.incarnation))


def _own_machine(job: JobConfig, launch: Launch) -> OwnMachine:
    runtime = job.runtime
    return OwnMachine(
        launch,
        MachineBoard(CheckedStore(open_part("machines", runtime), heeds_signals=True)),
        open_memory(runtime),
        lambda settings: WatcherProcess(
            settings,
            agent_pid(),
            lambda: MachineBoard(open_part("machines", runtime, own_connection=True)),
            lambda absent: answer_exit_barrier(absent, settings.num_machines),
        ),
        host=host_of(job, launch),
        spare_nodes=runtime.spare_nodes,
        node_s=runtime.node_s,
    )


def begin_first(
    taken: TakenNode | None, supervised: SupervisedRank, incarnation: int
) -> int | None:
    """Let the waiting process of a rank begin; return its pid, or None without one."""
    waiting = taken.waiting if taken else None
    if waiting is None or waiting.has_begun:
        return None
    order = _Order(
        node=supervised.launch.node,
        num_nodes=supervised.launch.num_nodes,
        incarnation=incarnation,
        memory=str(supervised.memory),
        folder=str(supervised.folder.path),
    )
    return waiting.begin(msgspec.json.encode(order).decode())


def report_lost(taken: TakenNode, generations: Generations) -> None:
    """Record the death of a rank whose machine is lost, and print a message."""
    launch, call = taken.launch, taken.call
    ranks = ranks_in_words(launch.local_ranks)
    lost = f"node {launch.node} ({ranks}) is lost: {call.why}"
    death = Death(
        fault=FaultClass.NODE,
        global_rank=launch.global_rank,
        pid=0,
        signal="",
        why=lost,
        iteration=0,
        phase=Phase.BUILD.name.lower(),
        last_seen_unix_s=call.last_seen_unix_s,
        found_unix_s=call.found_unix_s,
    )
    generations.record_death(generations.current(), death)
    if launch.local_rank == 0:
        complain(f"{lost}; {socket.gethostname()}, a spare node, takes its ranks")
