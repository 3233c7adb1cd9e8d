"""The seconds of the parts of an iteration, of a replay and of a copy.

Pure arithmetic over sizes and a cluster's constants. MoEvement, Appendix C: the profile
of one layer is repeated, T_pipeline = (M + S - 1) max_s(t_s), T_iter = T_pipeline +
T_sync + T_update. If an iteration was measured, its seconds are given, and all parts
are scaled to these seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from moe_ckpt.config import MaxBytesPerS, require, require_at_least
from moe_ckpt.sim.hardware import JOB, ClusterConfig
from moe_ckpt.sim.job import Array, Job
from moe_ckpt.snapshot.token_bucket import BURST_S
from moe_ckpt.types import OperatorKind

GRADIENT_BYTES = 4  # gradients are reduced in FP32


@dataclass(frozen=True, kw_only=True)
class TimingConfig:
    """The timing of an iteration beside its parts; keys of conf/simulate.yaml."""

    iteration_s: float | None
    """Measured seconds of an iteration without checkpoints. None: derived from the
    cluster's constants.
    """

    interleave: int
    """Model chunks per stage (interleaved 1F1B)."""

    def __post_init__(self) -> None:
        wanted = "more than 0 seconds, or null: by the cluster's constants"
        given = self.iteration_s
        require(
            given is None or 0 < given < math.inf, "timing.iteration_s", given, wanted
        )
        require_at_least("timing.interleave", self.interleave, 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Costs:
    """The times of a job on a cluster."""

    iteration_s: float
    """Seconds of a mean iteration without saving."""

    micro_batch_s: Array
    """Seconds of forward and backward of a micro-batch on each stage, float64 [stages].
    With `are_shared`, the seconds hold while all stages run at once.
    """

    num_micro_batches: int
    """Micro-batches of an iteration."""

    interleave: int
    """Model chunks per stage (interleaved 1F1B)."""

    sync_s: float
    """Seconds of collectives at the end of an iteration that no computation hides."""

    update_s: float
    """Seconds of the optimizer's update."""

    log_s: Array
    """Seconds in which each stage receives the boundary logs of an iteration, float64
    [stages].
    """

    are_shared: bool = False
    """Whether all stages share their processors."""

    rerun_ratio: float = 1.0
    """Time of an iteration that runs again, or is replayed, relative to its first run.
    """

    @property
    def num_stages(self) -> int:
        return len(self.micro_batch_s)

    def overlap_s(self, iteration_s: float) -> float:
        """Return the seconds of an iteration up to its update.

        The update waits for copies of the state before it.
        """
        return max(0.0, iteration_s - self.update_s)

    def pipeline_s(self, stages: range) -> float:
        """Return the seconds of all micro-batches through some neighbouring stages.

        The time covers forward and backward in interleaved 1F1B. On shared processors,
        the time is the stages' share of the work of all stages, because these stages
        can use the processors of all stages.
        """
        if self.are_shared and len(stages) < self.num_stages:
            return self._work_share(stages) * self.pipeline_s(range(self.num_stages))
        bubbles = (len(stages) - 1) / self.interleave
        return (self.num_micro_batches + bubbles) * float(
            self.micro_batch_s[stages.start : stages.stop].max()
        )

    def replay_s(self, stages: range, active: float) -> float:
        """Return the seconds in which some stages replay an iteration.

        The first and the last of these stages replay from logs, unless the stages are
        all stages.

        Args:
            stages: The stages that replay together.
            active: The share of the work that belongs to operators with their whole
                state. All other operators skip weight gradients, a third of their work
                (MoEvement, section 3.3).
        """
        is_local = len(stages) < self.num_stages
        logs_s = (
            float(max(self.log_s[stages.start], self.log_s[stages.stop - 1]))
            if is_local
            else 0.0
        )
        end_s = (self.sync_s + self.update_s) * (
            self._work_share(stages) if self.are_shared else 1.0
        )
        return (
            self.rerun_ratio * (self.pipeline_s(stages) * (2 + active) / 3 + end_s)
            + logs_s
        )

    def _work_share(self, stages: range) -> float:
        return float(
            self.micro_batch_s[stages.start : stages.stop].sum()
            / self.micro_batch_s.sum()
        )


