"""The in-memory tier: snapshots of a part of the state or all of it, and the logs that make parts sufficient.

Owns: the work at each hook of the loop, the same on every rank, so that windows line up over the whole job. Must not:
decide which operators a snapshot takes (the policy does), or recover (`engine.stage_recovery` does, from these
snapshots and logs). MoEvement, sections 3.2 to 3.5.

    started(t)           log the start of t; logs and counts of t begin
    ready(t)             the copy of snapshot t-1 is complete: the step may change the state; facts of t are logged
    committed(t), take   snapshot t starts; a window is kept once all ranks, and their peers, have all of it

If ranks do not recover locally, only the start of the iteration after a snapshot is logged, and a window may take until
the next one to reach peers.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum

import numpy as np
import torch

from moe_ckpt.config import InMemoryConfig
from moe_ckpt.engine.disk_writes import DiskWindows, Role
from moe_ckpt.engine.expert_events import ExpertEvents
from moe_ckpt.engine.interfaces import StagePlace, Training
from moe_ckpt.engine.measurements import Measurements
from moe_ckpt.engine.server_states import ServerStates
from moe_ckpt.engine.snapshot_stores import NOTHING, SnapshotStore
from moe_ckpt.engine.token_account import TokenAccount
from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.events import (
    CheckpointFailed,
    EventLog,
    HostMemoryUsed,
    SnapshotTaken,
    WindowReplicated,
)
from moe_ckpt.policies.expert_popularity import accumulate, carried_over
from moe_ckpt.policies.lost_tokens import IntArray
from moe_ckpt.replication.local_disk import LocalDisk
from moe_ckpt.replication.publisher import Publisher
from moe_ckpt.snapshot.boundary_log import BoundaryLog
from moe_ckpt.snapshot.bubbles import PipelineBubbles
from moe_ckpt.snapshot.capture import SnapshotEngine
from moe_ckpt.snapshot.copier import HostCopier
from moe_ckpt.snapshot.step_log import StepLog
from moe_ckpt.snapshot.units import UnitMemory
from moe_ckpt.snapshot.windows import HostBuffers, SnapshotMemory, Window
from moe_ckpt.types import ExpertCounts, Measured, PartialPlan, ReadyGradients, SlotPlan

_log = logging.getLogger(__name__)
_UNKNOWN = -1.0  # where seconds are meant


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TierStores:
    """The parts of a rank's host memory, and the engine that fills them.

    `boundary` is None if stages keep no log, `publisher` if no memory outlives the process, `disk` without a local
    disk, `bubbles` if copies do not wait for bubbles.
    """

    copiers: Sequence[HostCopier]
    engine: SnapshotEngine
    memory: SnapshotMemory | UnitMemory
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankParts:
    """The parts of one rank that its tier and its recoveries share.

    `account` is that of policies whose recoveries lose tokens.
    """

    place: StagePlace
    training: Training
    stores: TierStores
    meter: Measurements
    events: EventLog
    account: TokenAccount | None = None


class _Found(IntEnum):
    """The progress of a window on a rank; over all ranks the least counts."""

    NOTHING = 0  # and it never will
    NOT_YET = 1
    ALL = 2


class InMemoryTier:
    """Carries out the policy's slot plans. All hooks are collective over all ranks."""

    def __init__(
        self,
        config: InMemoryConfig,
        parts: RankParts,
        store: SnapshotStore,
        servers: ServerStates | None = None,
    ) -> None:
        place, training, stores, events = parts.place, parts.training, parts.stores, parts.events
        self._config = config
        self._cap = config.max_bytes_per_s
        self._logs = config.recovers_locally
        self._place = place
        self._stage = training.stage
        self._operators = training.operators
        self._counts = training.counts
        self._boost = training.boost
        self._made_up: IntArray | None = None
        self._stores = stores
        self._store = store
        self._account = parts.account
        self._servers = servers
        self._events = events
        rank_in_stage = place.stage_ranks.rank
        self._dense_bytes = int(training.operators.table.full_bytes[rank_in_stage].sum())
        tells = rank_in_stage == 0 and training.counts is not None
        self._expert_events = ExpertEvents(training.operators.table, events, tells=tells)
        self._newest: SlotPlan | PartialPlan | None = None
        self._awaits_confirmation = False
        self._has_failed = False
        self._disk = DiskWindows(store.newest_on_disk(), stores.publisher, events, strict=config.strict)
        self._on_all_disks = NOTHING
        self._noted: int | None = None
        self._pauses = False
        self._longest_iters = 0
        self._meter = parts.meter
        self._counted: ExpertCounts | None = None
        self._measured: Measured | None = None
        stores.engine.apply_cap()  # which the end of the generation before this one has lifted

    def started(self, iteration: int) -> None:
        """Before the first forward of `iteration`."""
        self._measured = None
        if self._logs:
            self._begin_logs(iteration)
        if self._counts:
            self._counts.begin()
        if self._boost:
            self._boost.begin_iteration()
        if self._stores.bubbles:
            self._stores.bubbles.take_seconds()  # those of evaluations are none of an iteration
        self._meter.iteration_started(is_quiet=self._is_idle())

    def ready(self, iteration: int, gradients: ReadyGradients) -> None:
        """All gradients are complete, and no parameter has changed yet."""
        self._meter.gradients_complete()
        self.stop_observing()
        if self._stores.bubbles:
            self._meter.bubbles_s.append(self._stores.bubbles.take_seconds())
        self._operators.note_step(iteration, gradients)
        if self._boost and self._boost.deficit.any():
            extra = self._boost.end_iteration()
            self._made_up = (
                np.zeros_like(extra) if gradients.overflow else extra
            )  # otherwise the step was skipped, and they trained no expert
        if self._logs:
            self._stores.steps.add(self._stage.record(iteration, gradients))
        try:
            with self._meter.waiting():
                self._stores.engine.release()
        except CheckpointSaveError as error:
            self._report(error)
        waits = self._logs and not self._pauses
        self._collect(wait=self._awaits_confirmation and waits)
        self._count()
        if self._awaits_confirmation:
            self._confirm(wait=waits)
        if self._servers:
            with self._meter.stalling():
                self._servers.ready(iteration, gradients)
        if not self._disk.is_writing:
            self.finish_persisting()
        self._meter.resumed()

    def committed(self, iteration: int) -> None:
        """The state is that after `iteration` steps."""
        self._meter.iteration_finished()
        self._make_up(iteration)
        if self._logs:
            self.note_start(iteration + 1)

    def _make_up(self, iteration: int) -> None:
        """Subtract the extra tokens of all ranks of the stage in this iteration from the experts' deficits."""
        extra, self._made_up = self._made_up, None
        if self._boost is None or self._account is None or extra is None:
            return
        total = torch.from_numpy(extra).to(self._place.device)
        self._place.stage_ranks.reduce(total, "sum")
        self._boost.make_up(total.cpu().numpy())
        self._account.deficit = self._boost.deficit.copy()
        boosted = self._boost.boosted(iteration)
        if boosted:
            self._events.append(boosted)

    def note_start(self, iteration: int) -> None:
        """Log the current state as the start of `iteration`."""
        self._stores.steps.note_start(iteration, self._stage.begin(iteration))
        self._noted = iteration

    def take(self, plan: SlotPlan | PartialPlan, *, to_disk: bool = False) -> None:
        """Start the snapshot of a plan. `to_disk`: the window that begins with it also goes to disk."""
        if self._servers:
            if self._servers.goes_on:
                self._hand_over(self._servers, plan)
                return
            self._servers.reset()
        if self._awaits_confirmation:
            self._confirm(wait=True)
        self._collect(wait=True)
        self._expert_events.took(plan)
        if plan.slot == 0:
            self._meter.snapshot_began()
            self._disk.begin(plan.window_start, to_disk=to_disk)
            self._store.begin(plan)
        self._newest = plan
        self._pauses = plan.pause_iters > 0
        self._longest_iters = max(self._longest_iters, plan.period_iters)
        self._awaits_confirmation = plan.slot == plan.num_slots - 1
        following = plan.window_start + plan.slot + 1
        if self._noted != following and (not plan.has_start or following == 1):
            self.note_start(following)
        with self._meter.stalling():
            self._capture(plan)

    def take_base(self, plan: SlotPlan | PartialPlan, *, to_disk: bool = False) -> None:
        """Take a snapshot of everything.

        If a rank has no other window, wait until it is kept: a fault can come at any time.

        Servers that continue from a snapshot that all ranks have restored need no further snapshot.
        """
        if self._servers and self._servers.adopt(plan.window_start):
            return
        oldest = self._stores.memory.oldest_needed_iteration()
        if oldest is not None:  # windows of the last generation were this long: theirs may be the only one for a while
            self._longest_iters = plan.window_start - oldest
        self.take(plan, to_disk=to_disk)
        num_kept = torch.tensor([len(self._stores.memory.windows())], device=self._place.device)
        self._place.ranks.reduce(num_kept, "min")
        if not num_kept.item():
            self._confirm(wait=True)
            self._meter.forget_snapshot()  # no other has training wait for all of it

    def _hand_over(self, servers: ServerStates, plan: SlotPlan | PartialPlan) -> None:
        """Let servers compute the state that the plan names, from the gradients that led to it."""
        self._collect(wait=True)  # the stream may begin with it
        self.note_start(plan.window_start + 1)
        kept = [self._stores.memory.in_flight(), *self._stores.memory.windows()]
        whole = [snapshot for window in kept if window for snapshot in window.snapshots]
        with self._meter.stalling():
            servers.hand_over(self._store.wanted(plan)[0], whole[0] if whole else None)

    def stop_observing(self) -> None:
        """The pass over the batch has ended: later transfers and tokens are neither logged nor counted."""
        if self._stores.boundary:
            self._stores.boundary.end()
        self._counted = self._counts.end() if self._counts else None

    def measure(self) -> Measured:
        """Return the measurements for the start of a window, and count popularity anew from then on.

        If a window has just ended, the ranks agreed on these measurements in the same reduction as on its end.
        """
        if self._measured is None:
            self._agree(wait=False)
        measured, self._measured = self._measured, None
        assert measured is not None
        self._expert_events.measured(measured.popularity)
        if self._account:
            self._account.count(measured.popularity)
        if self._counts:
            self._meter.popularity = carried_over(self._config.popularity, self._meter.popularity)
        return measured

    def lose(self) -> None:
        """This rank's state is lost: a snapshot in progress is torn, and the boundary log dies with the process."""
        self._stores.engine.discard_torn()
        if self._stores.boundary:
            self._stores.boundary.clear()
        self._meter.popularity = np.zeros_like(self._meter.popularity)

    def abort(self) -> None:
        """Abandon the iteration: stop observing, finish copies, drop an incomplete window."""
        self.stop_observing()
        self._meter.forget_snapshot()
        self._stage.abandon_pass()
        self._operators.freeze(())
        if self._servers:
            self._servers.clear()
        self.settle()
        self._stores.memory.keep_complete()

    def settle(self) -> None:
        """Finish the snapshot in progress, without a cap: its state may change then."""
        with self._stores.engine.uncapped():
            self._collect(wait=True)

    def close(self) -> None:
        """Finish the snapshot in progress, and end the copying thread."""
        self.settle()
        for copier in self._stores.copiers:
            copier.close()

    def retake(self, iteration: int) -> None:
        """The state is again that after `iteration` steps: take the snapshots that the fault tore."""
        self._expert_events.interrupted()
        plan, window = self._newest, self._stores.memory.in_flight()
        if plan is None or window is None or plan.window_start + plan.slot != iteration:
            return
        if all(snapshot.header.slot != plan.slot for snapshot in window.snapshots):
            self._capture(plan)

    def _capture(self, plan: SlotPlan | PartialPlan) -> None:
        self._has_failed = False
        bubble_bytes = self._meter.bubble_bytes() if self._stores.bubbles else 0.0
        self._stores.engine.capture(self._store.wanted(plan), bubble_bytes=bubble_bytes)

    def _collect(self, *, wait: bool) -> None:
        try:
            taken = self._stores.engine.collect(wait=wait)
        except CheckpointSaveError as error:
            self._report(error)
            return
        if not taken:
            return
        for snapshot in taken.snapshots:
            self._stores.memory.add(snapshot)
        header, copied = taken.snapshots[0].header, taken.copied
        size_bytes = sum(snapshot.header.payload_bytes for snapshot in taken.snapshots)
        self._meter.copied(size_bytes, copied.seconds)
        self._events.append(
            SnapshotTaken(
                iteration=header.iteration,
                window_start=header.window_start,
                slot=header.slot,
                num_slots=header.num_slots,
                size_bytes=size_bytes,
                dense_bytes=self._dense_bytes,
                copy_s=copied.seconds,
                bubble_bytes=copied.bubble_bytes,
            )
        )

    def _confirm(self, *, wait: bool) -> None:
        """Keep the window if every rank of the job has all of it: recovery needs windows that line up.

        Without `wait`, nothing happens while a rank still lacks a part of it.
        """
        with self._meter.waiting():
            self._collect(wait=wait)
        found = self._agree(wait=wait)
        if found is _Found.NOT_YET:
            return
        self._awaits_confirmation = False
        if found is _Found.ALL:
            self._keep()
            self._drop_old_logs()
            self._events.append(self._memory_used())
            return
        self._stores.memory.abandon()
        if self._config.strict:
            raise CheckpointSaveError("ckpt.strict=true: a snapshot is not complete on every rank")

    def finish_persisting(self) -> None:
        """Wait for the write to disk in progress."""
        with self._meter.waiting():
            self._disk.finish()

    def _keep(self) -> None:
        """Keep the window in flight, and start its write to disk if it is selected; the write before it has ended then.

        On disk a window stays until all ranks have a newer one there: they need the same.
        """
        window = self._stores.memory.in_flight()
        if window:
            self._tell_copies(window)
        self._store.confirm(self._on_all_disks)
        if window and window.start == self._disk.start_of(Role.SNAPSHOT):
            done = self._store.persist(window, self._on_all_disks)
            if done:
                self._disk.set_out(done)

    def _tell_copies(self, window: Window) -> None:
        publisher = self._stores.publisher
        sent = publisher.sent(window.snapshots) if publisher else None
        if publisher and sent:
            self._events.append(
                WindowReplicated(window_start=window.start, num_peers=publisher.num_peers, **asdict(sent))
            )

    def _agree(self, *, wait: bool) -> _Found:
        """Measure, and return how much of the window in flight is complete, on all ranks alike."""
        found = self._find(wait=wait)  # first: what is on disk may be more then
        cost_s = self._meter.snapshot_cost_s()
        times = [self._meter.iteration_s(), _UNKNOWN if cost_s is None else cost_s, self._meter.iters_since_quiet()]
        costs_s = self._meter.snapshot_costs_s(self._dense_bytes)
        replayed_s = self._meter.replayed_iteration_s()
        times += [*(costs_s or (_UNKNOWN, _UNKNOWN)), _UNKNOWN if replayed_s is None else replayed_s]
        rates = [self._host_bytes_per_s(), self._peer_bytes_per_s(), self._meter.overlap_s()]
        on_disk, is_writing = self._disk.start_of(Role.RECOVERY), self._disk.is_writing
        flags = [float(is_writing), float(self._meter.costs_are_settled)]
        mine = [*times, *(-rate for rate in rates), -float(found), -float(on_disk), *flags]
        worst = torch.tensor(mine, dtype=torch.float64, device=self._place.device)
        self._place.ranks.reduce(worst, "max")
        popularity = torch.from_numpy(self._meter.popularity.copy()).to(self._place.device)
        if self._counts:
            self._place.stage_ranks.reduce(popularity, "sum")
        iteration_s, *times, host_rate, peer_rate, overlap_s, least, oldest, is_persisting, are_settled = worst.tolist()
        cost_s, since_quiet, empty_s, dense_s, replayed_s = (None if each == _UNKNOWN else each for each in times)
        self._on_all_disks = int(-oldest)
        self._measured = Measured(
            iteration_s=iteration_s,
            copy_bytes_per_s=min(-host_rate, -peer_rate, self._disk_bytes_per_s()),
            host_bytes_per_s=-host_rate,
            peer_bytes_per_s=-peer_rate,
            is_persisting=bool(is_persisting),
            popularity=popularity.cpu().numpy(),
            snapshot_cost_s=cost_s,
            iters_since_quiet=int(since_quiet or 0),
            empty_snapshot_s=empty_s,
            dense_snapshot_s=dense_s,
            costs_are_settled=bool(are_settled),
            replayed_iteration_s=replayed_s,
            overlap_s=-overlap_s,
        )
        return _Found(int(-least))

    def _find(self, *, wait: bool) -> _Found:
        memory, publisher = self._stores.memory, self._stores.publisher
        next_waits = self._disk.start_of(Role.SNAPSHOT) != NOTHING
        if self._disk.is_writing and next_waits and not wait:
            return _Found.NOT_YET
        if next_waits or not self._disk.is_writing:
            self.finish_persisting()
        window = memory.in_flight()
        if window is None or self._has_failed:
            return _Found.NOTHING
        if not window.complete:
            return _Found.NOTHING if wait else _Found.NOT_YET
        if publisher is None:
            return _Found.ALL
        if not wait and publisher.awaits_copies(window.snapshots):
            return _Found.NOT_YET
        with self._meter.waiting():
            return _Found.ALL if publisher.has_copies(window.snapshots) else _Found.NOTHING

    def _is_idle(self) -> bool:
        """Return whether this rank copies nothing."""
        return self._stores.memory.in_flight() is None and not self._disk.is_under_way

    def _drop_old_logs(self) -> None:
        oldest = self._stores.memory.oldest_needed_iteration()
        assert oldest is not None
        self._drop_logs_up_to(oldest)

    def _begin_logs(self, iteration: int) -> None:
        if self._noted != iteration:
            self.note_start(iteration)
        self._drop_logs_up_to(iteration - self._log_iters())
        if self._stores.boundary:
            self._stores.boundary.begin(iteration)

    def _log_iters(self) -> int:
        """Return the age in iterations at which logs are dropped even if no window is ever complete.

        No recovery needs older logs.
        """
        longest = max([self._longest_iters, *(window.num_slots for window in self._stores.memory.windows())])
        return 2 * ((self._config.keep_windows + 1) * longest + self._config.profile_iters)

    def _drop_logs_up_to(self, iteration: int) -> None:
        self._stores.steps.drop_up_to(iteration)
        if self._stores.boundary:
            self._stores.boundary.drop_up_to(iteration)

    def _memory_used(self) -> HostMemoryUsed:
        return HostMemoryUsed(
            **self._stores.memory.bytes_by_role(),
            boundary_log_bytes=self._stores.boundary.size_bytes if self._stores.boundary else 0,
            step_log_bytes=self._stores.steps.size_bytes,
            allocated_bytes=self._stores.allocated_bytes(),
            double_buffered_dense_bytes=2 * self._dense_bytes,
        )

    def _count(self) -> None:
        counted, self._counted = self._counted, None
        if counted is not None:
            kind, decay = self._config.popularity, self._config.popularity_decay
            self._meter.popularity = accumulate(kind, self._meter.popularity, counted.hard, counted.soft, decay=decay)

    def _host_bytes_per_s(self) -> float:
        measured = statistics.median(self._meter.copy_rates) if self._meter.copy_rates else math.inf
        return min(measured, self._cap.host or math.inf)

    def _peer_bytes_per_s(self) -> float:
        """Return the rate to each peer. The cap is for all peers together."""
        publisher = self._stores.publisher
        if publisher is None or not publisher.num_peers:
            return math.inf
        return min(publisher.copy_bytes_per_s(), (self._cap.peers or math.inf) / publisher.num_peers)

    def _disk_bytes_per_s(self) -> float:
        """Return the cap of the disk if every snapshot goes there before the next one is taken."""
        return (self._cap.disk if self._config.waits_for_disk else None) or math.inf

    def _report(self, error: CheckpointSaveError) -> None:
        assert self._newest is not None
        self._has_failed = True
        iteration = self._newest.window_start + self._newest.slot
        self._events.append(CheckpointFailed(iteration=iteration, reason=str(error)))
        _log.warning("snapshot not taken, training goes on (ckpt.strict=%s): %s", self._config.strict, error)
