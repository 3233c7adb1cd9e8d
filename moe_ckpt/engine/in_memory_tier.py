"""The in-memory tier: snapshots of the state, whole or in parts, and logs.

The logs make parts of the state sufficient for a recovery. Owns: the work at each hook
of the loop, equal on every rank, so that windows line up over the whole job. Must not:
decide which operators a snapshot takes (the policy does), or recover
(`engine.stage_recovery` does, from these snapshots and logs). MoEvement, sections 3.2
to 3.5.

    started(t)           log the start of t; logs and counts of t begin
    ready(t)             the copy of snapshot t-1 is complete: the step may change
                         the state; facts of t are logged
    committed(t), take   snapshot t starts; a window is kept once all ranks, and
                         their peers, have all of it

If ranks do not recover locally, only the start of the iteration after a snapshot is
logged, and a window has time until the next window to reach peers.
"""

from __future__ import annotations

import logging

from moe_ckpt.collectives import reduce_extremes
from moe_ckpt.config import InMemoryConfig
from moe_ckpt.engine.computed_snapshots import GradientSink
from moe_ckpt.engine.expert_tokens import ExpertTokens
from moe_ckpt.engine.iteration_logs import IterationLogs
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.engine.snapshot_stores import SnapshotStore
from moe_ckpt.engine.window_agreement import WindowAgreement
from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.events import CheckpointFailed, CopiesRestored, SnapshotTaken
from moe_ckpt.types import Measured, ReadyGradients, SlotPlan

_log = logging.getLogger(__name__)