def estimate(job: Job, cluster: ClusterConfig, timing: TimingConfig) -> Costs:
    """Return the times of a job on a cluster."""
    stages = range(job.layout.pp)
    micro_batch_s = np.array([_micro_batch_s(job, cluster, stage) for stage in stages])
    exposed_s, update_s = step_s(job, cluster)
    bubbles = (job.layout.pp - 1) / timing.interleave
    derived_s = (
        (job.num_micro_batches + bubbles) * float(micro_batch_s.max())
        + exposed_s
        + update_s
    )
    # a measured iteration has the same parts as a derived iteration, all scaled by one
    # factor
    scale = 1.0 if timing.iteration_s is None else timing.iteration_s / derived_s
    log_s = np.array(
        [job.boundary_log_bytes(stage) / cluster.peer_bytes_per_s for stage in stages]
    )
    return Costs(
        iteration_s=timing.iteration_s or derived_s,
        micro_batch_s=scale * micro_batch_s,
        num_micro_batches=job.num_micro_batches,
        interleave=timing.interleave,
        sync_s=scale * exposed_s,
        update_s=scale * update_s,
        log_s=log_s,
        are_shared=cluster.compute_share == JOB,
        rerun_ratio=cluster.rerun_ratio,
    )


def step_s(job: Job, cluster: ClusterConfig) -> tuple[float, float]:
    """Return the seconds of an iteration's end.

    Returns:
        The seconds of collectives that no computation hides, and the seconds of the
        optimizer's update.
    """
    sync_s = max(_sync_s(job, cluster, stage) for stage in range(job.layout.pp))
    return (1 - cluster.sync_overlap) * sync_s, update_bytes(
        job
    ) / cluster.gpu_bytes_per_s


