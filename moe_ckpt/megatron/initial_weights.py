"""The collective part of Megatron's model building, for a model that each rank has built by itself.

Owns: making the initial weights equal to those of a collective build. Collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from moe_ckpt.config import require
from moe_ckpt.megatron.fp8_parameters import is_fp8_parameter, weights_of
from moe_ckpt.megatron.operators import bare_model, replicas_of, shares_embedding
from moe_ckpt.megatron.state import TrainingState


@torch.no_grad()
def synchronize_fresh(state: TrainingState) -> None:
    """Give all replicas one set of initial weights, and both ends of the pipeline one embedding if they share it."""
    _share_embedding(state)
    for chunk in state.model:
        broadcast_parameters(chunk)
    kept = [(master, master.clone()) for master in _masters_of_fp8_parameters(state)]
    for optimizer in state.inner_optimizers:
        cast("Any", optimizer).reload_model_params()
    for master, values in kept:  # made of the values that parameters had before they were cast to FP8
        master.copy_(values)


@torch.no_grad()
def broadcast_parameters(chunk: torch.nn.Module) -> None:
    """Give all replicas of a chunk's parameters the weights of the first, as Megatron's `broadcast_params` does.

    Raises ConfigError for an FP8 parameter that differed: its master weights keep values that are not sent.
    """
    for name, parameter in bare_model(chunk).named_parameters():
        group = replicas_of(parameter)
        before = [tensor.clone() for tensor in weights_of(parameter)] if is_fp8_parameter(parameter) else []
        for tensor in weights_of(parameter):
            received = tensor.contiguous()
            dist.broadcast(received, src=dist.get_global_rank(group, 0), group=group)
            tensor.copy_(received)
        same = all(map(torch.equal, before, weights_of(parameter)))
        wanted = "those of the first replica: one seed for all"
        require(same, f"fp8_param_gather: initial weights of {name}", "others", wanted)


def _masters_of_fp8_parameters(state: TrainingState) -> Iterator[torch.Tensor]:
    for chunk in state.model:
        for parameter in chunk.parameters():
            master = getattr(parameter, "main_param", None)
            if is_fp8_parameter(parameter) and master is not None:
                yield master


def _share_embedding(state: TrainingState) -> None:
    group: Any = parallel_state.get_embedding_group(check_initialized=False)
    if group is None or group.size() == 1 or dist.get_rank() not in dist.get_process_group_ranks(group):
        return
    for chunk in state.model:
        model: Any = bare_model(chunk)
        weight = model.shared_embedding_or_output_weight() if shares_embedding(model) else None
        if weight is not None:  # with virtual stages, only one chunk of a rank has it
            dist.broadcast(weight.data, src=dist.get_process_group_ranks(group)[0], group=group)
