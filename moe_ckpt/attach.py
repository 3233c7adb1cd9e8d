"""The composition root: puts a checkpoint session together for a Megatron-Core training loop.

session = attach(ckpt=..., identity=..., folder=..., state=TrainingState(...), events=..., last_iteration=...)
first = session.resume(None) + 1
... per iteration: session.iteration_started, session.gradients_ready, session.step_committed
session.finish()
"""

from __future__ import annotations

from pathlib import Path

from moe_ckpt.adapters.megatron_durable import MegatronDurableState
from moe_ckpt.adapters.megatron_state import TrainingState, allocate_optimizer_state
from moe_ckpt.config import CkptConfig, DenseConfig
from moe_ckpt.events import EventLog
from moe_ckpt.policies.dense import make_policy
from moe_ckpt.runtime.durable import DurableTier
from moe_ckpt.runtime.session import Session
from moe_ckpt.store.disk import CheckpointFolder
from moe_ckpt.types import RunIdentity


def attach(
    *,
    ckpt: CkptConfig,
    identity: RunIdentity,
    folder: Path,
    state: TrainingState,
    events: EventLog,
    last_iteration: int,
) -> Session:
    """Return the session that checkpoints `state` as `ckpt` says, with checkpoints in `folder`. Call on every rank."""
    allocate_optimizer_state(state)
    dense = ckpt if isinstance(ckpt, DenseConfig) else None
    durable = DurableTier(
        MegatronDurableState(state, asynchronous=dense is not None and dense.async_save),
        CheckpointFolder(folder),
        identity,
        events,
        keep=dense.keep if dense else 1,
    )
    policy = make_policy(ckpt, last_iteration=last_iteration)
    return Session(policy, durable, strict=dense is not None and dense.strict)
