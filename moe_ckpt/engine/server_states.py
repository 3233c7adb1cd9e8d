"""One rank's checkpoint servers, as its in-memory tier uses them: the gradients sent to
them and their progress.

Owns: when the stream of gradients continues, agreed by all ranks, and when host memory
and servers may drop older states. Must not: take whole snapshots (the tier does, at the
start of a stream and after a gap). FlowCheck, sections 4 to 6.

    reset           servers find the streams of the groups, if they capture gradients
    ready(t)        copy gradients; agree on the newest iteration that all servers have, and on gaps in any stream
    take(t)         hand over t, or, after a gap, a whole snapshot of t on every rank
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from moe_ckpt.collectives import reduce_extremes
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.engine.interfaces import Mirror
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.events import (
    GradientsLost,
    GradientsSent,
    HostMemoryUsed,
    ServersChanged,
    ServersWorked,
)
from moe_ckpt.mirror.plan import Mirrored, MirroredSums
from moe_ckpt.replication.gradient_stream import NOTHING, GradientStream
from moe_ckpt.snapshot.adam_update import AdamStep
from moe_ckpt.snapshot.capture import SnapshotRequest
from moe_ckpt.snapshot.codec import Part, PartKey, Snapshot, layout_parts
from moe_ckpt.types import ReadyGradients

_log = logging.getLogger(__name__)


class ServerStates:
    """Collective over all ranks, but for `clear` and `hand_over`.

    With a mirror servers capture gradients, unless all servers with mirror ports are
    gone.
    """

    def __init__(
        self, parts: RankParts, max_lag_iters: int, elastic: ElasticContext
    ) -> None:
        assert parts.memory.publisher is not None, (
            "checkpoint servers live beside supervised ranks"
        )
        self._place = parts.adapter.place
        self._operators = parts.adapter.operators
        self._mirror_port = parts.adapter.mirror
        self._sums: tuple[MirroredSums, ...] = ()
        self._stream = GradientStream(parts.memory.publisher, max_lag_iters)
        self._snapshots = parts.memory.snapshots
        self._steps = parts.memory.steps
        self._publisher = parts.memory.publisher
        self._events = parts.events
        self._dense_bytes = parts.dense_bytes
        self._elastic = elastic
        self._ready_s: float | None = None
        self.goes_on = False

    def ready(self, iteration: int, gradients: ReadyGradients) -> None:
        """All gradients of an iteration are complete: copy them, and agree whether
        servers get them.
        """
        reduced = {} if gradients.overflow else self._operators.reduced_gradients()
        if self._mirror:
            self._sums = self._mirror.sums()
            # servers read the others from the mirror port, which is there to spare
            # training this copy
            reduced = {
                key: gradient
                for key, gradient in reduced.items()
                if key not in self._mirror.places
            }
        buffers = self._operators.buffer_pieces(
            range(len(self._operators.table.operators))
        )
        self._stream.tap(reduced, sum(tensor.nbytes for _, tensor, _ in buffers))
        progress = self._stream.progress()
        self._log_works()
        agreed = reduce_extremes(
            self._place.ranks,
            self._place.device,
            largest={"lost": bool(progress.lost)},
            smallest={"completed": progress.completed},
        )
        completed, is_cut = int(agreed["completed"]), bool(agreed["lost"])
        # on all ranks alike: a recovery needs all servers' states of one iteration
        self.goes_on = not is_cut
        if is_cut:
            reason = progress.lost or "the servers of another rank lack some"
            self._events.append(GradientsLost(iteration=iteration, reason=reason))
            if self._place.ranks.rank == 0:
                _log.warning(
                    "iteration %d: servers get a whole snapshot, not gradients: %s",
                    iteration,
                    reason,
                )
        if completed != NOTHING:
            self._drop_before(completed)

    def _log_works(self) -> None:
        """Append the work of servers, beside the time since the last iteration's
        gradients were complete.
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

        `base`: the whole snapshot at the start of a stream.
        """
        iteration = wanted.header.iteration
        if not self._stream.has_begun:
            # gradients lead on from that state only
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
            header, steps, buffers, self._mirrored(parts, steps)
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
        """Return whether all ranks have a snapshot of `iteration` in memory to continue
        from; then none is taken.
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
            self._place.ranks, self._place.device, largest={}, smallest=has_base
        )
        if base is None or not agreed["base"]:
            return False
        self._stream.clear()
        self._mark()
        self._stream.begin(base.snapshots[0])
        return True

    def reset(self) -> None:
        """A whole snapshot of every rank is being taken: the stream begins with it."""
        self._stream.reset()
        self._replace_hosts()
        self._mark()
        self.goes_on = False

    def clear(self) -> None:
        """Ranks were lost: ask the servers again for their progress."""
        self._stream.clear()
        self._ready_s = None  # a recovery is no iteration
        self.goes_on = False

    @property
    def _mirror(self) -> Mirror | None:
        """The reductions that servers capture: training nodes that take over from
        servers on hosts have no port.
        """
        hosts = self._elastic.hosts
        return None if hosts and not hosts.is_in_use else self._mirror_port

    def _replace_hosts(self) -> None:
        """Agree on servers on hosts once the stream is cut: a lost one may be the
        cause.

        No rank goes back for that, since all have their states: the snapshot that
        follows goes to the servers in use now, or to the training nodes' own.
        """
        hosts = self._elastic.hosts
        if hosts is None or not hosts.agree(self._place.ranks):
            return
        self._events.append(ServersChanged(addresses=", ".join(hosts.present)))
        self._publisher.stop_copying()
        self._elastic.use_peers()
        # as if no server had anything: a successor begins with an empty memory
        self._publisher.begin_copying(
            [frozenset[str]() for _ in self._elastic.holders], drop_stale=False
        )

    def _mark(self) -> None:
        # gloo's ports follow no setting: servers find the groups' connections, new in
        # each generation, by these marks
        if self._mirror:
            self._mirror.mark()

    def _mirrored(
        self, parts: Sequence[Part], steps: Mapping[PartKey, AdamStep]
    ) -> Mirrored | None:
        """Return the places of the gradients that servers capture for these steps; None
        if there are none.
        """
        if self._mirror is None:
            return None
        places = tuple(
            self._mirror.places.get(part.key) for part in parts if part.key in steps
        )
        return Mirrored(groups=self._sums, places=places) if any(places) else None

    def _drop_before(self, completed: int) -> None:
        """Drop states older than `completed`, which all servers have, there, and all
        states in own memory.
        """
        old = [
            window.start
            for window in self._snapshots.windows()
            if window.start < completed
        ]
        # memory then is that of this rank's states on one server, and of the gradients
        # on their way to it
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
