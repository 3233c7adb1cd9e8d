"""A rank that lives through deaths: its supervisor, its daemon, and how its workers find each other again.

The process that torchrun starts imports everything slow, forks the daemon and then worker after worker.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from launcher.config import AUTO, Settings
from launcher.faults.carry_out import carry_out
from launcher.job_store import open_store, use_hosted_store
from launcher.network import own_host
from launcher.run_folder import wait_for_run_folder
from launcher.torchrun import Launch, has_agent_store
from moe_ckpt.agent import agent_pid, die_with_parent
from moe_ckpt.config import FlowcheckConfig, InMemoryConfig, MoetionConfig, require
from moe_ckpt.elastic.backends import Backend, GlooBackend, NcclBackend
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.elastic.generations import Generations, Member, Membership
from moe_ckpt.elastic.process_groups import ElasticGroups, GroupTimeouts
from moe_ckpt.elastic.shared_memory import open_memory_root, rank_memory, take_over
from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.elastic.supervisor import Supervisor, SupervisorLimits, run_and_exit
from moe_ckpt.faults.schedule import Kill
from moe_ckpt.replication.client import DaemonClient
from moe_ckpt.replication.daemon import DaemonSettings, run_daemon
from moe_ckpt.replication.messages import Address, Ticket, parse_address
from moe_ckpt.replication.placement import num_nodes
from moe_ckpt.types import ParallelLayout


def wants_supervisor(settings: Settings) -> bool:
    """Return whether ranks of this run are supervised: by default where the policy recovers a lost rank from memory."""
    supervisor = settings.runtime.guard
    return isinstance(settings.ckpt, InMemoryConfig) if supervisor == AUTO else bool(supervisor)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """Where a supervised rank is: its launch, its folder in shared memory, and what its node and the job look like."""

    launch: Launch
    memory: Path
    ticket: Ticket
    ranks_per_node: int
    replicas: int
    has_daemon: bool
    host: str

    @property
    def node(self) -> int:
        return self.launch.global_rank // self.ranks_per_node


def supervise_rank(settings: Settings, launch: Launch, train: Callable[[RankPlace, int], int]) -> int:
    """Supervise a rank until the job is done or has failed; return the exit status. `train(place, life)` is the worker.

    Raises ConfigError for what cannot work.
    """
    wanted = "ckpt=moevement, flowcheck, gemini or checkfreq (dense and none: torchrun --max-restarts)"
    require(isinstance(settings.ckpt, InMemoryConfig), "runtime.guard", settings.runtime.guard, f"false, or {wanted}")
    if not has_agent_store():
        use_hosted_store(launch, _start_beside)
    store = open_store("generations")
    place = _place(settings, launch, store)
    _start_faults(settings, place)
    page = StatusPage(place.memory / "page")
    gc.freeze()  # workers share imported objects; the garbage collector must not visit them
    limits = SupervisorLimits(
        heartbeat_s=settings.runtime.heartbeat_s,
        progress_s=settings.runtime.progress_s,
        max_deaths=settings.runtime.max_deaths,
    )
    generations = Generations(store)
    start_daemon = (lambda: _start_daemon(settings, place)) if place.has_daemon else None
    return Supervisor(
        launch.global_rank, page, generations, lambda life: train(place, life), limits, start_daemon
    ).run()


def open_groups(settings: Settings, page: StatusPage, transport: Backend) -> ElasticGroups:
    """Return process groups that outlive generations, registered with torch; this process is alone in them yet."""
    runtime = settings.runtime
    timeouts = GroupTimeouts(form_s=runtime.form_s, operation_s=runtime.operation_s, abort_s=runtime.abort_s)
    groups = ElasticGroups(transport, timeouts, page.wait, page.wait_on_device)
    groups.register()
    return groups


def open_transport(*, on_gpu: bool) -> Backend:
    """Return what moves bytes between ranks; call once the device is chosen."""
    return NcclBackend() if on_gpu else GlooBackend()


def open_membership(
    settings: Settings, place: RankPlace, life: int, page: StatusPage, groups: ElasticGroups
) -> Membership:
    """Return a worker's way through generations, over torchrun's store."""
    launch, runtime = place.launch, settings.runtime
    return Membership(
        Member(global_rank=launch.global_rank, world_size=launch.world_size, life=life),
        open_store("generations"),
        open_store("generations", own_connection=True),
        groups,
        page,
        join_s=runtime.join_s,
        grace_s=runtime.grace_s,
    )


def open_elastic(
    settings: Settings, layout: ParallelLayout, place: RankPlace, membership: Membership
) -> ElasticContext:
    """Return a worker's means to survive the loss of ranks."""
    runtime, addresses = settings.runtime, open_store("daemons")
    return ElasticContext(
        member=membership.member,
        settle=membership.settle,
        page=membership.page,
        memory=place.memory,
        daemon=DaemonClient(place.memory, timeout_s=runtime.copy_s) if place.has_daemon else None,
        address_of=lambda rank: _address(addresses, rank),
        ticket=place.ticket,
        replicas=place.replicas,
        ranks_per_node=place.ranks_per_node,
        copy_s=runtime.copy_s,
        at_end=membership.at_end,
        peers=layout.ranks_per_stage if isinstance(settings.ckpt, MoetionConfig) else None,
        serves_itself=isinstance(settings.ckpt, FlowcheckConfig),
    )


