"""A rank that survives deaths, for any training loop: supervisor, daemon and workers.

    # in the process that torchrun starts, after all slow imports
    sys.exit(run_elastic(job, read_launch(), work))

    # in each worker; the supervisor forks one after another
    def work(worker: Worker) -> int:
        ...    # `moe_ckpt.loop` has the worker's life

The daemon keeps replicas of snapshots. Owns: the addresses by which the processes of a
rank find each other. Must not: know Hydra, a launcher or a training framework.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from moe_ckpt.agent import agent_pid
from moe_ckpt.config import (
    AUTO,
    FlowcheckConfig,
    RuntimeConfig,
    require,
)
from moe_ckpt.elastic.backend_choice import open_backend
from moe_ckpt.elastic.backends import die
from moe_ckpt.elastic.checked_store import CheckedStore, end_silent_connections
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.elastic.failures import (
    WORKER_FAULT,
    failure_of,
    is_fault,
    reserve_failure,
    take_failure,
    text_of,
    write_failure,
)
from moe_ckpt.elastic.generations import (
    FENCED,
    NODE_REPLACED,
    STARTED_AGAIN,
    STORE_LOST,
    Generations,
    Late,
    Member,
    Membership,
)
from moe_ckpt.elastic.janitor import janitor_of_node
from moe_ckpt.elastic.job_store import (
    answer_exit_barrier,
    has_static_agents,
    hosts_store,
    open_store,
    say_once,
    use_etcd,
    use_hosted_store,
)
from moe_ckpt.elastic.live_workers import remove_live, write_live
from moe_ckpt.elastic.machine_calls import Call
from moe_ckpt.elastic.machine_watcher import WatcherProcess
from moe_ckpt.elastic.network import own_host
from moe_ckpt.elastic.process_failure import Death, FaultClass
from moe_ckpt.elastic.process_groups import BACKEND, ElasticGroups, GroupTimeouts
from moe_ckpt.elastic.shared_memory import (
    Ended,
    begin_rank,
    end_rank,
    has_rank,
    open_memory_root,
    take_over,
)
from moe_ckpt.elastic.sick_place import SickPlaceRules
from moe_ckpt.elastic.standing_by import OwnMachine
from moe_ckpt.elastic.status_page import StatusPage, start_heartbeat
from moe_ckpt.elastic.stop_board import StopBoard
from moe_ckpt.elastic.supervisor import (
    REQUEUE,
    Supervisor,
    SupervisorHooks,
    SupervisorLimits,
    start_beside,
)
from moe_ckpt.elastic.torchrun import (
    Launch,
    export_launch,
    has_agent_store,
    require_spares,
)
from moe_ckpt.engine.session import Session
from moe_ckpt.engine.worker_loop import GenerationLoop, TrainingRun
from moe_ckpt.errors import ConfigError, MoeCkptError, RanksMissingError
from moe_ckpt.events import EventLog, LastSaveDone
from moe_ckpt.flowcheck.server_job import ServerJob
from moe_ckpt.job_config import JobConfig
from moe_ckpt.replication.client import DaemonClient
from moe_ckpt.replication.daemon import DaemonSettings, run_daemon
from moe_ckpt.replication.final_save import (
    save_last,
    save_while_missing,
    saved_iterations,
)
from moe_ckpt.replication.holders import CopyHolders, PeerHolders
from moe_ckpt.replication.messages import Ticket, parse_address
from moe_ckpt.replication.placement import num_nodes
from moe_ckpt.replication.tls import open_tls
from moe_ckpt.run_folder import RunFolder, find_run_folder, job_id, require_lasting
from moe_ckpt.run_lock import release_lock
from moe_ckpt.run_secret import SECRET_FILE, read_secret, ticket_of
from moe_ckpt.types import ParallelLayout, Phase

# a new connection to a busy store may take seconds
_REPORT_S = 10.0
_PRINT_S = 1.0
# an exit status
_CUDA_IS_LOST = 9
_FAILED = 1
# the rank of this process, which forked workers inherit
_own_rank: list[int] = []


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


class Worker:
    """One of the successive processes of a rank; implements `loop.WorkerProcess`.

    The training thread calls all methods.
    """

    is_supervised = True

    def __init__(
        self, job: JobConfig, supervised: SupervisedRank, incarnation: int
    ) -> None:
        """Begin a worker.

        Args:
            job: The settings.
            supervised: The rank.
            incarnation: Number of workers of this rank before this one, in this job.
        """
        self.job = job
        self.supervised = supervised
        self.incarnation = incarnation
        self.page = StatusPage(supervised.memory / "page")
        self._ckpt = job.in_memory
        self._servers = _servers(job, supervised.launch)
        self._membership: Membership | None = None
        start_heartbeat(self.page)

    @property
    def launch(self) -> Launch:
        """This rank's position in the job."""
        return self.supervised.launch

    @property
    def membership(self) -> Membership:
        """This worker's way through generations, over the job's store."""
        assert self._membership is not None, "join_world comes first"
        return self._membership

    @property
    def is_first_start(self) -> bool:
        """Whether no generation and no attempt of torchrun came before this one."""
        return self.launch.attempt == 0 and self.page.generation == 1

    def join_world(self, *, on_gpu: bool) -> None:
        """Make the world a group that survives the loss of ranks.

        No other rank is in the group until a generation forms. Later groups of the
        backends `elastic` and `elastic_cpu` also survive the loss of ranks.

        Args:
            on_gpu: Whether ranks train on GPUs.

        Raises:
            ConfigError: `runtime.backend` does not fit the devices.
        """
        launch, runtime = self.launch, self.job.runtime
        backend = open_backend(
            on_gpu=on_gpu, kind=runtime.backend, share_gpus=runtime.share_gpus
        )
        timeouts = GroupTimeouts(
            form_s=runtime.form_s,
            operation_s=runtime.operation_s,
            abort_s=runtime.abort_s,
        )
        groups = ElasticGroups(
            backend,
            timeouts,
            self.page.wait,
            self.page.wait_on_device,
            shares=self._ckpt.shares_groups,
        )
        groups.register()
        self._membership = Membership(
            Member(
                global_rank=launch.global_rank,
                world_size=launch.world_size,
                incarnation=self.incarnation,
            ),
            _open_store("generations", runtime),
            # the watching thread always waits in this connection
            _open_store("generations", runtime, own_connection=True),
            groups,
            self.page,
            join_s=runtime.join_s,
            grace_s=runtime.grace_s,
            late=Late(after_s=2 * runtime.node_s, act=self._save_windows)
            if runtime.spare_nodes
            else None,
        )
        # the ranks do not meet here: a store of this process is enough until the first
        # generation forms
        dist.init_process_group(
            BACKEND,
            store=dist.HashStore(),
            rank=launch.global_rank,
            world_size=launch.world_size,
        )

    def context(self, layout: ParallelLayout) -> ElasticContext:
        """Return the means to survive the loss of ranks, for `attach`."""
        supervised, membership, ckpt = self.supervised, self.membership, self._ckpt
        copy_s = self.job.runtime.copy_s
        return ElasticContext(
            member=membership.member,
            page=self.page,
            memory=supervised.memory,
            daemon=DaemonClient(supervised.memory, timeout_s=copy_s)
            if supervised.has_daemon
            else None,
            holders=self._holders(
                layout.ranks_per_stage if ckpt.copies_within_stage else None
            ),
            ticket=supervised.ticket,
            copy_s=copy_s,
            at_end=membership.at_end,
        )

    def _holders(self, stage_ranks: int | None) -> CopyHolders:
        supervised = self.supervised
        addresses = CheckedStore(
            _open_store("daemons", self.job.runtime), self.page.waits
        )
        peers = PeerHolders(
            global_rank=supervised.launch.global_rank,
            world_size=supervised.launch.world_size,
            ranks_per_node=supervised.ranks_per_node,
            num_peers=supervised.replicas,
            address_of=lambda rank: parse_address(addresses.get(str(rank)).decode()),
            stage_ranks=stage_ranks,
        )
        if self._servers:
            return self._servers.holders(peers, supervised.ticket, self.page.waits)
        return peers

    def _save_windows(self, missing: Sequence[int]) -> None:
        """Save windows to disk, because ranks are missing and no spare node has come.

        Args:
            missing: The missing ranks.
        """
        memory, runtime = self.supervised.memory, self.job.runtime
        if not self.supervised.has_daemon or not runtime.stop_save_s:
            return
        if self.launch.global_rank == 0:
            _say(
                f"ranks {', '.join(map(str, missing))} are missing, and no spare node"
                " has taken them: windows go to disk, and the job waits"
                f" runtime.join_s={runtime.join_s:g} seconds for a spare node"
            )
        daemon = DaemonClient(memory, timeout_s=runtime.copy_s)
        self.page.wait_for_copies(True)
        try:
            save_while_missing(memory, daemon, runtime.copy_s, missing)
        except (MoeCkptError, TimeoutError) as error:
            _say(f"rank {self.launch.global_rank}: not saved while it waits: {error}")
        finally:
            daemon.close()
            self.page.wait_for_copies(False)

    def enter_phase(self, phase: Phase) -> None:
        """Show this rank's phase on the status page; a recovery stays a recovery."""
        self.page.enter_in_iteration(phase)

    def open_folder(self) -> RunFolder:
        """Return the run folder, after an announcement of this worker there.

        The status command and fault injection read the worker's file.
        """
        if self._servers:
            self._servers.announce(self.supervised.folder.path)
        write_live(
            self.supervised.folder.path,
            global_rank=self.launch.global_rank,
            node=self.supervised.node,
            supervisor_pid=os.getppid(),
            memory=self.supervised.memory,
            incarnation=self.incarnation,
        )
        return self.supervised.folder

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold this rank until the ranks that build data sets first have done so.

        These are the first rank of the job, then the first rank of this node. An
        earlier process of either rank counts.

        Raises:
            ConfigError: The wait takes longer than `runtime.join_s`, which the message
                names.
        """
        launch, runtime = self.launch, self.job.runtime
        store = CheckedStore(_open_store("turns", runtime), self.page.waits)
        first = launch.global_rank - launch.local_rank
        before = f"{first}" if launch.local_rank else "0" if first else None
        if before is not None:
            try:
                store.wait([before], timedelta(seconds=runtime.join_s))
            except dist.DistStoreError as error:
                wanted = f"rank {before} to have built its data sets by then"
                raise ConfigError(
                    f"runtime.join_s: got {runtime.join_s:g} seconds, wanted {wanted}"
                ) from error
        yield
        if not launch.local_rank:
            store.set(f"{first}", "built")

    def run(
        self,
        session: Session,
        training: TrainingRun,
        events: EventLog,
        *,
        start: Callable[[], int],
        finish: Callable[[int], dict[str, Any]],
    ) -> dict[str, Any]:
        """Return the result of `finish(deaths)` once all ranks have finished.

        Args:
            session: The session of this worker.
            training: The rank's iterations.
            events: The log of this rank's events.
            start: Returns the iteration from which a run without saved state begins.
                Collective; may be called again.
            finish: Returns the result. Collective; may be called again.

        Raises:
            Exception: An error of training, unless the loss of ranks caused the error.
        """
        return GenerationLoop(self.membership, session, training, events).run(
            start, finish
        )

    def retire(self, folder: RunFolder) -> None:
        """Remove this worker's file from the run folder."""
        remove_live(folder.path, self.launch.global_rank)


