"""One rank's host memory: snapshots, logs, and the copies in and out.

Owns: opening the memory, its total size, the check that all ranks' forecasts fit the
memory that they share, and clearing or refilling all of the memory together. Must not:
decide which snapshots are taken or kept.

    training thread --copiers, engine--> snapshots, steps, boundary
    snapshots, steps --publisher--> replica daemon --> peers, local disk
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from moe_ckpt.collectives import Ranks, gather_results
from moe_ckpt.config import InMemoryConfig
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.engine.interfaces import RankPosition
from moe_ckpt.errors import ConfigError
from moe_ckpt.linux import boot_id
from moe_ckpt.policies.memory_forecast import SharedUse, require_room
from moe_ckpt.replication.copy_ledger import NoCopies
from moe_ckpt.replication.final_save import SaveTarget, write_save_target
from moe_ckpt.replication.local_disk import LocalDisk
from moe_ckpt.replication.publisher import Publisher
from moe_ckpt.snapshot.blobs import BlobFolder, own_path
from moe_ckpt.snapshot.boundary_log import BoundaryLog
from moe_ckpt.snapshot.bubbles import PipelineBubbles
from moe_ckpt.snapshot.capture import SnapshotEngine
from moe_ckpt.snapshot.copier import HostCopier
from moe_ckpt.snapshot.gradient_log import GradientLog
from moe_ckpt.snapshot.step_log import StepLog
from moe_ckpt.snapshot.token_bucket import Throttle
from moe_ckpt.snapshot.windows import HostBuffers, PrivateMemory, SnapshotMemory

_BLOCK_BYTES = 512  # unit of st_blocks, on every file system


class RankMemory:
    """The snapshots and logs of one rank in host memory, for the training thread.

    Lifetime: that of the process. A new generation finds the contents of the last
    generation. With `elastic`, snapshots and step log outlive the process: the memory
    of a replacement opens with the contents that the dead worker left.
    """

    def __init__(
        self,
        config: InMemoryConfig,
        position: RankPosition,
        elastic: ElasticContext | None,
        disk_folder: Path,
        *,
        snapshots_limit_bytes: int | None,
    ) -> None:
        """Open the memory, and adopt the contents of an earlier process of this rank.

        Args:
            config: The caps of copies, the kept windows, and the logs of the policy.
            position: The rank's position in the job.
            elastic: The rank's means to survive the loss of ranks. None: the memory
                ends with the process.
            disk_folder: The run's folder for snapshots on the local disk.
            snapshots_limit_bytes: Maximum bytes of snapshots. None: no limit.
        """
        private = PrivateMemory(pinned=torch.cuda.is_available())
        throttle = Throttle(config.max_bytes_per_s.host)
        copier = HostCopier(throttle)
        # a copier of its own, without a cap: a tensor for the boundary log takes device
        # memory until the tensor is copied
        log_copier = HostCopier()

        self.publisher: Publisher | None = None
        """Shared memory with snapshots and step log, copied to peers. None: no memory
        outlives the process.
        """

        self.disk: LocalDisk | None = None
        """The rank's folder on the local disk. None if `publisher` is None."""

        if elastic:
            self.publisher = _open_publisher(config, elastic, copier)
            self.disk = _open_disk(config, position, elastic, disk_folder)
        # private memory: the boundary log may end with the process, whose stage then
        # replays and logs the sent tensors again
        log_buffers = HostBuffers(private)
        shared_or_private = self.publisher.folder if self.publisher else private
        snapshot_buffers = HostBuffers(
            shared_or_private, limit_bytes=snapshots_limit_bytes
        )
        keeps_log = config.logs_boundaries and position.num_stages > 1

        # a thread of its own: training waits for gradients, and not for the snapshot
        # that is being copied
        gradient_copier = HostCopier(throttle) if config.logs_gradients else None
        gradient_buffers = HostBuffers(shared_or_private)

        self.copiers = tuple(filter(None, (copier, log_copier, gradient_copier)))
        """Threads that copy from the device: for snapshots and for logged gradients,
        under the cap `host`, and for the boundary log.
        """

        self.buffers = (log_buffers, snapshot_buffers, gradient_buffers)
        """Pools of buffers: of the boundary log, of snapshots, and of gradients."""

        self.bubbles = PipelineBubbles() if config.copies_in_bubbles else None
        """Pipeline bubbles that copies of snapshots wait for. None: copies wait for no
        bubble.
        """

        self.engine = SnapshotEngine(
            copier, snapshot_buffers, self.publisher, self.bubbles
        )
        """Takes one snapshot at a time, in the background."""

        self.snapshots = SnapshotMemory(
            snapshot_buffers,
            config.keep_windows,
            self.publisher,
            keeps_oldest=config.audit_every_iters > 0,
        )
        """The kept windows, and the window in flight."""

        self.steps = StepLog(self.publisher)
        """The start and the facts of each logged iteration."""

        self.gradients = (
            GradientLog(
                gradient_copier,
                gradient_buffers,
                self.publisher,
                position.identity,
                position.shard,
            )
            if gradient_copier
            else None
        )
        """The gradients of each logged iteration. None: the policy logs none."""

        self.boundary = BoundaryLog(log_copier, log_buffers) if keeps_log else None
        """Tensors sent to neighbour stages, by iteration. None: the policy keeps no
        such log, or the job has one stage.
        """

        self.adopt_kept()

    def allocated_bytes(self) -> int:
        """Return the bytes of all buffers, in use or free, and of the step log."""
        return sum(pool.total_bytes for pool in self.buffers) + self.steps.size_bytes

    def oldest_start(self) -> int | None:
        """Return the oldest iteration that a recovery from this memory may run again.

        Returns None if there are neither snapshots nor logged starts.
        """
        oldest, logged = (
            self.snapshots.oldest_needed_iteration(),
            self.steps.oldest_start,
        )
        first = None if oldest is None else oldest + 1
        return logged if first is None or logged is None else min(first, logged)

    def drop_logs_after(self, iteration: int) -> None:
        """Drop the step log and logged gradients of all later iterations.

        A rollback leads to `iteration`, and later iterations run again.
        """
        self.steps.drop_after(iteration)
        if self.gradients is not None:
            self.gradients.drop(lambda logged: logged > iteration)

    def clear(self) -> None:
        """Drop everything.

        Training continues from a state to which no snapshot here leads.
        """
        if self.boundary:
            self.boundary.clear()
        self.drop_published()

    def drop_published(self) -> None:
        """Drop snapshots and step log, and give their memory back."""
        self.snapshots.clear()
        self.steps.clear()
        if self.gradients is not None:
            self.gradients.drop(lambda _: True)
        for pool in self.buffers:
            pool.free_unused()

    def adopt_kept(self) -> None:
        """Register the blobs in the publisher's folder.

        An earlier process left these blobs, or a recovery fetched them.
        """
        if self.publisher:
            kept = self.publisher.adopt()
            self.snapshots.adopt(kept.snapshots)
            self.steps.adopt(kept.starts, kept.records)
            if self.gradients is not None:
                self.gradients.adopt(kept.gradients)


