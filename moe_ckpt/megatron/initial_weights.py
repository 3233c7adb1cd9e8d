"""The collective part of Megatron's model building, for a model that each rank has built by itself.

Owns: making the initial weights equal to those of a collective build. Collective.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from moe_ckpt.megatron.operators import bare_model, shares_embedding
from moe_ckpt.megatron.state import TrainingState


@torch.no_grad()
def synchronize_fresh(state: TrainingState) -> None:
    """Give all replicas one set of initial weights, and both ends of the pipeline one embedding if they share it."""
    _share_embedding(state)
    for chunk in state.model:
        cast("Any", chunk).broadcast_params()
    for optimizer in state.inner_optimizers:
        cast("Any", optimizer).reload_model_params()


def _share_embedding(state: TrainingState) -> None:
    group: Any = parallel_state.get_embedding_group(check_initialized=False)
    if group is None or group.size() == 1 or dist.get_rank() not in dist.get_process_group_ranks(group):
        return
    for chunk in state.model:
        model: Any = bare_model(chunk)
        weight = model.shared_embedding_or_output_weight() if shares_embedding(model) else None
        if weight is not None:  # with virtual stages, only one chunk of a rank has it
            dist.broadcast(weight.data, src=dist.get_process_group_ranks(group)[0], group=group)
