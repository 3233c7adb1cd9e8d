"""The sparse tier: every iteration a small snapshot, and the logs that make it enough (MoEvement, sections 3.2 to 3.5).

Owns: what happens at each hook of the loop, on every rank alike, so that windows line up over the whole job. Must not:
decide which operators a snapshot takes (the policy does), or recover (`runtime.recover` does, from what is kept here).

    started(t)           note what t starts from; logs and counts of t begin
    ready(t)             the copy of snapshot t-1 is done: the step may change the state; facts of t are logged
    committed(t), take   snapshot t starts; a window is kept once all ranks, and their peers, have all of it
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from moe_ckpt.config import MoevementConfig
from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.events import CheckpointFailed, EventLog, HostMemoryUsed, SnapshotTaken
from moe_ckpt.popularity import accumulate, carried_over
from moe_ckpt.runtime.stage import Place, Training
from moe_ckpt.store.boundary import BoundaryLog
from moe_ckpt.store.codec import SnapshotHeader
from moe_ckpt.store.copier import HostCopier
from moe_ckpt.store.journal import Journal
from moe_ckpt.store.memory import HostBuffers, SnapshotMemory
from moe_ckpt.store.snapshot import SnapshotEngine
from moe_ckpt.store.steps import StepLog
from moe_ckpt.types import ExpertCounts, Measured, ReadyGradients, SlotPlan

_log = logging.getLogger(__name__)
_RECENT_ITERS = 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SparseStores:
    """What a rank keeps in host memory, and the engine that fills it.

    `boundary` is None where stages keep no log, `journal` where nothing outlives the process.
    """

    copiers: Sequence[HostCopier]
    engine: SnapshotEngine
    memory: SnapshotMemory
    steps: StepLog
    boundary: BoundaryLog | None
    buffers: Sequence[HostBuffers]
    journal: Journal | None = None

    def allocated_bytes(self) -> int:
        return sum(pool.total_bytes for pool in self.buffers) + self.steps.size_bytes

    def clear(self) -> None:
        """Keep nothing: training goes on from a state that nothing here leads to."""
        self.memory.clear()
        self.steps.clear()
        if self.boundary:
            self.boundary.clear()


class Clock:
    """Seconds of recent iterations, without what checkpointing adds to them."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT_ITERS)
        self._since_s = 0.0
        self._so_far_s = 0.0

    def started(self) -> None:
        self._so_far_s = 0.0
        self._since_s = time.monotonic()

    def paused(self) -> None:
        self._so_far_s += time.monotonic() - self._since_s

    def resumed(self) -> None:
        self._since_s = time.monotonic()

    def finished(self) -> None:
        self.paused()
        self._recent.append(self._so_far_s)

    def iteration_s(self) -> float:
        """Return the median, or 0 before the first iteration."""
        return statistics.median(self._recent) if self._recent else 0.0


class Meter:
    """What this rank has measured so far, which a recovery does not change: `popularity` is by expert of its stage."""

    def __init__(self, num_experts: int) -> None:
        self.clock = Clock()
        self.copy_rates: deque[float] = deque(maxlen=_RECENT_ITERS)
        self.popularity = np.zeros(num_experts)


