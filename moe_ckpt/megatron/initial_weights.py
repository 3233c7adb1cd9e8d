"""The collective part of building a Megatron model, for ranks that built alone.

Owns: making the initial weights equal to those of a collective build.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from moe_ckpt.config import require
from moe_ckpt.megatron.fp8_parameters import is_fp8_parameter, weights_of
from moe_ckpt.megatron.groups import replicas_of, shared_embedding
from moe_ckpt.megatron.operator_names import bare_model
from moe_ckpt.megatron.optimizer_state import renew_masters
from moe_ckpt.megatron.state import TrainingState


@torch.no_grad()
def synchronize_fresh(state: TrainingState) -> None:
    """Give all replicas one set of initial weights. Collective over all ranks.

    If both ends of the pipeline share an embedding, both get the same embedding.

    Raises:
        ConfigError: As in `broadcast_parameters`.
    """
    if shared := shared_embedding(state.model):
        weight, group = shared
        dist.broadcast(
            weight.data, src=dist.get_process_group_ranks(group)[0], group=group
        )
    for chunk in state.model:
        broadcast_parameters(chunk)
    fp8 = [
        each
        for chunk in state.model
        for each in chunk.parameters()
        if is_fp8_parameter(each)
    ]
    masters = [
        master
        for each in fp8
        if (master := getattr(each, "main_param", None)) is not None
    ]
    kept = [(master, master.clone()) for master in masters]
    # the optimizers' masters were made of the weights before the broadcast
    for optimizer in state.inner_optimizers:
        cast("Any", optimizer).reload_model_params()
        renew_masters(optimizer)
    # masters of FP8 parameters were made of the values before the cast to FP8
    for master, values in kept:
        master.copy_(values)


@torch.no_grad()
def broadcast_parameters(chunk: torch.nn.Module) -> None:
    """Give all replicas of a chunk's parameters the weights of the first replica.

    Does the same as Megatron's `broadcast_params`. Collective.

    Raises:
        ConfigError: An FP8 parameter differed from the first replica. The master
            weights of the parameter keep values that are not sent.
    """
    for name, parameter in bare_model(chunk).named_parameters():
        group = replicas_of(parameter)
        before = (
            [tensor.clone() for tensor in weights_of(parameter)]
            if is_fp8_parameter(parameter)
            else []
        )
        for tensor in weights_of(parameter):
            received = tensor.contiguous()  # views of scales are not
            dist.broadcast(received, src=dist.get_global_rank(group, 0), group=group)
            tensor.copy_(received)
        same = all(map(torch.equal, before, weights_of(parameter)))
        wanted = "those of the first replica: one seed for all"
        require(same, f"fp8_param_gather: initial weights of {name}", "others", wanted)
