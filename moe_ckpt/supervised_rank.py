"""A rank under supervision: its folders, its node, and how it leaves them.

Owns: the settings of a rank that its supervisor, its daemon and its workers share. Must
not: start processes.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from moe_ckpt.agent import agent_pid
from moe_ckpt.config import (
    AUTO,
    FlowcheckConfig,
    RuntimeConfig,
    require,
)
from moe_ckpt.elastic.network import own_host
from moe_ckpt.elastic.shared_memory import (
    Ended,
    begin_rank,
    end_rank,
    open_memory_root,
    take_over,
)
from moe_ckpt.elastic.standing_by import OwnMachine
from moe_ckpt.elastic.supervisor import REQUEUE
from moe_ckpt.elastic.torchrun_variables import Launch
from moe_ckpt.flowcheck.server_job import ServerJob
from moe_ckpt.job_config import JobConfig
from moe_ckpt.replication.messages import Ticket
from moe_ckpt.replication.placement import num_nodes
from moe_ckpt.replication.tls import open_tls
from moe_ckpt.run_folder import (
    RunFolder,
    find_run_folder,
    job_id,
)
from moe_ckpt.run_lock import release_lock
from moe_ckpt.run_secret import SECRET_FILE, read_secret, ticket_of


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisedRank:
    """A rank under supervision: launch, folder in shared memory, node and job."""

    launch: Launch
    """The rank's position in the job."""

    memory: Path
    """The rank's folder in shared memory."""

    ticket: Ticket
    """Proof towards other nodes that a process belongs to this job."""

    folder: RunFolder
    """The run folder."""

    ranks_per_node: int
    """Number of ranks that fail together."""

    replicas: int
    """Copies of snapshots in other nodes' memory."""

    has_daemon: bool
    """Whether a replica daemon runs beside this rank."""

    host: str
    """Address of this node at which other nodes reach the daemon."""

    @property
    def node(self) -> int:
        """Number of this rank's node."""
        return self.launch.global_rank // self.ranks_per_node

    @property
    def failure(self) -> Path:
        """The file in which a worker leaves its last error for the supervisor."""
        return self.memory / "failure"


def begin_supervised(
    job: JobConfig, launch: Launch, store: dist.Store, machine: OwnMachine | None
) -> SupervisedRank:
    """Return a rank whose supervisor is about to begin, with its folder in memory.

    Args:
        job: The settings.
        launch: The rank's position in the job.
        store: The keys of generations.
        machine: This machine in a job with spare nodes; else None.

    Raises:
        ConfigError: Settings that cannot work.
    """
    ranks_per_node = _ranks_per_node(job, launch)
    agreed = int(
        store.compare_set(
            f"ranks_per_node/{launch.world_size}", "", str(ranks_per_node)
        )
    )
    wanted = "the same on all nodes, as torchrun was told to start"
    require(
        agreed == ranks_per_node,
        "parallel.ranks_per_node",
        f"{ranks_per_node} and {agreed}",
        wanted,
    )
    described = describe_rank(
        job,
        launch,
        host=lambda: machine.host if machine else host_of(job, launch),
        folder=lambda: find_run_folder(job.folder, launch, job.runtime.join_s),
    )
    root = machine.root if machine else open_memory(job.runtime)
    # ranks of an earlier start of the job may have had other numbers on this node
    take_over(root, launch.local_ranks)
    return replace(described, memory=begin_rank(root, launch.global_rank))


