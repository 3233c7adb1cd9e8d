"""One run's checkpointing, as the training loop sees it: resume, hooks, finish.

Owns: asking the policy after every iteration and carrying out its plan, in the durable tier and in the sparse one, and
recovering where state was lost; a save that fails is reported and training goes on, unless the configuration is strict.
Must not: decide what to save, or touch Megatron.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.events import EventLog, WindowChosen
from moe_ckpt.ports import Policy
from moe_ckpt.runtime.durable import DurableTier
from moe_ckpt.runtime.inject import StateLosses
from moe_ckpt.runtime.recover import Loss, Recovery
from moe_ckpt.runtime.sparse import SparseStores, SparseTier
from moe_ckpt.types import Measured, ReadyGradients, SnapshotPlan

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SparseParts:
    """What a session with sparse snapshots consists of; `notes` say what it will cost, for people."""

    tier: SparseTier
    stores: SparseStores
    recovery: Recovery
    losses: StateLosses
    notes: Sequence[str]


class Session:
    """Implements `ports.TrainingHooks`. Every method is collective over all ranks."""

    def __init__(
        self, policy: Policy, durable: DurableTier, events: EventLog, *, strict: bool, sparse: SparseParts | None
    ) -> None:
        self._policy = policy
        self._durable = durable
        self._events = events
        self._strict = strict
        self.sparse = sparse
        self._has_base = False

    @property
    def notes(self) -> Sequence[str]:
        """What checkpointing will cost, line by line, for people."""
        return self.sparse.notes if self.sparse else ()

    def resume(self, source: Path | None) -> int:
        """Load the newest checkpoint of this run, or the one at `source`; return the iteration of the state.

        Raises CheckpointLoadError on all ranks.
        """
        return self._durable.resume_newest() if source is None else self._durable.resume_from(source)

    def iteration_started(self, iteration: int) -> None:
        if self.sparse is None:
            return
        if not self._has_base:
            self._take_base(self.sparse, iteration - 1)
        self.sparse.tier.started(iteration)
        self.sparse.losses.arm(iteration)

    def gradients_ready(self, iteration: int, gradients: ReadyGradients) -> bool:
        if self.sparse is None:
            return True
        if self._recover(self.sparse, iteration - 1, undo=True):
            return False
        self.sparse.tier.ready(iteration, gradients)
        return True

    def step_committed(self, iteration: int) -> None:
        if self.sparse:
            self.sparse.tier.committed(iteration)
            self.sparse.losses.strike(iteration, "step")
            self._recover(self.sparse, iteration, undo=False)
        plan = self._policy.plan(iteration, self._measure)
        self._attempt(lambda: self._durable.poll(wait=plan.durable))
        if plan.durable:
            self._attempt(lambda: self._durable.save(iteration))
        if self.sparse:
            self._take(self.sparse, iteration, plan)
            self.sparse.losses.strike(iteration, "between")
            self._recover(self.sparse, iteration, undo=False)

    def finish(self) -> None:
        """Wait for what is still being written."""
        self._attempt(lambda: self._durable.poll(wait=True))
        if self.sparse:
            self.sparse.tier.close()

    def _take_base(self, sparse: SparseParts, iteration: int) -> None:
        plan = self._policy.plan(iteration, self._measure).sparse
        assert plan is not None, iteration
        sparse.tier.take_base(plan)
        self._has_base = True

    def _take(self, sparse: SparseParts, iteration: int, plan: SnapshotPlan) -> None:
        if plan.window:
            self._events.append(WindowChosen(iteration=iteration, **asdict(plan.window)))
        if plan.sparse:
            sparse.tier.take(plan.sparse)

    def _recover(self, sparse: SparseParts, target_iteration: int, *, undo: bool) -> bool:
        """Return whether something was lost; then all ranks are at the state after the target iteration."""
        lost = sparse.losses.take()
        if lost is None:
            return False
        if undo:
            sparse.tier.stop_observing()
        sparse.tier.settle()
        loss = Loss(stages=lost.stages, mine=lost.mine, target_iteration=target_iteration, undo=undo)
        sparse.recovery.recover(loss)
        sparse.tier.retake(target_iteration)
        return True

    def _measure(self) -> Measured:
        assert self.sparse is not None
        return self.sparse.tier.measure()

    def _attempt(self, save: Callable[[], None]) -> None:
        try:
            save()
        except CheckpointSaveError as error:
            if self._strict:
                raise
            if dist.get_rank() == 0:
                _log.warning("checkpoint not saved, training goes on (ckpt.strict=false): %s", error)