def run_elastic(
    job: JobConfig,
    launch: Launch,
    work: Callable[[Worker], int],
    *,
    beside: Callable[[SupervisedRank], None] = lambda _: None,
) -> int:
    """Supervise a rank until the job is done or has failed.

    Args:
        job: The settings.
        launch: This rank's position in the job.
        work: Trains in a forked process, and returns its exit status. After an
            exception that is a fault of the hardware, the supervisor replaces the
            process. A MoeCkptError is printed as one message.
        beside: May start processes that live at most as long as the supervisor.

    Returns:
        The exit status.

    Raises:
        ConfigError: Settings that cannot work, or a mirror port that cannot be read.
    """
    require_forkable()
    runtime = job.runtime
    require_lasting(job.folder)
    require(
        not _own_rank,
        "run_elastic",
        "a second one, inside a worker of the first",
        "one a process",
    )
    require(
        agent_pid() > 0,
        "torchrun",
        "a rank that is the first process of its container",
        "torchrun as its parent",
    )
    _own_rank.append(launch.global_rank)
    if runtime.spare_nodes:
        require_spares(launch, runtime.spare_nodes)
    if runtime.etcd:
        use_etcd(runtime.etcd)
    elif not has_agent_store():
        # torchrun shares no store if TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set, which
        # spare agents of torch 2.13 need
        use_hosted_store(launch, start_beside)
    # a scheduler's signal may arrive while the network to the store is cut
    store = CheckedStore(_open_store("generations", runtime), heeds_signals=True)
    # all workers share the imports: garbage collection must not touch these pages
    gc.freeze()
    if not runtime.spare_nodes:
        return _supervise(job, launch, store, work, beside).run()
    return _run_with_spares(
        job,
        launch,
        lambda place: _supervise(job, place.launch, store, work, beside, place),
    )


