"""One rank's checkpoint servers, as the sink of the rank's gradients.

Owns: the gradients sent to servers and the servers' progress; the agreement of all
ranks on when the stream of gradients continues; when host memory and servers may drop
older states. Must not: take whole snapshots (the tier does, at the start of a stream
and after a gap). FlowCheck, sections 4 to 6.

    begin_with_snapshot   servers find the streams of the groups, if they capture
                          gradients
    ready(t)              copy gradients; agree on the newest iteration that all
                          servers have, and on gaps in any stream
    hand_over(t)          servers compute t; after a gap every rank takes a whole
                          snapshot instead
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from moe_ckpt.collectives import reduce_extremes
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.events import (
    GradientsLost,
    GradientsSent,
    HostMemoryUsed,
    ServersWorked,
)
from moe_ckpt.flowcheck.gradient_stream import NOTHING, GradientStream
from moe_ckpt.flowcheck.mirror.plan import BucketOffset, Mirrored, MirroredSums
from moe_ckpt.flowcheck.server_holders import ServerHolders
from moe_ckpt.snapshot.adam_update import AdamStep, ObservedGradients
from moe_ckpt.snapshot.capture import SnapshotRequest
from moe_ckpt.snapshot.codec import Part, PartKey, Snapshot, layout_parts
from moe_ckpt.types import ReadyGradients

_log = logging.getLogger(__name__)


class Mirror(Protocol):
    """Reductions of this rank's gradients that servers capture from a mirror port."""

    offsets: Mapping[PartKey, BucketOffset]
    """Offset of each captured gradient, by master weight. All other gradients are
    tapped.
    """

    def mark(self) -> None:
        """Let servers find the streams of the groups. Collective in the groups.

        Servers can capture the reductions that follow the mark.
        """
        ...

    def sums(self) -> tuple[MirroredSums, ...]:
        """Return the reductions since the last call, or since the mark.

        These are the reductions of one iteration.
        """
        ...


