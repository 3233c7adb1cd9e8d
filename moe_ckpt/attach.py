"""The composition root: puts a checkpoint session together for a Megatron-Core training loop.

loop = TrainingLoop(communicator=StageCommunicator(...), forward_backward=..., ...)
session = attach(ckpt=..., identity=..., folder=..., state=TrainingState(...), loop=loop, events=..., ...)
first = session.resume(None) + 1
... per iteration: session.iteration_started, session.gradients_ready, session.step_committed
session.finish()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import torch

from moe_ckpt.adapters.megatron_boost import CapacityBoost
from moe_ckpt.adapters.megatron_durable import MegatronDurableState
from moe_ckpt.adapters.megatron_operators import RankOperators, shard_identity, stage_group
from moe_ckpt.adapters.megatron_pipeline import StageCommunicator
from moe_ckpt.adapters.megatron_replay import StageReplay, require_replayable
from moe_ckpt.adapters.megatron_router import RouterCounts, expert_capacity, router_top_k
from moe_ckpt.adapters.megatron_state import TrainingState, allocate_optimizer_state, small_state
from moe_ckpt.adapters.megatron_wipe import StateWiper
from moe_ckpt.collectives import TorchRanks
from moe_ckpt.config import (
    CheckfreqConfig,
    CkptConfig,
    GeminiConfig,
    InMemoryConfig,
    MocConfig,
    MoetionConfig,
    MoevementConfig,
    NoneConfig,
    require,
)
from moe_ckpt.events import EventLog
from moe_ckpt.faults import FaultSchedule, StateLoss
from moe_ckpt.placement import placement_lines
from moe_ckpt.policies.dense import make_policy
from moe_ckpt.policies.moc import PartialExperts
from moe_ckpt.policies.moetion import PopularExperts
from moe_ckpt.policies.moevement import SparseWindows
from moe_ckpt.policies.profile import StageProfile
from moe_ckpt.policies.whole import WholeSnapshots
from moe_ckpt.runtime.durable import DurableTier
from moe_ckpt.runtime.elastic import Elastic
from moe_ckpt.runtime.groups import CPU_BACKEND
from moe_ckpt.runtime.inject import StateLosses
from moe_ckpt.runtime.kept import KeptCopies
from moe_ckpt.runtime.meter import Meter
from moe_ckpt.runtime.recover import Recovery
from moe_ckpt.runtime.rejoin import Rejoin, adopt_kept
from moe_ckpt.runtime.rejoining import Rejoining
from moe_ckpt.runtime.session import Parts, Session, SparseParts
from moe_ckpt.runtime.shelf import UnitShelf, WindowShelf
from moe_ckpt.runtime.sparse import SparseStores, SparseTier
from moe_ckpt.runtime.stage import Place, Training
from moe_ckpt.runtime.tokens import TokenAccount, TokenRate
from moe_ckpt.runtime.unit_rejoin import UnitRejoin
from moe_ckpt.store.blobs import BlobFolder, own_path
from moe_ckpt.store.boundary import BoundaryLog
from moe_ckpt.store.bubbles import PipelineBubbles
from moe_ckpt.store.copier import HostCopier
from moe_ckpt.store.disk import CheckpointFolder
from moe_ckpt.store.journal import Journal, NoCopies
from moe_ckpt.store.local_disk import LocalDisk
from moe_ckpt.store.memory import HostBuffers, PrivateMemory, SnapshotMemory
from moe_ckpt.store.snapshot import SnapshotEngine
from moe_ckpt.store.steps import StepLog
from moe_ckpt.store.unit_memory import UnitMemory
from moe_ckpt.types import OperatorKind, RunIdentity


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingLoop:
    """What a replay needs of the loop.

    `forward_backward(iteration)` clears nothing and updates nothing: it runs Megatron's schedule over the iteration's
    batch, with `communicator` as its `p2p_communicator`. An iteration has `num_micro_batches` of `micro_batch_size`
    sequences of `sequence_length` tokens on every rank.
    """

    communicator: StageCommunicator
    forward_backward: Callable[[int], object]
    num_micro_batches: int
    micro_batch_size: int
    sequence_length: int


def attach(
    *,
    ckpt: CkptConfig,
    identity: RunIdentity,
    folder: Path,
    state: TrainingState,
    loop: TrainingLoop,
    events: EventLog,
    last_iteration: int,
    losses: Sequence[StateLoss] = (),
    elastic: Elastic | None = None,
    suspect_iters: int = 2,
) -> Session:
    """Return the session that checkpoints `state` as `ckpt` says, with checkpoints in `folder`. Call on every rank.

    A state that was loaded is not trusted any more where the loss is not finite in one of the first `suspect_iters`
    iterations after that. `losses` are inflicted on purpose. With `elastic` the session outlives the loss of ranks; a
    rank may attach by itself then, and the caller enters the session once all are together. Raises ConfigError for what
    cannot work.
    """
    allocate_optimizer_state(state)
    ranks = TorchRanks()
    saving = None if isinstance(ckpt, NoneConfig) else ckpt
    asynchronous, cpu_backend = saving is not None and saving.async_save, CPU_BACKEND if elastic else "gloo"
    durable_state = MegatronDurableState(state, asynchronous=asynchronous, cpu_backend=cpu_backend)
    keep, strict = (saving.keep, saving.strict) if saving else (1, False)
    durable = DurableTier(durable_state, CheckpointFolder(folder), identity, ranks, events, keep=keep)
    wanted = "none: only ckpt=moevement recovers what is lost in a living process"
    require(isinstance(ckpt, MoevementConfig) or not losses, "fault.at", [str(loss) for loss in losses], wanted)
    if isinstance(ckpt, InMemoryConfig):
        sparse = _InMemory(ckpt, identity, state, loop, events, losses, elastic, folder.with_name("snapshots"))
        session = Session(
            sparse.meet, durable, ranks, events, strict=strict, suspect_iters=suspect_iters, elastic=elastic
        )
    else:
        policy = make_policy(ckpt, last_iteration=last_iteration)
        parts = Parts(policy=policy, sparse=None)
        session = Session(lambda: parts, durable, ranks, events, strict=strict, suspect_iters=suspect_iters)
    if elastic is None:
        session.enter()
    return session


class _InMemory:
    """The parts of a session with snapshots in host memory, built in the order in which they need each other."""

    def __init__(
        self,
        config: InMemoryConfig,
        identity: RunIdentity,
        state: TrainingState,
        loop: TrainingLoop,
        events: EventLog,
        losses: Sequence[StateLoss],
        elastic: Elastic | None,
        disk_folder: Path,
    ) -> None:
        require_replayable(state)
        self.config = config
        self.state = state
        self.loop = loop
        self.events = events
        self.elastic = elastic
        self.disk_folder = Path(config.disk_path) / identity.run_id if config.disk_path else disk_folder
        self.schedule = FaultSchedule(losses)
        self.place = _place(identity, loop.communicator)
        self.schedule.check_fit(self.place.num_stages, self.place.identity.layout.dp)
        self.operators = RankOperators(state)
        self.stage = StageReplay(state, self.operators, loop.communicator, loop.forward_backward)
        self.is_partial = isinstance(config, MocConfig | MoetionConfig)
        self.account: TokenAccount | None = None
        self.boost = self._open_boost()
        self.stores: SparseStores | None = None
        self.counts: RouterCounts | None = None
        self.meter: Meter | None = None

    def meet(self) -> Parts:
        """Return parts that all ranks agree on; what this rank has in host memory stays. Collective over all ranks."""
        self.operators.meet()
        num_copies = self.elastic.replicas if self.elastic else 0
        self.policy = _make_policy(self.config, _gather_profiles(self), self.place, num_copies)
        if self.elastic:
            self.elastic.use_peers()
        self.stores = self.stores or self._open_stores()
        if self.is_partial:
            self.account = self.account or TokenAccount(self.operators.table)
        if isinstance(self.config, MoevementConfig) or self.is_partial:  # else nobody asks for popularity
            self.counts = self.counts or RouterCounts(self.state, self.operators.table)
        training = Training(stage=self.stage, operators=self.operators, counts=self.counts, boost=self.boost)
        self.meter = self.meter or Meter(sum(op.kind is OperatorKind.EXPERT for op in self.operators.table.operators))
        shelf = self._shelf(self.stores)
        tier = SparseTier(self.config, self.place, training, self.stores, shelf, self.meter, self.events, self.account)
        recovery = None if self.is_partial else Recovery(self.place, training, self.stores, self.events)
        injected = StateLosses(self.schedule, StateWiper(self.state), self.place, tier.lose, self.events)
        parts = SparseParts(
            tier=tier,
            stores=self.stores,
            recovery=recovery,
            losses=injected,
            notes=[*self.policy.notes(), *([self.boost.note] if self.boost else []), *self._placement()],
            recovers_locally=self.config.recovers_locally,
            rejoin=self._rejoin(training, self.stores, shelf, recovery),
        )
        return Parts(policy=self.policy, sparse=parts)

    def _shelf(self, stores: SparseStores) -> WindowShelf | UnitShelf:
        if isinstance(stores.memory, SnapshotMemory):
            return WindowShelf(self.place, self.operators, stores.memory, stores.journal, stores.disk)
        assert self.account is not None
        mine = self.operators.table.full_bytes[self.place.stage_ranks.rank]
        owned = [position for position, nbytes in enumerate(mine.tolist()) if nbytes]
        return UnitShelf(
            self.place, self.stage, self.operators, self.account, stores.memory, stores.journal, stores.disk, owned
        )

    def _rejoin(
        self, training: Training, stores: SparseStores, shelf: WindowShelf | UnitShelf, recovery: Recovery | None
    ) -> Rejoining | None:
        if self.elastic is None:
            return None
        copies = KeptCopies(self.place, stores, self.elastic)
        if recovery is None:
            assert isinstance(shelf, UnitShelf)
            assert isinstance(self.policy, PartialExperts | PopularExperts)
            assert self.account
            assert self.meter
            return UnitRejoin(
                self.place,
                training,
                stores,
                shelf,
                self.account,
                self.meter,
                self.policy,
                copies,
                self.elastic,
                self.events,
                self._token_rate(),
            )
        return Rejoin(
            self.place,
            self.stage,
            stores,
            recovery,
            copies,
            self.elastic,
            logs_tied=self.stage.tied_gradient_bytes > 0,
            recovers_locally=self.config.recovers_locally,
        )

    def _open_boost(self) -> CapacityBoost | None:
        if not isinstance(self.config, MoetionConfig) or not self.config.boost:
            return None
        return CapacityBoost.find(self.state, num_micro_batches=self.loop.num_micro_batches, factor=self.config.boost)

    def _token_rate(self) -> TokenRate:
        loop, layout = self.loop, self.place.identity.layout
        tokens = loop.num_micro_batches * loop.micro_batch_size * loop.sequence_length * layout.dp
        return TokenRate(tokens=tokens, top_k=router_top_k(self.state))

    def _placement(self) -> list[str]:
        if self.elastic is None:
            return []
        elastic = self.elastic
        lines = placement_lines(
            world_size=self.place.identity.layout.world_size,
            ranks_per_node=elastic.ranks_per_node,
            replicas=elastic.replicas,
            peers=elastic.peers,
        )
        return ["where copies of host memory are:", *lines]

    def _open_stores(self) -> SparseStores:
        """Host memory: logs take what they need, snapshots what the budget leaves them."""
        pinned = torch.cuda.is_available()
        private = PrivateMemory(pinned=pinned)
        journal = self._open_journal(pinned=pinned)
        copier, log_copier = HostCopier(), HostCopier()  # two: what is sent is not to wait behind a snapshot
        log_buffers = HostBuffers(private)
        snapshot_buffers = HostBuffers(journal.folder if journal else private, limit_bytes=self._limit())
        keeps_log = self.config.logs_boundaries and self.place.num_stages > 1
        boundary = BoundaryLog(log_copier, log_buffers) if keeps_log else None
        bubbles = PipelineBubbles() if isinstance(self.config, MoetionConfig) and self.config.bubble_copies else None
        self.loop.communicator.log, self.loop.communicator.bubbles = boundary, bubbles
        stores = SparseStores(
            copiers=(copier, log_copier),
            engine=SnapshotEngine(copier, snapshot_buffers, journal, bubbles),
            memory=UnitMemory(snapshot_buffers, journal)
            if self.is_partial
            else SnapshotMemory(snapshot_buffers, self.config.keep_windows, journal),
            steps=StepLog(journal),
            boundary=boundary,
            buffers=(log_buffers, snapshot_buffers),
            journal=journal,
            disk=self._open_disk(),
            bubbles=bubbles,
        )
        adopt_kept(stores)
        return stores

    def _open_journal(self, *, pinned: bool) -> Journal | None:
        if self.elastic is None:
            return None
        elastic = self.elastic
        folder = BlobFolder(own_path(elastic.memory), pinned=pinned)
        return Journal(folder, elastic.keeper or NoCopies(), elastic.copy_s, elastic.page.wait_for_copies)

    def _open_disk(self) -> LocalDisk | None:
        keeper = self.elastic.keeper if self.elastic else None
        if keeper is None or not self.config.disk_every_iters:
            return None
        return LocalDisk(self.disk_folder, self.place.shard.global_rank, keeper, self.config.disk_budget_bytes)

    def _limit(self) -> int | None:
        if self.config.memory_budget_bytes is None:
            return None
        forecast = self.policy.own_forecast()
        return self.config.memory_budget_bytes - forecast.total_bytes + forecast.snapshots_bytes

    def boundary_log_bytes(self) -> int:
        """Return the bytes that a rank of this stage logs an iteration."""
        if not self.config.logs_boundaries:
            return 0
        num_neighbours = sum(rank is not None for rank in (self.place.previous_rank, self.place.next_rank))
        num_tokens = self.loop.micro_batch_size * self.loop.sequence_length
        return num_neighbours * self.loop.num_micro_batches * self.loop.communicator.tensor_bytes(num_tokens)

    def step_log_bytes(self) -> int:
        """Return the bytes of this rank's step log an iteration."""
        return sum(tensor.nbytes for tensor in small_state(self.state).values()) + self.stage.tied_gradient_bytes


