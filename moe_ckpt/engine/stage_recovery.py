"""Rebuilds stages that lost their state, from the last sparse window and the neighbours' logs (MoEvement, 3.3, 3.4).

Owns: one recovery, from the common inventory to the proof that a replay left healthy ranks unchanged. Must not: decide
which stages roll back (`recovery.plan` does) or in which steps (`recovery.convert` does).

    all ranks        inventory -> plan                                                        -> outcome
    segment          load snapshot -> [receive logs of i -> replay i -> load ...] -> compare
    its neighbours   send logs of i, i+1, ...
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from moe_ckpt.collectives import gather_results, receive_buffers, send_buffers
from moe_ckpt.config import DIVERGENCES
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.events import CheckpointSkipped, ReplayDiffered, StageRecovered
from moe_ckpt.recovery.convert import ReplayStep, SnapshotContents, plan_conversion
from moe_ckpt.recovery.inventory import Inventory, ReplayedState, WindowRef
from moe_ckpt.recovery.plan import RecoveryPlan, Rollback, plan_recovery
from moe_ckpt.snapshot.boundary_log import Direction, LoggedEnds
from moe_ckpt.snapshot.codec import ShardIdentity, Snapshot, verify
from moe_ckpt.snapshot.windows import Window
from moe_ckpt.types import RunIdentity

_log = logging.getLogger(__name__)

WINDOW, END = DIVERGENCES
CORRUPT, NOT_DETERMINISTIC = "corrupt memory", "training that is not deterministic"


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A loss to recover from: `stages` lost their state, and this rank did if `mine`; `target` is that of all ranks.

    `undo`: an iteration had begun and is abandoned; healthy ranks restore what it changed.
    """

    stages: frozenset[int]
    mine: bool
    target_iteration: int
    undo: bool


