"""A cluster's rates and the prices of its failures: the constants of a simulation.
Values and checks only.

All assumptions of a simulation about machines are such numbers, one set a cluster: see
conf/cluster/. Collectives are affine in the bytes: alpha + beta m (MoEvement, Appendix
C).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from moe_ckpt.config import require, require_at_least, require_choice

RANK, JOB = "rank", "job"
GPU_MEMORY_SHARE = 0.7
"""Of a GPU's memory, for weights, gradients and the optimizer's state; the rest is for
activations.
"""
STORE_OPERATIONS = 10
"""Operations in the job's store by which a rank enters a generation, whatever the
number of ranks.

`benchmarks/control_plane.py` counts them. The bytes that it counts beside (64 kB and 46
a rank) take no time here: on 16,384 ranks less than a megabyte.
"""
JOB_GROUPS = 2
"""Groups on the host that have all ranks of a job, one for training and one for saves.
"""
FORM_OPERATIONS = 10
"""Operations by which a rank forms such a group; `benchmarks/world_group.py` counts
them.
"""
_SHARES = ("compute_share", "copies_share")
_MAY_BE_ZERO = ("spares", "interference", "sync_overlap")


def connecting_operations(num_ranks: int) -> int:
    """Return the most operations by which a rank finds others in a group's first uses.

    The uses are an all-reduce, a barrier and a transfer to a neighbour
    (`benchmarks/world_group.py`).
    """
    return max(0, 4 * math.ceil(math.log2(num_ranks)) - 2)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Key by key explained in conf/cluster/h200.yaml."""

    name: str
    nodes: int
    gpus_per_node: int
    gpu_memory_bytes: float
    host_memory_bytes: float
    flops_per_s: float
    efficiency: float
    gpu_bytes_per_s: float
    node_latency_s: float
    node_bytes_per_s: float
    network_latency_s: float
    network_bytes_per_s: float
    sync_overlap: float
    compute_share: str
    copies_share: str
    copy_bytes_per_s: float
    whole_copy_bytes_per_s: float
    take_s: float
    interference: float
    rerun_ratio: float
    server_bytes_per_s: float
    disk_bytes_per_s: float
    disk_read_bytes_per_s: float
    detect_s: float
    hang_s: float
    rebuild_s: float
    store_operation_s: float
    restart_s: float
    resume_s: float
    spares: int
    spare_s: float
    repair_s: float

    def __post_init__(self) -> None:
        for name in (
            field.name for field in fields(self) if field.name not in ("name", *_SHARES)
        ):
            number = getattr(self, name)
            require(math.isfinite(number), f"cluster.{name}", number, "a finite number")
            # something may take no time at all, but nothing happens at a rate of zero
            is_time = name.endswith("_s") and not name.endswith("_per_s")
            if is_time or name in _MAY_BE_ZERO:
                require_at_least(f"cluster.{name}", number, 0)
            else:
                require(number > 0, f"cluster.{name}", number, "more than 0")
        for name in ("efficiency", "sync_overlap"):
            require(
                getattr(self, name) <= 1,
                f"cluster.{name}",
                getattr(self, name),
                "at most 1",
            )
        for name in _SHARES:
            require_choice(f"cluster.{name}", getattr(self, name), [RANK, JOB])

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def join_s(self) -> float:
        """Seconds in which the one store of the job serves all ranks that enter a
        generation.

        Each rank enters, and forms and uses the groups of all ranks. Smaller groups are
        left out: all of them together ask for less where there are many ranks.
        """
        of_group = FORM_OPERATIONS + connecting_operations(self.num_gpus)
        operations = STORE_OPERATIONS + JOB_GROUPS * of_group
        return operations * self.num_gpus * self.store_operation_s

    @property
    def peer_bytes_per_s(self) -> float:
        """A rank's share of its node's network."""
        return self.network_bytes_per_s / self.gpus_per_node

    def collective_s(
        self, num_bytes: float, group_size: int, *, within_node: bool
    ) -> float:
        """Return the seconds in which `group_size` ranks exchange `num_bytes` each, all
        but their own part of it.

        All-to-all, all-gather, reduce-scatter: alpha(p) + beta(p) m, with ceil(log2 p)
        steps and (p - 1) / p of all bytes.
        """
        if group_size <= 1:
            return 0.0
        latency_s = self.node_latency_s if within_node else self.network_latency_s
        bytes_per_s = self.node_bytes_per_s if within_node else self.peer_bytes_per_s
        steps = math.ceil(math.log2(group_size))
        return (
            steps * latency_s + (group_size - 1) / group_size * num_bytes / bytes_per_s
        )
