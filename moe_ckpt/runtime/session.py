"""One run's checkpointing, as the training loop sees it: resume, hooks, finish.

Owns: asking the policy after every iteration and carrying out its plan; a save that fails is reported and training goes
on, unless the configuration is strict. Must not: decide what to save, or touch Megatron.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.ports import Policy
from moe_ckpt.runtime.durable import DurableTier

_log = logging.getLogger(__name__)


class Session:
    """Implements `ports.TrainingHooks`. Every method is collective over all ranks."""

    def __init__(self, policy: Policy, durable: DurableTier, *, strict: bool) -> None:
        self._policy = policy
        self._durable = durable
        self._strict = strict

    def resume(self, source: Path | None) -> int:
        """Load the newest checkpoint of this run, or the one at `source`; return the iteration of the state.

        Raises CheckpointLoadError on all ranks.
        """
        return self._durable.resume_newest() if source is None else self._durable.resume_from(source)

    def iteration_started(self, iteration: int) -> None:
        pass

    def gradients_ready(self, iteration: int) -> None:
        pass

    def step_committed(self, iteration: int) -> None:
        durable_now = self._policy.plan(iteration).durable
        self._attempt(lambda: self._durable.poll(wait=durable_now))
        if durable_now:
            self._attempt(lambda: self._durable.save(iteration))

    def finish(self) -> None:
        """Wait for what is still being written."""
        self._attempt(lambda: self._durable.poll(wait=True))

    def _attempt(self, save: Callable[[], None]) -> None:
        try:
            save()
        except CheckpointSaveError as error:
            if self._strict:
                raise
            if dist.get_rank() == 0:
                _log.warning("checkpoint not saved, training goes on (ckpt.strict=false): %s", error)