def _open_publisher(
    config: InMemoryConfig, elastic: ElasticContext, copier: HostCopier
) -> Publisher:
    """Open the memory that outlives this process."""
    # otherwise survivors would join late, after the rest of a copy
    elastic.at_end(copier.throttle.lift)
    folder = BlobFolder(own_path(elastic.memory), pinned=torch.cuda.is_available())
    daemon = elastic.daemon or NoCopies()
    publisher = Publisher(
        folder,
        daemon,
        elastic.copy_s,
        elastic.page.wait_for_copies,
        copies_gradients=config.copies_gradients,
    )
    elastic.at_end(publisher.waits.interrupt)  # the same for waits for copies to peers
    return publisher


def _open_disk(
    config: InMemoryConfig,
    position: RankPosition,
    elastic: ElasticContext,
    folder: Path,
) -> LocalDisk:
    """Open this rank's folder on the local disk.

    At the end of the job the rank's supervisor saves the memory to this folder.
    """
    rank = position.shard.global_rank
    disk = LocalDisk(folder, rank, elastic.daemon, config.disk.budget_bytes)
    # the last save handles windows only: partial checkpoints go on from the units on
    # disk
    if not config.loses_tokens:
        target = SaveTarget(
            path=str(disk.path),
            limit_bytes=disk.limit_bytes,
            identity=position.identity,
            shard=position.shard,
            by_gradients=config.logs_gradients,
        )
        write_save_target(elastic.memory, target)
    return disk


def require_shared_room(ranks: Ranks, folder: Path, needed_bytes: int) -> None:
    """Check that shared memory has room for the snapshots and copies of all ranks.

    Collective over all ranks, before the first iteration of a start.

    Args:
        ranks: All ranks of the job.
        folder: This rank's folder in shared memory.
        needed_bytes: The forecast of this rank's bytes in shared memory.

    Raises:
        ConfigError: The memory of a node has less room. Raised on all ranks.
    """
    ranks.barrier()  # no rank frees or takes memory between the measurements
    uses = gather_results(ranks, lambda: _measure(folder, needed_bytes), ConfigError)
    require_room(uses)


def _measure(folder: Path, needed_bytes: int) -> SharedUse:
    there = os.statvfs(folder)
    return SharedUse(
        memory=f"{boot_id()} {folder.stat().st_dev}",
        free_bytes=there.f_bavail * there.f_frsize,
        held_bytes=_held_bytes(folder),
        needed_bytes=needed_bytes,
    )


def _held_bytes(folder: Path) -> int:
    """Return the bytes that a folder's files take."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            total += os.lstat(os.path.join(parent, name)).st_blocks * _BLOCK_BYTES
    return total