class ServerStates:
    """Implements `GradientSink`: the states of one rank on checkpoint servers.

    All methods except `ranks_were_lost` and `hand_over` are collective over all ranks.
    With a mirror, servers capture gradients, unless all servers with mirror ports are
    gone.

    Attributes:
        goes_on: Whether the stream of gradients is intact on all ranks, so that servers
            compute the next state. False: the next state is a whole snapshot.
    """

    def __init__(
        self,
        parts: RankParts,
        elastic: ElasticContext,
        max_lag_iters: int,
        mirror: Mirror | None,
    ) -> None:
        """Begin without states.

        Args:
            parts: The rank's training and host memory.
            elastic: The rank's means to survive the loss of ranks. Its holders are
                `ServerHolders`.
            max_lag_iters: Most iterations by which servers may lag.
            mirror: Reductions that servers capture. None: ranks send all gradients.
        """
        assert isinstance(elastic.holders, ServerHolders), elastic.holders
        assert parts.memory.publisher is not None, (
            "checkpoint servers live beside supervised ranks"
        )
        self._position = parts.adapter.position
        self._operators = parts.adapter.operators
        self._mirror_port = mirror
        self._sums: tuple[MirroredSums, ...] = ()
        self._stream = GradientStream(parts.memory.publisher, max_lag_iters)
        self._snapshots = parts.memory.snapshots
        self._steps = parts.memory.steps
        self._publisher = parts.memory.publisher
        self._events = parts.events
        self._dense_bytes = parts.dense_bytes
        self._elastic = elastic
        self._holders = elastic.holders
        self._ready_s: float | None = None
        self.goes_on = False

    def ready(self, iteration: int, gradients: ReadyGradients) -> None:
        """Copy the complete gradients, and agree whether servers receive the gradients.

        Args:
            iteration: The iteration of the gradients.
            gradients: The facts of the step.
        """
        reduced = {} if gradients.overflow else self._operators.reduced_gradients()
        if self._mirror:
            self._sums = self._mirror.sums()
            # servers read the other gradients from the mirror port, which spares
            # training this copy
            reduced = {
                key: gradient
                for key, gradient in reduced.items()
                if key not in self._mirror.offsets
            }
        buffers = self._operators.buffer_pieces(
            range(len(self._operators.table.operators))
        )
        self._stream.tap(reduced, sum(tensor.nbytes for _, tensor, _ in buffers))
        progress = self._stream.progress()
        self._log_works()
        agreed = reduce_extremes(
            self._position.ranks,
            self._position.device,
            largest={"lost": bool(progress.lost)},
            smallest={"completed": progress.completed},
        )
        completed, is_cut = int(agreed["completed"]), bool(agreed["lost"])
        # equal on all ranks: a recovery needs all servers' states of one iteration
        self.goes_on = not is_cut
        if is_cut:
            reason = progress.lost or "the servers of another rank lack some"
            self._events.append(GradientsLost(iteration=iteration, reason=reason))
            if self._position.ranks.rank == 0:
                _log.warning(
                    "iteration %d: servers get a whole snapshot, not gradients: %s",
                    iteration,
                    reason,
                )
        if completed != NOTHING:
            self._drop_before(completed)

    def _log_works(self) -> None:
        """Log the work of servers, with the time between gradients of two iterations.

        The time runs from the complete gradients of the last iteration to those of this
        iteration.
        """
        now_s = time.monotonic()
        if self._ready_s is not None:
            iteration_s = now_s - self._ready_s
            for iteration, work in self._stream.take_works():
                self._events.append(
                    ServersWorked(
                        iteration=iteration,
                        busy_s=work.busy_us / 1e6,
                        after_s=work.after_us / 1e6,
                        iteration_s=iteration_s,
                    )
                )
        self._ready_s = now_s

    def hand_over(self, wanted: SnapshotRequest, base: Snapshot | None) -> None:
        """Let servers compute the state that `wanted` describes.

        Args:
            wanted: The state after the step.
            base: The whole snapshot at the start of a stream.
        """
        iteration = wanted.header.iteration
        if not self._stream.has_begun:
            # the gradients apply only to the state of the iteration before
            if base is None or base.header.iteration != iteration - 1:
                self._stream.cut(
                    f"iteration {iteration}: there is no whole snapshot of the one"
                    " before"
                )
                return
            self._stream.begin(base)
        try:
            parts, payload_bytes = layout_parts([*wanted.pieces(), *wanted.changing])
        except CheckpointSaveError as error:
            self._stream.cut(str(error))
            return
        header = replace(wanted.header, parts=parts, payload_bytes=payload_bytes)
        buffers = {key: tensor for key, tensor, _ in wanted.changing}
        steps = self._operators.steps_taken(iteration)
        sent = self._stream.hand_over(
            header, steps, buffers, self._observed(parts, steps)
        )
        if sent:
            self._events.append(
                GradientsSent(
                    iteration=iteration,
                    size_bytes=sent.size_bytes,
                    tap_s=sent.tap_s,
                    lag_iters=sent.lag_iters,
                )
            )

    def adopt(self, iteration: int) -> bool:
        """Continue from a snapshot of `iteration` if all ranks have one in memory.

        Returns:
            Whether servers continue from that snapshot, so that no snapshot is taken.
        """
        base = next(
            (
                window
                for window in self._snapshots.windows()
                if window.start == iteration
            ),
            None,
        )
        has_base = {"base": base is not None}
        # on all ranks or on none: a recovery needs the states of one iteration from all
        # servers
        agreed = reduce_extremes(
            self._position.ranks, self._position.device, largest={}, smallest=has_base
        )
        if base is None or not agreed["base"]:
            return False
        self._stream.clear()
        self._mark()
        self._stream.begin(base.snapshots[0])
        return True

    def begin_with_snapshot(self) -> None:
        """Begin the stream with the whole snapshot that every rank is about to take."""
        self._stream.reset()
        self._agree_on_servers()
        self._mark()
        self.goes_on = False

    def ranks_were_lost(self) -> None:
        """Forget the progress of the servers after ranks were lost.

        The progress is requested again.
        """
        self._stream.clear()
        self._ready_s = None  # a recovery is no iteration
        self.goes_on = False

    @property
    def _mirror(self) -> Mirror | None:
        """The reductions that servers capture. None: servers capture none.

        Training nodes that take over from servers on hosts have no mirror port.
        """
        return None if self._holders.have_taken_over else self._mirror_port

    def _agree_on_servers(self) -> None:
        """Agree on the servers in use, as a lost server may have cut the stream.

        No rank goes back for a lost server, because all ranks have their states. The
        snapshot that follows goes to the servers now in use, or to the training nodes'
        own servers.
        """
        changed = self._holders.agree(self._position.ranks)
        if changed is None:
            return
        self._events.append(changed)
        self._publisher.stop_copying()
        self._elastic.use_peers()
        # begin as if no server had any state: a successor starts with an empty memory
        self._publisher.begin_copying(
            [frozenset[str]() for _ in self._holders.numbers], drop_stale=False
        )

    def _mark(self) -> None:
        # gloo's ports follow no setting: servers find the connections of the groups,
        # new in each generation, by these marks
        if self._mirror:
            self._mirror.mark()

    def _observed(
        self, parts: Sequence[Part], steps: Mapping[PartKey, AdamStep]
    ) -> ObservedGradients | None:
        """Return the gradients that servers capture for these steps; None for none."""
        if self._mirror is None:
            return None
        offsets = [
            self._mirror.offsets.get(part.key) for part in parts if part.key in steps
        ]
        mirrored = Mirrored(
            groups=self._sums, offsets=tuple(each for each in offsets if each)
        )
        if not mirrored.offsets:
            return None
        return ObservedGradients(
            weights=tuple(each is not None for each in offsets),
            source=mirrored.to_json(),
        )

    def _drop_before(self, completed: int) -> None:
        """Drop the states before `completed`, on servers and in own memory.

        Args:
            completed: The newest iteration that all servers have.
        """
        old = [
            window.start
            for window in self._snapshots.windows()
            if window.start < completed
        ]
        # the memory then consists of this rank's states on one server, and of the
        # gradients on the way to that server
        if old:
            states_bytes = self._stream.num_states * self._dense_bytes
            self._events.append(
                HostMemoryUsed(
                    full_bytes=states_bytes,
                    compute_bytes=0,
                    buffer_bytes=0,
                    boundary_log_bytes=0,
                    step_log_bytes=self._steps.size_bytes,
                    allocated_bytes=states_bytes
                    + self._stream.packed_bytes
                    + self._steps.size_bytes,
                    double_buffered_dense_bytes=2 * self._dense_bytes,
                )
            )
        self._stream.drop_before(completed)
        for start in old:
            self._snapshots.drop(start)
        self._steps.drop_up_to(completed)
