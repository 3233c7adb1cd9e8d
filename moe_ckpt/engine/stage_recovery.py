"""Rebuilds stages that lost their state (MoEvement, 3.3, 3.4).

The sources are the last sparse window and the neighbours' logs. Owns: one recovery,
from the common inventory to the proof that a replay left healthy ranks unchanged. Must
not: decide which stages roll back (`recovery.plan` does) or in which steps
(`recovery.convert` does).

    all ranks        inventory -> plan -> the plan's sources are intact
    segment          load snapshot -> [receive logs of i -> replay i -> load ...]
                     -> compare
    its neighbours   send logs of i, i+1, ...
    all ranks        outcome
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from moe_ckpt.collectives import gather_results, receive_buffers, send_buffers
from moe_ckpt.config import DIVERGENCES
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.engine.state_loss import LostStages
from moe_ckpt.errors import CheckpointLoadError, DataError
from moe_ckpt.events import CheckpointSkipped, ReplayDiffered, StageRecovered
from moe_ckpt.recovery.convert import ReplayStep, plan_conversion
from moe_ckpt.recovery.inventory import Inventory, ReplayedState, WindowRef
from moe_ckpt.recovery.plan import RecoveryPlan, Rollback, plan_recovery
from moe_ckpt.snapshot.boundary_log import Direction, LoggedEnds
from moe_ckpt.snapshot.codec import Snapshot
from moe_ckpt.snapshot.verified_windows import (
    assignment_of,
    contents_of,
    verified_window,
)
from moe_ckpt.snapshot.windows import Window

_log = logging.getLogger(__name__)

WINDOW, END = DIVERGENCES
CORRUPT, NOT_DETERMINISTIC = "corrupt memory", "training that is not deterministic"

Progress = Callable[[ReplayedState | None], None]
"""Receives each state from which an interrupted replay can go on, and None before that
state changes.
"""


class StageRecovery:
    """Recovers lost stages, with all ranks of the job present.

    All public methods except `inventory` and `is_intact` are collective over all ranks.

    Args:
        parts: The rank's parts.
        on_divergence: `WINDOW` or `END`: after a replay that differs from the state
            of a healthy rank, training goes on from a second replay, or the recovery
            raises an error.
    """

    def __init__(self, parts: RankParts, on_divergence: str = WINDOW) -> None:
        self._position = parts.adapter.position
        self._meter = parts.meter
        self._stage = parts.adapter.stage
        self._operators = parts.adapter.operators
        self._memory = parts.memory
        self._events = parts.events
        self._on_divergence = on_divergence

    def recover(self, lost: LostStages, target: int, *, undo: bool) -> None:
        """Bring all ranks to the state after the target iteration.

        All processes live, but some have lost state.

        Args:
            lost: The stages that have lost state.
            target: The iteration to reach.
            undo: Whether a later iteration had begun and is abandoned. Healthy ranks
                then restore the state that this iteration changed.

        Raises:
            CheckpointLoadError: The remaining sources do not lead to the target or,
                with `on_divergence=end`, a replay shows that a healthy rank's state
                differs from the result of its own steps. Raised on all ranks.
            DataError: A replay has read other samples than before. Raised on all ranks.
        """
        # before `carry_out` takes digests of healthy ranks: these must be digests of
        # the target, which a replay has to reach
        if undo and not lost.mine:
            self._stage.restore_start(
                self._memory.steps.start(target + 1), undo=target + 1
            )
        has_log = self._memory.boundary is not None

        def plan_from(inventories: Sequence[Inventory]) -> RecoveryPlan:
            plan = plan_recovery(
                lost.stages, inventories, target_iteration=target, boundary_log=has_log
            )
            if plan.target_iteration != target:
                raise CheckpointLoadError(
                    f"nothing leads to iteration {target}: {'; '.join(plan.lines())}"
                )
            return plan

        plan = self.intact_plan(target, plan_from)
        self.carry_out(plan, live=not lost.mine)
        if self._position.shard.global_rank == 0:
            _log.warning("%s", "; ".join(plan.lines()))

    def inventory(self, target: int | None) -> Inventory:
        """Return this rank's own sources.

        The contents of the sources are not read: `is_intact` verifies the sources that
        a plan takes.

        Args:
            target: The iteration to which windows have to lead. None: any iteration.
        """
        boundary = self._memory.boundary
        refs = [
            ref
            for window in self._memory.snapshots.windows()
            if (ref := self._usable(window, by_headers=True)) is not None
            and (target is None or ref.end <= target)
        ]
        last = 0 if target is None else target
        return Inventory(
            global_rank=self._position.shard.global_rank,
            stage=self._position.stage,
            windows=tuple(refs),
            held={},
            logged_from=boundary.complete_from(last) if boundary else last + 1,
            logged_to=last,
        )

    def intact_plan(
        self,
        target: int | None,
        plan_from: Callable[[Sequence[Inventory]], RecoveryPlan],
    ) -> RecoveryPlan:
        """Return a plan for which all ranks' own sources are intact. Collective.

        Args:
            target: The iteration to which sources have to lead. None: any iteration.
            plan_from: Makes a plan from the inventories of all ranks.
        """
        ranks = self._position.ranks
        while True:
            plan = plan_from(
                gather_results(
                    ranks, lambda: self.inventory(target), CheckpointLoadError
                )
            )
            if all(
                gather_results(
                    ranks, functools.partial(self.is_intact, plan), CheckpointLoadError
                )
            ):
                return plan

    def is_intact(self, plan: RecoveryPlan, *, has_fetched: bool = False) -> bool:
        """Verify this rank's sources for a plan, and drop damaged sources.

        After a drop, all ranks take stock and plan again.

        Args:
            plan: The plan.
            has_fetched: Whether this rank's window was fetched for the plan, and
                verified at that time.

        Returns:
            Whether nothing was damaged.
        """
        stage, target = self._position.stage, plan.target_iteration
        mine = plan.rollback_of(stage)
        has_window = mine is None or has_fetched or self._has_intact(mine.window_start)
        served = [
            each.starts_from
            for each in plan.rollbacks
            if stage in each.neighbours(plan.num_stages)
        ]
        boundary = self._memory.boundary
        lacks_log = (
            boundary is not None
            and bool(served)
            and boundary.drop_damaged(1 + min(served), target)
        )
        return has_window and not lacks_log

    def carry_out(
        self, plan: RecoveryPlan, *, live: bool, progress: Progress = lambda _: None
    ) -> int:
        """Bring this rank to the plan's target.

        If the stage of a live rank rolls back all the same, the replay must reproduce
        the live state. If the replay differs on any rank, `on_divergence` decides: the
        stages that have replayed replay once more, and training goes on from that
        replay, or all ranks raise an error.

        Args:
            plan: The plan.
            live: Whether the rank's state is whole and already at the target.
            progress: Receives the states from which an interrupted replay can go on.

        Returns:
            Number of iterations that this rank executed.

        Raises:
            CheckpointLoadError: With `on_divergence=end`, a replay gave another state
                than a live rank had. Raised on all ranks.
            DataError: A replay has read other samples than before. Raised on all ranks.
        """
        target, mine = plan.target_iteration, plan.rollback_of(self._position.stage)
        before = self._operators.digests() if mine is not None and live else None
        self._execute(plan, mine, progress)
        differing = gather_results(
            self._position.ranks,
            lambda: self._compare(target, before),
            CheckpointLoadError,
        )
        if any(differing):  # on any rank: neighbours have to send their logs again
            self._replay_again(plan, mine, differing, progress)
        return 0 if mine is None else target - mine.starts_from

    def _execute(
        self, plan: RecoveryPlan, mine: Rollback | None, progress: Progress
    ) -> None:
        """Roll this rank's stage back and replay, or serve the stages that replay.

        Collective over all ranks.

        Raises:
            DataError: A replay has read other samples than before. Raised on all ranks.
        """
        self._execute_alone(plan, mine, progress)
        # checked after the replay: other ranks wait for the outcome of a replay, and
        # not for a rank that has raised an error during the replay
        gather_results(
            self._position.ranks, self._stage.require_same_samples, DataError
        )

    def _execute_alone(
        self, plan: RecoveryPlan, mine: Rollback | None, progress: Progress
    ) -> None:
        started_s, target = time.monotonic(), plan.target_iteration
        if mine is None:
            self._serve(plan.rollbacks, target)
            return
        fetched_bytes = self._roll_back(mine, target, progress)
        seconds = time.monotonic() - started_s
        # stages that replay together also wait for each other
        if len(mine.stages) == 1:
            self._meter.replayed(target - mine.starts_from, seconds)
        self._events.append(
            StageRecovered(
                iteration=target,
                window_start=mine.window_start,
                first_stage=mine.stages[0],
                last_stage=mine.stages[-1],
                replayed_iters=target - mine.starts_from,
                fetched_bytes=fetched_bytes,
                seconds=seconds,
            )
        )

    def _replay_again(
        self,
        plan: RecoveryPlan,
        mine: Rollback | None,
        differing: Sequence[list[str]],
        progress: Progress,
    ) -> None:
        """Find out by a second replay why the first one differed.

        Training goes on from the last replay.
        """
        verdict = f"{CORRUPT}, or {NOT_DETERMINISTIC}"
        # a replay that continued an earlier replay cannot be repeated: the logs of the
        # first iterations may be gone
        if all(rollback.resumed_at is None for rollback in plan.rollbacks):
            first = self._operators.digests() if mine is not None else {}
            self._execute(plan, mine, progress)
            agrees = mine is None or self._operators.digests() == first
            all_agree = all(
                gather_results(
                    self._position.ranks, lambda: agrees, CheckpointLoadError
                )
            )
            # a kernel that is not deterministic makes no state wrong: each state is a
            # valid result of training
            verdict = CORRUPT if all_agree else NOT_DETERMINISTIC
        own = differing[self._position.shard.global_rank]
        if own:
            self._events.append(
                ReplayDiffered(
                    iteration=plan.target_iteration, operators=own, verdict=verdict
                )
            )
        if self._position.shard.global_rank == 0:
            ranks = [rank for rank, names in enumerate(differing) if names]
            _log.warning(
                "replaying to iteration %d gave another state than ranks %s had: %s;"
                " all ranks go on from the replay",
                plan.target_iteration,
                ranks,
                verdict,
            )

    def _usable(self, window: Window, *, by_headers: bool) -> WindowRef | None:
        """Check a window of this rank, and drop the window if damaged."""
        replayable_to = self._memory.steps.reaches(window.start + 1)
        try:
            return verified_window(
                window.snapshots,
                self._position.identity,
                self._position.shard,
                replayable_to,
                by_headers=by_headers,
            )
        except CheckpointLoadError as error:
            self._events.append(
                CheckpointSkipped(source=str(window), reason=str(error))
            )
            _log.warning("%s cannot be used: %s", window, error)
            self._memory.snapshots.drop(window.start)
            return None

    def _has_intact(self, window_start: int) -> bool:
        """Verify the window of this rank with this start; drop a damaged window."""
        window = self._window_at(window_start)
        # None: the window was dropped while another rank's fetch failed; all ranks then
        # plan with the same inventories
        return window is not None and self._usable(window, by_headers=False) is not None

    def _window_at(self, start: int) -> Window | None:
        return next(
            (
                window
                for window in self._memory.snapshots.windows()
                if window.start == start
            ),
            None,
        )

    def _roll_back(self, rollback: Rollback, target: int, progress: Progress) -> int:
        """Load and replay, or continue an earlier replay.

        Returns:
            The bytes received from neighbours.
        """
        window = self._window_at(rollback.window_start)
        assert window is not None, rollback
        contents = [contents_of(snapshot) for snapshot in window.snapshots]
        assignment = assignment_of(contents)

        def reach(iteration: int) -> None:
            progress(
                ReplayedState(
                    span=rollback.span, assignment=assignment, iteration=iteration
                )
            )

        if rollback.resumed_at is None:
            # the window is about to replace the state of an earlier replay
            progress(None)
        else:
            reach(rollback.resumed_at)
            # if no start is logged, the pass after that state has not begun
            if self._memory.steps.has_start(rollback.resumed_at + 1):
                cut_off = rollback.resumed_at + 1
                self._stage.restore_start(
                    self._memory.steps.start(cut_off), undo=cut_off
                )
        fetched_bytes = 0
        for step in plan_conversion(contents, target):
            if (
                step.run_iteration is not None
                and step.run_iteration <= rollback.starts_from
            ):
                continue  # the state that an earlier replay has left is past this step
            if step.load_iteration is not None:
                self._load(window.snapshots[step.load_iteration - window.start])
            if step.run_iteration is not None:
                fetched_bytes += self._run_again(
                    step, step.run_iteration, rollback, lambda: progress(None)
                )
                self._note_start(step.run_iteration + 1)
                reach(step.run_iteration)
        # if the target is the window's end, the last load activates operators that the
        # last replay had frozen
        self._operators.freeze(())
        # if no start is logged, an earlier replay has led to the target
        if self._memory.steps.has_start(target + 1):
            self._stage.restore_start(self._memory.steps.start(target + 1))
        return fetched_bytes

    def _note_start(self, iteration: int) -> None:
        """Note the start of an iteration, after the replay of the iteration before."""
        # also remembers buffers, which the next pass changes
        start = self._stage.begin(iteration)
        if not self._memory.steps.has_start(iteration):
            self._memory.steps.log_start(iteration, start)

    def _load(self, snapshot: Snapshot) -> None:
        header = snapshot.header
        parts = {part.key: snapshot.part(part) for part in header.parts}
        self._operators.load(
            parts, set(header.full), set(header.compute), header.adam_steps
        )

    def _run_again(
        self,
        step: ReplayStep,
        iteration: int,
        rollback: Rollback,
        before_update: Callable[[], None],
    ) -> int:
        position, segment = self._position, rollback.stages
        steps, boundary = self._memory.steps, self._memory.boundary
        ends = LoggedEnds(
            from_previous=self._receive(position.previous_rank)
            if position.stage == segment[0]
            else None,
            from_next=self._receive(position.next_rank)
            if position.stage == segment[-1]
            else None,
        )
        self._operators.freeze(step.frozen)
        if boundary:
            # log the sent tensors again: this stage's neighbours may be the next to
            # fail
            boundary.begin(iteration)
        # if so, a tied embedding's gradient is summed over the stages again, and not
        # taken from the log
        whole_model = segment == range(position.num_stages)
        record, start = steps.record(iteration), steps.start(iteration)
        self._stage.replay(
            record, start, ends, whole_model=whole_model, before_update=before_update
        )
        if boundary:
            boundary.end()
        return sum(
            tensor.nbytes
            for end in (ends.from_previous, ends.from_next)
            for tensor in end or ()
        )

    def _serve(self, rollbacks: Sequence[Rollback], target: int) -> None:
        """Send the logs of the replayed iterations to neighbours that replay.

        Each transfer carries one micro-batch.
        """
        first = 1 + min(
            (rollback.starts_from for rollback in rollbacks), default=target
        )
        # iterations outside, segments inside: a second segment does not wait until the
        # first has replayed everything
        for iteration in range(first, target + 1):
            for rollback in rollbacks:
                if iteration <= rollback.starts_from:
                    continue
                if self._position.stage == rollback.stages.start - 1:
                    self._send(
                        self._position.next_rank, iteration, Direction.ACTIVATION
                    )
                if self._position.stage == rollback.stages.stop:
                    self._send(
                        self._position.previous_rank, iteration, Direction.GRADIENT
                    )

    def _send(self, rank: int | None, iteration: int, direction: Direction) -> None:
        assert rank is not None, iteration
        assert self._memory.boundary is not None
        # from host to host: on a device all micro-batches would need room at once,
        # beside a whole training, and the transfer would take turns with all others of
        # the job's communicator
        send_buffers(
            self._position.host_ranks,
            self._memory.boundary.sent(iteration, direction),
            rank,
        )

    def _receive(self, rank: int | None) -> tuple[torch.Tensor, ...] | None:
        """Return a neighbour's log of an iteration by micro-batch, on the host.

        Returns None at an end of the pipeline.
        """
        if rank is None:
            return None
        # pinned, because the replay copies each tensor to the device
        pinned = self._position.device.type == "cuda"
        return receive_buffers(self._position.host_ranks, rank, pinned=pinned)

    def _compare(self, target: int, live: Mapping[str, str] | None) -> list[str]:
        """Return the operators in which the replay of a healthy rank differs.

        Args:
            target: The iteration of the state.
            live: Digests before the replay. None: the state was not live, or not
                replayed.

        Raises:
            CheckpointLoadError: With `on_divergence=end`, operators differ.
        """
        replayed = self._operators.digests() if live is not None else None
        if live == replayed or live is None or replayed is None:
            return []
        differing = [name for name in live if live[name] != replayed.get(name)]
        if self._on_divergence == WINDOW:
            return differing
        self._events.append(ReplayDiffered(iteration=target, operators=differing))
        raise CheckpointLoadError(
            f"rank {self._position.shard.global_rank}: replaying to iteration {target}"
            f" gave another state of {', '.join(differing)} than the rank had, which"
            f" lost nothing: {CORRUPT}, or {NOT_DETERMINISTIC}"
            " (runtime.on_divergence=window goes on)"
        )
