"""The agreement of all ranks on the end of a window, and on measurements.

A window is complete on all ranks and kept, or dropped. Owns: one reduction for the
window and the ranks' measurements, and the writes to local disks that follow. Must not:
copy a snapshot.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from enum import IntEnum

from moe_ckpt.collectives import gather_results, reduce_extremes
from moe_ckpt.config import InMemoryConfig
from moe_ckpt.engine.disk_writes import DiskWindows, Role
from moe_ckpt.engine.expert_tokens import ExpertTokens
from moe_ckpt.engine.iteration_logs import IterationLogs
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.engine.snapshot_stores import SnapshotStore
from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.events import HostMemoryUsed, WindowReplicated
from moe_ckpt.types import Measured

# stands for unknown seconds, or an unknown start of a window, in a reduction
_UNKNOWN = -1.0


class _Found(IntEnum):
    """The progress of a window on a rank. Over all ranks the minimum counts."""

    NOTHING = 0
    """The window will never be complete on this rank and the rank's peers."""

    NOT_YET = 1
    """The window is not complete yet, or has to wait for a write to disk."""

    ALL = 2
    """The rank has the whole window, and so have the rank's peers."""


class WindowAgreement:
    """The window in flight of one generation.

    `decide` and `measure` are collective over all ranks.

    Attributes:
        awaits: Whether the window in flight waits for `decide`.
        has_failed: Whether a copy of the window in flight has failed.
        disk: The windows that go to this rank's disk.
    """

    def __init__(
        self,
        config: InMemoryConfig,
        parts: RankParts,
        store: SnapshotStore,
        logs: IterationLogs,
        experts: ExpertTokens,
    ) -> None:
        self.awaits = False
        self.has_failed = False
        self.disk = DiskWindows(
            parts.memory.publisher, parts.events, strict=config.strict
        )
        self._config = config
        self._position = parts.adapter.position
        self._memory = parts.memory
        self._meter = parts.meter
        self._events = parts.events
        self._store = store
        self._logs = logs
        self._experts = experts
        self._dense_bytes = parts.dense_bytes
        self._on_all_disks: int | None = None
        self._measured: Measured | None = None

    def decide(self, *, wait: bool) -> None:
        """Keep the window if every rank of the job has the whole window.

        A recovery needs windows that line up over all ranks.

        Args:
            wait: Whether to wait for the parts that a rank still lacks. If not, nothing
                happens while a rank lacks a part.

        Raises:
            CheckpointSaveError: A rank will never have the whole window, or a write to
                disk failed, and `ckpt.strict=true`.
        """
        found = self._agree(wait=wait)
        if found is _Found.NOT_YET:
            return
        self.awaits = False
        if found is _Found.ALL:
            self._keep()
            # in this order: until all ranks keep the new window, a recovery needs the
            # older window and its logs
            self._logs.drop_old()
            self._events.append(
                HostMemoryUsed(
                    **self._memory.snapshots.bytes_by_role(),
                    boundary_log_bytes=self._memory.boundary.size_bytes
                    if self._memory.boundary
                    else 0,
                    step_log_bytes=self._memory.steps.size_bytes,
                    gradient_log_bytes=self._memory.gradients.size_bytes
                    if self._memory.gradients
                    else 0,
                    allocated_bytes=self._memory.allocated_bytes(),
                    double_buffered_dense_bytes=2 * self._dense_bytes,
                )
            )
            return
        self._memory.snapshots.abandon()
        if self._config.strict:
            raise CheckpointSaveError(
                "ckpt.strict=true: a snapshot is not complete on every rank"
            )

    def drop_measured(self) -> None:
        """Drop measurements of an earlier iteration, as an iteration begins."""
        self._measured = None

    def measure(self) -> Measured:
        """Return the ranks' common measurements.

        The values are those of the last reduction, if no iteration has begun since.
        """
        if self._measured is None:
            self._agree(wait=False)
        # once: otherwise the account of tokens would count the same popularity twice
        measured, self._measured = self._measured, None
        assert measured is not None
        return measured

    def finish_persisting(self) -> None:
        """Wait for the write to disk in progress.

        Raises:
            CheckpointSaveError: The write failed, and `ckpt.strict=true`.
        """
        with self._meter.waiting():
            self.disk.finish()

    def _keep(self) -> None:
        """Keep the window in flight, and write a selected window to disk.

        The last write has ended by then.
        """
        window = self._memory.snapshots.in_flight()
        publisher = self._memory.publisher
        sent = publisher.sent(window.snapshots) if publisher and window else None
        if publisher and window and sent:
            self._events.append(
                WindowReplicated(
                    window_start=window.start,
                    num_peers=publisher.num_peers,
                    **asdict(sent),
                )
            )
        # agreed: ranks that have all units themselves also keep the units that other
        # ranks need
        lacks_units = self._measured is not None and self._measured.lacks_units
        being_written = (
            self.disk.start_of(Role.PERSIST) if self.disk.is_writing else None
        )
        self._store.keep_in_flight(
            self._on_all_disks, being_written, lacks_units=lacks_units
        )
        if (
            window
            and window.start == self.disk.start_of(Role.SNAPSHOT)
            and not lacks_units
        ):
            # the window that all disks have stays on each disk until all disks have a
            # newer one: ranks go back to the same window
            keep = (
                self._newest_on_disks()
                if self._on_all_disks is None
                else self._on_all_disks
            )
            done = self._store.persist(window, keep)
            if done:
                self.disk.set_out(done)

    def _newest_on_disks(self) -> int | None:
        """Return the start of the newest window that is complete on all disks.

        If disks have no window in common: the newest window on this disk. Disks are
        read, because notes of an earlier generation may be wrong: a start may have
        dropped a damaged window from all disks.
        """
        of_each = gather_results(
            self._position.ranks, self._store.on_disk, CheckpointSaveError
        )
        # if disks have no window in common, older windows lead nowhere, and would fill
        # this disk
        common = (
            frozenset[int].intersection(*of_each) or of_each[self._position.ranks.rank]
        )
        return max(common, default=None)

    def _agree(self, *, wait: bool) -> _Found:
        """Measure, and agree how much of the window in flight is complete.

        Returns:
            The progress, equal on all ranks.
        """
        found = self._find(wait=wait)  # first: `_find` may register a finished write
        agreed = self._reduce(found)
        on_disk, newest_on_disk = (
            _if_known(agreed[name]) for name in ("on_disk", "newest_on_disk")
        )
        # otherwise writes failed: the window before is still on all disks
        if on_disk == newest_on_disk:
            self._on_all_disks = None if on_disk is None else int(on_disk)
        self._measured = self._measured_by_all(agreed)
        return _Found(int(agreed["found"]))

    def _reduce(self, found: _Found) -> dict[str, float]:
        """Return the extremes over all ranks in one reduction.

        The values are measurements, starts of windows, and the progress that each rank
        `found`.
        """
        meter, caps = self._meter, self._config.max_bytes_per_s
        # no limit if nothing was measured, for example on a replacement: the slowest of
        # the other ranks decides
        host_bytes_per_s = (
            statistics.median(meter.copy_rates) if meter.copy_rates else math.inf
        )
        empty_s, dense_s = meter.added.fit(self._dense_bytes) or (None, None)
        # one reduction, at a point where ranks have just met for the norm: each small
        # collective waits for the slowest rank
        return reduce_extremes(
            self._position.ranks,
            self._position.device,
            largest={
                "iteration_s": meter.iteration_s(),
                "iters_since_quiet": meter.iters_since_quiet,
                "snapshot_cost_s": _known_or(meter.snapshot_cost_s()),
                "empty_snapshot_s": _known_or(empty_s),
                "dense_snapshot_s": _known_or(dense_s),
                "replayed_iteration_s": _known_or(meter.replayed_iteration_s()),
                "is_persisting": self.disk.is_writing,
                "costs_are_settled": meter.added.is_settled,
                "lacks_units": self._memory.snapshots.lacks_units,
                "newest_on_disk": _known_or(self.disk.start_of(Role.RECOVERY)),
            },
            smallest={
                "host_bytes_per_s": min(host_bytes_per_s, caps.host or math.inf),
                "peer_bytes_per_s": self._peer_bytes_per_s(),
                "overlap_s": meter.overlap_s(),
                "found": found,
                "on_disk": _known_or(self.disk.start_of(Role.RECOVERY)),
                "kept_since": _known_or(self._memory.snapshots.newest_start()),
            },
        )

    def _measured_by_all(self, agreed: Mapping[str, float]) -> Measured:
        """Return the measurements of a reduction.

        Collective over the ranks of the stage, whose popularity is summed.
        """
        kept_since = _if_known(agreed["kept_since"])
        # if every snapshot goes to disk before the next snapshot is taken, the disk's
        # cap counts, too
        disk_bytes_per_s = (
            self._config.max_bytes_per_s.disk if self._config.waits_for_disk else None
        )
        return Measured(
            iteration_s=agreed["iteration_s"],
            copy_bytes_per_s=min(
                agreed["host_bytes_per_s"],
                agreed["peer_bytes_per_s"],
                disk_bytes_per_s or math.inf,
            ),
            host_bytes_per_s=agreed["host_bytes_per_s"],
            peer_bytes_per_s=agreed["peer_bytes_per_s"],
            is_persisting=bool(agreed["is_persisting"]),
            popularity=self._experts.of_stage(),
            snapshot_cost_s=_if_known(agreed["snapshot_cost_s"]),
            iters_since_quiet=int(agreed["iters_since_quiet"]),
            empty_snapshot_s=_if_known(agreed["empty_snapshot_s"]),
            dense_snapshot_s=_if_known(agreed["dense_snapshot_s"]),
            costs_are_settled=bool(agreed["costs_are_settled"]),
            replayed_iteration_s=_if_known(agreed["replayed_iteration_s"]),
            overlap_s=agreed["overlap_s"],
            kept_since=None if kept_since is None else int(kept_since),
            lacks_units=bool(agreed["lacks_units"]),
        )

    def _find(self, *, wait: bool) -> _Found:
        publisher = self._memory.publisher
        next_waits = self.disk.start_of(Role.SNAPSHOT) is not None
        if self.disk.is_writing and next_waits and not wait:
            return _Found.NOT_YET
        if next_waits or not self.disk.is_writing:
            # one write at a time: `_keep` is about to start the next
            self.finish_persisting()
        window = self._memory.snapshots.in_flight()
        if window is None or self.has_failed:
            return _Found.NOTHING
        if not window.complete:
            # all copies were waited for: a missing copy has failed
            return _Found.NOTHING if wait else _Found.NOT_YET
        if publisher is None:
            return _Found.ALL
        if not wait and publisher.awaits_copies(window.snapshots):
            return _Found.NOT_YET
        with self._meter.waiting():
            has_copies = publisher.await_copies(window.snapshots)
            return _Found.ALL if has_copies else _Found.NOTHING

    def _peer_bytes_per_s(self) -> float:
        """Return the rate to each peer, in bytes per second."""
        publisher = self._memory.publisher
        if publisher is None or not publisher.num_peers:
            return math.inf
        # the cap is for all peers together
        return min(
            publisher.copy_bytes_per_s(),
            (self._config.max_bytes_per_s.peers or math.inf) / publisher.num_peers,
        )


def _known_or(number: float | None) -> float:
    """Return the number, or a placeholder for a reduction.

    A maximum prefers a known number; a minimum prefers the placeholder.
    """
    return _UNKNOWN if number is None else number


def _if_known(number: float) -> float | None:
    return None if number == _UNKNOWN else number