class StageRecovery:
    """Recovers lost stages, with all ranks of the job present. Collective over all ranks."""

    def __init__(self, parts: RankParts, on_divergence: str = WINDOW) -> None:
        self._place = parts.place
        self._meter = parts.meter
        self._stage = parts.training.stage
        self._operators = parts.training.operators
        self._stores = parts.stores
        self._memory = parts.stores.memory
        self._events = parts.events
        self._on_divergence = on_divergence

    def recover(self, loss: Loss) -> None:
        """Bring all ranks to the state after the target iteration, in processes that live but have lost state.

        Raises CheckpointLoadError on all ranks if the remaining sources do not lead there, or, with
        `on_divergence=end`, if a replay shows that a healthy rank's state differs from the result of its own steps.
        """
        if loss.undo and not loss.mine:
            undo = loss.target_iteration + 1
            self._stage.restore_start(self._stores.steps.start(undo), undo=undo)
        target = loss.target_iteration
        inventories = gather_results(self._place.ranks, lambda: self.inventory(target), CheckpointLoadError)
        plan = plan_recovery(
            loss.stages, inventories, target_iteration=target, boundary_log=self._stores.boundary is not None
        )
        if plan.target_iteration != target:
            raise CheckpointLoadError(f"nothing leads to iteration {target}: {'; '.join(plan.lines())}")
        self.carry_out(plan, live=not loss.mine)
        if self._place.shard.global_rank == 0:
            _log.warning("%s", "; ".join(plan.lines()))

    def inventory(self, target: int | None) -> Inventory:
        """Return this rank's own verified sources that lead to `target`, or to any iteration (None)."""
        boundary = self._stores.boundary
        refs = [
            ref
            for window in self._memory.windows()
            if (ref := self._usable(window)) is not None and (target is None or ref.end <= target)
        ]
        last = 0 if target is None else target
        return Inventory(
            global_rank=self._place.shard.global_rank,
            stage=self._place.stage,
            windows=tuple(refs),
            held={},
            logged_from=boundary.usable_from(last) if boundary else last + 1,
            logged_to=last,
        )

    def require(self, plan: RecoveryPlan) -> None:
        """Raise CheckpointLoadError unless this rank has the intact window to which the plan rolls it back."""
        for rollback in plan.rollbacks:
            if self._place.stage in rollback.segment.stages:
                target = plan.target_iteration
                found = [window for window in self.inventory(target).windows if window.states == rollback.states]
                if not any(window.steps_to >= target for window in found):
                    raise CheckpointLoadError(f"no window of {rollback.states} that leads to iteration {target}")

    def carry_out(
        self, plan: RecoveryPlan, *, live: bool, progress: Callable[[ReplayedState | None], None] = lambda _: None
    ) -> int:
        """Bring this rank to the plan's target; return the number of iterations that it executed.

        `live`: the rank's state is whole and at the target already. If its stage rolls back all the same, the replay
        must reproduce that state. If it does not on one rank, all ranks replay once more and go on from there, or raise
        CheckpointLoadError, as `on_divergence` says. `progress` is called with each state from which a replay can go on
        if it is cut off, and with None before that state changes.
        """
        target = plan.target_iteration
        mine = next((rollback for rollback in plan.rollbacks if self._place.stage in rollback.segment.stages), None)
        before = self._operators.digests() if mine is not None and live else None
        self._execute(plan, mine, progress)
        differing = gather_results(self._place.ranks, lambda: self._compare(target, before), CheckpointLoadError)
        if any(differing):
            self._replay_again(plan, mine, differing, progress)
        return 0 if mine is None else target - mine.starts_from

    def _execute(
        self, plan: RecoveryPlan, mine: Rollback | None, progress: Callable[[ReplayedState | None], None]
    ) -> None:
        """Roll this rank's stage back and replay it, or serve the stages that do."""
        started_s, target = time.monotonic(), plan.target_iteration
        if mine is None:
            self._serve(plan.rollbacks, target)
        else:
            self._report(mine, target, self._roll_back(mine, target, progress), started_s)

    def _replay_again(
        self,
        plan: RecoveryPlan,
        mine: Rollback | None,
        differing: Sequence[list[str]],
        progress: Callable[[ReplayedState | None], None],
    ) -> None:
        """Find out by a second replay which of two states is the odd one; all ranks go on from the last replay."""
        verdict = self._second_replay(plan, mine, progress)
        own = differing[self._place.shard.global_rank]
        if own:
            self._events.append(ReplayDiffered(iteration=plan.target_iteration, operators=own, verdict=verdict))
        if self._place.shard.global_rank == 0:
            ranks = [rank for rank, names in enumerate(differing) if names]
            _log.warning(
                "replaying to iteration %d gave another state than ranks %s had: %s; all ranks go on from the replay",
                plan.target_iteration,
                ranks,
                verdict,
            )

    def _second_replay(
        self, plan: RecoveryPlan, mine: Rollback | None, progress: Callable[[ReplayedState | None], None]
    ) -> str:
        """Return what a second replay shows.

        Two that agree: the live memory was corrupt. Two that differ: a kernel is not deterministic, so that no state is
        wrong, and all are a valid result of training. A replay that went on from an earlier one cannot be repeated: its
        first iterations' logs may be gone.
        """
        if any(rollback.resumed_at is not None for rollback in plan.rollbacks):
            return f"{CORRUPT}, or {NOT_DETERMINISTIC}"
        first = self._operators.digests() if mine is not None else {}
        self._execute(plan, mine, progress)
        agrees = mine is None or self._operators.digests() == first
        all_agree = all(gather_results(self._place.ranks, lambda: agrees, CheckpointLoadError))
        return CORRUPT if all_agree else NOT_DETERMINISTIC

    def _usable(self, window: Window) -> WindowRef | None:
        try:
            steps_to = self._stores.steps.reaches(window.start + 1)
            return verified_window(window.snapshots, self._place.identity, self._place.shard, steps_to)
        except CheckpointLoadError as error:
            self._events.append(CheckpointSkipped(source=str(window), reason=str(error)))
            _log.warning("%s cannot be used: %s", window, error)
            self._memory.drop(window.start)
            return None

    def _roll_back(self, rollback: Rollback, target: int, progress: Callable[[ReplayedState | None], None]) -> int:
        """Load and replay, or go on with a replay; return the bytes received from neighbours."""
        window = next(window for window in self._memory.windows() if window.start == rollback.window_start)
        contents = [_contents(snapshot) for snapshot in window.snapshots]
        cut = _cut(contents)

        def reach(iteration: int) -> None:
            progress(ReplayedState(states=rollback.states, cut=cut, iteration=iteration))

        if rollback.resumed_at is None:
            progress(None)  # of an earlier replay, whose state the window is about to replace
        else:
            reach(rollback.resumed_at)
            if self._stores.steps.has_start(rollback.resumed_at + 1):  # else the pass after that has not begun
                cut_off = rollback.resumed_at + 1
                self._stage.restore_start(self._stores.steps.start(cut_off), undo=cut_off)
        fetched_bytes = 0
        for step in plan_conversion(contents, target):
            if step.run_iteration is not None and step.run_iteration <= rollback.starts_from:
                continue
            if step.load_iteration is not None:
                self._load(window.snapshots[step.load_iteration - window.start])
            if step.run_iteration is not None:
                fetched_bytes += self._run_again(step, step.run_iteration, rollback, lambda: progress(None))
                self._stage.begin(step.run_iteration + 1)  # remembers buffers, which the next pass changes
                reach(step.run_iteration)
        self._operators.freeze(())
        if self._stores.steps.has_start(target + 1):  # else the replay has led there
            self._stage.restore_start(self._stores.steps.start(target + 1))
        return fetched_bytes

    def _load(self, snapshot: Snapshot) -> None:
        header = snapshot.header
        parts = {part.key: snapshot.part(part) for part in header.parts}
        self._operators.load(parts, set(header.full), set(header.compute), header.adam_steps)

    def _run_again(
        self, step: ReplayStep, iteration: int, rollback: Rollback, before_update: Callable[[], None]
    ) -> int:
        segment, steps, boundary = rollback.segment, self._stores.steps, self._stores.boundary
        last_stage = self._place.num_stages - 1
        before = self._place.stage == segment.first_stage and segment.first_stage > 0
        after = self._place.stage == segment.last_stage and segment.last_stage < last_stage
        ends = LoggedEnds(
            from_previous=self._receive(self._place.previous_rank, iteration) if before else None,
            from_next=self._receive(self._place.next_rank, iteration) if after else None,
        )
        self._operators.freeze(step.frozen)
        if boundary:
            boundary.begin(iteration)  # log again what this stage sent then: its neighbours may be the next to fail
        whole_model = (segment.first_stage, segment.last_stage) == (0, last_stage)
        record, start = steps.record(iteration), steps.start(iteration)
        self._stage.replay(record, start, ends, whole_model=whole_model, before_update=before_update)
        if boundary:
            boundary.end()
        return sum(tensor.nbytes for end in (ends.from_previous, ends.from_next) for tensor in end or ())

    def _serve(self, rollbacks: Iterable[Rollback], target: int) -> None:
        """Send neighbours what this stage sent them in the iterations that they replay."""
        for iteration, rank, direction in sorted(self._requests(rollbacks, target), key=lambda request: request[0]):
            self._send(rank, iteration, direction)

    def _requests(self, rollbacks: Iterable[Rollback], target: int) -> list[tuple[int, int, Direction]]:
        requests = []
        for rollback in rollbacks:
            for iteration in range(rollback.starts_from + 1, target + 1):
                if self._place.stage == rollback.segment.first_stage - 1 and self._place.next_rank is not None:
                    requests.append((iteration, self._place.next_rank, Direction.ACTIVATION))
                if self._place.stage == rollback.segment.last_stage + 1 and self._place.previous_rank is not None:
                    requests.append((iteration, self._place.previous_rank, Direction.GRADIENT))
        return requests

    def _send(self, rank: int, iteration: int, direction: Direction) -> None:
        """Send a neighbour the log of an iteration from host memory, a micro-batch at a time.

        Both ends of a log are host memory: on the devices all micro-batches of an iteration would need room at once,
        beside a whole training, and the transfer would take turns with all others of the job's communicator.
        """
        assert self._stores.boundary is not None
        send_buffers(self._place.host_ranks, self._stores.boundary.sent(iteration, direction), rank)

    def _receive(self, rank: int | None, iteration: int) -> tuple[torch.Tensor, ...]:
        """Return a neighbour's log of an iteration by micro-batch, on the host."""
        assert rank is not None, iteration
        pinned = self._place.device.type == "cuda"  # the replay copies each to the device
        return receive_buffers(self._place.host_ranks, rank, pinned=pinned)

    def _compare(self, target: int, live: Mapping[str, str] | None) -> list[str]:
        """Return the operators in which a healthy rank's state after its replay differs from its state before.

        With `on_divergence=end`, raises CheckpointLoadError if there are any.
        """
        replayed = self._operators.digests() if live is not None else None
        if live == replayed or live is None or replayed is None:
            return []
        differing = [name for name in live if live[name] != replayed.get(name)]
        if self._on_divergence == WINDOW:
            return differing
        self._events.append(ReplayDiffered(iteration=target, operators=differing))
        raise CheckpointLoadError(
            f"rank {self._place.shard.global_rank}: replaying to iteration {target} gave another state of "
            f"{', '.join(differing)} than the rank had, which lost nothing: {CORRUPT}, or {NOT_DETERMINISTIC} "
            "(runtime.on_divergence=window goes on)"
        )

    def _report(self, rollback: Rollback, target: int, fetched_bytes: int, started_s: float) -> None:
        seconds = time.monotonic() - started_s
        self._meter.replayed(target - rollback.starts_from, seconds)
        self._events.append(
            StageRecovered(
                iteration=target,
                window_start=rollback.window_start,
                first_stage=rollback.segment.first_stage,
                last_stage=rollback.segment.last_stage,
                replayed_iters=target - rollback.starts_from,
                fetched_bytes=fetched_bytes,
                seconds=seconds,
            )
        )