def _place(identity: RunIdentity, communicator: StageCommunicator) -> Place:
    shard, layout = shard_identity(), identity.layout
    return Place(
        identity=identity,
        shard=shard,
        ranks=TorchRanks(),
        stage_ranks=TorchRanks(stage_group()),
        previous_rank=communicator.prev_rank if shard.pp_rank > 0 else None,
        next_rank=communicator.next_rank if shard.pp_rank < layout.pp - 1 else None,
        device=torch.device(torch.cuda.current_device()),
    )


def _make_policy(
    config: InMemoryConfig, stages: Sequence[StageProfile], place: Place, num_copies: int
) -> SparseWindows | WholeSnapshots | PartialExperts | PopularExperts:
    match config:
        case MoevementConfig():
            return SparseWindows(config, stages, place.stage, num_copies)
        case GeminiConfig() | CheckfreqConfig():
            return WholeSnapshots(config, stages, place.stage, num_copies)
        case MocConfig():
            return PartialExperts(config, stages, place.stage, place.identity.layout.ep)
        case MoetionConfig():
            return PopularExperts(config, stages, place.stage, num_copies)
        case _:
            assert_never(config)


def _gather_profiles(parts: _InMemory) -> list[StageProfile]:
    """Return every stage's profile, from the rank of it that logs most. Collective over all ranks."""
    mine = StageProfile(
        table=parts.operators.table,
        boundary_log_bytes=parts.boundary_log_bytes(),
        step_log_bytes=parts.step_log_bytes(),
        expert_capacity=expert_capacity(parts.state, parts.operators.table),
    )
    of_each = parts.place.ranks.gather((parts.place.stage, mine))
    by_stage = dict(sorted(of_each, key=lambda entry: entry[1].step_log_bytes))
    return [by_stage[stage] for stage in sorted(by_stage)]
