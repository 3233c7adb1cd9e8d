"""Jobs whose ranks are threads, with the real session, recovery and servers.

The in-memory tier and host memory are real, too. A rank's memory is a folder, and a
rank's replica daemon is a few threads. Folder and daemon outlive the rank's worker. A
worker dies by an order in the worker's status page, as in a real job: the thread ends
where the page executes the order, and a new worker with a model of its own takes the
place of the dead worker. All ranks end the generation, and reach one state in the next
generation, by `GenerationLoop`.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from signal import SIGKILL
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from moe_ckpt.collectives import Ranks
from moe_ckpt.config import FlowcheckConfig, InMemoryConfig
from moe_ckpt.durable.checkpoint_folder import CheckpointFolder
from moe_ckpt.durable.tier import DurableTier
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.elastic.generations import Member
from moe_ckpt.elastic.process_failure import Death, FaultClass
from moe_ckpt.elastic.status_page import ANY_ITERATION, StatusPage
from moe_ckpt.engine.assembly import InMemoryAssembly, InMemoryPolicy
from moe_ckpt.engine.computed_snapshots import NOTHING_COMPUTED
from moe_ckpt.engine.in_memory import InMemoryCheckpointing
from moe_ckpt.engine.interfaces import RankAdapter, RankPosition
from moe_ckpt.engine.rank_memory import RankMemory
from moe_ckpt.engine.session import Session
from moe_ckpt.engine.token_account import TokenRate
from moe_ckpt.engine.worker_loop import GenerationLoop
from moe_ckpt.errors import PeersLostError, RolledBackError
from moe_ckpt.events import EventLog, read_events
from moe_ckpt.flowcheck.attachment import server_snapshots
from moe_ckpt.flowcheck.mirror.capture import MirrorCapture
from moe_ckpt.flowcheck.mirror.captured_gradients import from_sums
from moe_ckpt.flowcheck.mirror.watcher import Watcher
from moe_ckpt.flowcheck.server_holders import ServerHolders
from moe_ckpt.flowcheck.server_hosts import ServerHosts, ServerNumbers, ServerRules
from moe_ckpt.megatron.kept_batches import KeptBatches
from moe_ckpt.replication.client import DaemonClient
from moe_ckpt.replication.copy_server import CopyServer, HoldingRules
from moe_ckpt.replication.daemon import WorkerServer
from moe_ckpt.replication.holders import CopyHolders, PeerHolders
from moe_ckpt.replication.messages import Address, Ticket
from moe_ckpt.replication.sender import Replicator
from moe_ckpt.snapshot.arriving_update import OpenGradients, observes_nothing
from moe_ckpt.snapshot.blobs import BlobFolder, own_path
from moe_ckpt.snapshot.codec import ShardIdentity
from moe_ckpt.types import Phase, ReadyGradients, RunIdentity
from tests.harness.threads.model import (
    BOUNDARY_BYTES,
    MICRO_BATCHES,
    TOKENS,
    Model,
    Shape,
    TokenCounts,
)
from tests.harness.threads.model_files import ModelFiles
from tests.harness.threads.ranks import (
    HostRanks,
    ThreadGroup,
    ThreadRanks,
    WorkerKilled,
    one_processor,
)
from tests.harness.threads.wire import ModelMirror, Wire
from tests.report_runs import committed

T = TypeVar("T")

TICKET = Ticket(run_id="run", token="token")
_WAIT_S = 20.0


MOMENTS = [
    (Phase.FORWARD, 0),
    (Phase.BACKWARD, 0),
    (Phase.REDUCE, 0),
    (Phase.STEP, 0),
    (Phase.STEP, 1),
    (Phase.SNAPSHOT, 0),
    (Phase.BETWEEN, 0),
]
"""Moments at which a rank can die, as (phase, skip).

The rank survives `skip` entries into the phase, and dies as it enters the phase again.
"""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A rank dies as it enters a phase, and other ranks may die with it."""

    rank: int

    phase: Phase
    """Phase that `rank` enters as it dies."""

    iteration: int = ANY_ITERATION

    skip: int = 0
    """Number of entries into the phase that `rank` survives first."""

    also: tuple[int, ...] = ()
    """Ranks that die together with `rank`."""

    loses_memory: bool = False
    """Whether the nodes of `rank` and `also` are lost."""

    before_restart: Callable[[ThreadJob], None] | None = None
    """Called while `rank` and all of `also` are dead."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The end of a job."""

    digests: tuple[str, ...]
    """Digest of the final state of each rank, by rank."""

    losses: Mapping[int, float]
    """Loss of each iteration, as seen by all ranks."""


