"""Digests of the state and a broken recovery, for runs that `moe-ckpt prove` compares.

Owns: the iterations after which a rank of an attached run logs digests, and the
ingredient that a control run leaves out of a recovery. Must not: change the state of
any other run.
"""

from __future__ import annotations

import hashlib

from moe_ckpt.collectives import TorchRanks
from moe_ckpt.config import CheckConfig
from moe_ckpt.events import EventLog, StateDigest, TensorDigests
from moe_ckpt.megatron.optimizer_state import named_tensors
from moe_ckpt.megatron.state import TrainingState, digest_of, tensor_digests
from moe_ckpt.snapshot.codec import EXP_AVG


class StateChecks:
    """Logs the digests of one rank's state.

    Digests are due after each `digest_every_iters`-th iteration, and after a recovery
    to such an iteration.
    """

    def __init__(
        self, config: CheckConfig, state: TrainingState, events: EventLog
    ) -> None:
        self._config = config
        self._state = state
        self._events = events
        self._leaves_out = config.leave_out == "moments"

    def begin(self, done: int, *, is_replacement: bool) -> None:
        """Log the digests of a state that has just become available, if any are due.

        In a control run (`run.leave_out=moments`) a replacement process first drops
        Adam's first moments, once.

        Args:
            done: Iterations that the state has completed.
            is_replacement: Whether this process replaces an earlier process of the
                rank.
        """
        if is_replacement and self._leaves_out:
            self._leaves_out = False
            forget_first_moments(self._state)
        self.log_where_due(done)

    def log_where_due(self, done: int) -> None:
        """Log the digests of the state after `done` iterations, if digests are due.

        For the state before the first iteration only digests of tensors are logged: a
        recovery may bring experts back to that state.
        """
        every = self._config.digest_every_iters
        if not every or done % every:
            return
        if done:
            self._events.append(
                StateDigest(iteration=done, digest=digest_of(self._state))
            )
        if self._config.digest_tensors:
            self._events.append(
                TensorDigests(iteration=done, digests=tensor_digests(self._state))
            )


def job_digest(state: TrainingState) -> tuple[str, list[str]]:
    """Return one digest of the states of all ranks. Collective over all ranks.

    Returns:
        A SHA-256, in hex, over the digests of all ranks, and the digests by rank.
    """
    digests = TorchRanks().gather(digest_of(state))
    return hashlib.sha256("\n".join(digests).encode()).hexdigest(), digests


def forget_first_moments(state: TrainingState) -> bool:
    """Set Adam's first moments to zero, as a recovery without moments would.

    A resume without moments would do the same.

    Returns:
        Whether the optimizers have first moments.
    """
    found = False
    for optimizer in state.inner_optimizers:
        for name, tensor in named_tensors(optimizer):
            if name.endswith(EXP_AVG):
                tensor.zero_()
                found = True
    return found
