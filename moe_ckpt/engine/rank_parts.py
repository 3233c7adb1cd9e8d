"""The parts of one rank that its in-memory tier and its recoveries share: training, host memory, measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_ckpt.engine.interfaces import Boost, Counts, Operators, Stage, StagePlace
from moe_ckpt.engine.measurements import Measurements
from moe_ckpt.engine.token_account import TokenAccount
from moe_ckpt.events import EventLog
from moe_ckpt.replication.local_disk import LocalDisk
from moe_ckpt.replication.publisher import Publisher
from moe_ckpt.snapshot.boundary_log import BoundaryLog
from moe_ckpt.snapshot.bubbles import PipelineBubbles
from moe_ckpt.snapshot.capture import SnapshotEngine
from moe_ckpt.snapshot.copier import HostCopier
from moe_ckpt.snapshot.step_log import StepLog
from moe_ckpt.snapshot.windows import HostBuffers, SnapshotMemory


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TierStores:
    """The parts of a rank's host memory, and the engine that fills them.

    `boundary` is None if stages keep no log, `publisher` if no memory outlives the process, `disk` without a local
    disk, `bubbles` if copies do not wait for bubbles.
    """

    copiers: Sequence[HostCopier]
    engine: SnapshotEngine
    memory: SnapshotMemory
    steps: StepLog
    boundary: BoundaryLog | None
    buffers: Sequence[HostBuffers]
    publisher: Publisher | None = None
    disk: LocalDisk | None = None
    bubbles: PipelineBubbles | None = None

    def allocated_bytes(self) -> int:
        return sum(pool.total_bytes for pool in self.buffers) + self.steps.size_bytes

    def oldest_start(self) -> int | None:
        """Return the oldest iteration that a recovery from this memory may run again; None without snapshots."""
        oldest, logged = self.memory.oldest_needed_iteration(), self.steps.oldest_start
        first = None if oldest is None else oldest + 1
        return logged if first is None or logged is None else min(first, logged)

    def clear(self) -> None:
        """Drop everything: training continues from a state that no snapshot here leads to."""
        self.memory.clear()
        self.steps.clear()
        if self.boundary:
            self.boundary.clear()

    def adopt_kept(self) -> None:
        """Register the contents of the publisher's folder: those of an earlier process, or those fetched into it."""
        if self.publisher:
            kept = self.publisher.adopt()
            self.memory.adopt(kept.snapshots)
            self.steps.adopt(kept.starts, kept.records)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankParts:
    """The parts of one rank that its tier and its recoveries share.

    `counts` is None if the policy does not use popularity, `boost` if lost tokens are not made up; `account` is that of
    policies whose recoveries lose tokens.
    """

    place: StagePlace
    stage: Stage
    operators: Operators
    counts: Counts | None
    boost: Boost | None
    stores: TierStores
    meter: Measurements
    events: EventLog
    account: TokenAccount | None = None

    @property
    def dense_bytes(self) -> int:
        """The bytes of this rank's whole state."""
        return int(self.operators.table.full_bytes[self.place.stage_ranks.rank].sum())