class Daemon:
    """The replica daemon of one rank.

    The daemon has a server for peers, senders to peers, and a socket for the rank's
    workers.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        may_send: Callable[[], bool],
        *,
        keeps_own: bool,
        capture: MirrorCapture | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._capture = capture
        self.server = CopyServer(
            folder,
            rank,
            TICKET,
            host="127.0.0.1",
            timeout_s=_WAIT_S,
            rules=HoldingRules(
                keeps_own=keeps_own,
                open_gradients=_opener(capture),
            ),
        )
        own = BlobFolder(own_path(folder))
        self._replicator = Replicator(
            own, rank, TICKET, may_send=may_send, deadline_s=_WAIT_S
        )
        self._door = WorkerServer(folder, self._replicator, timeout_s=_WAIT_S)

    def close(self) -> None:
        self._door.close()
        self._replicator.close()
        self.server.close()
        if self._capture:
            self._capture.close()


class _Hosts:
    """Checkpoint servers on machines that train nothing.

    In `store` the ranks find the servers.
    """

    def __init__(
        self,
        folder: Path,
        config: FlowcheckConfig,
        capture: Callable[[int], MirrorCapture | None],
    ) -> None:
        self.store = dist.HashStore()
        self.numbers = ServerNumbers(self.store, config.server_hosts)
        self._folder = folder
        self._config = config
        self._capture = capture
        self._running: dict[int, tuple[CopyServer, MirrorCapture | None]] = {}
        self._num_started = 0
        self.join_s = _WAIT_S  # as runtime.join_s

    def start(self) -> None:
        """Start one more server, with an empty memory, under the first free number."""
        self._num_started += 1
        capture = self._capture(self._num_started)
        server = CopyServer(
            self.memory(self._num_started),
            -1,
            TICKET,
            host="127.0.0.1",
            timeout_s=_WAIT_S,
            rules=HoldingRules(keeps_own=True, open_gradients=_opener(capture)),
        )
        claimed = self.numbers.claim(server.address)
        assert claimed is not None
        self._running[claimed[0]] = server, capture

    def memory(self, started: int) -> Path:
        """Return the memory of the server that was started as number `started`.

        Servers are counted from 1.
        """
        return self._folder / f"host{started}"

    def end(self, number: int) -> None:
        server, capture = self._running.pop(number)
        server.close()
        if capture:
            capture.close()

    def close(self) -> None:
        for number in list(self._running):
            self.end(number)

    def view(self) -> ServerHosts:
        config = self._config
        rules = ServerRules(
            num_servers=config.server_hosts,
            copies=config.server_copies,
            join_s=self.join_s,
            wait_s=config.server_wait_s,
        )
        return ServerHosts(self.store, TICKET, rules)


class _Generations:
    """The meeting point of the ranks in all generations.

    Implements the ends and beginnings of generations for each rank's `_Rendezvous`.
    """

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._changed = threading.Condition()
        self._arrived: set[int] = set()
        self.number = 0
        # each death with the generation that the death ended
        self.deaths: list[tuple[int, Death]] = []
        self._done: set[int] = set()
        self._is_over = True
        self._groups: tuple[ThreadGroup, list[ThreadGroup]] | None = None
        self.failure: BaseException | None = None
        # actions of the workers at each end of a generation
        self.at_end: list[Callable[[], None]] = []

    def join(self, rank: int) -> tuple[int, ThreadGroup, ThreadGroup]:
        """Wait for all ranks.

        Returns:
            The generation that begins, the group of all ranks, and the group of the
            rank's stage.
        """
        with self._changed:
            self._arrived.add(rank)
            if len(self._arrived) == self._shape.world_size:
                self.number, self._arrived, self._done, self._is_over = (
                    self.number + 1,
                    set(),
                    set(),
                    False,
                )
                stages = [ThreadGroup(self._shape.dp) for _ in range(self._shape.pp)]
                self._groups = ThreadGroup(self._shape.world_size), stages
                self._changed.notify_all()
            else:
                self._wait(lambda: rank not in self._arrived)
            assert self._groups is not None
            return (
                self.number,
                self._groups[0],
                self._groups[1][self._shape.stage_of(rank)],
            )

    def end(self, reason: str) -> None:
        with self._changed:
            self._is_over = True
            for action in self.at_end:
                action()
            for group in [self._groups[0], *self._groups[1]] if self._groups else []:
                group.cut(reason)
            self._changed.notify_all()

    def leave(self, rank: int) -> None:
        with self._changed:
            self._arrived.discard(rank)

    def finish(self, rank: int) -> None:
        with self._changed:
            self._done.add(rank)
            self._changed.notify_all()
            self._wait(
                lambda: len(self._done) == self._shape.world_size or self._is_over
            )
            if self._is_over and len(self._done) < self._shape.world_size:
                raise PeersLostError("ranks were lost before all had finished")

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure = self.failure or error
        self.end(f"a rank failed: {error!r}")

    def is_over(self) -> bool:
        with self._changed:
            return self._is_over

    def _wait(self, is_met: Callable[[], bool]) -> None:
        until_s = time.monotonic() + 3 * _WAIT_S
        while not is_met():
            if self.failure is not None:
                raise PeersLostError(f"a rank failed: {self.failure!r}")
            if not self._changed.wait(until_s - time.monotonic()):
                raise AssertionError(
                    f"deadlock between generations: {sorted(self._arrived)} have"
                    " arrived"
                )


class _Rendezvous:
    """Implements `worker_loop.Rendezvous` for one worker that is a thread."""

    def __init__(
        self,
        rank: int,
        generations: _Generations,
        page: StatusPage,
        ranks: ThreadRanks,
        stage: ThreadRanks,
    ) -> None:
        self.page = page
        self._rank = rank
        self._generations = generations
        self._ranks, self._stage_ranks = ranks, stage
        self._reported = 0
        self._number = 0
        self.num_formed_groups = self.num_kept_groups = 0

    def join(self) -> int:
        if self._generations.failure:
            raise self._generations.failure
        self._ranks.require_alive()
        self.page.enter(Phase.JOIN)
        self._number, group, stage_group = self._generations.join(self._rank)
        self.page.join(self._number)
        self._ranks.use(group)
        self._stage_ranks.use(stage_group)
        return self._number

    def entered(self) -> None:
        self._reported = self._number

    def deaths(self) -> Sequence[Death]:
        first = self._reported or self._number - 1
        return [
            death
            for number, death in self._generations.deaths
            if first <= number < self._number
        ]

    def num_deaths(self) -> int:
        return len(self._generations.deaths)

    def lost(self, error: BaseException) -> bool:
        causes = [error, error.__cause__, error.__context__]
        if any(isinstance(cause, PeersLostError) for cause in causes):
            self._generations.end(f"rank {self._rank}: {error}")
            return self._generations.failure is None
        return False

    def leave(self) -> str:
        return "ranks were lost"

    def finish(self) -> None:
        self._generations.finish(self._rank)


@dataclass
class _Training:
    """Implements `worker_loop.TrainingRun`: the training loop of one rank.

    The loop calls the hooks of the session as a user's loop does.
    """

    job: ThreadJob
    rank: int
    model: Model

    session: Session | None
    """None: the job trains without a session."""

    enter: Callable[[Phase], None]
    """Called as the rank enters a phase."""

    events: EventLog

    ranks: ThreadRanks
    """All ranks of the job."""

    prepared: tuple[int, float] | None = None
    """Newest iteration with complete gradients, and the loss of the iteration."""

    def run(self, done: int, notes: Sequence[str]) -> None:
        self.job.notes[self.rank] = notes
        # a recovery has finished the step of the prepared iteration
        if self.prepared and self.prepared[0] == done:
            self.job.note_loss(*self.prepared)
        self.job.log_start(done, self.rank, self.model)
        while done < self.job.iterations:
            try:
                done = self._run_iteration(done + 1)
            except RolledBackError as back:
                done = back.iteration
                self.job.log_start(done, self.rank, self.model)

    def _run_iteration(self, iteration: int) -> int:
        model, hooks = self.model, self.session
        while True:
            if hooks:
                if model.data:
                    model.data.iteration_started(
                        iteration, keep_since=hooks.oldest_start
                    )
                hooks.iteration_started(iteration)
            model.clear_gradients()
            self.job.upsets.pop((self.rank, iteration), lambda _: None)(model)
            self.enter(Phase.FORWARD)
            losses = model.train_on(iteration, lambda: self.enter(Phase.BACKWARD))
            self.enter(Phase.REDUCE)
            gradients = model.finish_gradients()
            loss = self._mean_over_job(losses, iteration)
            if hooks:
                hooks.loss_known(iteration, loss)
            self.prepared = iteration, loss
            if hooks is None or hooks.gradients_ready(iteration, gradients):
                break
        self.job.note_loss(iteration, loss)
        model.update(gradients)
        if hooks:
            hooks.update_applied(iteration)
        model.gather()
        if hooks:
            hooks.step_committed(iteration)
        self._log(iteration, loss, gradients)
        self.job.note_state(iteration, self.rank, model)
        if self.job.settles:
            # a rank that dies as the next iteration begins finds all ranks' snapshots
            self.ranks.barrier()
        return iteration

    def _mean_over_job(self, losses: list[float], iteration: int) -> float:
        diverges = self.rank == 0 and self.job.diverges_now(iteration)
        total = torch.tensor([sum(losses), len(losses), diverges], dtype=torch.float64)
        self.ranks.reduce(total, "sum")
        return float("inf") if total[2] else float(total[0] / total[1])

    def _log(self, iteration: int, loss: float, gradients: ReadyGradients) -> None:
        step = {
            "grad_norm": gradients.total_norm,
            "loss_scale": gradients.loss_scale,
            "skipped": gradients.overflow,
        }
        self.events.append(replace(committed(iteration, loss=loss), **step))


class Observer(Protocol):
    """Sees the models of all ranks. Each rank's thread calls the methods."""

    def started(self, iteration: int, rank: int, model: Model) -> None:
        """A rank starts from the state after `iteration`. Does nothing by default."""

    def committed(self, iteration: int, rank: int, model: Model) -> None:
        """A rank has committed `iteration`. Does nothing by default."""