def describe_rank(
    job: JobConfig,
    launch: Launch,
    *,
    host: Callable[[], str],
    folder: Callable[[], RunFolder],
    memory: Path = Path(),
) -> SupervisedRank:
    """Return a rank under supervision, as the settings describe it.

    Args:
        job: The settings.
        launch: The rank's position in the job.
        host: Returns the address of this node.
        folder: Returns the run folder.
        memory: The rank's folder in shared memory.

    Raises:
        ConfigError: Settings that cannot work.
    """
    ckpt, ranks_per_node = job.in_memory, _ranks_per_node(job, launch)
    nodes = num_nodes(launch.world_size, ranks_per_node)
    wanted_replicas = ckpt.peer_replicas
    replicas = min(1, nodes - 1) if wanted_replicas == AUTO else int(wanted_replicas)
    limit = (
        f"less than {nodes}, the number of nodes"
        f" (parallel.ranks_per_node={ranks_per_node})"
    )
    require(replicas < nodes, "ckpt.replicas", replicas, limit)
    # all errors of the settings come before the folder: a rank that is killed while it
    # creates a folder leaves that folder behind
    tls = open_tls(ckpt.replication.tls)
    address, run = host(), folder()
    return SupervisedRank(
        launch=launch,
        memory=memory,
        ticket=ticket_of(read_secret(run.path / SECRET_FILE), job_id(), tls),
        folder=run,
        ranks_per_node=ranks_per_node,
        replicas=replicas,
        has_daemon=replicas > 0 or ckpt.disk.every_iters > 0 or ckpt.keeps_own_copy,
        host=address,
    )


def _ranks_per_node(job: JobConfig, launch: Launch) -> int:
    """Return the number of ranks that fail together.

    With auto on a single machine, each rank counts as a node of its own.
    """
    wanted = job.ranks_per_node
    if job.runtime.spare_nodes:
        # a spare node takes all ranks of another one
        require(
            wanted in (AUTO, launch.local_world_size),
            "parallel.ranks_per_node",
            wanted,
            f"auto, or {launch.local_world_size} as torchrun starts on a node, with"
            " runtime.spare_nodes",
        )
        return launch.local_world_size
    if wanted == AUTO:
        return (
            launch.local_world_size
            if launch.local_world_size < launch.world_size
            else 1
        )
    divides = launch.world_size % int(wanted) == 0
    require(
        divides,
        "parallel.ranks_per_node",
        wanted,
        f"a divisor of {launch.world_size} processes",
    )
    return int(wanted)


def host_of(job: JobConfig, launch: Launch) -> str:
    """Return the address of this node.

    Raises:
        ConfigError: `ckpt.network_interface` has no address.
    """
    return own_host(launch, job.in_memory.replication.network_interface)


def open_memory(runtime: RuntimeConfig) -> Path:
    """Return this node's folder in shared memory.

    Raises:
        ConfigError: `runtime.shared_memory` cannot be used.
    """
    return open_memory_root(
        Path(runtime.shared_memory), agent_pid(), patience_s=runtime.heartbeat_s
    )


def leave_rank(
    supervised: SupervisedRank, status: int, *, is_replaced: bool = False
) -> None:
    """Leave the node's memory and, if the job ends here, the run folder.

    Args:
        supervised: The rank.
        status: The exit status of the supervisor.
        is_replaced: Whether a spare node has the rank now.
    """
    if is_replaced:
        # the folder of the node stays: this machine may become another node
        shutil.rmtree(supervised.memory, ignore_errors=True)
        return
    launch, how = supervised.launch, how_ended(supervised.launch, status)
    if launch.global_rank == 0 and (status == REQUEUE or how is not Ended.TO_GO_ON):
        # if the folder's file system is gone, its lock is gone, too
        with contextlib.suppress(OSError):
            release_lock(supervised.folder.path)
    end_rank(supervised.memory.parent, launch.global_rank, launch.local_ranks, how)


def how_ended(launch: Launch, status: int) -> Ended:
    """Return how a supervisor ends with an exit status.

    Args:
        launch: The rank's position in the job.
        status: The exit status.

    Returns:
        Whether a later start on this node uses the rank's memory.
    """
    if status == 0:
        return Ended.WELL
    if status == 128 + signal.SIGINT:
        return Ended.FOR_GOOD
    # torchrun also sends SIGTERM when it starts all ranks again, with more or fewer
    # nodes
    is_told = status == REQUEUE or status > 128
    return Ended.FOR_GOOD if launch.is_last_attempt and not is_told else Ended.TO_GO_ON


def servers_of(job: JobConfig, launch: Launch) -> ServerJob | None:
    """Return the job's checkpoint servers; None for policies without servers."""
    if not isinstance(job.ckpt, FlowcheckConfig):
        return None
    return ServerJob(job.ckpt, job.runtime, launch.global_rank)
