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

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from moe_ckpt.collectives import gather_results, receive_buffers, send_buffers
from moe_ckpt.config import DIVERGENCES
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.engine.rebuilding import Progress, Rebuilding
from moe_ckpt.errors import CheckpointLoadError, DataError
from moe_ckpt.events import ReplayDiffered, StageRecovered
from moe_ckpt.recovery.convert import ReplayStep, plan_conversion
from moe_ckpt.recovery.inventory import Inventory, ReplayedState
from moe_ckpt.recovery.plan import RecoveryPlan, Rollback, plan_recovery
from moe_ckpt.recovery.target import Target
from moe_ckpt.snapshot.boundary_log import Direction, LoggedEnds
from moe_ckpt.snapshot.codec import Snapshot
from moe_ckpt.snapshot.verified_windows import assignment_of, contents_of

_log = logging.getLogger(__name__)

WINDOW, END = DIVERGENCES
CORRUPT, NOT_DETERMINISTIC = "corrupt memory", "training that is not deterministic"


class StageRecovery(Rebuilding[RecoveryPlan]):
    """Recovers lost stages by replays.

    Args:
        parts: The rank's parts.
        on_divergence: `WINDOW` or `END`: after a replay that differs from the state
            of a healthy rank, training goes on from a second replay, or the recovery
            raises an error.
    """

    def __init__(self, parts: RankParts, on_divergence: str = WINDOW) -> None:
        super().__init__(parts)
        self._on_divergence = on_divergence

    def plan(
        self, target: Target | None, inventories: Sequence[Inventory]
    ) -> RecoveryPlan:
        all_stages = frozenset(range(self._position.num_stages))
        return plan_recovery(
            target.lost_stages if target else all_stages,
            inventories,
            target_iteration=target.iteration if target else None,
            boundary_log=self._memory.boundary is not None,
        )

    def is_intact(self, plan: RecoveryPlan, *, has_fetched: bool = False) -> bool:
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
        self._operators.load(
            snapshot.tensors(),
            set(header.full),
            set(header.compute),
            header.adam_steps,
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
