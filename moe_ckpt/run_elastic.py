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
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist

from moe_ckpt.agent import agent_pid
from moe_ckpt.config import require
from moe_ckpt.elastic.checked_store import CheckedStore
from moe_ckpt.elastic.failures import reserve_failure, take_failure, text_of
from moe_ckpt.elastic.generations import (
    FENCED,
    NODE_REPLACED,
    STARTED_AGAIN,
    Generations,
)
from moe_ckpt.elastic.janitor import janitor_of_node
from moe_ckpt.elastic.job_store import (
    hosts_store,
    open_store,
    use_etcd,
    use_hosted_store,
)
from moe_ckpt.elastic.shared_memory import has_rank
from moe_ckpt.elastic.sick_place import SickPlaceRules
from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.elastic.stop_board import StopBoard
from moe_ckpt.elastic.supervisor import (
    Supervisor,
    SupervisorHooks,
    SupervisorLimits,
    complain,
    start_beside,
)
from moe_ckpt.elastic.torchrun_variables import (
    Launch,
    has_agent_store,
    require_spares,
)
from moe_ckpt.elastic.waiting_worker import WaitingWorker
from moe_ckpt.elastic_worker import Worker, open_part, run_one_worker
from moe_ckpt.errors import ConfigError, MoeCkptError
from moe_ckpt.events import LastSaveDone
from moe_ckpt.job_config import JobConfig
from moe_ckpt.replication.daemon import DaemonSettings, run_daemon
from moe_ckpt.replication.final_save import (
    save_last,
    saved_iterations,
)
from moe_ckpt.run_folder import require_lasting
from moe_ckpt.spare_nodes import (
    TakenNode,
    begin_first,
    begin_waiting,
    report_lost,
    run_with_spares,
)
from moe_ckpt.supervised_rank import (
    SupervisedRank,
    begin_supervised,
    leave_rank,
    servers_of,
)

STANDBY_LEAVES_BYTES = 2 << 30
"""Free memory of a GPU, beside training and a process that waits, without which no
process waits under `runtime.standby=auto`. Training may still grow by as much.
"""

# a new connection to a busy store may take seconds
_REPORT_S = 10.0
_PRINT_S = 1.0
# an exit status
_CUDA_IS_LOST = 9
_FAILED = 1
# the rank of this process, which forked workers inherit
_own_rank: list[int] = []


def run_elastic(
    job: JobConfig,
    launch: Launch,
    work: Callable[[Worker], int],
    *,
    beside: Callable[[SupervisedRank], None] = lambda _: None,
    warm_up: Callable[[], bool] = lambda: False,
) -> int:
    """Supervise a rank until the job is done or has failed.

    Args:
        job: The settings.
        launch: This rank's position in the job.
        work: Trains in a forked process, and returns its exit status. After an
            exception that is a fault of the hardware, the supervisor replaces the
            process. A MoeCkptError is printed as one message.
        beside: May start processes that live at most as long as the supervisor.
        warm_up: The generic first work of a worker, for processes that wait to become
            one. Returns whether the device is a GPU.

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
        require_spares(launch.num_nodes, runtime.spare_nodes)
    if runtime.etcd:
        use_etcd(runtime.etcd)
    elif not has_agent_store():
        # torchrun shares no store if TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set, which
        # spare agents of torch 2.13 need
        use_hosted_store(launch, start_beside)
    # a scheduler's signal may arrive while the network to the store is cut
    store = CheckedStore(open_part("generations", runtime), heeds_signals=True)
    # all workers share the imports: garbage collection must not touch these pages
    gc.freeze()
    if not runtime.spare_nodes:
        return _supervise(job, launch, store, work, beside, warm_up).run()
    return run_with_spares(
        job,
        launch,
        lambda taken: _supervise(
            job, taken.launch, store, work, beside, warm_up, taken
        ),
        lambda: WaitingWorker(
            lambda: prepare_standby(warm_up, always=True),
            lambda order: begin_waiting(job, launch, work, order),
            start_beside,
        ),
    )


def _supervise(
    job: JobConfig,
    launch: Launch,
    store: dist.Store,
    work: Callable[[Worker], int],
    beside: Callable[[SupervisedRank], None],
    warm_up: Callable[[], bool],
    taken: TakenNode | None = None,
) -> Supervisor:
    """Return the supervisor of a rank.

    Args:
        job: The settings.
        launch: This process's position in the job.
        store: The keys of generations.
        work: As in `run_elastic`.
        beside: As in `run_elastic`.
        warm_up: As in `run_elastic`.
        taken: The node of the rank in a job with spare nodes; else None.
    """
    runtime = job.runtime
    # supervisors that torchrun has started again find their rank's folder
    replaces = bool(
        taken
        and taken.call.why
        and not has_rank(taken.machine.root, launch.global_rank)
    )
    supervised = begin_supervised(job, launch, store, taken.machine if taken else None)
    if servers := servers_of(job, launch):
        servers.prepare()
    if taken and replaces:
        report_lost(taken, Generations(store))
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
        begin_waiting=lambda incarnation: begin_first(taken, supervised, incarnation),
        warm_up=(lambda: prepare_standby(warm_up, always=runtime.standby is True))
        if runtime.standby
        else None,
        notice=Path(runtime.notice_file) if runtime.notice_file else None,
        # this node's agent ends as if the node were lost: torchrun keeps the rendezvous
        # open for a spare node
        leave=(lambda: os.kill(agent_pid(), signal.SIGTERM))
        if runtime.sick_place == "leave"
        else None,
        free_memory=lambda status: leave_rank(
            supervised, status, is_replaced=taken is not None and status == FENCED
        ),
        node_processes=taken.machine.processes
        if taken
        else lambda: janitor_of_node(root),
    )
    StopBoard(open_part("stop", runtime), launch.world_size).begin(launch.global_rank)
    return Supervisor(
        launch.global_rank,
        page,
        Generations(store),
        lambda incarnation: run_one_worker(work, Worker(job, supervised, incarnation)),
        limits,
        hooks,
        why_again=NODE_REPLACED if replaces else STARTED_AGAIN,
    )


def prepare_standby(warm_up: Callable[[], bool], *, always: bool) -> bool:
    """Warm a process up that is to wait until it becomes a worker.

    Args:
        warm_up: As in `run_elastic`.
        always: Whether the process waits in any case. Else the process waits on a GPU
            that keeps STANDBY_LEAVES_BYTES of free memory: elsewhere a new process
            starts as fast, or training could lack the memory.

    Returns:
        Whether the process waits.
    """
    if always:
        warm_up()
        return True
    try:
        if not warm_up():
            return False
        free_bytes, _ = torch.cuda.mem_get_info()
    except RuntimeError as error:  # such as a GPU without memory for another process
        complain(f"runtime.standby=auto: no process waits: {text_of(error)}")
        return False
    if free_bytes >= STANDBY_LEAVES_BYTES:
        return True
    complain(
        f"runtime.standby=auto: no process waits: the GPU would have {free_bytes:,}"
        f" free bytes left, wanted {STANDBY_LEAVES_BYTES:,}"
    )
    return False


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
    servers = servers_of(job, supervised.launch)
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