def verified_window(
    snapshots: Sequence[Snapshot], identity: RunIdentity, shard: ShardIdentity, steps_to: int | None
) -> WindowRef | None:
    """Return the reference of the complete window of these snapshots, with steps up to `steps_to`, or None.

    None: the steps do not reach the window's end. Raises CheckpointLoadError if the window is damaged, incomplete, or
    of another run or shard.
    """
    for snapshot in snapshots:
        verify(snapshot, identity=identity, shard=shard)
    contents = sorted(map(_contents, snapshots), key=lambda snapshot: snapshot.slot)
    last = contents[-1].iteration
    plan_conversion(contents, last)
    start, num_slots = contents[0].window_start, len(contents)
    if steps_to is None or steps_to < last:
        return None
    return WindowRef(start=start, num_slots=num_slots, steps_to=steps_to, cut=_cut(contents))


def _cut(contents: Iterable[SnapshotContents]) -> str:
    """Return the identity of the assignment of operators to the slots of a window."""
    slots = sorted(contents, key=lambda snapshot: snapshot.slot)
    return hashlib.sha256(repr([(slot.full, slot.compute) for slot in slots]).encode()).hexdigest()[:12]


def _contents(snapshot: Snapshot) -> SnapshotContents:
    header = snapshot.header
    return SnapshotContents(
        iteration=header.iteration,
        window_start=header.window_start,
        slot=header.slot,
        num_slots=header.num_slots,
        full=header.full,
        compute=header.compute,
    )
