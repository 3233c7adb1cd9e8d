"""A policy in a simulated job: snapshots, costs, and rollback after a fault.

Values only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from moe_ckpt.policies.memory_forecast import MemoryForecast
from moe_ckpt.replication.placement import copy_holders
from moe_ckpt.sim.costs import Costs
from moe_ckpt.sim.hardware import ClusterConfig
from moe_ckpt.sim.job import Job
from moe_ckpt.sim.measuring import GenerationStart
from moe_ckpt.sim.pace import EVEN, Pace
from moe_ckpt.sim.partial import Partial
from moe_ckpt.sim.snapshot_pattern import SnapshotPattern


class Recovery(Enum):
    """The ranks that go back after a fault, and the source of their state."""

    RESTART = "all processes start again and load what is on disk"
    ROLLBACK = "all ranks go back to the newest snapshot in host memory"
    LOCAL = "the stages that were lost replay from logs"


@dataclass(frozen=True, kw_only=True)
class Switches:
    """MoEvement's means to shorten replays (Figure 13)."""

    skip_frozen: bool = True
    """Whether a replay skips weight gradients of operators whose whole state comes
    later.
    """

    order_by_popularity: bool = True
    """Whether snapshots take popular experts last."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """A job on a cluster, and its costs there."""

    job: Job
    """The job."""

    cluster: ClusterConfig
    """The cluster."""

    costs: Costs
    """Costs of a mean iteration."""

    mtbf_s: float | None
    """Mean time between failures of the job, in seconds. None: the fault plan gives the
    faults.
    """

    switches: Switches = Switches()
    """MoEvement's means to shorten replays."""

    pace: Pace = EVEN
    """Lengths of single iterations."""

    def holders(
        self, rank: int, replicas: int, peers: int | None = None
    ) -> tuple[int, ...]:
        """Return the ranks whose memories hold the copies of a rank.

        Args:
            rank: The rank.
            replicas: The number of copies.
            peers: As in `copy_holders`.
        """
        world_size, per_node = self.job.layout.world_size, self.cluster.gpus_per_node
        return copy_holders(
            rank,
            world_size=world_size,
            ranks_per_node=per_node,
            replicas=replicas,
            peers=peers,
        )

    @property
    def total_full_bytes(self) -> float:
        """The bytes of the whole state of the job."""
        return float(self.job.shape.parameters.sum()) * self.job.formats.full_bytes

    @property
    def write_s(self) -> float:
        """Seconds until the whole state is on disk."""
        return self.total_full_bytes / self.cluster.disk_bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Durable:
    """Whole checkpoints on disk at an interval."""

    every_iters: int
    """Iterations between two checkpoints."""

    stall_s: float
    """Seconds for which a checkpoint stops training."""

    done_s: float
    """Seconds from the start of a checkpoint until it is complete."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Saving:
    """A policy's saves and their costs.

    All rates except `reload_bytes_per_s` are within the policy's caps.
    """

    name: str
    """Name of the policy."""

    recovery: Recovery
    """The ranks that go back after a fault."""

    pattern: Callable[[GenerationStart], SnapshotPattern]
    """Returns the snapshots of a generation."""

    settled: SnapshotPattern
    """Snapshots of a generation that starts after all costs and a replay were measured.
    """

    whole_bytes: float
    """Bytes of the whole state on the rank with the most bytes, or of the job where all
    ranks share one link.
    """

    reload_bytes_per_s: float
    """Rate at which a state is loaded after a fault."""

    replicas: int = 0
    """Number of copies in the memory of other nodes."""

    logs: bool = False
    """Whether ranks keep boundary logs."""

    keep_windows: int = 1
    """Number of complete windows that ranks keep."""

    host_bytes_per_s: float = math.inf
    """Rate at which a snapshot reaches host memory."""

    kept_bytes_per_s: float = math.inf
    """Rate at which a snapshot reaches all its destinations."""

    peer_bytes_per_s: float = math.inf
    """Rate at which a snapshot goes from host memory to peers."""

    disk_s: float = 0.0
    """Seconds until a snapshot that goes to disk is there."""

    durable: Durable | None = None
    """Whole checkpoints on disk. None: there are none."""

    active: Callable[[int], tuple[float, ...]] = lambda num_slots: (1.0,) * num_slots
    """Returns, for a window of so many slots, the share of the work whose operators are
    active after slot j is loaded.
    """

    memory: MemoryForecast | None = None
    """Host memory of the rank with the most bytes, or of the job with
    `sizes_are_of_job`. None: no snapshots in host memory.
    """

    sizes_are_of_job: bool = False
    """Whether sizes are those of the whole job, because all ranks share one link."""

    partial: Partial | None = None
    """The experts of partial snapshots. None: the policy takes whole snapshots or
    windows.
    """

    served_s: float = 0.0
    """Seconds in which servers make a state from a snapshot that has arrived."""

    window_bytes: float | None = None
    """Bytes on a rank of a state that servers make. None: snapshots are the state."""

    @property
    def kept_bytes(self) -> float:
        """The bytes of a kept window, or of a state that servers have made."""
        if self.window_bytes is not None:
            return self.window_bytes
        snapshots = self.settled.repeat
        return float(
            sum(snapshot.size_bytes for snapshot in snapshots[: snapshots[0].num_slots])
        )

    @property
    def overhead_s(self) -> float:
        """Mean seconds that saving adds to an iteration of a settled policy."""
        pattern = self.settled
        snapshots_s = (
            sum(snapshot.stall_s for snapshot in pattern.repeat) / pattern.period
            if pattern.repeat
            else 0.0
        )
        return snapshots_s + (
            self.durable.stall_s / self.durable.every_iters if self.durable else 0.0
        )

    def host_bytes(self, setup: Setup) -> float:
        """Return the host memory that a node needs for snapshots and logs."""
        if self.memory is None:
            return 0.0
        if self.sizes_are_of_job:
            return self.memory.total_bytes / setup.cluster.nodes
        return self.memory.total_bytes * setup.cluster.gpus_per_node
