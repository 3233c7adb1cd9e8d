"""Builds the in-memory tier of one rank from an adapter's description of its training: stores, policy, tier, recovery.

Owns: the order in which the parts are built; which parts live as long as the process, and which as long as a
generation. Must not: import Megatron, or do anything but build.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, assert_never

import torch

from moe_ckpt.config import (
    DIVERGENCES,
    CheckfreqConfig,
    FlowcheckConfig,
    GeminiConfig,
    InMemoryConfig,
    MocConfig,
    MoetionConfig,
    MoevementConfig,
    require,
)
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.engine.in_memory_tier import InMemoryTier
from moe_ckpt.engine.interfaces import Boost, Counts, FaultInjector, Mirror, Operators, Stage, StagePlace
from moe_ckpt.engine.job_recovery import JobRecovery
from moe_ckpt.engine.measurements import Measurements
from moe_ckpt.engine.partial_recovery import PartialPolicy, PartialRecovery
from moe_ckpt.engine.rank_parts import RankParts, TierStores
from moe_ckpt.engine.server_states import ServerStates
from moe_ckpt.engine.session import InMemoryParts, Parts
from moe_ckpt.engine.snapshot_stores import SnapshotStore
from moe_ckpt.engine.stage_profiles import share_profiles
from moe_ckpt.engine.stage_recovery import StageRecovery
from moe_ckpt.engine.state_loss import StateLosses
from moe_ckpt.engine.token_account import TokenAccount, TokenRate
from moe_ckpt.engine.window_recovery import WindowRecovery
from moe_ckpt.engine.window_sources import WindowSources
from moe_ckpt.events import EventLog, ServersChanged
from moe_ckpt.faults.schedule import FaultSchedule, StateLoss
from moe_ckpt.policies.flowcheck import ServerSnapshots
from moe_ckpt.policies.full_snapshots import WholeSnapshots
from moe_ckpt.policies.memory_forecast import MemoryForecast
from moe_ckpt.policies.moc import PartialExperts
from moe_ckpt.policies.moetion import PopularExperts
from moe_ckpt.policies.moevement import SparseWindows
from moe_ckpt.policies.stage_profile import StageProfile
from moe_ckpt.policies.window_cost import alone_share
from moe_ckpt.ports import Policy
from moe_ckpt.replication.final_save import SaveTarget, write_save_target
from moe_ckpt.replication.local_disk import LocalDisk
from moe_ckpt.replication.placement import placement_lines
from moe_ckpt.replication.publisher import NoCopies, Publisher
from moe_ckpt.snapshot.blobs import BlobFolder, own_path
from moe_ckpt.snapshot.boundary_log import BoundaryLog
from moe_ckpt.snapshot.bubbles import PipelineBubbles
from moe_ckpt.snapshot.capture import SnapshotEngine
from moe_ckpt.snapshot.copier import HostCopier
from moe_ckpt.snapshot.step_log import StepLog
from moe_ckpt.snapshot.token_bucket import Throttle
from moe_ckpt.snapshot.windows import HostBuffers, PrivateMemory, SnapshotMemory
from moe_ckpt.types import OperatorKind


class InMemoryPolicy(Policy, Protocol):
    """A policy with snapshots in host memory."""

    def own_forecast(self) -> MemoryForecast:
        """Return the most host memory that a rank of this stage can need."""
        ...

    def notes(self) -> list[str]:
        """Return the costs, line by line, for the log."""
        ...


class Communicator(Protocol):
    """Carries activations and gradients between stages. It writes to `log` and opens `bubbles` if these are set."""

    log: BoundaryLog | None
    bubbles: PipelineBubbles | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Attached:
    """One rank's training, as an adapter presents it to the engine.

    Byte counts are those of this rank's logs in one iteration, which has at most `num_micro_batches`. `counts` is
    called once the operator table of the whole stage is known; `notes` go to the log at the start.
    """

    place: StagePlace
    stage: Stage
    operators: Operators
    communicator: Communicator
    injector: FaultInjector
    counts: Callable[[], Counts]
    tokens: TokenRate
    num_micro_batches: int
    boundary_log_bytes: int
    step_log_bytes: int
    tied_gradient_bytes: int
    boost: Boost | None = None
    mirror: Mirror | None = None
    notes: Sequence[str] = ()
    on_divergence: str = DIVERGENCES[0]


class InMemoryAssembly:
    """The parts of a session with snapshots in host memory. Stores, counts and measurements outlive generations."""

    def __init__(
        self,
        config: InMemoryConfig,
        attached: Attached,
        events: EventLog,
        elastic: ElasticContext | None,
        folder: Path,
        losses: Sequence[StateLoss] = (),
    ) -> None:
        """`folder` holds snapshots on the local disk, unless the configuration names another folder."""
        self._config = config
        self._attached = attached
        self._place = attached.place
        self._events = events
        self._elastic = elastic
        self._disk_folder = Path(config.disk_path) / self._place.identity.run_id if config.disk_path else folder
        self._schedule = FaultSchedule(losses)
        self._schedule.check_fit(self._place.num_stages, self._place.identity.layout.dp)
        self._account: TokenAccount | None = None
        self._stores: TierStores | None = None
        self._counts: Counts | None = None
        self._meter: Measurements | None = None

    def build_parts(self) -> Parts:
        """Return the parts of a new generation. The contents of host memory stay. Collective over all ranks."""
        self._attached.operators.meet()  # first: a replacement was alone as it built its model
        num_copies = self._elastic.replicas if self._elastic else 0
        stages = self._gather_profiles()
        self._require_time_for_copies(stages, num_copies)
        self._policy = _make_policy(self._config, stages, self._attached, num_copies)
        partial = self._policy if isinstance(self._policy, PartialExperts | PopularExperts) else None
        if self._elastic:
            hosts = self._elastic.hosts
            # before `use_peers`, which then names the servers that all ranks can reach
            if hosts and hosts.agree(self._place.ranks):
                self._events.append(ServersChanged(addresses=", ".join(hosts.present)))
            self._elastic.use_peers()  # a daemon that was replaced since has another address
        # after the policy: its forecast divides the memory budget between logs and snapshots
        self._stores = self._stores or self._open_stores()
        if partial:
            self._account = self._account or TokenAccount(self._attached.operators.table)
        if self._config.asks_popularity:
            self._counts = self._counts or self._attached.counts()
        # outlives the policy: once a surviving rank has settled costs, a generation makes no more trial windows
        self._meter = self._meter or Measurements(
            sum(op.kind is OperatorKind.EXPERT for op in self._attached.operators.table.operators)
        )
        rank = RankParts(
            place=self._place,
            stage=self._attached.stage,
            operators=self._attached.operators,
            counts=self._counts,
            boost=self._attached.boost,
            stores=self._stores,
            meter=self._meter,
            events=self._events,
            account=self._account,
        )
        store = SnapshotStore(rank)
        tier = InMemoryTier(self._config, rank, store, self._server_states(rank))
        recovery = None if partial else StageRecovery(rank, self._attached.on_divergence)
        injected = StateLosses(self._schedule, self._attached.injector, self._place, tier.lose, self._events)
        parts = InMemoryParts(
            tier=tier,
            stores=self._stores,
            recovery=recovery,
            losses=injected,
            notes=[*self._policy.notes(), *self._attached.notes, *self._placement()],
            rejoin=self._rejoin(rank, store, partial, recovery),
        )
        return Parts(policy=self._policy, sparse=parts)

    def _server_states(self, rank: RankParts) -> ServerStates | None:
        if self._config.served is None:
            return None
        assert self._elastic is not None, "checkpoint servers live beside supervised ranks"
        return ServerStates(rank, self._attached.mirror, self._config.served.max_lag_iters, self._elastic)

    def _rejoin(
        self, rank: RankParts, store: SnapshotStore, partial: PartialPolicy | None, recovery: StageRecovery | None
    ) -> JobRecovery | None:
        if self._elastic is None:
            return None
        if partial:
            return PartialRecovery(rank, store, partial, self._elastic, self._attached.tokens)
        assert recovery is not None, "only units are loaded without a replay"
        sources = WindowSources(
            rank,
            recovery,
            self._elastic,
            logs_tied=self._attached.tied_gradient_bytes > 0,
            servers_lead=self._config.served is not None,
        )
        recovers_locally = self._config.recovers_locally
        return WindowRecovery(rank, sources, recovery, self._elastic, recovers_locally=recovers_locally)

    def _placement(self) -> list[str]:
        if self._elastic is None:
            return []
        elastic = self._elastic
        if elastic.uses_hosts:
            return elastic.hosts_lines()
        lines = placement_lines(
            world_size=self._place.identity.layout.world_size,
            ranks_per_node=elastic.ranks_per_node,
            replicas=elastic.replicas,
            peers=elastic.peers,
        )
        return ["where copies of host memory are:", *lines]

    def _open_stores(self) -> TierStores:
        """Open host memory: logs take what they need, and snapshots get the rest of the budget."""
        private = PrivateMemory(pinned=torch.cuda.is_available())
        # two copiers: a copy to peers must not wait behind a snapshot, and has no cap, since it waits in device memory
        copier, log_copier = HostCopier(Throttle(self._config.max_bytes_per_s.host)), HostCopier()
        publisher, disk = self._open_surviving(self._elastic, copier) if self._elastic else (None, None)
        limit_bytes = self._config.memory_budget_bytes
        if limit_bytes is not None:
            forecast = self._policy.own_forecast()
            limit_bytes += forecast.snapshots_bytes - forecast.total_bytes
        log_buffers = HostBuffers(private)  # ends with the process: its stage replays, and logs again what it sends
        snapshot_buffers = HostBuffers(publisher.folder if publisher else private, limit_bytes=limit_bytes)
        keeps_log = self._config.boundary_log and self._place.num_stages > 1
        boundary = BoundaryLog(log_copier, log_buffers) if keeps_log else None
        bubbles = PipelineBubbles() if self._config.copies_in_bubbles else None
        self._attached.communicator.log, self._attached.communicator.bubbles = boundary, bubbles
        stores = TierStores(
            copiers=(copier, log_copier),
            engine=SnapshotEngine(copier, snapshot_buffers, publisher, bubbles),
            memory=SnapshotMemory(snapshot_buffers, self._config.keep_windows, publisher),
            steps=StepLog(publisher),
            boundary=boundary,
            buffers=(log_buffers, snapshot_buffers),
            publisher=publisher,
            disk=disk,
            bubbles=bubbles,
        )
        # a replacement finds the snapshots and the step log of the worker before it, which outlive a process
        stores.adopt_kept()
        return stores

    def _open_surviving(self, elastic: ElasticContext, copier: HostCopier) -> tuple[Publisher, LocalDisk]:
        """Open the memory that outlives this process, and the local disk, where its supervisor saves it at the end."""
        elastic.at_end(copier.throttle.lift)  # else survivors would join late, after the rest of a copy,
        folder = BlobFolder(own_path(elastic.memory), pinned=torch.cuda.is_available())
        publisher = Publisher(folder, elastic.daemon or NoCopies(), elastic.copy_s, elastic.page.wait_for_copies)
        elastic.at_end(publisher.interrupt_waits)  # and of those to peers
        rank, limit_bytes = self._place.shard.global_rank, self._config.disk_budget_bytes
        disk = LocalDisk(self._disk_folder, rank, elastic.daemon, limit_bytes)
        if not self._config.loses_tokens:  # the last save knows windows only: units go on from those on disk
            target = SaveTarget(path=str(disk.path), limit_bytes=disk.limit_bytes, global_rank=rank)
            write_save_target(elastic.memory, target)
        return publisher, disk

    def _require_time_for_copies(self, stages: Sequence[StageProfile], num_copies: int) -> None:
        """Raise ConfigError on all ranks if the cap lets no full snapshot through within `runtime.copy_s`."""
        if self._elastic is None:
            return
        # by the largest of all stages: ranks that raised alone would leave the others waiting for them
        caps, copy_s = self._config.max_bytes_per_s, self._elastic.copy_s
        most_bytes = max(stage.dense_bytes for stage in stages)
        for name, cap, nbytes in (
            ("host", caps.host, most_bytes),
            ("peers", caps.peers, most_bytes * num_copies),
            ("disk", caps.disk, most_bytes),
        ):
            if cap is not None:
                wanted = (
                    f"at least {nbytes / cap:.3g}: a full snapshot of {nbytes} bytes at ckpt.max_bytes_per_s.{name}"
                )
                require(nbytes <= cap * copy_s, "runtime.copy_s", copy_s, wanted)

    def _gather_profiles(self) -> list[StageProfile]:
        """Return the profile of every stage. Collective over all ranks."""
        attached = self._attached
        mine = StageProfile(
            table=attached.operators.table,
            boundary_log_bytes=attached.boundary_log_bytes if self._config.boundary_log else 0,
            step_log_bytes=attached.step_log_bytes,
        )
        return share_profiles(self._place, mine)


def _make_policy(
    config: InMemoryConfig, stages: Sequence[StageProfile], attached: Attached, num_copies: int
) -> InMemoryPolicy:
    place = attached.place
    match config:
        case MoevementConfig():
            share = alone_share(attached.num_micro_batches, place.num_stages)
            return SparseWindows(config, stages, place.stage, num_copies, share)
        case GeminiConfig() | CheckfreqConfig():
            return WholeSnapshots(config, stages, place.stage, num_copies)
        case MocConfig():
            return PartialExperts(config, stages, place.stage, place.identity.layout.ep)
        case MoetionConfig():
            return PopularExperts(config, stages, place.stage, num_copies)
        case FlowcheckConfig():
            return ServerSnapshots(config, stages, place.stage, num_copies)
        case _:
            assert_never(config)
