"""A policy in a simulated job: its snapshots, their prices, its rollback after a fault.
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
    """The ranks that go back after a fault, and their path."""

    RESTART = "all processes start again and load what is on disk"
    ROLLBACK = "all ranks go back to the newest snapshot in host memory"
    LOCAL = "the stages that were lost replay from logs"


@dataclass(frozen=True, kw_only=True)
class Switches:
    """MoEvement's means to replay less (its Figure 13)."""

    skip_frozen: bool = True
    order_by_popularity: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """A job on a cluster, and its costs there: those of a mean iteration, and the pace
    of single ones.
    """

    job: Job
    cluster: ClusterConfig
    costs: Costs
    mtbf_s: float | None
    switches: Switches = Switches()
    pace: Pace = EVEN

    def holders(
        self, rank: int, replicas: int, peers: int | None = None
    ) -> tuple[int, ...]:
        """Return the ranks whose memories hold the copies of a rank; `peers` as in
        `copy_holders`.
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
        """The whole state of the job."""
        return float(self.job.shape.parameters.sum()) * self.job.formats.full_bytes

    @property
    def write_s(self) -> float:
        """Seconds until the whole state is on disk."""
        return self.total_full_bytes / self.cluster.disk_bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Durable:
    """A whole checkpoint on disk every few iterations: it stops training, and is
    complete after `done_s`.
    """

    every_iters: int
    stall_s: float
    done_s: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Saving:
    """A policy's saves and their price.

    `pattern` gives its snapshots in a generation; `settled` are those in one that
    starts once all costs, and a replay, have been measured. `host_bytes_per_s`: the
    rate at which a snapshot reaches host memory, `peer_bytes_per_s` the one at which it
    goes from there to peers, `kept_bytes_per_s` the one at which it reaches all
    destinations, all within the policy's caps, which do not hold for
    `reload_bytes_per_s`; `disk_s` the time of a snapshot that goes to disk. `active`
    gives, for a window of so many slots, the share of the work whose operators are
    active once slot j of it is loaded. `partial`: the experts in snapshots. `served_s`:
    the time in which servers make a state of a snapshot that has arrived;
    `window_bytes` are those of such a state on a rank, None where snapshots are the
    state.
    """

    name: str
    recovery: Recovery
    pattern: Callable[[GenerationStart], SnapshotPattern]
    settled: SnapshotPattern
    whole_bytes: float
    reload_bytes_per_s: float
    replicas: int = 0
    logs: bool = False
    keep_windows: int = 1
    host_bytes_per_s: float = math.inf
    kept_bytes_per_s: float = math.inf
    peer_bytes_per_s: float = math.inf
    disk_s: float = 0.0
    durable: Durable | None = None
    active: Callable[[int], tuple[float, ...]] = lambda num_slots: (1.0,) * num_slots
    memory: MemoryForecast | None = None
    sizes_are_of_job: bool = False
    partial: Partial | None = None
    served_s: float = 0.0
    window_bytes: float | None = None

    @property
    def kept_bytes(self) -> float:
        """Return the bytes of a kept window, or of a state that a server has made."""
        if self.window_bytes is not None:
            return self.window_bytes
        snapshots = self.settled.repeat
        return float(
            sum(snapshot.size_bytes for snapshot in snapshots[: snapshots[0].num_slots])
        )

    @property
    def overhead_s(self) -> float:
        """Return the seconds that saving adds to an iteration on average, once the
        policy has settled.
        """
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
        """Return the host memory that a node needs for it."""
        if self.memory is None:
            return 0.0
        if self.sizes_are_of_job:
            return self.memory.total_bytes / setup.cluster.nodes
        return self.memory.total_bytes * setup.cluster.gpus_per_node
