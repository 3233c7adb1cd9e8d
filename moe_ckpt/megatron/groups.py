"""A rank's position in the job, and the ranks that share parameters with the rank."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from moe_ckpt.megatron.operator_names import bare_model
from moe_ckpt.snapshot.codec import ShardIdentity


def shard_identity() -> ShardIdentity:
    """Return the shard of the job that this rank holds."""
    return ShardIdentity(
        global_rank=dist.get_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        etp_rank=cast("int", parallel_state.get_expert_tensor_parallel_rank()),
        dp_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def stage_group() -> dist.ProcessGroup:
    """Return the process group of this rank's pipeline stage.

    The group has all data-, expert- and tensor-parallel ranks of the stage.
    """
    return cast(
        "dist.ProcessGroup",
        parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
    )


def replicas_of(parameter: torch.nn.Parameter) -> dist.ProcessGroup:
    """Return the group of ranks that hold copies of a parameter."""
    # Megatron sets `allreduce` to false on parameters that expert parallelism splits
    if getattr(parameter, "allreduce", True):
        return cast(
            "dist.ProcessGroup",
            parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
    return cast("dist.ProcessGroup", parallel_state.get_expert_data_parallel_group())


def shared_embedding(
    chunks: list[torch.nn.Module],
) -> tuple[torch.nn.Parameter, dist.ProcessGroup] | None:
    """Return this rank's copy of a word embedding that another stage holds, too.

    The last stage has a copy for its output, or for the prediction of tokens further
    ahead.

    Returns:
        The copy and the group of all ranks with a copy; None on other stages.
    """
    group: Any = parallel_state.get_embedding_group(check_initialized=False)
    if (
        group is None
        or group.size() == 1
        or dist.get_rank() not in dist.get_process_group_ranks(group)
    ):
        return None
    for chunk in chunks:
        model: Any = bare_model(chunk)
        if model.share_embeddings_and_output_weights or getattr(
            model.config, "mtp_num_layers", None
        ):
            weight = model.shared_embedding_or_output_weight()
            # with virtual stages only one chunk of a rank has the weight
            if weight is not None:
                return weight, group
    return None
