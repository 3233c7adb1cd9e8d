"""Small jobs on small clusters, with round numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from launcher.config import compose_settings
from moe_ckpt.config import CkptConfig
from moe_ckpt.sim.costs import TimingConfig, estimate
from moe_ckpt.sim.hardware import ClusterConfig
from moe_ckpt.sim.job import BatchConfig, FormatsConfig, Job, ModelShape
from moe_ckpt.sim.saving import Setup, Switches
from moe_ckpt.types import OperatorId, OperatorKind, ParallelLayout

EXPERTS = 4
CLUSTER = ClusterConfig(
    name="test",
    nodes=4,
    gpus_per_node=2,
    gpu_memory_bytes=1e9,
    host_memory_bytes=1e12,
    flops_per_s=1e9,
    efficiency=0.5,
    gpu_bytes_per_s=1e12,
    node_latency_s=0.0,
    node_bytes_per_s=1e12,
    network_latency_s=0.0,
    network_bytes_per_s=2e12,
    sync_overlap=1.0,
    compute_share="rank",
    copies_share="rank",
    copy_bytes_per_s=1e6,
    whole_copy_bytes_per_s=1e6,
    take_s=0.0,
    interference=0.0,
    rerun_ratio=1.0,
    server_bytes_per_s=1e9,
    disk_bytes_per_s=1e7,
    disk_read_bytes_per_s=1e7,
    detect_s=1.0,
    hang_s=9.0,
    rebuild_s=2.0,
    store_operation_s=0.0,
    restart_s=50.0,
    resume_s=0.0,
    spares=4,
    spare_s=0.0,
    repair_s=1e6,
)


def cluster(**changes: Any) -> ClusterConfig:
    return replace(CLUSTER, **changes)


def shape(
    num_layers: int = 8, *, popularity: tuple[float, ...] = (0.25,) * EXPERTS
) -> ModelShape:
    """Return a model whose layers have a block, a gate and experts.

    An expert has 1000 parameters.
    """
    operators = [(OperatorId(kind=OperatorKind.EMBEDDING), 2000)]
    for layer in range(num_layers):
        operators.append((OperatorId(kind=OperatorKind.BLOCK, layer=layer), 4000))
        operators.append((OperatorId(kind=OperatorKind.GATE, layer=layer), 80))
        operators += [
            (OperatorId(kind=OperatorKind.EXPERT, layer=layer, expert=expert), 1000)
            for expert in range(len(popularity))
        ]
    operators += [
        (OperatorId(kind=OperatorKind.FINAL_NORM), 16),
        (OperatorId(kind=OperatorKind.OUTPUT), 2000),
    ]
    return ModelShape(
        operators=tuple(operator for operator, _ in operators),
        parameters=np.array([count for _, count in operators], np.int64),
        num_layers=num_layers,
        hidden_size=16,
        topk=2,
        popularity=np.array(popularity),
    )


def job(pp: int = 4, dp: int = 2, ep: int = 2, **changes: Any) -> Job:
    batch = BatchConfig(micro_batch_size=1, global_batch_size=8 * dp, sequence_length=8)
    formats = FormatsConfig(compute_bytes=2, full_bytes=12)
    arguments: dict[str, Any] = {
        "shape": shape(),
        "batch": batch,
        "formats": formats,
        **changes,
    }
    return Job(layout=ParallelLayout(pp=pp, dp=dp, ep=ep, tp=1), **arguments)


def setup(
    *,
    machines: ClusterConfig = CLUSTER,
    of: Job | None = None,
    iteration_s: float | None = 10.0,
    mtbf_s: float | None = None,
    switches: Switches = Switches(),  # noqa: B008 - frozen
) -> Setup:
    of = of or job()
    costs = estimate(of, machines, TimingConfig(iteration_s=iteration_s, interleave=1))
    return Setup(
        job=of, cluster=machines, costs=costs, mtbf_s=mtbf_s, switches=switches
    )


@cache
def ckpt(*overrides: str) -> CkptConfig:
    """Return a policy's settings from command-line overrides.

    The first override chooses the policy.
    """
    return compose_settings(overrides).ckpt
