"""Rebuilds ranks by steps with logged gradients, without any pass over a batch.

A rank loads its own window, and takes the optimizer's steps again with the gradients
that the rank has logged. Nothing depends on other ranks before the weights are
gathered, and no kernel of a pass has to repeat its results. Owns: one such recovery.
Must not: decide which ranks are rebuilt (`recovery.gradient_plan` does).

    a lost rank      load snapshot -> [gradients of i -> step i -> load ...] -> buffers
    its stage        gather the weights
    all ranks        outcome
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from moe_ckpt.collectives import gather_results
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.engine.rebuilding import Progress, Rebuilding
from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.events import CheckpointSkipped, StageRecovered
from moe_ckpt.recovery.convert import plan_conversion
from moe_ckpt.recovery.gradient_plan import GradientPlan, plan_by_gradients
from moe_ckpt.recovery.inventory import Inventory
from moe_ckpt.recovery.target import Target
from moe_ckpt.snapshot.step_log import StepRecord
from moe_ckpt.snapshot.verified_windows import contents_of


class GradientRecovery(Rebuilding[GradientPlan]):
    """Recovers lost ranks by their logged gradients.

    Args:
        parts: The rank's parts, whose memory has a gradient log.
    """

    by_gradients = True

    def __init__(self, parts: RankParts) -> None:
        super().__init__(parts)
        assert parts.memory.gradients is not None, "the policy logs no gradients"
        self._gradients = parts.memory.gradients

    def plan(
        self, target: Target | None, inventories: Sequence[Inventory]
    ) -> GradientPlan:
        return plan_by_gradients(
            target.lost_ranks if target else range(len(inventories)),
            inventories,
            target_iteration=target.iteration if target else None,
            branch=target.branch if target else None,
        )

    def is_intact(self, plan: GradientPlan, *, has_fetched: bool = False) -> bool:
        span = self.span_for_me(plan)
        if span is None or has_fetched:
            return True
        return self.leads(span.start, plan.target_iteration)

    def carry_out(
        self, plan: GradientPlan, *, live: bool, progress: Progress = lambda _: None
    ) -> int:
        del live, progress  # a rank is rebuilt in one go, and no other rank changes
        span, target = self.span_for_me(plan), plan.target_iteration
        # on all ranks: no rank may wait in the gather for a rank that has failed
        gather_results(
            self._position.ranks,
            lambda: self._rebuild(span, target) if span else None,
            CheckpointLoadError,
        )
        stage_ranks = self._position.stage_ranks
        if any(
            gather_results(stage_ranks, lambda: span is not None, CheckpointLoadError)
        ):
            self.gather()
        return 0

    def leads(self, start: int, target: int) -> bool:
        """Verify a window and the gradients after it; drop all that is damaged.

        Args:
            start: Iteration of the window's first snapshot.
            target: Last iteration of the gradients.

        Returns:
            Whether nothing was damaged.
        """
        has_window = self._has_intact(start)
        damaged = self._gradients.drop_damaged(start + 1, target)
        if damaged:
            self._events.append(
                CheckpointSkipped(
                    source=f"logged gradients of iterations {damaged}",
                    reason="damaged: the log has the details",
                )
            )
        return has_window and not damaged

    def take_steps(self, start: int, target: int) -> None:
        """Rebuild this rank's own part of the state, on this rank alone.

        Args:
            start: Iteration of the first snapshot of a window, which is intact.
            target: The iteration to reach.
        """
        window, steps = self._window_at(start), self._memory.steps
        assert window is not None, start
        contents = [contents_of(snapshot) for snapshot in window.snapshots]
        loaded: set[str] = set()
        newest: StepRecord | None = None
        for step in plan_conversion(contents, target, by_gradients=True):
            if step.load_iteration is not None:
                snapshot = window.snapshots[step.load_iteration - window.start]
                header = snapshot.header
                self._operators.load_own(
                    snapshot.tensors(), set(header.full), header.adam_steps
                )
                loaded |= set(header.full)
            if step.run_iteration is not None:
                newest = steps.record(step.run_iteration)
                if not newest.gradients.overflow:
                    self._operators.set_gradients(
                        self._gradients.gradients(step.run_iteration), loaded
                    )
                self._stage.step_again(newest)
        if newest is not None:
            self._stage.restore_buffers(newest)
        elif steps.has_start(target + 1):
            self._stage.restore_start(steps.start(target + 1))

    def gather(self) -> None:
        """Give each rank of the stage the parts that other ranks have rebuilt."""
        self._operators.make_whole()
        self._stage.gather()
        # NCCL has only queued the gather
        self._position.stage_ranks.confirm()

    def _checksums(self) -> Mapping[int, int]:
        return self._gradients.checksums

    def _rebuild(self, span: range, target: int) -> None:
        """Bring this rank's own part of the state to the target."""
        started_s = time.monotonic()
        self.take_steps(span.start, target)
        seconds = time.monotonic() - started_s
        self._meter.replayed(target - span.start, seconds)
        self._events.append(
            StageRecovered(
                iteration=target,
                window_start=span.start,
                first_stage=self._position.stage,
                last_stage=self._position.stage,
                replayed_iters=0,
                fetched_bytes=0,
                seconds=seconds,
                gradient_steps=target - span.start,
            )
        )