def update_bytes(job: Job) -> float:
    """Return the bytes that an update moves on the rank with the most bytes.

    An update reads and writes the whole state once.
    """
    return 2 * max(
        float(profile.table.full_bytes.sum(axis=1).max()) for profile in job.profiles
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyRates:
    """The rates of copies in bytes per second, within the caps of a policy.

    Where all ranks share one link (cluster.copies_share=job), host and peer rates are
    those of the whole job, and peers are assumed to keep up. Disk rates are always
    those of the whole job.
    """

    cluster: ClusterConfig
    """The cluster with the rates of the links."""

    caps: MaxBytesPerS
    """The caps of a rank (`ckpt.max_bytes_per_s`)."""

    num_ranks: int
    """Number of ranks of the job."""

    def host(self, bytes_per_s: float) -> float:
        """Return a rate of copies to host memory, limited by the cap."""
        return min(bytes_per_s, self._sharing * (self.caps.host or math.inf))

    def burst_s(self, bytes_per_s: float) -> float:
        """Return the seconds that a burst saves for a copy to host memory.

        The copy is that much shorter than the capped rate implies. Returns 0 where the
        cap does not limit the rate.
        """
        return BURST_S if self.host(bytes_per_s) < bytes_per_s else 0.0

    def to_peers(self, replicas: int) -> float:
        """Return the rate to each of `replicas` peers; infinite for none."""
        if replicas == 0:
            return math.inf
        link = (
            math.inf
            if self.cluster.copies_share == JOB
            else self.cluster.peer_bytes_per_s
        )
        return min(link, self._sharing * (self.caps.peers or math.inf)) / replicas

    def kept(self, replicas: int) -> float:
        """Return the rate of a rank's copies into host memory and `replicas` peers."""
        return min(self.host(self.cluster.copy_bytes_per_s), self.to_peers(replicas))

    def disk(self) -> float:
        """Return the rate of the whole job's writes to local disks."""
        return min(
            self.cluster.disk_bytes_per_s, self.num_ranks * (self.caps.disk or math.inf)
        )

    @property
    def _sharing(self) -> int:
        return self.num_ranks if self.cluster.copies_share == JOB else 1


def stall_s(
    *, copy_s: float, awaited_s: float, overlap_s: float, interference: float
) -> float:
    """Return the seconds that a snapshot adds to training.

    Copies slow training by a share `interference` of their time. An update that waits
    for copies is late by the time of these copies beyond `overlap_s`, however slow the
    iteration was: 5 s of copying beside 2 s of forward and backward add 3 s (MoC,
    equation 10). Copies that continue after the update also slow the next iterations.

    Args:
        copy_s: Seconds of all copies of the snapshot.
        awaited_s: Seconds of the copies for which the update waits.
        overlap_s: Seconds of the iteration up to its update.
        interference: The slowdown, as a share of the time of copies.
    """
    until_update_s = max(awaited_s, overlap_s)
    later_s = max(0.0, copy_s - until_update_s)
    return (
        max(awaited_s - overlap_s, interference * (copy_s - later_s))
        + interference * later_s
    )


def _micro_batch_s(job: Job, cluster: ClusterConfig, stage: int) -> float:
    where = job.positions(stage)
    operators = job.shape.operators[where]
    num_moe_layers = sum(operator.kind is OperatorKind.GATE for operator in operators)
    num_layers = sum(operator.kind is OperatorKind.BLOCK for operator in operators)
    layout, tensor_bytes = (
        job.layout,
        job.micro_batch_tokens * job.shape.hidden_size * job.formats.activation_bytes,
    )
    # 2: a multiplication and an addition; 3: backward computes two gradients for each
    # product of forward
    flops = 2 * 3 * float(job.work[where].sum()) * job.micro_batch_tokens / layout.tp
    compute_s = flops / (cluster.flops_per_s * cluster.efficiency)
    in_node = layout.ep * layout.tp <= cluster.gpus_per_node
    routed_s = cluster.collective_s(
        job.shape.topk * tensor_bytes / layout.tp, layout.ep, within_node=in_node
    )
    # an all-reduce is a reduce-scatter and an all-gather
    reduced_s = 2 * cluster.collective_s(tensor_bytes, layout.tp, within_node=True)
    # activations go one way and gradients the other: a stage in the middle has two
    # neighbours
    sends = (stage > 0) + (stage < layout.pp - 1)
    sent_s = sends * (
        cluster.network_latency_s + tensor_bytes / layout.tp / cluster.peer_bytes_per_s
    )
    # 4: dispatch and combine, or the sums after attention and MLP, each in forward and
    # in backward
    return (
        compute_s + 4 * num_moe_layers * routed_s + 4 * num_layers * reduced_s + sent_s
    )


def _sync_s(job: Job, cluster: ClusterConfig, stage: int) -> float:
    """Return the seconds of an iteration's collectives on a stage.

    Ranks with the same parameters reduce gradients and gather weights. If no rank has a
    shard, ranks gather gradients instead of weights.
    """
    where, layout = job.positions(stage), job.layout
    counts, is_expert = job.shape.parameters[where], job.is_expert[where]
    bytes_each = GRADIENT_BYTES + (
        job.formats.compute_bytes if job.is_sharded else GRADIENT_BYTES
    )
    in_node = layout.dp * layout.tp <= cluster.gpus_per_node
    shared = float(counts[~is_expert].sum()) / layout.tp * bytes_each
    experts = float(counts[is_expert].sum()) / (layout.ep * layout.tp) * bytes_each
    return cluster.collective_s(
        shared, layout.dp, within_node=in_node
    ) + cluster.collective_s(experts, layout.dp // layout.ep, within_node=in_node)
