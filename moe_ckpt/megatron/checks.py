"""The part of an attached run that `moe-ckpt prove` compares: digests of the state, and
a broken recovery.

Owns: the iterations after which a rank logs digests, and the ingredient that a control
run leaves out. Must not: change a state in any other run.
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
    """One rank's digests, after each `every_iters`-th iteration and after recoveries to
    such an iteration.
    """

    def __init__(
        self, config: CheckConfig, state: TrainingState, events: EventLog
    ) -> None:
        self._config = config
        self._state = state
        self._events = events
        self._leaves_out = config.leave_out == "moments"

    def begin(self, done: int, *, is_replacement: bool) -> None:
        """The state after `done` iterations is there, for the first time or again after
        a recovery.
        """
        if is_replacement and self._leaves_out:
            self._leaves_out = False
            forget_first_moments(self._state)
        self.log_where_due(done)

    def log_where_due(self, done: int) -> None:
        """Log the digests of the state after `done` iterations, unless none are due.

        Of the state before the first iteration only those of tensors: a recovery may
        bring experts back to it.
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
    """Return a SHA-256, in hex, over the digests of all ranks' states, and these
    digests. Collective.
    """
    digests = TorchRanks().gather(digest_of(state))
    return hashlib.sha256("\n".join(digests).encode()).hexdigest(), digests


def forget_first_moments(state: TrainingState) -> bool:
    """Set Adam's first moments to zero, as a recovery or a resume without them would.

    Returns:
        Whether there were any.
    """
    found = False
    for optimizer in state.inner_optimizers:
        for name, tensor in named_tensors(optimizer):
            if name.endswith(EXP_AVG):
                tensor.zero_()
                found = True
    return found
