"""The costs of each policy in a simulated job.

Decisions are those of `moe_ckpt.policies`, and costs are those of the simulator. A
policy is one entry in POLICIES. The module must not know faults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from moe_ckpt.config import (
    AUTO,
    CheckfreqConfig,
    DenseConfig,
    FlowcheckConfig,
    GeminiConfig,
    InMemoryConfig,
    MocConfig,
    MoetionConfig,
    MoevementConfig,
    NoneConfig,
    require,
)
from moe_ckpt.policies.flowcheck import GRADIENT_SHARE, ServerSnapshots
from moe_ckpt.policies.full_snapshots import WholeSnapshots
from moe_ckpt.policies.lost_tokens import IntArray
from moe_ckpt.policies.moc import PartialExperts
from moe_ckpt.policies.moetion import PopularExperts
from moe_ckpt.policies.moevement import SparseWindows
from moe_ckpt.policies.partial import MoeStage
from moe_ckpt.policies.stage_profile import StageProfile
from moe_ckpt.policies.window_cost import alone_share
from moe_ckpt.policies.window_schedule import fixed_order
from moe_ckpt.sim.capture_redundancy import PACKET_BYTES, failure_probability
from moe_ckpt.sim.costs import GRADIENT_BYTES, CopyRates, stall_s, step_s
from moe_ckpt.sim.hardware import GPU_MEMORY_SHARE, JOB, ClusterConfig
from moe_ckpt.sim.job import Array, Job
from moe_ckpt.sim.measuring import SETTLED, GenerationStart, MeasuredSoFar
from moe_ckpt.sim.partial import Partial, Tokens, probe_turns
from moe_ckpt.sim.saving import Durable, Recovery, Saving, Setup
from moe_ckpt.sim.snapshot_pattern import NOTHING, SnapshotPattern, probe_policy
from moe_ckpt.types import (
    ENOUGH_SNAPSHOTS,
    ENOUGH_WINDOWS,
    ExpertChoice,
    Measured,
    OperatorKind,
    OperatorTable,
    SlotPlan,
)

_NO_EXPERTS = np.zeros(0)


def plan_saving(config: Any, setup: Setup) -> Saving:
    """Return the costs of a policy's configuration in a setup.

    Args:
        config: The configuration of one of POLICIES.
        setup: The job on a cluster.

    Raises:
        ConfigError: The policy is unknown, or the configuration is impossible, for
            example because host memory is too small.
    """
    require(
        config.policy in POLICIES,
        "ckpt.policy",
        config.policy,
        "one of " + ", ".join(POLICIES),
    )
    saving = POLICIES[config.policy](config, setup)
    need, have = saving.host_bytes(setup), setup.cluster.host_memory_bytes
    wanted = (
        f"at least {need:.4g} on each node, for snapshots and logs of"
        f" ckpt.policy={config.policy}"
    )
    require(need <= have, "cluster.host_memory_bytes", have, wanted)
    return saving


def _none(config: NoneConfig | DenseConfig, setup: Setup) -> Saving:
    return Saving(
        name=config.policy,
        recovery=Recovery.RESTART,
        pattern=lambda _: NOTHING,
        settled=NOTHING,
        whole_bytes=setup.total_full_bytes,
        reload_bytes_per_s=setup.cluster.disk_read_bytes_per_s,
    )


def _dense(config: DenseConfig, setup: Setup) -> Saving:
    return replace(
        _none(config, setup),
        durable=_durable(setup, config.every_iters, asynchronous=config.async_save),
    )


def _in_memory(
    config: InMemoryConfig,
    setup: Setup,
    link: _Link,
    pattern: Callable[[GenerationStart], SnapshotPattern],
    recovery: Recovery = Recovery.ROLLBACK,
    host: _Link | None = None,
    **own: Any,
) -> Saving:
    """Return the costs that all policies with snapshots in memory share.

    Args:
        config: The settings.
        setup: The job on a cluster.
        link: The link of the snapshots.
        pattern: Returns the snapshots of a generation.
        recovery: The ranks that go back after a fault.
        host: The link to host memory, where `link` is also the link to peers.
        **own: The fields of `Saving` that depend on the policy.
    """
    return Saving(
        name=config.policy,
        recovery=recovery,
        pattern=pattern,
        settled=pattern(SETTLED),
        whole_bytes=link.most_bytes,
        durable=_durable(
            setup, config.durable_every_iters, asynchronous=config.async_save
        ),
        sizes_are_of_job=link.is_shared,
        host_bytes_per_s=(host or link).bytes_per_s,
        **own,
    )


def _whole(config: GeminiConfig | CheckfreqConfig, setup: Setup) -> Saving:
    rates = _rates(config, setup)
    link = _whole_link(setup, rates)
    replicas = _replicas(config.replication.replicas, setup.cluster)
    kept_bytes_per_s = narrowest = min(link.bytes_per_s, rates.kept(replicas))
    # the disk's rate is that of the whole job, so it is scaled to one rank's copies
    if config.waits_for_disk:  # the next snapshot waits until this one is written
        narrowest = min(
            narrowest, rates.disk() * link.most_bytes / setup.total_full_bytes
        )

    def stalled_s(length: float) -> float:
        return link.stall_s(link.most_bytes, length * setup.costs.iteration_s)

    def measured(so_far: MeasuredSoFar) -> Measured:
        return Measured(
            iteration_s=so_far.length * setup.costs.iteration_s,
            copy_bytes_per_s=narrowest,
            host_bytes_per_s=link.bytes_per_s,
            popularity=_NO_EXPERTS,
            snapshot_cost_s=stalled_s(so_far.length)
            if so_far.num_costs >= ENOUGH_SNAPSHOTS
            else None,
        )

    def describe(_: SlotPlan, length: float) -> tuple[int, float]:
        return link.most_bytes, stalled_s(length)

    make = partial(WholeSnapshots, config, link.profiles, link.own, replicas)
    return _in_memory(
        config,
        setup,
        link,
        _patterns(
            config, make, measured, describe, is_fixed=config.every_iters != AUTO
        ),
        reload_bytes_per_s=setup.cluster.whole_copy_bytes_per_s,
        replicas=replicas,
        kept_bytes_per_s=kept_bytes_per_s,
        peer_bytes_per_s=rates.to_peers(replicas),
        disk_s=setup.total_full_bytes / rates.disk(),
        memory=make().forecast(),
    )


def _servers(config: FlowcheckConfig, setup: Setup) -> Saving:
    """Return the costs of servers: ranks copy and send gradients, and servers step.

    In each iteration, gradients are copied while training waits, then sent. A fault
    fetches a whole state. Gradients that servers capture from a mirror port take no
    time, but need an optimizer that is not sharded.
    """
    added_s = _unsharded_s(setup) if config.mirrors else 0.0
    cluster = setup.cluster
    link = _Link(setup, cluster.whole_copy_bytes_per_s)
    replicas = _replicas(config.replication.replicas, cluster)
    gradient_bytes = _gradient_bytes(config, setup.job, link.profiles[link.own].table)
    served_s = _served_s(setup, link, replicas)
    # servers on processors of their own work in parallel to training; on shared
    # processors training stands still meanwhile
    iteration_s = setup.costs.iteration_s
    waits_s = (
        served_s if cluster.compute_share == JOB else max(0.0, served_s - iteration_s)
    )
    added_s += waits_s + _lost_share(config, setup.job, replicas) * link.stall_s(
        link.most_bytes, iteration_s
    )
    tap_s = cluster.take_s + gradient_bytes / link.bytes_per_s + added_s
    make = partial(ServerSnapshots, config, link.profiles, link.own, replicas)
    measured = Measured(
        iteration_s=iteration_s,
        copy_bytes_per_s=link.bytes_per_s,
        popularity=_NO_EXPERTS,
    )
    pattern = _patterns(
        config,
        make,
        lambda _: measured,
        lambda _, __: (gradient_bytes, tap_s),
        is_fixed=True,
    )
    return _in_memory(
        config,
        setup,
        link,
        lambda _: pattern(SETTLED),
        reload_bytes_per_s=link.bytes_per_s,
        replicas=replicas,
        kept_bytes_per_s=min(link.bytes_per_s, _rates(config, setup).kept(replicas)),
        memory=make().forecast(),
        served_s=served_s,
        window_bytes=link.most_bytes,
    )


def _served_s(setup: Setup, link: _Link, replicas: int) -> float:
    """Return the seconds in which servers on a rank's processors make one state.

    A server steps the rank's own state and those of `replicas` other ranks. Training
    waits for servers that need more than an iteration, as with ckpt.max_lag_iters=0. On
    processors that training shares with servers, training waits for the whole time.
    """
    ranks = setup.job.layout.world_size if link.is_shared else 1
    return (1 + replicas) * link.most_bytes / ranks / setup.cluster.server_bytes_per_s


def _lost_share(config: FlowcheckConfig, job: Job, replicas: int) -> float:
    """Return the share of iterations that any server cannot complete.

    After such an iteration, a whole snapshot of every rank follows.
    """
    if not config.mirrors or config.capture_loss == 0 or job.layout.dp == 1:
        return 0.0
    packets = (
        (1 + replicas)
        * GRADIENT_BYTES
        * float(job.shape.parameters.sum())
        / PACKET_BYTES
    )
    captures = min(config.captures, job.layout.dp)
    return failure_probability(
        packets=packets,
        ranks=job.layout.dp,
        captures=captures,
        loss=config.capture_loss,
    )


def _unsharded_s(setup: Setup) -> float:
    """Return the extra seconds of an iteration's end with an optimizer without shards.

    Each rank then steps the whole state of its parameters.

    Raises:
        ConfigError: A GPU has no room for the whole state beside weights and gradients.
    """
    job, cluster = setup.job.unsharded(), setup.cluster
    state_bytes = max(profile.dense_bytes for profile in job.profiles)
    need = (
        state_bytes
        * (1 + (job.formats.compute_bytes + GRADIENT_BYTES) / job.formats.full_bytes)
        / GPU_MEMORY_SHARE
    )
    wanted = (
        f"at least {need:.4g} for an optimizer without shards, which"
        " ckpt.capture=mirror needs"
    )
    require(
        need <= cluster.gpu_memory_bytes,
        "cluster.gpu_memory_bytes",
        cluster.gpu_memory_bytes,
        wanted,
    )
    return sum(step_s(job, cluster)) - sum(step_s(setup.job, cluster))


def _gradient_bytes(config: FlowcheckConfig, job: Job, table: OperatorTable) -> int:
    """Return the bytes of gradients that a rank hands over.

    A rank hands over all gradients, or only those of experts that no other rank has.
    """
    layout = job.layout
    taps_all = not config.mirrors or layout.dp == 1
    taps_experts = taps_all or layout.dp == layout.ep
    tapped = [
        taps_experts if operator.kind is OperatorKind.EXPERT else taps_all
        for operator in table.operators
    ]
    return int(table.full_bytes[:, tapped].sum(axis=1).max()) // GRADIENT_SHARE


def _moevement(config: MoevementConfig, setup: Setup) -> Saving:
    replicas = _replicas(config.replication.replicas, setup.cluster)
    rates = _rates(config, setup)
    link = _Link(
        setup, rates.kept(replicas), rates.burst_s(setup.cluster.copy_bytes_per_s)
    )
    host = _Link(setup, rates.kept(0))
    measured = _measured_windows(setup, link, host, rates.to_peers(replicas))
    share = alone_share(setup.job.num_micro_batches, setup.job.layout.pp)
    make = partial(SparseWindows, config, link.profiles, link.own, replicas, share)
    table = link.profiles[link.own].table
    full_bytes, compute_bytes = table.full_bytes, table.compute_bytes

    def describe(plan: SlotPlan, length: float) -> tuple[int, float]:
        iteration_s = length * setup.costs.iteration_s
        full, compute = np.array(plan.full, np.int64), np.array(plan.compute, np.int64)
        size_bytes = int(
            (
                full_bytes[:, full].sum(axis=1) + compute_bytes[:, compute].sum(axis=1)
            ).max()
        )
        awaited = host if plan.pause_iters else link  # copies to peers use the pause
        return size_bytes, link.stall_s(
            size_bytes, iteration_s, awaited_bytes_per_s=awaited.bytes_per_s
        )

    # is_fixed=False: the base is not a window that the policy chose
    pattern = _patterns(
        config,
        make,
        measured,
        describe,
        popularity=_popularity(setup, link),
        is_fixed=False,
    )
    chosen = pattern(SETTLED).repeat[0]
    return _in_memory(
        config,
        setup,
        link,
        pattern,
        recovery=Recovery.LOCAL,
        host=host,
        reload_bytes_per_s=setup.cluster.copy_bytes_per_s,
        replicas=replicas,
        logs=config.logs_boundaries,
        keep_windows=config.keep_windows,
        kept_bytes_per_s=link.bytes_per_s,
        peer_bytes_per_s=rates.to_peers(replicas),
        disk_s=setup.total_full_bytes / rates.disk(),
        active=cache(lambda num_slots: _active_shares(config, num_slots, setup, link)),
        memory=make().forecast(chosen.num_slots, chosen.pause_iters),
    )


def _measured_windows(
    setup: Setup, link: _Link, host: _Link, peer_bytes_per_s: float
) -> Callable[[MeasuredSoFar], Measured]:
    """Return a function that gives the measurements of a job with windows.

    The measurements are the cluster's constants, once they are measured.
    """
    costs, cluster, popularity = setup.costs, setup.cluster, _popularity(setup, link)
    replayed_s = max(
        costs.replay_s(range(stage, stage + 1), active=1.0)
        for stage in range(costs.num_stages)
    )

    def measured(so_far: MeasuredSoFar) -> Measured:
        return Measured(
            iteration_s=so_far.length * costs.iteration_s,
            overlap_s=costs.overlap_s(so_far.length * costs.iteration_s),
            copy_bytes_per_s=link.bytes_per_s,
            host_bytes_per_s=host.bytes_per_s,
            peer_bytes_per_s=peer_bytes_per_s,
            popularity=popularity,
            empty_snapshot_s=cluster.take_s if so_far.num_costs else None,
            dense_snapshot_s=link.added_s(link.most_bytes)
            if so_far.num_costs
            else None,
            costs_are_settled=so_far.num_costs >= ENOUGH_WINDOWS,
            replayed_iteration_s=so_far.replay_length * replayed_s
            if so_far.replay_length
            else None,
            kept_since=so_far.kept_since,
        )

    return measured


def _moc(config: MocConfig, setup: Setup) -> Saving:
    costs = _PartialCosts(config, setup)
    return _partial(
        config,
        setup,
        costs,
        lambda: PartialExperts(config, costs.stages, 0, setup.job.layout.ep),
    )


def _moetion(config: MoetionConfig, setup: Setup) -> Saving:
    costs = _PartialCosts(config, setup)
    return _partial(
        config,
        setup,
        costs,
        lambda: PopularExperts(config, costs.stages, 0, costs.replicas),
    )


def _partial(
    config: MocConfig | MoetionConfig,
    setup: Setup,
    costs: _PartialCosts,
    make: Callable[[], PartialExperts | PopularExperts],
) -> Saving:
    num_experts = setup.job.shape.num_experts
    tokens = Tokens(setup.job)
    measured = costs.measured(tokens.by_expert * config.every_iters)
    probe = partial(
        probe_turns, measured=measured, describe=costs.describe, num_experts=num_experts
    )
    told = Partial(make=make, probe=probe, tokens=tokens)
    pattern = told.first_epoch().pattern
    choices = [
        snapshot.experts.choice for snapshot in pattern.repeat if snapshot.experts
    ]
    return _in_memory(
        config,
        setup,
        costs.link,
        lambda _: pattern,
        reload_bytes_per_s=setup.cluster.whole_copy_bytes_per_s,
        replicas=costs.replicas,
        kept_bytes_per_s=min(
            costs.size_bytes(choice) / costs.copy_s(choice) for choice in choices
        ),
        disk_s=max(map(costs.write_s, choices)),
        memory=make().forecast(),
        partial=told,
    )


POLICIES: Mapping[str, Callable[[Any, Setup], Saving]] = {
    "none": _none,
    "dense": _dense,
    "checkfreq": _whole,
    "gemini": _whole,
    "moevement": _moevement,
    "moc": _moc,
    "moetion": _moetion,
    "flowcheck": _servers,
}


class _Link:
    """A link for snapshots.

    Each rank has a link of its own, or all ranks of the job share one link.

    Args:
        setup: The job on a cluster.
        bytes_per_s: The rate of the link.
        burst_s: Seconds by which a copy is shorter than the rate implies.
    """

    def __init__(self, setup: Setup, bytes_per_s: float, burst_s: float = 0.0) -> None:
        self._setup, self._burst_s = setup, burst_s
        self.is_shared = setup.cluster.copies_share == JOB
        self.bytes_per_s = bytes_per_s
        self.profiles = (
            [setup.job.whole_profile()] if self.is_shared else setup.job.profiles
        )
        sizes = [profile.dense_bytes for profile in self.profiles]
        self.own = int(np.argmax(sizes))
        self.most_bytes = sizes[self.own]

    def stall_s(
        self,
        size_bytes: float,
        iteration_s: float,
        awaited_bytes_per_s: float | None = None,
    ) -> float:
        """Return the seconds that a snapshot adds to an iteration and later ones.

        Args:
            size_bytes: The bytes of the snapshot.
            iteration_s: Seconds of the iteration.
            awaited_bytes_per_s: The rate of the copies for which the update waits;
                None: all copies.
        """
        awaited_s = size_bytes / (awaited_bytes_per_s or self.bytes_per_s)
        return self._setup.cluster.take_s + stall_s(
            copy_s=max(0.0, size_bytes / self.bytes_per_s - self._burst_s),
            awaited_s=max(0.0, awaited_s - self._burst_s),
            overlap_s=self._setup.costs.overlap_s(iteration_s),
            interference=self._setup.cluster.interference,
        )

    def added_s(self, size_bytes: float) -> float:
        """Return the seconds that a snapshot adds by starting and by slowing training.

        The seconds are those of all iterations during the copy.
        """
        return (
            self._setup.cluster.take_s
            + self._setup.cluster.interference * size_bytes / self.bytes_per_s
        )


def _whole_link(setup: Setup, rates: CopyRates) -> _Link:
    """Return the link by which a whole snapshot reaches host memory.

    The link is within the policy's cap.
    """
    bytes_per_s = setup.cluster.whole_copy_bytes_per_s
    return _Link(setup, rates.host(bytes_per_s), rates.burst_s(bytes_per_s))


def _kinds_of_stages(profiles: Sequence[StageProfile]) -> list[StageProfile]:
    """Return one stage of each kind, the stage with experts that copies most first.

    Policies need no further stages.
    """

    def rank(profile: StageProfile) -> tuple[bool, int]:
        has_experts = any(
            operator.kind is OperatorKind.EXPERT for operator in profile.table.operators
        )
        return has_experts, profile.dense_bytes

    # stages with equal bytes get equal answers
    kinds = {profile.table.full_bytes.tobytes(): profile for profile in profiles}
    return sorted(kinds.values(), key=rank, reverse=True)


class _PartialCosts:
    """The costs of partial snapshots."""

    def __init__(self, config: MocConfig | MoetionConfig, setup: Setup) -> None:
        cluster = setup.cluster
        self.iteration_s = setup.costs.iteration_s
        self.replicas = _replicas(config.replication.replicas, cluster)
        rates = _rates(config, setup)
        self.link = _whole_link(setup, rates)
        self.stages = _kinds_of_stages(self.link.profiles)
        table = self.stages[0].table
        self._own = MoeStage(table, config.partial)
        self._peer_bytes_per_s = rates.to_peers(self.replicas)
        # all stages write at the same time, each with a share of the job's rate
        self._disk_bytes_per_s = (
            rates.disk() * int(table.full_bytes.sum()) / setup.total_full_bytes
        )

    def measured(self, tokens: IntArray) -> Measured:
        return Measured(
            iteration_s=self.iteration_s,
            copy_bytes_per_s=min(self.link.bytes_per_s, self._peer_bytes_per_s),
            popularity=np.tile(tokens, self._own.num_layers).astype(np.float64),
            host_bytes_per_s=self.link.bytes_per_s,
            peer_bytes_per_s=self._peer_bytes_per_s,
        )

    def describe(self, choice: ExpertChoice) -> tuple[int, float, float]:
        """Return the bytes of the largest rank, the stall, and the seconds to disk."""
        stall_s = self.link.stall_s(
            self.copy_s(choice) * self.link.bytes_per_s, self.iteration_s
        )
        return self.size_bytes(choice), stall_s, self.write_s(choice)

    def size_bytes(self, choice: ExpertChoice) -> int:
        return int(self._own.snapshot_bytes(choice.memory).max())

    def copy_s(self, choice: ExpertChoice) -> float:
        sent_bytes = int(self._own.snapshot_bytes(choice.on_peers).max())
        return max(
            self.size_bytes(choice) / self.link.bytes_per_s,
            sent_bytes / self._peer_bytes_per_s,
        )

    def write_s(self, choice: ExpertChoice) -> float:
        return (
            float(self._own.snapshot_bytes(choice.on_disk).sum())
            / self._disk_bytes_per_s
        )


def _patterns(
    config: InMemoryConfig,
    make: Callable[[], Any],
    measured: Callable[[MeasuredSoFar], Measured],
    describe: Callable[[SlotPlan, float], tuple[int, float]],
    *,
    popularity: Array = _NO_EXPERTS,
    is_fixed: bool,
) -> Callable[[GenerationStart], SnapshotPattern]:
    """Return a function that gives a fresh policy's snapshots by a generation's start.

    The arguments are those of `probe_policy`.
    """
    nothing = Measured(iteration_s=0.0, copy_bytes_per_s=np.inf, popularity=popularity)

    @cache
    def pattern(begin: GenerationStart) -> SnapshotPattern:
        return probe_policy(
            make(),
            begin,
            lambda so_far: measured(so_far) if so_far else nothing,
            describe,
            disk_every=config.disk.every_iters > 0,
            is_fixed=is_fixed,
        )

    return pattern


def _durable(setup: Setup, every_iters: int, *, asynchronous: bool) -> Durable | None:
    """Return the costs of whole checkpoints on disk, one at a time.

    Asynchronous checkpoints are copied first.
    """
    if every_iters == 0:
        return None
    cluster, write_s = setup.cluster, setup.write_s
    if not asynchronous:
        return Durable(every_iters=every_iters, stall_s=write_s, done_s=write_s)
    link = _Link(setup, cluster.whole_copy_bytes_per_s)
    copy_s = link.most_bytes / link.bytes_per_s
    waits_s = max(0.0, write_s - every_iters * setup.costs.iteration_s)
    return Durable(
        every_iters=every_iters, stall_s=copy_s + waits_s, done_s=copy_s + write_s
    )


def _rates(config: InMemoryConfig, setup: Setup) -> CopyRates:
    return CopyRates(
        cluster=setup.cluster,
        caps=config.max_bytes_per_s,
        num_ranks=setup.job.layout.world_size,
    )


def _replicas(wanted: int | str, cluster: ClusterConfig) -> int:
    """Return the copies in other nodes' memory; `auto` is one if there is another node.

    Raises:
        ConfigError: There are too few nodes.
    """
    if wanted == AUTO:
        return min(1, cluster.nodes - 1)
    replicas = int(wanted)
    require(
        replicas < cluster.nodes,
        "ckpt.replicas",
        replicas,
        f"less than cluster.nodes={cluster.nodes}",
    )
    return replicas


def _popularity(setup: Setup, link: _Link) -> Array:
    """Return the popularity of experts of the ranks with the most bytes.

    The popularity is in the form that a policy measures.
    """
    profile = link.profiles[link.own]
    experts = fixed_order(profile.table.operators).experts
    if not setup.switches.order_by_popularity:
        return np.ones(len(experts))
    numbers = [profile.table.operators[position].expert or 0 for position in experts]
    return setup.job.shape.popularity[numbers]


def _active_shares(
    config: MoevementConfig, num_slots: int, setup: Setup, link: _Link
) -> tuple[float, ...]:
    """Return the share of active work after each slot of a window is loaded."""
    where = slice(None) if link.is_shared else setup.job.positions(link.own)
    work = setup.job.work[where]
    policy = SparseWindows(
        replace(config, window=num_slots, pause_iters=0), link.profiles, link.own
    )
    measured = Measured(
        iteration_s=1.0, copy_bytes_per_s=np.inf, popularity=_popularity(setup, link)
    )
    shares, active = [], 0.0
    for offset in range(1 + num_slots):
        plan = policy.plan(offset, lambda: measured).sparse
        assert plan is not None
        if offset > 0:  # the first snapshot is the base
            active += float(work[list(plan.full)].sum())
            shares.append(
                active / float(work.sum()) if setup.switches.skip_frozen else 1.0
            )
    return tuple(shares)