def _place(settings: Settings, launch: Launch, store: dist.Store) -> RankPlace:
    assert isinstance(settings.ckpt, InMemoryConfig)
    ranks_per_node = _ranks_per_node(settings, launch)
    agreed = int(store.compare_set(f"ranks_per_node/{launch.world_size}", "", str(ranks_per_node)))
    wanted = "the same on all nodes, as torchrun was told to start"
    require(agreed == ranks_per_node, "parallel.ranks_per_node", f"{ranks_per_node} and {agreed}", wanted)
    nodes = num_nodes(launch.world_size, ranks_per_node)
    wanted = settings.ckpt.replicas
    replicas = min(1, nodes - 1) if wanted == AUTO else int(wanted)
    limit = f"less than {nodes}, the number of nodes (parallel.ranks_per_node={ranks_per_node})"
    require(replicas < nodes, "ckpt.replicas", replicas, limit)
    root = open_memory_root(Path(settings.runtime.shared_memory), agent_pid())
    first = launch.global_rank - launch.local_rank
    take_over(root, range(first, first + launch.local_world_size))
    token = store.compare_set("token", "", os.urandom(16).hex()).decode()
    return RankPlace(
        launch=launch,
        memory=rank_memory(root, launch.global_rank),
        ticket=Ticket(run_id=token[:8], token=token),
        ranks_per_node=ranks_per_node,
        replicas=replicas,
        has_daemon=replicas > 0 or settings.ckpt.disk_every_iters > 0 or isinstance(settings.ckpt, FlowcheckConfig),
        host=own_host(launch, settings.ckpt.network_interface),
    )


def _ranks_per_node(settings: Settings, launch: Launch) -> int:
    """Return how many ranks fail together; on a single machine each is taken for a node of its own."""
    wanted = settings.parallel.ranks_per_node
    if wanted == AUTO:
        return launch.local_world_size if launch.local_world_size < launch.world_size else 1
    divides = launch.world_size % int(wanted) == 0
    require(divides, "parallel.ranks_per_node", wanted, f"a divisor of {launch.world_size} processes")
    return int(wanted)


def _start_daemon(settings: Settings, place: RankPlace) -> int:
    """Return the pid of a daemon that will announce its address; until then it has none."""
    open_store("daemons").delete_key(str(place.launch.global_rank))
    supervisor_pid = os.getpid()
    return _start_beside(lambda: _keep(settings, place, supervisor_pid))


def _keep(settings: Settings, place: RankPlace, supervisor_pid: int) -> int:
    assert isinstance(settings.ckpt, InMemoryConfig)
    page = StatusPage(place.memory / "page")
    store = open_store("daemons")
    run_daemon(
        DaemonSettings(
            rank_folder=place.memory,
            global_rank=place.launch.global_rank,
            ticket=place.ticket,
            host=place.host,
            timeout_s=settings.runtime.copy_s,
            copy_deadline_s=settings.runtime.copy_s,
            caps=settings.ckpt.max_bytes_per_s,
            serves_itself=isinstance(settings.ckpt, FlowcheckConfig),
        ),
        supervisor_pid=supervisor_pid,
        may_send=lambda: not page.communicates,
        announce=lambda address: store.set(str(place.launch.global_rank), str(address)),
    )


def _start_faults(settings: Settings, place: RankPlace) -> None:
    """Let a process beside the job inflict what the settings ask for on this node's workers."""
    launch = place.launch
    first = launch.global_rank - launch.local_rank
    here = range(first, first + launch.local_world_size)
    kills = [kill for kill in settings.fault.kills(launch.world_size) if kill.rank in here]
    if launch.local_rank != 0 or not kills:
        return
    _start_beside(lambda: _inflict(kills, place, settings.runtime.join_s))


def _start_beside(main: Callable[[], int]) -> int:
    """Start a process that lives as long as this supervisor, at most; return its pid."""
    supervisor_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(signal.SIGKILL, parent=supervisor_pid)
        run_and_exit(main)
    return pid


def _inflict(kills: Sequence[Kill], place: RankPlace, join_s: float) -> int:
    run = wait_for_run_folder(join_s)
    done = carry_out(kills, run, ranks_per_node=place.ranks_per_node, say=lambda text: print(text, file=sys.stderr))
    return 0 if done else 1


def _address(store: dist.Store, global_rank: int) -> Address:
    return parse_address(store.get(str(global_rank)).decode())