class InMemoryTier:
    """Carries out the policy's slot plans. All hooks are collective over all ranks.

    Attributes:
        logs: The rank's logs of iterations.
        recovers_locally: Whether ranks that survive a fault keep their state. If so,
            every iteration is logged.
    """

    def __init__(
        self,
        config: InMemoryConfig,
        parts: RankParts,
        store: SnapshotStore,
        sink: GradientSink,
    ) -> None:
        self.logs = IterationLogs(config, parts)
        self._strict = config.strict
        self.recovers_locally = config.recovers_locally
        self._position = parts.adapter.position
        self._stage = parts.adapter.stage
        self._operators = parts.adapter.operators
        self._memory = parts.memory
        self._store = store
        self._sink = sink
        self._events = parts.events
        self._meter = parts.meter
        self._experts = ExpertTokens(config, parts)
        self._agreement = WindowAgreement(
            config, parts, store, self.logs, self._experts
        )
        self._dense_bytes = parts.dense_bytes
        self._newest: SlotPlan | None = None
        self._pauses = False
        self._awaits_restored = False
        # the end of the last generation lifted the cap
        parts.memory.engine.apply_cap()

    def started(self, iteration: int) -> None:
        """Begin logs and counts, before the first forward of `iteration`."""
        self._agreement.drop_measured()
        if self.recovers_locally:
            self.logs.begin(iteration)
        self._experts.begin()
        if self._memory.bubbles:
            # drop the bubbles of evaluations, which belong to no iteration
            self._memory.bubbles.take_seconds()
        copies_nothing = (
            self._memory.snapshots.in_flight() is None
            and not self._agreement.disk.is_under_way
        )
        self._meter.iteration_started(is_quiet=copies_nothing)

    def ready(self, iteration: int, gradients: ReadyGradients) -> None:
        """Log the facts of the iteration, and let the step change the state.

        Called when all gradients are complete and no parameter has changed yet.

        Raises:
            CheckpointSaveError: A window is not complete on every rank, or the write of
                a window failed, and `ckpt.strict` is set.
        """
        # first: the rest of this hook is not the iteration's own work
        self._meter.gradients_complete()
        self.stop_observing()
        if self._memory.bubbles:
            self._meter.bubbles_s.append(self._memory.bubbles.take_seconds())
        self._operators.log_step(iteration, gradients)
        self._experts.log_extra(gradients)
        if self.recovers_locally:
            # before the session's vote, which waits until peers hold this record
            self.logs.add(iteration, gradients)
        try:
            with self._meter.waiting():
                # the copier reads parameters in place, and the step changes them
                self._memory.engine.release()
        except CheckpointSaveError as error:
            self._report(error)
        # if the next window follows at once, this window has to reach peers now; whole
        # snapshots and pauses leave time
        waits = self.recovers_locally and not self._pauses
        self._collect(wait=self._agreement.awaits and waits)
        # before the agreement, which sums the popularity over the stage
        self._experts.count()
        if self._agreement.awaits:
            self._decide(wait=waits)
        with self._meter.stalling():
            self._sink.ready(iteration, gradients)
        if not self._agreement.disk.is_writing:
            # does not wait here; a write that is not registered keeps iterations from
            # being quiet
            self.finish_persisting()
        if self._awaits_restored:
            self._look_at_copies()
        self._meter.resumed()

    def committed(self, iteration: int) -> None:
        """End the iteration: the state is the state after `iteration` steps."""
        self._meter.iteration_finished()
        self.logs.committed()
        self._experts.make_up(iteration)
        if self.recovers_locally:
            self.logs.note_start(iteration + 1)

    def take(self, plan: SlotPlan, *, to_disk: bool = False) -> None:
        """Start the snapshot of a plan.

        Args:
            plan: The snapshot to take.
            to_disk: Whether the window that begins with this snapshot also goes to
                disk.

        Raises:
            CheckpointSaveError: The window before is not complete on every rank, or its
                write failed, and `ckpt.strict` is set.
        """
        if self._sink.goes_on:
            self._hand_over(plan)
            return
        self._sink.begin_with_snapshot()
        if self._agreement.awaits:
            # decide first: otherwise the window in flight is dropped, and was taken for
            # nothing
            self._decide(wait=True)
        self._collect(wait=True)  # the engine has room for one capture
        self._experts.events.took(plan)
        if plan.slot == 0:
            self._meter.snapshot_began()
            self._agreement.disk.begin(plan.window_start, to_disk=to_disk)
            self._store.begin(plan)
        self._newest = plan
        self._pauses = plan.pause_iters > 0
        self._agreement.awaits = plan.is_last
        self.logs.took(plan)
        with self._meter.stalling():
            self._capture(plan)

    def entered(self, iteration: int, period_iters: int) -> None:
        """Prepare the logs for a generation that begins after `iteration` steps.

        Args:
            iteration: Number of optimizer steps in the state.
            period_iters: Iterations until the next window may come.
        """
        oldest = self._memory.snapshots.oldest_needed_iteration()
        # windows of the last generation were this long, and may be the only windows for
        # a while
        if oldest is not None:
            self.logs.window_takes(max(iteration - oldest, period_iters))

    def take_base(self, plan: SlotPlan, *, to_disk: bool = False) -> None:
        """Take the first snapshot of a generation.

        If a rank has no other window, wait until the snapshot is kept: a fault can come
        at any time. No snapshot is taken if all ranks have a whole snapshot of this
        very state, to which all ranks went back, unless the snapshot is to go to disk.
        A sink that continues from a snapshot that all ranks have restored needs no
        further snapshot.

        Args:
            plan: The snapshot to take.
            to_disk: Whether the window that begins with this snapshot also goes to
                disk.
        """
        windows = self._memory.snapshots.windows()
        self._awaits_restored = bool(windows)
        if self._sink.adopt(plan.window_start):
            return
        has_state = any(
            window.is_whole_state and window.start == plan.window_start
            for window in windows
        )
        # the rank with the fewest windows decides for all: snapshots and decisions
        # are collective
        facts = {"num_kept": len(windows), "has_state": has_state}
        all_have = reduce_extremes(
            self._position.ranks, self._position.device, largest={}, smallest=facts
        )
        if all_have["has_state"] and not to_disk:
            self.logs.drop_old()
            return
        self.take(plan, to_disk=to_disk)
        if not all_have["num_kept"]:
            self._decide(wait=True)
            # training waits for the whole of this snapshot, and for no other
            self._meter.drop_snapshot()

    def _hand_over(self, plan: SlotPlan) -> None:
        """Let the sink compute the plan's state from the gradients of the step."""
        self._collect(wait=True)  # the stream may begin with this snapshot
        # computed states have no generators and no schedule: a recovery takes both from
        # the step log
        self.logs.log_start(plan.window_start + 1)
        kept = [self._memory.snapshots.in_flight(), *self._memory.snapshots.windows()]
        whole = [snapshot for window in kept if window for snapshot in window.snapshots]
        with self._meter.stalling():
            self._sink.hand_over(
                self._store.wanted(plan, self.logs.branch_of_state)[0],
                whole[0] if whole else None,
            )

    def stop_observing(self) -> None:
        """Stop logging transfers and counting tokens: the pass has ended."""
        self.logs.end_pass()
        self._experts.end_pass()

    def measure(self) -> Measured:
        """Return the measurements for the start of a window, and count popularity anew.

        If a window has just ended, the ranks agreed on these measurements in the same
        reduction as on the end of the window.
        """
        measured = self._agreement.measure()
        self._experts.measured(measured)
        return measured

    def lose(self) -> None:
        """Drop everything that this rank loses together with its state.

        A snapshot in progress is torn. The boundary log is dropped, as in the death of
        a process.
        """
        # a copy still under way may take bytes from after the loss, with a checksum
        # that matches these bytes
        self._memory.engine.discard_torn()
        # boundary log and counts die with a process; snapshots and step log are in
        # memory that outlives the process
        self.logs.lose_boundary()
        self._meter.drop_counts()

    def abort(self) -> None:
        """Abandon the iteration and drop an incomplete window.

        Observing stops, and copies in progress are finished.
        """
        self.stop_observing()
        # the fault would count as the price of the snapshot
        self._meter.drop_snapshot()
        self._stage.abandon_pass()
        self._operators.freeze(())  # an interrupted replay leaves operators frozen
        self._sink.ranks_were_lost()
        # the copier still reads tensors that the recovery overwrites
        self.finish_snapshot()
        # after `finish_snapshot`: the last snapshot may complete a window that other
        # ranks have kept before the fault
        self._memory.snapshots.keep_complete()

    def finish_snapshot(self) -> None:
        """Finish the snapshot in progress, without the cap on copies.

        Afterwards the captured state may change.
        """
        with self._memory.engine.uncapped():
            self._collect(wait=True)

    def close(self) -> None:
        """Finish the snapshot in progress, and end the copying threads."""
        self.finish_snapshot()
        for copier in self._memory.copiers:
            copier.close()

    def retake(self, iteration: int) -> None:
        """Take the snapshots that a fault tore.

        Called when the state is again the state after `iteration` steps.
        """
        self._experts.events.interrupted()
        plan, window = self._newest, self._memory.snapshots.in_flight()
        if plan is None or window is None or plan.iteration != iteration:
            return
        # a copy that had ended before the loss is whole, and has the same bits as the
        # rebuilt state
        if all(snapshot.header.slot != plan.slot for snapshot in window.snapshots):
            self._capture(plan)

    def _capture(self, plan: SlotPlan) -> None:
        self._agreement.has_failed = False
        bubble_bytes = self._meter.bubble_bytes() if self._memory.bubbles else 0.0
        wanted = self._store.wanted(plan, self.logs.branch_of_state)
        self._memory.engine.capture(wanted, bubble_bytes=bubble_bytes)

    def _collect(self, *, wait: bool) -> None:
        try:
            taken = self._memory.engine.collect(wait=wait)
        except CheckpointSaveError as error:
            self._report(error)
            return
        if not taken:
            return
        if self._memory.snapshots.in_flight() is None:
            # another rank's copy has failed after this copy was released, and all ranks
            # have dropped the window
            self._memory.engine.drop(taken.snapshots)
            return
        self._memory.snapshots.add(*taken.snapshots)
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

    def _decide(self, *, wait: bool) -> None:
        with self._meter.waiting():
            self._collect(wait=wait)
        self._agreement.decide(wait=wait)

    def finish_persisting(self) -> None:
        """Wait for the write to disk in progress.

        Raises:
            CheckpointSaveError: The write failed, and `ckpt.strict` is set.
        """
        self._agreement.finish_persisting()

    def _look_at_copies(self) -> None:
        """Log once that peers hold again what this rank keeps from before."""
        publisher = self._memory.publisher
        if publisher and publisher.num_peers and publisher.has_begun_blobs():
            self._awaits_restored = False
            self._events.append(CopiesRestored(num_peers=publisher.num_peers))

    def _report(self, error: CheckpointSaveError) -> None:
        assert self._newest is not None
        self._agreement.has_failed = True
        self._events.append(
            CheckpointFailed(iteration=self._newest.iteration, reason=str(error))
        )
        _log.warning(
            "snapshot not taken, training goes on (ckpt.strict=%s): %s",
            self._strict,
            error,
        )