class ThreadJob:
    """A job whose ranks are threads. Faults strike in order while the job trains.

    Args:
        folder: Folder of all files of the job.
        config: Settings of the policy. None: the job trains without a session.
        shape: Shape of model and job.
        iterations: Number of iterations.
        faults: Deaths of ranks, in the order in which they strike.
        losses: Scheduled losses of state in living processes.
        run_id: Id of the run.
        lossless: Whether states are compared with the job without faults, and all
            losses of one iteration with each other. None: as the policy promises.
        settles: Whether all ranks wait after each iteration until the iteration's
            snapshots are in memory and on peers, and the snapshots of the iteration
            before are on disk.
    """

    def __init__(
        self,
        folder: Path,
        config: InMemoryConfig | None,
        shape: Shape | None = None,
        *,
        iterations: int = 8,
        faults: Sequence[Fault] = (),
        losses: Sequence[Any] = (),
        run_id: str = "run",
        lossless: bool | None = None,
        settles: bool = False,
    ) -> None:
        self.folder, self.config, self.shape = folder, config, shape or Shape()
        self.iterations = iterations
        self.identity = RunIdentity(
            run_id=run_id, model="model", layout=self.shape.layout
        )
        self.wire = Wire()
        self.notes: dict[int, Sequence[str]] = {}
        self.sessions: dict[int, Session] = {}
        # policies of each generation, by rank
        self.policies: dict[int, list[InMemoryPolicy]] = {
            rank: [] for rank in self.ranks
        }
        self.models: dict[int, Model] = {}
        self.struck: list[Fault] = []
        self.on_worker: list[Callable[[int, Session], None]] = []
        # called once each with the rank's model, by rank and iteration
        self.upsets: dict[tuple[int, int], Callable[[Model], object]] = {}
        self.observers: list[Observer] = []
        self.sent_between_hosts: dict[int, list[torch.Tensor]] = {
            rank: [] for rank in self.ranks
        }
        self._lossless = (
            (config is None or not config.loses_tokens)
            if lossless is None
            else lossless
        )
        self.checks_digests = config is not None and self._lossless
        self.on_divergence = "window"
        self.settles = settles
        self.before_fetch: Callable[[int, int], None] = lambda rank, holder: None
        self._faults = list(faults)
        self._replicas = (
            0
            if config is None
            else 1
            if config.replication.replicas == "auto"
            else int(config.replication.replicas)
        )
        self._losses_of_config = losses
        self._generations = _Generations(self.shape)
        self.at_end = self._generations.at_end
        self._lock = threading.RLock()
        self._buried = 0
        self.digests: dict[int, dict[int, str]] = {}
        self._losses: dict[int, float] = {}
        self.daemons: dict[int, Daemon] = {}
        # of each rank's present worker
        self.clients: dict[int, DaemonClient | None] = {}
        self.all_ranks: dict[int, ThreadRanks] = {}
        self.hosts = None
        if isinstance(config, FlowcheckConfig) and config.on_hosts:
            self.hosts = _Hosts(folder, config, self._begin_capture)
        self._killed = {rank: threading.Event() for rank in self.ranks}
        self._incarnations = dict.fromkeys(self.ranks, 0)
        self._workers: list[threading.Thread] = []
        self._outcomes: dict[int, str] = {}
        self.pages = {
            rank: StatusPage(
                self._made(folder / "pages") / str(rank), execute=self._executor(rank)
            )
            for rank in self.ranks
        }
        self.saves_slowly, self.sends_slowly = False, False
        # returns the batches of a worker's model
        self.data_of: Callable[[Model], KeptBatches] | None = None
        self.start_from: Path | None = None  # a whole checkpoint of another run
        # number of further attempts that end in an infinite loss, by iteration
        self.diverging: dict[int, int] = {}

    @property
    def ranks(self) -> range:
        return range(self.shape.world_size)

    def memory(self, rank: int) -> Path:
        """Return the rank's folder in the memory of its node.

        The folder has the rank's `own` blobs, and the blobs `held` for other ranks.
        """
        return self._made(self.folder / "memory") / f"rank{rank:04d}"

    def disk(self, rank: int) -> Path:
        """Return the rank's folder on its local disk."""
        return self.folder / "snapshots" / f"rank{rank:04d}"

    def in_memory(self, rank: int) -> InMemoryCheckpointing:
        """Return the in-memory side of the rank's session in the present generation."""
        in_memory = self.sessions[rank].in_memory
        assert in_memory is not None
        return in_memory

    def rank_memory(self, rank: int) -> RankMemory:
        """Return the snapshots and logs of the rank's present worker."""
        return self.in_memory(rank).parts.memory

    @one_processor()
    def run(self) -> Result:
        """Run to the end.

        Raises:
            BaseException: The error of the first rank that failed.
        """
        try:
            for rank in self.ranks:
                self.daemons[rank] = self._daemon(rank)
            for _ in range(self.hosts.numbers.num_servers if self.hosts else 0):
                self.hosts.start()  # type: ignore[union-attr]
            self._arm_next()
            for rank in self.ranks:
                self._start(rank)
            self._join()
        finally:
            for daemon in self.daemons.values():
                daemon.close()
            if self.hosts:
                self.hosts.close()
        if self._generations.failure:
            raise self._generations.failure
        assert not self._faults, f"these faults never struck: {self._faults}"
        return Result(
            digests=tuple(self._outcomes[rank] for rank in self.ranks),
            losses=dict(self._losses),
        )

    def events(self, kind: type[T], rank: int = 0) -> list[T]:
        """Return one rank's events of a kind, from all workers of the rank."""
        return [
            entry.event
            for entry in read_events(self.event_path(rank))
            if isinstance(entry.event, kind)
        ]

    def note_loss(self, iteration: int, loss: float) -> None:
        with self._lock:
            if np.isfinite(loss):
                assert (
                    not self._lossless or self._losses.get(iteration, loss) == loss
                ), f"another loss of {iteration}"
                self._losses[iteration] = loss

    def log_start(self, iteration: int, rank: int, model: Model) -> None:
        for observer in self.observers:
            observer.started(iteration, rank, model)

    def note_state(self, iteration: int, rank: int, model: Model) -> None:
        """Compare a rank's state with the state in the job without faults.

        No state is compared where recoveries may lose tokens. Without a session, the
        digest of the state is recorded.
        """
        if self.config is None:
            self.digests.setdefault(iteration, {})[rank] = model.digest()
        elif self.checks_digests:
            expected = _reference(self.shape, self.iterations)[1][iteration][rank]
            assert model.digest() == expected, (
                f"rank {rank} after iteration {iteration}, after {len(self.struck)}"
                " faults"
            )
        for observer in self.observers:
            observer.committed(iteration, rank, model)
        if self.settles:
            self.settle(rank)

    def settle(self, rank: int) -> None:
        """Wait until peers and servers have all of a rank's newest state.

        Afterwards no write to disk is in progress.
        """
        tier, memory = self.in_memory(rank).tier, self.rank_memory(rank)
        tier.finish_snapshot()
        window, publisher = memory.snapshots.in_flight(), memory.publisher
        if window and publisher:
            publisher.await_copies(window.snapshots)
        tier.finish_persisting()
        if self._has_servers:
            client = self.clients[rank]
            assert client is not None
            client.copy([]).result(_WAIT_S)  # ends after all earlier copies

    def kill(self, rank: int) -> None:
        """Kill a rank at once.

        The first pending fault must name this rank, and a phase that the rank does not
        enter.
        """
        self._killed[rank].set()
        self._generations.end(f"rank {rank} was killed")

    def diverges_now(self, iteration: int) -> bool:
        """Return whether the loss of this attempt at an iteration is infinite."""
        if not self.diverging.get(iteration):
            return False
        self.diverging[iteration] -= 1
        return True

    def lose_memory(self, rank: int) -> None:
        """Lose a node's memory while the node's worker is dead.

        Own blobs and copies of other ranks' blobs are lost.
        """
        self.daemons[rank].close()
        shutil.rmtree(self.memory(rank))
        self.daemons[rank] = self._daemon(rank)

    @property
    def _has_servers(self) -> bool:
        return isinstance(self.config, FlowcheckConfig)

    @property
    def _mirrors(self) -> bool:
        return isinstance(self.config, FlowcheckConfig) and self.config.mirrors

    def _daemon(self, rank: int) -> Daemon:
        may_send = lambda: not self.sends_slowly  # noqa: E731
        return Daemon(
            self.memory(rank),
            rank,
            may_send,
            keeps_own=self._has_servers,
            capture=self._begin_capture(rank),
        )

    def _begin_capture(self, rank: int) -> MirrorCapture | None:
        if not self._mirrors:
            return None
        config = self.config
        assert isinstance(config, FlowcheckConfig)
        watcher = Watcher(config.captures, loss=config.capture_loss, seed=rank)
        return MirrorCapture(
            self.wire.port(), watcher, keep_iters=config.max_lag_iters + 2, wait_s=0.5
        )

    def _start(self, rank: int) -> None:
        thread = threading.Thread(
            target=self._work, args=(rank,), name=f"rank {rank}", daemon=True
        )
        self._workers.append(thread)
        thread.start()

    def _join(self) -> None:
        for thread in self._workers:  # grows as dead workers are replaced
            thread.join(6 * _WAIT_S)
            assert not thread.is_alive(), f"{thread.name} hangs"

    def _work(self, rank: int) -> None:
        try:
            try:
                with contextlib.ExitStack() as closing:
                    self._outcomes[rank] = self._train(rank, closing)
            except WorkerKilled:
                self._bury(rank)
        except BaseException as error:  # top of a thread: `run` raises the error
            self._generations.fail(error)

    def _train(self, rank: int, closing: contextlib.ExitStack) -> str:
        ranks = self.all_ranks[rank] = ThreadRanks(rank, self._killed[rank])
        stage_ranks = ThreadRanks(rank % self.shape.dp, self._killed[rank])
        page = self.pages[rank]
        rendezvous = _Rendezvous(rank, self._generations, page, ranks, stage_ranks)
        model = self.models[rank] = Model(self.shape, rank, ranks, stage_ranks)
        model.data = self.data_of(model) if self.data_of else None
        events = EventLog(
            self.event_path(rank), global_rank=rank, clock_origin_unix_s=0.0
        )
        closing.callback(events.close)
        if self.config is None:
            rendezvous.join()
            _Training(self, rank, model, None, lambda _: None, events, ranks).run(0, [])
            return model.digest()
        elastic = self._elastic(rank, page)
        self.clients[rank] = elastic.daemon
        if elastic.daemon:
            closing.callback(elastic.daemon.close)
        session = self._session(rank, model, ranks, stage_ranks, elastic, events)
        self.sessions[rank] = session
        closing.callback(_close_copiers, session)
        for act in self.on_worker:
            act(rank, session)
        training = _Training(
            self, rank, model, session, elastic.page.enter_in_iteration, events, ranks
        )
        job = GenerationLoop(rendezvous, session, training, events)

        def start() -> int:
            return session.resume(None) or (
                session.resume(self.start_from) if self.start_from else 0
            )

        job.run(start, lambda _: {})
        session.finish()
        return model.digest()

    def _elastic(self, rank: int, page: StatusPage) -> ElasticContext:
        has_daemon = (
            self._replicas > 0
            or self._has_servers
            or bool(self.config and self.config.disk.every_iters)
        )
        return ElasticContext(
            member=Member(
                global_rank=rank,
                world_size=self.shape.world_size,
                incarnation=self._incarnations[rank],
            ),
            page=page,
            memory=self.memory(rank),
            daemon=DaemonClient(self.memory(rank), timeout_s=_WAIT_S)
            if has_daemon
            else None,
            holders=self._holders(rank),
            ticket=TICKET,
            copy_s=_WAIT_S,
            at_end=self.at_end.append,
        )

    def _holders(self, rank: int) -> CopyHolders:
        peers = PeerHolders(
            global_rank=rank,
            world_size=self.shape.world_size,
            ranks_per_node=1,
            num_peers=self._replicas,
            address_of=lambda peer: self._address_of(rank, peer),
        )
        if not self._has_servers:
            return peers
        return ServerHolders(peers, self.hosts.view() if self.hosts else None)

    def _address_of(self, rank: int, peer: int) -> Address:
        if self.pages[rank].phase == Phase.RECOVERY:
            self.before_fetch(rank, peer)
        return self.daemons[peer].server.address

    def _session(
        self,
        rank: int,
        model: Model,
        ranks: ThreadRanks,
        stage: ThreadRanks,
        elastic: ElasticContext,
        events: EventLog,
    ) -> Session:
        assert self.config is not None
        host_ranks = cast("Ranks", HostRanks(ranks, self.sent_between_hosts[rank]))
        position = position_of(self.identity, self.shape, ranks, stage, host_ranks)
        neighbours = sum(
            neighbour is not None
            for neighbour in (model.previous_rank, model.next_rank)
        )
        tied = model.tied_weight()
        adapter = RankAdapter(
            position=position,
            stage=model,
            operators=model,
            communicator=model.communicator,
            injector=model,
            counts=lambda: TokenCounts(model),
            tokens=TokenRate(tokens=MICRO_BATCHES * TOKENS * self.shape.dp, top_k=1),
            num_micro_batches=MICRO_BATCHES,
            boundary_log_bytes=neighbours * MICRO_BATCHES * BOUNDARY_BYTES,
            step_log_bytes=sum(tensor.nbytes for tensor in model.begin(0).values()),
            gradient_bytes=sum(weight.master.nbytes for weight in model.owned)
            if self.config.logs_gradients
            else 0,
            tied_gradient_bytes=tied.master.nbytes if tied else 0,
        )
        computed = NOTHING_COMPUTED
        if isinstance(self.config, FlowcheckConfig):
            mirror = ModelMirror(model, stage, self.wire) if self._mirrors else None
            computed = server_snapshots(self.config, mirror, notes=[])
        assembly = InMemoryAssembly(
            self.config,
            adapter,
            events,
            elastic,
            self.folder / "snapshots",
            self._losses_of_config,
            on_divergence=self.on_divergence,
            computed=computed,
        )
        folder = CheckpointFolder(self.folder / "checkpoints")
        files = ModelFiles(model, ranks, is_slow=self.saves_slowly)
        durable = DurableTier(
            files, folder, self.identity, ranks, events, keep=self.config.keep
        )

        def build_generation() -> tuple[InMemoryPolicy, InMemoryCheckpointing]:
            policy, in_memory = assembly.build_generation()
            self.policies[rank].append(policy)
            return policy, in_memory

        return Session(
            build_generation,
            durable,
            ranks,
            events,
            strict=self.config.strict,
            suspect_iters=2,
            forget_evaluations=lambda: None,
            elastic=elastic,
        )

    # Faults

    def _executor(self, rank: int) -> Callable[[int], None]:
        def execute(_: int) -> None:
            for victim in (rank, *self._faults[0].also):
                self._killed[victim].set()
            raise WorkerKilled

        return execute

    def _arm_next(self) -> None:
        if self._faults:
            fault = self._faults[0]
            self.pages[fault.rank].order(
                SIGKILL, fault.phase, iteration=fault.iteration, skip=fault.skip
            )

    def _bury(self, rank: int) -> None:
        """Note a death, and start new workers, as supervisors do.

        New workers start once all ranks of the fault are dead.
        """
        with self._lock:
            fault, page = self._faults[0], self.pages[rank]
            death = Death(
                fault=FaultClass.SIGNAL,
                global_rank=rank,
                pid=0,
                signal="SIGKILL",
                why="was killed",
                iteration=page.iteration,
                phase=page.phase.name,
                last_seen_unix_s=0.0,
                found_unix_s=0.0,
            )
            number = self._generations.number
            self._generations.deaths.append((number, death))
            self._generations.leave(rank)
            page.reset()
            dead = {
                death.global_rank
                for at, death in self._generations.deaths[self._buried :]
            }
            victims = {fault.rank, *fault.also}
            if not victims <= dead:
                # the other victims notice their death in their next operation
                self._generations.end("ranks died")
                return
            self._buried = len(self._generations.deaths)
            self._faults.pop(0)
            self.struck.append(fault)
            for victim in sorted(victims):
                if fault.loses_memory:
                    self.lose_memory(victim)
            if fault.before_restart:
                fault.before_restart(self)
            self._arm_next()
            self._generations.end("ranks died")
            for victim in sorted(victims):
                self._killed[victim].clear()
                self._incarnations[victim] += 1
                self._start(victim)

    def event_path(self, rank: int) -> Path:
        return self.folder / "events" / f"rank{rank:04d}.jsonl"

    @staticmethod
    def _made(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def position_of(
    identity: RunIdentity,
    shape: Shape,
    ranks: ThreadRanks,
    stage_ranks: ThreadRanks,
    host_ranks: Ranks,
) -> RankPosition:
    rank, dp_rank = ranks.rank, ranks.rank % shape.dp
    axes = {
        "pp_rank": shape.stage_of(rank),
        "ep_rank": dp_rank % shape.ep,
        "dp_rank": dp_rank,
    }
    return RankPosition(
        identity=identity,
        shard=ShardIdentity(global_rank=rank, tp_rank=0, etp_rank=0, **axes),
        ranks=ranks,
        stage_ranks=stage_ranks,
        host_ranks=host_ranks,
        previous_rank=rank - shape.dp if rank >= shape.dp else None,
        next_rank=rank + shape.dp if rank + shape.dp < shape.world_size else None,
        device=torch.device("cpu"),
    )


@cache
def _reference(
    shape: Shape, iterations: int
) -> tuple[Result, Mapping[int, Mapping[int, str]]]:
    """Train without faults and sessions.

    Returns:
        The result, and the digests by iteration and rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = ThreadJob(Path(folder), None, shape, iterations=iterations)
        return job.run(), job.digests


def uninterrupted(shape: Shape, iterations: int) -> Result:
    return _reference(shape, iterations)[0]


def exact(job: ThreadJob) -> ThreadJob:
    """Run a job to its end, which must equal the end of the job without faults."""
    assert job.run() == uninterrupted(job.shape, job.iterations)
    return job


def _opener(capture: MirrorCapture | None) -> OpenGradients:
    return from_sums(capture.sums) if capture else observes_nothing


def _close_copiers(session: Session) -> None:
    for copier in session.in_memory.parts.memory.copiers if session.in_memory else ():
        copier.close()


def stay_in_the_vote(job: ThreadJob, rank: int, *, iteration: int) -> None:
    """Keep a rank in the vote of an iteration until the generation is cut.

    The other ranks leave the vote.
    """

    def hold(worker: int, _: object) -> None:
        vote = job.all_ranks[worker].barrier

        def wait_for_the_cut() -> None:
            vote()
            if job.pages[worker].iteration == iteration:
                vote()

        if worker == rank:
            job.all_ranks[rank].barrier = wait_for_the_cut  # type: ignore[method-assign]

    job.on_worker.append(hold)
