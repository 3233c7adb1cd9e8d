"""A worker of a supervised rank, over the job's store.

Owns: the connections of a worker, and what becomes of its errors. Must not: know a
launcher or a training framework.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from moe_ckpt.config import RuntimeConfig
from moe_ckpt.elastic.backend_choice import open_backend
from moe_ckpt.elastic.backends import die
from moe_ckpt.elastic.checked_store import CheckedStore, end_silent_connections
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.elastic.failures import (
    WORKER_FAULT,
    failure_of,
    is_fault,
    text_of,
    write_failure,
)
from moe_ckpt.elastic.generations import (
    Late,
    Member,
    Membership,
)
from moe_ckpt.elastic.job_store import (
    open_store,
    say_once,
)
from moe_ckpt.elastic.live_workers import remove_live, write_live
from moe_ckpt.elastic.process_failure import ranks_in_words
from moe_ckpt.elastic.process_groups import ELASTIC, ElasticGroups, GroupTimeouts
from moe_ckpt.elastic.status_page import StatusPage, start_heartbeat
from moe_ckpt.elastic.supervisor import (
    REQUEUE,
    complain,
)
from moe_ckpt.elastic.torchrun_variables import Launch
from moe_ckpt.engine.session import Session
from moe_ckpt.engine.worker_loop import GenerationLoop, TrainingRun
from moe_ckpt.errors import ConfigError, MoeCkptError, RanksMissingError
from moe_ckpt.events import EventLog
from moe_ckpt.job_config import JobConfig
from moe_ckpt.replication.client import DaemonClient
from moe_ckpt.replication.final_save import save_while_missing
from moe_ckpt.replication.holders import CopyHolders, PeerHolders
from moe_ckpt.replication.messages import parse_address
from moe_ckpt.run_folder import RunFolder
from moe_ckpt.supervised_rank import SupervisedRank, servers_of
from moe_ckpt.types import ParallelLayout, Phase

# an exit status
_FAILED = 1


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
        self._servers = servers_of(job, supervised.launch)
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
            open_part("generations", runtime),
            # the watching thread always waits in this connection
            open_part("generations", runtime, own_connection=True),
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
            ELASTIC,
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
            open_part("daemons", self.job.runtime), self.page.waits
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
            complain(
                f"missing: {ranks_in_words(missing)}; no spare node has taken them:"
                " windows go to disk, and the job waits"
                f" runtime.join_s={runtime.join_s:g} seconds for a spare node"
            )
        daemon = DaemonClient(memory, timeout_s=runtime.copy_s)
        self.page.wait_for_copies(True)
        try:
            save_while_missing(memory, daemon, runtime.copy_s, missing)
        except (MoeCkptError, TimeoutError) as error:
            complain(
                f"rank {self.launch.global_rank}: not saved while it waits: {error}"
            )
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
        store = CheckedStore(open_part("turns", runtime), self.page.waits)
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


def open_part(
    part: str, runtime: RuntimeConfig, *, own_connection: bool = False
) -> dist.Store:
    """Return a part of the job's store, over a connection that may end.

    The connection ends after it was cut for `runtime.join_s`. By then other ranks have
    given this rank up.
    """
    store = open_store(part, own_connection=own_connection)
    end_silent_connections(int(os.environ["MASTER_PORT"]), runtime.join_s)
    return store
