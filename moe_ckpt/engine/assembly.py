"""Builds one rank's in-memory checkpointing from the rank's adapter.

The result consists of host memory, policy, tier and recoveries. Owns: the order in
which the parts are built, and their two lifetimes. Must not: import Megatron, or do
anything but build.

    process      adapter, events -> RankParts (memory, account, counts, meter),
                 in the first generation
    generation   policy; RankParts -> store, tier, recoveries -> InMemoryCheckpointing
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, assert_never

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
from moe_ckpt.engine.audits import Audits
from moe_ckpt.engine.computed_snapshots import (
    NOTHING_COMPUTED,
    ComputedSnapshots,
    NoSink,
)
from moe_ckpt.engine.gradient_recovery import GradientRecovery
from moe_ckpt.engine.in_memory import InMemoryCheckpointing
from moe_ckpt.engine.in_memory_tier import InMemoryTier
from moe_ckpt.engine.interfaces import RankAdapter
from moe_ckpt.engine.job_recovery import JobRecovery
from moe_ckpt.engine.measurements import Measurements
from moe_ckpt.engine.partial_recovery import PartialRecovery
from moe_ckpt.engine.rank_memory import RankMemory, require_shared_room
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.engine.rebuilding import Rebuilding
from moe_ckpt.engine.snapshot_stores import SnapshotStore
from moe_ckpt.engine.stage_profiles import SharedProfiles, share_profiles
from moe_ckpt.engine.stage_recovery import StageRecovery
from moe_ckpt.engine.state_loss import StateLosses
from moe_ckpt.engine.token_account import TokenAccount
from moe_ckpt.engine.window_recovery import WindowRecovery
from moe_ckpt.engine.window_sources import WindowSources
from moe_ckpt.events import EventLog
from moe_ckpt.faults.schedule import FaultSchedule, StateLoss
from moe_ckpt.policies.flowcheck import ServerSnapshots
from moe_ckpt.policies.full_snapshots import WholeSnapshots
from moe_ckpt.policies.memory_forecast import MemoryForecast
from moe_ckpt.policies.moc import PartialExperts
from moe_ckpt.policies.moetion import PopularExperts
from moe_ckpt.policies.moevement import SparseWindows
from moe_ckpt.policies.partial import PartialSnapshots
from moe_ckpt.policies.stage_profile import StageProfile
from moe_ckpt.policies.window_cost import alone_share
from moe_ckpt.policies.window_sizes import WindowSizes
from moe_ckpt.ports import Policy
from moe_ckpt.types import OperatorKind


class InMemoryPolicy(Policy, Protocol):
    """A policy with snapshots in host memory."""

    def own_forecast(self) -> MemoryForecast:
        """Return the maximum host memory that a rank of this stage can need."""
        ...

    def start_forecast(self) -> MemoryForecast:
        """Return the host memory that a rank of this stage needs as training begins."""
        ...

    def notes(self) -> list[str]:
        """Return the costs, line by line, for the log."""
        ...


class InMemoryAssembly:
    """Builds the in-memory side of one rank's session, generation after generation.

    Lifetime: that of the process. Keeps the `RankParts`, which outlive generations.
    """

    def __init__(
        self,
        config: InMemoryConfig,
        adapter: RankAdapter,
        events: EventLog,
        elastic: ElasticContext | None,
        folder: Path,
        losses: Sequence[StateLoss] = (),
        *,
        on_divergence: str = DIVERGENCES[0],
        computed: ComputedSnapshots = NOTHING_COMPUTED,
    ) -> None:
        """Store the settings. Nothing is opened before the first generation.

        Args:
            config: The policy's settings.
            adapter: This rank's training.
            events: This rank's log of events.
            elastic: This rank's means to survive the loss of ranks. None: such a loss
                ends the job.
            folder: The folder of snapshots on the local disk, unless the configuration
                names another one.
            losses: Losses of state that are injected on purpose, in living processes.
            on_divergence: One of `config.DIVERGENCES`, for a replay that differs from
                the state of a healthy rank.
            computed: Snapshots that processes other than workers compute.

        Raises:
            ConfigError: A loss names a stage or a rank that the job does not have.
        """
        self._config = config
        self._adapter = adapter
        self._position = adapter.position
        self._events = events
        self._elastic = elastic
        self._disk_folder = (
            Path(config.disk.path) / self._position.identity.run_id
            if config.disk.path
            else folder
        )
        self._on_divergence = on_divergence
        self._computed = computed
        self._schedule = FaultSchedule(losses)
        self._schedule.check_fit(
            self._position.num_stages, self._position.identity.layout.dp
        )
        self._parts: RankParts | None = None
        self._profiles: SharedProfiles | None = None
        self._sizes: WindowSizes | None = None

    def build_generation(self) -> tuple[InMemoryPolicy, InMemoryCheckpointing]:
        """Build the in-memory side of a new generation. Collective over all ranks.

        The contents of host memory stay.

        Returns:
            The policy and the rank's checkpointing. The policy is equal on all ranks of
            a stage and has no history.

        Raises:
            ConfigError: The settings do not fit the model or the machines. Raised on
                all ranks.
        """
        # first: a replacement was alone while it built its model
        self._adapter.operators.meet()
        num_copies = self._elastic.holders.num_peers if self._elastic else 0
        profiles = self._gather_profiles()
        self._require_time_for_copies(profiles.stages, num_copies)
        if profiles is not self._profiles:
            self._profiles, self._sizes = profiles, None
        policy = _make_policy(
            self._config, profiles.stages, self._adapter, num_copies, self._sizes
        )
        if isinstance(policy, SparseWindows):
            # kept for later generations: in a large job the windows of all stages take
            # a second to compute
            self._sizes = policy.sizes
        partial = policy if isinstance(policy, PartialSnapshots) else None
        if self._elastic:
            # before `use_peers`, which then names the holders that all ranks can reach
            if changed := self._elastic.holders.agree(self._position.ranks):
                self._events.append(changed)
            # a daemon that was replaced since the last generation has another address
            self._elastic.use_peers()
        if self._parts is None:
            self._parts = self._open_parts(policy, has_account=partial is not None)
        parts = self._parts
        store = SnapshotStore(parts)
        sink = self._computed.sink(parts, self._elastic) if self._elastic else NoSink()
        tier = InMemoryTier(self._config, parts, store, sink)
        rebuilding = None if partial else self._rebuilding(parts)
        checkpointing = InMemoryCheckpointing(
            parts,
            tier,
            StateLosses(
                self._schedule,
                self._adapter.injector,
                self._position,
                tier.lose,
                self._events,
            ),
            rebuilding=rebuilding,
            job_recovery=self._job_recovery(parts, store, partial, rebuilding),
            audits=self._audits(parts, rebuilding),
            notes=[
                *policy.notes(),
                *self._adapter.notes,
                *self._computed.notes,
                *(self._elastic.holders.lines() if self._elastic else ()),
            ],
            require_room=lambda: self._require_room(policy),
        )
        return policy, checkpointing

    def _open_parts(self, policy: InMemoryPolicy, *, has_account: bool) -> RankParts:
        """Open the parts that live as long as the process."""
        # after the policy: the policy's forecast divides the memory budget between logs
        # and snapshots
        memory = RankMemory(
            self._config,
            self._position,
            self._elastic,
            self._disk_folder,
            snapshots_limit_bytes=self._snapshots_limit_bytes(policy),
        )
        communicator, table = self._adapter.communicator, self._adapter.operators.table
        communicator.log, communicator.bubbles = memory.boundary, memory.bubbles
        num_experts = sum(
            operator.kind is OperatorKind.EXPERT for operator in table.operators
        )
        return RankParts(
            adapter=self._adapter,
            memory=memory,
            account=TokenAccount(table) if has_account else None,
            counts=self._adapter.counts() if self._config.asks_popularity else None,
            meter=Measurements(num_experts),
            events=self._events,
        )

    def _require_room(self, policy: InMemoryPolicy) -> None:
        """Raise ConfigError on all ranks if the forecast exceeds shared memory."""
        if self._elastic is not None:
            needed_bytes = policy.start_forecast().shared_bytes
            require_shared_room(
                self._position.ranks, self._elastic.memory, needed_bytes
            )

    def _snapshots_limit_bytes(self, policy: InMemoryPolicy) -> int | None:
        """Return the maximum bytes of snapshots, or None without a memory budget.

        The limit is the budget without the logs and copies that the policy forecasts.
        """
        if self._config.memory_budget_bytes is None:
            return None
        forecast = policy.own_forecast()
        return self._config.memory_budget_bytes - (
            forecast.total_bytes - forecast.snapshots_bytes
        )

    def _rebuilding(self, parts: RankParts) -> Rebuilding[Any]:
        if self._config.logs_gradients:
            return GradientRecovery(parts)
        return StageRecovery(parts, self._on_divergence)

    def _audits(
        self, parts: RankParts, rebuilding: Rebuilding[Any] | None
    ) -> Audits | None:
        every_iters = self._config.audit_every_iters
        if not every_iters:
            return None
        assert isinstance(rebuilding, GradientRecovery), "the settings require it"
        return Audits(parts, rebuilding, every_iters)

    def _job_recovery(
        self,
        parts: RankParts,
        store: SnapshotStore,
        partial: PartialSnapshots | None,
        rebuilding: Rebuilding[Any] | None,
    ) -> JobRecovery | None:
        if self._elastic is None:
            return None
        if partial:
            return PartialRecovery(parts, store, partial, self._elastic)
        assert rebuilding is not None, "only units are loaded as they are"
        computed = self._computed.source(parts, self._elastic)
        return WindowRecovery(
            parts,
            WindowSources(parts, rebuilding, self._elastic, computed),
            rebuilding,
            self._elastic,
            computed,
            recovers_locally=self._config.recovers_locally,
        )

    def _require_time_for_copies(
        self, stages: Sequence[StageProfile], num_copies: int
    ) -> None:
        """Require that a full snapshot passes each cap within `runtime.copy_s`.

        Raises ConfigError on all ranks otherwise.
        """
        if self._elastic is None:
            return
        # checked for the largest of all stages: ranks that raised alone would leave the
        # others waiting
        caps, copy_s = self._config.max_bytes_per_s, self._elastic.copy_s
        most_bytes = max(stage.dense_bytes for stage in stages)
        for name, cap, nbytes in (
            ("host", caps.host, most_bytes),
            ("peers", caps.peers, most_bytes * num_copies),
            ("disk", caps.disk, most_bytes),
        ):
            if cap is not None:
                wanted = (
                    f"at least {nbytes / cap:.3g}: a full snapshot of {nbytes} bytes at"
                    f" ckpt.max_bytes_per_s.{name}"
                )
                require(nbytes <= cap * copy_s, "runtime.copy_s", copy_s, wanted)

    def _gather_profiles(self) -> SharedProfiles:
        """Return the profile of every stage. Collective over all ranks."""
        table = self._adapter.operators.table
        if self._config.logs_gradients:
            # a window that is not replayed needs no compute weights
            table = table.without_compute()
        mine = StageProfile(
            table=table,
            boundary_log_bytes=self._adapter.boundary_log_bytes
            if self._config.logs_boundaries
            else 0,
            step_log_bytes=self._adapter.step_log_bytes,
            gradient_bytes=self._adapter.gradient_bytes,
        )
        return share_profiles(self._position, mine, self._profiles)


def _make_policy(
    config: InMemoryConfig,
    stages: Sequence[StageProfile],
    adapter: RankAdapter,
    num_copies: int,
    sizes: WindowSizes | None,
) -> InMemoryPolicy:
    position = adapter.position
    match config:
        case MoevementConfig():
            share = alone_share(adapter.num_micro_batches, position.num_stages)
            return SparseWindows(
                config, stages, position.stage, num_copies, share, sizes
            )
        case GeminiConfig() | CheckfreqConfig():
            return WholeSnapshots(config, stages, position.stage, num_copies)
        case MocConfig():
            return PartialExperts(
                config, stages, position.stage, position.identity.layout.ep
            )
        case MoetionConfig():
            return PopularExperts(config, stages, position.stage, num_copies)
        case FlowcheckConfig():
            return ServerSnapshots(config, stages, position.stage, num_copies)
        case _:
            assert_never(config)
