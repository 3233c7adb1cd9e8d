"""The in-memory side of a session: one rank's checkpointing in one generation.

This side consists of the tier, the recoveries and the injected losses. Owns: the
recovery of state that living processes have lost. Must not: bring ranks of different
states together (`JobRecovery` does), or know the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moe_ckpt.engine.audits import Audits
from moe_ckpt.engine.in_memory_tier import InMemoryTier
from moe_ckpt.engine.job_recovery import JobRecovery
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.engine.rebuilding import Rebuilding
from moe_ckpt.engine.state_loss import StateLosses


class InMemoryCheckpointing:
    """Checkpointing in host memory, as the session uses it.

    Lifetime: one generation. Only `parts` live as long as the process.
    """

    def __init__(
        self,
        parts: RankParts,
        tier: InMemoryTier,
        losses: StateLosses,
        *,
        rebuilding: Rebuilding[Any] | None,
        job_recovery: JobRecovery | None,
        audits: Audits | None,
        notes: Sequence[str],
        require_room: Callable[[], None] = lambda: None,
    ) -> None:
        self.parts = parts
        """The rank's training, host memory and measurements."""

        self.tier = tier
        """Takes snapshots and keeps logs, at each hook of the loop."""

        self.losses = losses
        """The scheduled losses of state in living processes."""

        self.job_recovery = job_recovery
        """Recovery after the loss of a process. None: such a loss ends the job."""

        self.audits = audits
        """Compares the state with window and gradients. None: there are no audits."""

        self.notes = notes
        """A forecast of the cost, line by line, for the log."""

        self.require_room = require_room
        """Checks that shared memory has room for the needs of training. Collective.

        Raises ConfigError on all ranks.
        """

        self._rebuilding = rebuilding

    def recover_lost_state(self, target_iteration: int, *, undo: bool) -> bool:
        """Recover the state that living processes have lost since the last call.

        Collective over all ranks.

        Args:
            target_iteration: All ranks are at the state after this iteration once any
                lost state is recovered.
            undo: Whether a later iteration has begun and is abandoned.

        Returns:
            Whether any rank had lost state.

        Raises:
            CheckpointLoadError: No source leads to the target. Raised on all ranks.
        """
        lost = self.losses.take()
        if lost is None:
            return False
        if undo:
            self.tier.stop_observing()
        # the copier reads the tensors that the recovery is about to overwrite
        self.tier.finish_snapshot()
        assert self._rebuilding is not None, lost
        self._rebuilding.recover(
            lost, target_iteration, self.tier.logs.branch_of_state, undo=undo
        )
        # the loss tears the snapshot in flight: without the torn slot no rank has a
        # complete window
        self.tier.retake(target_iteration)
        return True