def _run_with_spares(
    job: JobConfig, launch: Launch, supervise: Callable[[_TakenNode], Supervisor]
) -> int:
    """Supervise a rank of the node that this machine is, while it is one.

    Args:
        job: The settings.
        launch: This process's position, as torchrun has given it.
        supervise: Returns the supervisor of a rank.

    Returns:
        The exit status.

    Raises:
        ConfigError: The rendezvous is not static.
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
        _say(f"runtime.spare_nodes: node 0, {socket.gethostname()}, {limit}")
    is_first, host = launch.local_rank == 0, socket.gethostname()
    if is_first and machine.is_spare:
        _say(f"{host} is a spare node, and waits")
    while True:
        call = machine.wait_for_node()
        if call.node is None:
            return call.status
        place = _TakenNode(
            machine=machine, launch=machine.position(call.node), call=call
        )
        export_launch(place.launch)
        supervisor = supervise(place)
        status = supervisor.run()
        # FENCED: another machine is the node now. STORE_LOST: nothing can be recorded
        if status == FENCED:
            if is_first:
                given_up = f"was given up as node {call.node}, and waits as a spare one"
                _say(f"{host} {given_up}")
            continue
        if status != STORE_LOST and not supervisor.has_left:
            machine.end_job(status)
        return status


@dataclass(frozen=True, kw_only=True, slots=True)
class _TakenNode:
    """A node that this machine is."""

    machine: OwnMachine
    """This machine."""

    launch: Launch
    """This process's position in the job."""

    call: Call
    """Why this machine is the node."""


