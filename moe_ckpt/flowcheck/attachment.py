"""Attaches checkpoint servers to a rank's training, by two interfaces of the engine.

Owns: the checks that servers can follow the training. Must not: start servers.
FlowCheck, section 5.
"""

from __future__ import annotations

import torch

from moe_ckpt.config import FlowcheckConfig
from moe_ckpt.engine.computed_snapshots import ComputedSnapshots
from moe_ckpt.flowcheck.gradient_mirror import GradientMirror
from moe_ckpt.flowcheck.server_source import ServerSource
from moe_ckpt.flowcheck.server_states import Mirror, ServerStates
from moe_ckpt.megatron.operators import RankOperators
from moe_ckpt.megatron.state import TrainingState


def attach_servers(
    config: FlowcheckConfig, state: TrainingState, operators: RankOperators
) -> ComputedSnapshots:
    """Return the snapshots that servers compute from this rank's gradients.

    Args:
        config: The policy's settings.
        state: This rank's training state.
        operators: The operators of this rank.

    Raises:
        ConfigError: Servers cannot repeat the steps of the optimizer, derive the
            weights, or capture the reductions.
    """
    operators.require_steps()
    mirror = GradientMirror(state, operators) if config.mirrors else None
    notes = [mirror.note()] if mirror else []
    if torch.cuda.is_available():
        notes.append(
            "servers take the optimizer's steps: after a fault all ranks go on from"
            " the servers' states, which a CPU computed and which may differ from the"
            " GPUs' in the last bits"
        )
    return server_snapshots(config, mirror, notes)


def server_snapshots(
    config: FlowcheckConfig, mirror: Mirror | None, notes: list[str]
) -> ComputedSnapshots:
    """Return the snapshots that servers compute, for checked training.

    Args:
        config: The policy's settings.
        mirror: Reductions that servers capture. None: ranks send all gradients.
        notes: Lines for the log.
    """
    return ComputedSnapshots(
        sink=lambda parts, elastic: ServerStates(
            parts, elastic, config.max_lag_iters, mirror
        ),
        source=lambda _, elastic: ServerSource(elastic),
        notes=notes,
    )
