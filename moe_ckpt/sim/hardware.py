"""A cluster's rates and the costs of its failures: the constants of a simulation.

Values and checks only. All assumptions of a simulation about machines are such numbers,
one set per cluster: see conf/cluster/. Collectives are affine in the bytes: alpha +
beta m (MoEvement, Appendix C).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from moe_ckpt.config import require, require_at_least, require_choice

RANK, JOB = "rank", "job"
GPU_MEMORY_SHARE = 0.7
"""Share of a GPU's memory for weights, gradients and the optimizer's state. The rest is
for activations.
"""
STORE_OPERATIONS = 10
"""Operations in the job's store by which a rank enters a generation.

The number does not depend on the number of ranks. `benchmarks/control_plane.py` counts
the operations. The bytes that the benchmark also counts (64 kB and 46 per rank) take no
time in the simulation: on 16,384 ranks these are less than a megabyte.
"""
JOB_GROUPS = 2
"""Host groups of all ranks of a job: one for training and one for saves."""
FORM_OPERATIONS = 10
"""Operations by which a rank forms such a group.

`benchmarks/world_group.py` counts the operations.
"""
_SHARES = ("compute_share", "copies_share")
_MAY_BE_ZERO = ("spares", "interference", "sync_overlap")


def connecting_operations(num_ranks: int) -> int:
    """Return the most operations by which a rank finds others in a group's first uses.

    The first uses are an all-reduce, a barrier and a transfer to a neighbour
    (`benchmarks/world_group.py`).
    """
    return max(0, 4 * math.ceil(math.log2(num_ranks)) - 2)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The constants of a cluster; keys of conf/cluster/h200.yaml."""

    name: str
    """Name of the cluster."""

    nodes: int
    """Nodes that the job trains on."""

    gpus_per_node: int
    """GPUs of a node; the GPUs of a node fail together."""

    gpu_memory_bytes: float
    """Memory of a GPU."""

    host_memory_bytes: float
    """Host memory of a node that snapshots and logs may use."""

    flops_per_s: float
    """Peak of a GPU in 16 bits."""

    efficiency: float
    """Share of the peak that a layer's computation reaches."""

    gpu_bytes_per_s: float
    """Memory bandwidth of a GPU: the optimizer's update reads and writes the state
    once.
    """

    node_latency_s: float
    """Seconds of one step of a collective between GPUs of a node (alpha)."""

    node_bytes_per_s: float
    """Bandwidth per GPU of a collective between GPUs of a node (1 / beta)."""

    network_latency_s: float
    """Seconds of one step of a collective between nodes (alpha)."""

    network_bytes_per_s: float
    """Bandwidth of a node over all its network cards."""

    sync_overlap: float
    """Share of gradient reduction and weight gathering that computation hides."""

    compute_share: str
    """Sharing of processors. "rank": each rank has a processor of its own. "job": ranks
    share processors, and idle processors help other ranks.
    """

    copies_share: str
    """Sharing of the link for copies. "rank": each rank copies through a link of its
    own. "job": all ranks share one link.
    """

    copy_bytes_per_s: float
    """Rate of a copy from GPU to host memory through the link during an iteration."""

    whole_copy_bytes_per_s: float
    """Rate of a copy of the whole state at once through the link."""

    take_s: float
    """Mean seconds for which a snapshot of any size stops training."""

    interference: float
    """Share of the overlap of copies and training by which training slows down."""

    rerun_ratio: float
    """Time of an iteration that runs again, or is replayed, relative to its first run.
    """

    server_bytes_per_s: float
    """State that a rank's share of processors steps per second as a server (FlowCheck).
    """

    disk_bytes_per_s: float
    """Rate of writes of the whole job to durable storage."""

    disk_read_bytes_per_s: float
    """Rate of reads of the whole job from durable storage."""

    detect_s: float
    """Seconds from a worker's death until all ranks have noticed the death."""

    hang_s: float
    """Seconds from a hung worker's last sign of life until the worker counts as dead.
    """

    rebuild_s: float
    """Seconds until all ranks, replaced ranks included, are in new process groups,
    without the time of the store.
    """

    store_operation_s: float
    """Seconds of one operation of the job's store, which serves all ranks that enter a
    generation one operation after another.
    """

    restart_s: float
    """Seconds until all processes have been restarted, where a policy needs a restart.
    """

    resume_s: float
    """Seconds, beside copying, until ranks that went back without a replay train from
    host memory as before.
    """

    spares: int
    """Spare nodes that wait (`runtime.spare_nodes`)."""

    spare_s: float
    """Seconds by which the loss of a node takes longer than the death of a worker,
    until the node's ranks are on a spare node.

    A spare node has imported all modules, so little but detection adds to `detect_s`
    and `rebuild_s`: `runtime.node_s` if a node falls silent.
    """

    repair_s: float
    """Seconds until a lost node is back, as a spare.

    A job without spare nodes waits for a lost node. `runtime.join_s`, after which the
    job saves and ends, is assumed to be longer.
    """

    def __post_init__(self) -> None:
        for name in (
            field.name for field in fields(self) if field.name not in ("name", *_SHARES)
        ):
            number = getattr(self, name)
            require(math.isfinite(number), f"cluster.{name}", number, "a finite number")
            # a time may be zero, but a rate of zero would never finish
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
        """Seconds in which the job's store serves all ranks that enter a generation.

        Each rank enters, and forms and uses the groups of all ranks. Smaller groups are
        left out: all of them together need less time where there are many ranks.
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
        """Return the seconds of an all-to-all, all-gather or reduce-scatter.

        The time is alpha(p) + beta(p) m, with ceil(log2 p) steps and (p - 1) / p of all
        bytes.

        Args:
            num_bytes: The bytes of each rank, including the rank's own part, which is
                not sent.
            group_size: The number of ranks p.
            within_node: Whether all ranks are on one node.
        """
        if group_size <= 1:
            return 0.0
        latency_s = self.node_latency_s if within_node else self.network_latency_s
        bytes_per_s = self.node_bytes_per_s if within_node else self.peer_bytes_per_s
        steps = math.ceil(math.log2(group_size))
        return (
            steps * latency_s + (group_size - 1) / group_size * num_bytes / bytes_per_s
        )