def _own_machine(job: JobConfig, launch: Launch) -> OwnMachine:
    runtime = job.runtime
    return OwnMachine(
        launch,
        CheckedStore(_open_store("machines", runtime), heeds_signals=True),
        _open_memory(runtime),
        lambda settings: WatcherProcess(
            settings,
            agent_pid(),
            lambda: _open_store("machines", runtime, own_connection=True),
            lambda absent: answer_exit_barrier(absent, settings.num_machines),
        ),
        host=_host(job, launch),
        spare_nodes=runtime.spare_nodes,
        node_s=runtime.node_s,
    )


def _host(job: JobConfig, launch: Launch) -> str:
    return own_host(launch, job.in_memory.replication.network_interface)


def _open_memory(runtime: RuntimeConfig) -> Path:
    return open_memory_root(
        Path(runtime.shared_memory), agent_pid(), patience_s=runtime.heartbeat_s
    )


def _supervise(
    job: JobConfig,
    launch: Launch,
    store: dist.Store,
    work: Callable[[Worker], int],
    beside: Callable[[SupervisedRank], None],
    taken: _TakenNode | None = None,
) -> Supervisor:
    """Return the supervisor of a rank.

    Args:
        job: The settings.
        launch: This process's position in the job.
        store: The keys of generations.
        work: As in `run_elastic`.
        beside: As in `run_elastic`.
        taken: The node of the rank in a job with spare nodes; else None.
    """
    runtime = job.runtime
    # supervisors that torchrun has started again find their rank's folder
    replaces = bool(
        taken
        and taken.call.why
        and not has_rank(taken.machine.root, launch.global_rank)
    )
    supervised = _supervised_rank(job, launch, store, taken)
    if servers := _servers(job, launch):
        servers.prepare()
    if taken and replaces:
        _report_lost(taken, Generations(store))
    else:
        beside(supervised)
    root, page = supervised.memory.parent, StatusPage(supervised.memory / "page")
    reserve_failure(supervised.failure)
    limits = SupervisorLimits(
        heartbeat_s=runtime.heartbeat_s,
        progress_s=runtime.progress_s,
        max_deaths=runtime.max_deaths,
        stop_save_s=runtime.stop_save_s,
        sick=SickPlaceRules(
            deaths=runtime.sick_deaths,
            within_s=runtime.sick_within_s,
            health=runtime.health,
            health_s=runtime.health_s,
        ),
    )
    hooks = SupervisorHooks(
        start_daemon=(lambda: _start_daemon(job, supervised))
        if supervised.has_daemon
        else None,
        take_failure=lambda: take_failure(supervised.failure),
        save_last=(lambda: save_and_report(supervised, runtime.stop_save_s))
        if runtime.stop_save_s
        else None,
        notice=Path(runtime.notice_file) if runtime.notice_file else None,
        # this node's agent ends as if the node were lost: torchrun keeps the rendezvous
        # open for a spare node
        leave=(lambda: os.kill(agent_pid(), signal.SIGTERM))
        if runtime.sick_place == "leave"
        else None,
        free_memory=lambda status: _leave(
            supervised, status, is_replaced=taken is not None and status == FENCED
        ),
        node_processes=taken.machine.processes
        if taken
        else lambda: janitor_of_node(root),
    )
    StopBoard(_open_store("stop", runtime), launch.world_size).begin(launch.global_rank)
    return Supervisor(
        launch.global_rank,
        page,
        Generations(store),
        lambda incarnation: run_one_worker(work, Worker(job, supervised, incarnation)),
        limits,
        hooks,
        why_again=NODE_REPLACED if replaces else STARTED_AGAIN,
    )