class SparseTier:
    """Carries out the policy's slot plans. All hooks are collective over all ranks."""

    def __init__(
        self,
        config: MoevementConfig,
        place: Place,
        training: Training,
        stores: SparseStores,
        meter: Meter,
        events: EventLog,
    ) -> None:
        self._config = config
        self._place = place
        self._stage = training.stage
        self._operators = training.operators
        self._counts = training.counts
        self._stores = stores
        self._events = events
        self._names = tuple(str(operator) for operator in training.operators.table.operators)
        self._dense_bytes = int(training.operators.table.full_bytes[dist.get_rank(place.stage_group)].sum())
        self._newest: SlotPlan | None = None
        self._awaits_confirmation = False
        self._noted: int | None = None
        self._most_slots = 0
        self._meter = meter
        self._counted: ExpertCounts | None = None
        self._measured: Measured | None = None

    def started(self, iteration: int) -> None:
        """Before the first forward of `iteration`."""
        if self._noted != iteration:
            self.note_start(iteration)
        self._measured = None
        self._drop_logs_up_to(iteration - self._log_iters())
        self._counts.begin()
        if self._stores.boundary:
            self._stores.boundary.begin(iteration)
        self._meter.clock.started()

    def ready(self, iteration: int, gradients: ReadyGradients) -> None:
        """All gradients are there, no parameter has changed yet."""
        self._meter.clock.paused()
        self.stop_observing()
        self._stores.steps.add(self._stage.record(iteration, gradients))
        try:
            self._stores.engine.release()
        except CheckpointSaveError as error:
            self._report(error)
        self._collect(wait=self._awaits_confirmation)
        self._count()
        if self._awaits_confirmation:
            self._confirm()
        self._meter.clock.resumed()

    def committed(self, iteration: int) -> None:
        """The state is that after `iteration` steps."""
        self._meter.clock.finished()
        self.note_start(iteration + 1)

    def note_start(self, iteration: int) -> None:
        """The state is what `iteration` starts from."""
        self._stores.steps.note_start(iteration, self._stage.begin(iteration))
        self._noted = iteration

    def take(self, plan: SlotPlan) -> None:
        """Start taking of the state what the plan for it says."""
        self._collect(wait=True)
        if plan.slot == 0:
            self._stores.memory.begin(plan.window_start, plan.num_slots)
        self._newest = plan
        self._most_slots = max(self._most_slots, plan.num_slots)
        self._awaits_confirmation = plan.slot == plan.num_slots - 1
        self._capture(plan)

    def take_base(self, plan: SlotPlan) -> None:
        """Take everything; where a rank keeps nothing else, wait until it is kept: a fault can come at any time."""
        self.take(plan)
        num_kept = torch.tensor([len(self._stores.memory.windows())], device=self._place.device)
        dist.all_reduce(num_kept, op=dist.ReduceOp.MIN)
        if not num_kept.item():
            self._confirm()

    def stop_observing(self) -> None:
        """The pass over the batch is over: what follows is neither logged nor counted."""
        if self._stores.boundary:
            self._stores.boundary.end()
        self._counted = self._counts.end()

    def measure(self) -> Measured:
        """Return what a policy wants to know at the start of a window, and count popularity anew from then on.

        Where a window has just ended, the ranks have agreed on it with its end: they had to meet anyway.
        """
        if self._measured is None:
            self._agree()
        measured, self._measured = self._measured, None
        assert measured is not None
        self._meter.popularity = carried_over(self._config.popularity, self._meter.popularity)
        return measured

    def lose(self) -> None:
        """This rank's state is gone: what was being taken of it is torn, its boundary log died with the process."""
        self._stores.engine.discard_torn()
        if self._stores.boundary:
            self._stores.boundary.clear()
        self._meter.popularity = np.zeros_like(self._meter.popularity)

    def abort(self) -> None:
        """What was being done has come to nothing: stop looking, finish copies, drop an incomplete window."""
        self.stop_observing()
        self._stage.abandon_pass()
        self._operators.freeze(())
        self.settle()
        self._stores.memory.keep_complete()

    def settle(self) -> None:
        """Finish what is being taken: the state under it may change then."""
        self._collect(wait=True)

    def close(self) -> None:
        """Finish, and end the thread that copies."""
        self.settle()
        for copier in self._stores.copiers:
            copier.close()

    def retake(self, iteration: int) -> None:
        """The state is that after `iteration` steps again: take what the fault tore of it."""
        plan, window = self._newest, self._stores.memory.in_flight()
        if plan is None or window is None or plan.window_start + plan.slot != iteration:
            return
        if all(snapshot.header.slot != plan.slot for snapshot in window.snapshots):
            self._capture(plan)

    def _capture(self, plan: SlotPlan) -> None:
        iteration = plan.window_start + plan.slot
        header = SnapshotHeader(
            identity=self._place.identity,
            shard=self._place.shard,
            iteration=iteration,
            window_start=plan.window_start,
            slot=plan.slot,
            num_slots=plan.num_slots,
            full=tuple(self._names[position] for position in plan.full),
            compute=tuple(self._names[position] for position in plan.compute),
            adam_steps=self._operators.adam_steps(),
            parts=(),
            payload_bytes=0,
            checksum=0,
        )
        full, compute = frozenset(plan.full), frozenset(plan.compute)
        pieces = functools.partial(self._operators.pieces, full, compute)
        self._stores.engine.capture(header, pieces, self._operators.buffer_pieces(full | compute))

    def _collect(self, *, wait: bool) -> None:
        try:
            taken = self._stores.engine.collect(wait=wait)
        except CheckpointSaveError as error:
            self._report(error)
            return
        if taken is None:
            return
        self._stores.memory.add(taken.snapshot)
        header = taken.snapshot.header
        if header.payload_bytes:
            self._meter.copy_rates.append(header.payload_bytes / max(taken.copy_s, 1e-9))
        self._events.append(
            SnapshotTaken(
                iteration=header.iteration,
                window_start=header.window_start,
                slot=header.slot,
                num_slots=header.num_slots,
                size_bytes=header.payload_bytes,
                dense_bytes=self._dense_bytes,
                copy_s=taken.copy_s,
            )
        )

    def _confirm(self) -> None:
        """Keep the window if every rank of the job has all of it: windows line up, or recovery could not use them."""
        self._collect(wait=True)
        self._awaits_confirmation = False
        if self._agree():
            self._stores.memory.confirm()
            self._drop_old_logs()
            self._events.append(self._memory_used())
            return
        self._stores.memory.abandon()
        if self._config.strict:
            raise CheckpointSaveError("ckpt.strict=true: a sparse window is not complete on every rank")

    def _agree(self) -> bool:
        """Measure, and return whether the window in flight is complete, on all ranks alike."""
        complete = self._stores.memory.complete and self._has_copies()
        mine = [self._meter.clock.iteration_s(), -self._copy_bytes_per_s(), -float(complete)]
        worst = torch.tensor(mine, dtype=torch.float64, device=self._place.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        popularity = torch.from_numpy(self._meter.popularity.copy()).to(self._place.device)
        dist.all_reduce(popularity, group=self._place.stage_group)
        iteration_s, negative_rate, all_complete = worst.tolist()
        self._measured = Measured(
            iteration_s=iteration_s, copy_bytes_per_s=-negative_rate, popularity=popularity.cpu().numpy()
        )
        return all_complete < 0

    def _has_copies(self) -> bool:
        window, journal = self._stores.memory.in_flight(), self._stores.journal
        return window is not None and (journal is None or journal.has_copies(window.snapshots))

    def _drop_old_logs(self) -> None:
        oldest = self._stores.memory.oldest_needed_iteration()
        assert oldest is not None
        self._drop_logs_up_to(oldest)

    def _log_iters(self) -> int:
        """Return after how many iterations logs end, even where no window is ever complete: longer than any needs."""
        slots = max([self._most_slots, *(window.num_slots for window in self._stores.memory.windows())])
        return 2 * ((self._config.keep_windows + 1) * slots + self._config.profile_iters)

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

    def _copy_bytes_per_s(self) -> float:
        """Return the rate of the slowest copy: into this rank's memory, or into that of peers."""
        mine = statistics.median(self._meter.copy_rates) if self._meter.copy_rates else math.inf
        return min(mine, self._stores.journal.copy_bytes_per_s()) if self._stores.journal else mine

    def _report(self, error: CheckpointSaveError) -> None:
        assert self._newest is not None
        iteration = self._newest.window_start + self._newest.slot
        self._events.append(CheckpointFailed(iteration=iteration, reason=str(error)))
        _log.warning("snapshot not taken, training goes on (ckpt.strict=%s): %s", self._config.strict, error)