def _report_lost(taken: _TakenNode, generations: Generations) -> None:
    """Record the death of a rank whose machine is lost, and print a message."""
    launch, call = taken.launch, taken.call
    death = Death(
        fault=FaultClass.NODE,
        global_rank=launch.global_rank,
        pid=0,
        signal="",
        why=f"is lost: {call.why}",
        iteration=0,
        phase=Phase.BUILD.name.lower(),
        last_seen_unix_s=call.last_seen_unix_s,
        found_unix_s=call.found_unix_s,
    )
    generations.record_death(generations.current(), death)
    if launch.local_rank == 0:
        taker = f"{socket.gethostname()}, a spare node, takes its ranks"
        _say(f"node {launch.node} is lost: {call.why}; {taker}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_one_worker(work: Callable[[Worker], int], worker: Worker) -> int:
    """Run one worker in this process, and return the exit status.

    Args:
        work: As in `run_elastic`.
        worker: The worker.
    """
    runtime = worker.job.runtime
    try:
        return work(worker)
    except Exception as error:
        if not is_fault(error, replace_on=runtime.replace_on, end_on=runtime.end_on):
            if isinstance(error, RanksMissingError) and runtime.spare_nodes:
                say_once(
                    f"{error}: no spare node has taken the missing ranks. The job can"
                    " be started again"
                )
                return REQUEUE
            if isinstance(error, MoeCkptError):
                say_once(str(error))
                return _FAILED
            raise
        # by this file the supervisor detects whether a replacement repeats the
        # exception at the same location
        try:
            write_failure(
                worker.supervised.failure, failure_of(error, worker.page.iteration)
            )
        except OSError as full:
            die(f"{text_of(error)}; its failure file was not written ({full})")
        return WORKER_FAULT


def save_and_report(supervised: SupervisedRank, limit_s: float) -> int:
    """Bring the rank's complete windows to disk, and print the result.

    Once all ranks have done so, the message says that the job may be killed.

    Args:
        supervised: The rank.
        limit_s: Seconds after which the supervisor kills this process.

    Returns:
        The exit status: 1 if a window could not be saved.
    """
    began_s = time.monotonic()
    rank, world_size = supervised.launch.global_rank, supervised.launch.world_size
    status = 0
    try:
        save_last(supervised.memory)
    except MoeCkptError as error:
        print(
            f"error: rank {rank}: not saved, the next start uses an older state:"
            f" {error}",
            file=sys.stderr,
        )
        # an older window may be on all disks
        status = 1
    saved = saved_iterations(supervised.memory)
    if not saved:
        # no window was complete, or the policy has no windows: an older state serves
        return status
    print(f"rank {rank}: iteration {saved[-1]} is on disk", flush=True)
    events = supervised.folder.open_events(rank)
    # by these events a later start detects that the run has a state, even if the disk
    # is gone by then
    for iteration in saved:
        events.append(LastSaveDone(iteration=iteration))
    answers: list[int | None] = []
    asking = Thread(
        target=ask_if_safe,
        args=(rank, world_size, saved, answers),
        name="stop-board",
        daemon=True,
    )
    asking.start()
    # the network may be cut: a cut is one reason to stop a job
    asking.join(
        max(0.0, min(_REPORT_S, began_s + limit_s - time.monotonic() - _PRINT_S))
    )
    if not answers:
        print(
            f"rank {rank}: the store of the job does not answer: whether all ranks have"
            " it is unknown",
            flush=True,
        )
    elif (safe := answers[0]) is not None:
        print(
            f"safe to kill at iteration {safe}: all {world_size} ranks have it on disk",
            flush=True,
        )
    return status


def ask_if_safe(
    rank: int, world_size: int, saved: Sequence[int], answers: list[int | None]
) -> None:
    """Report a rank's saved iterations, and ask for those of all ranks.

    The rank that hosts the job's store waits for the reports of slower ranks.

    Args:
        rank: The rank.
        world_size: The number of ranks.
        saved: The iterations that the rank has on disk.
        answers: Gets the newest iteration that all ranks have on disk, or None if there
            is none yet. Gets nothing if the store does not answer.
    """
    # torch's error for a store that is gone, and the error of `open_store`
    with contextlib.suppress(RuntimeError, ConfigError):
        board = StopBoard(open_store("stop"), world_size)
        answers.append(board.report(rank, saved))
        # slower ranks have yet to report
        if hosts_store(rank):
            board.wait_for_all(_REPORT_S)


def _open_store(
    part: str, runtime: RuntimeConfig, *, own_connection: bool = False
) -> dist.Store:
    """Return a part of the job's store, over a connection that may end.

    The connection ends after it was cut for `runtime.join_s`. By then other ranks have
    given this rank up.
    """
    store = open_store(part, own_connection=own_connection)
    end_silent_connections(int(os.environ["MASTER_PORT"]), runtime.join_s)
    return store


def require_forkable() -> None:
    """Check that forked workers can use the GPUs of this machine, if there are any.

    Raises:
        ConfigError: There is a GPU, and an import has started CUDA in this process.
    """
    # Without a GPU, a CUDA build of torch marks forks as soon as torch looks for one,
    # and workers lose nothing. `is_available` comes second: without NVML that call
    # starts CUDA.
    usable = _forks_can_use_cuda() or not torch.cuda.is_available()
    wanted = (
        "false: an import has started CUDA, which a forked worker cannot use (set"
        " PYTORCH_NVML_BASED_CUDA_CHECK=1 before imports look for a device; Transformer"
        " Engine starts it where flash-attn is installed: uninstall that)"
    )
    require(usable, "runtime.guard", True, wanted)


def _forks_can_use_cuda() -> bool:
    child = os.fork()
    if child == 0:
        # only a fork can find out: torch's look for a device starts the driver, but
        # CUDA does not count as initialized
        os._exit(_CUDA_IS_LOST if torch.cuda._is_in_bad_fork() else 0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) != _CUDA_IS_LOST


def _supervised_rank(
    job: JobConfig, launch: Launch, store: dist.Store, taken: _TakenNode | None
) -> SupervisedRank:
    ckpt, ranks_per_node = job.in_memory, _ranks_per_node(job, launch)
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
    host = taken.machine.host if taken else _host(job, launch)
    folder = find_run_folder(job.folder, launch, job.runtime.join_s)
    ticket = ticket_of(read_secret(folder.path / SECRET_FILE), job_id(), tls)
    root = taken.machine.root if taken else _open_memory(job.runtime)
    # ranks of an earlier start of the job may have had other numbers on this node
    take_over(root, launch.local_ranks)
    return SupervisedRank(
        launch=launch,
        memory=begin_rank(root, launch.global_rank),
        ticket=ticket,
        folder=folder,
        ranks_per_node=ranks_per_node,
        replicas=replicas,
        has_daemon=replicas > 0 or ckpt.disk.every_iters > 0 or ckpt.keeps_own_copy,
        host=host,
    )


def _leave(
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


def _start_daemon(job: JobConfig, supervised: SupervisedRank) -> int:
    """Start a replica daemon and return its pid.

    The daemon announces its address itself; until then the store has no address.
    """
    # peers wait for the new address: nothing answers at the address of a dead daemon
    open_store("daemons").delete_key(str(supervised.launch.global_rank))
    supervisor_pid = os.getpid()
    return start_beside(lambda: _run_daemon(job, supervised, supervisor_pid))


def _run_daemon(job: JobConfig, supervised: SupervisedRank, supervisor_pid: int) -> int:
    ckpt, page = job.in_memory, StatusPage(supervised.memory / "page")
    servers = _servers(job, supervised.launch)
    store = open_store("daemons")
    run_daemon(
        DaemonSettings(
            rank_folder=supervised.memory,
            global_rank=supervised.launch.global_rank,
            ticket=supervised.ticket,
            host=supervised.host,
            timeout_s=job.runtime.copy_s,
            copy_deadline_s=job.runtime.copy_s,
            caps=ckpt.max_bytes_per_s,
            keeps_own=ckpt.keeps_own_copy,
            most_bytes_per_owner=ckpt.memory_budget_bytes,
        ),
        supervisor_pid=supervisor_pid,
        # the traffic of training goes first
        may_send=lambda: not page.communicates,
        announce=lambda address: store.set(
            str(supervised.launch.global_rank), str(address)
        ),
        observe=servers.observe if servers else None,
    )


def _servers(job: JobConfig, launch: Launch) -> ServerJob | None:
    """Return the job's checkpoint servers; None for policies without servers."""
    if not isinstance(job.ckpt, FlowcheckConfig):
        return None
    return ServerJob(job.ckpt, job.runtime, launch.global_rank)
