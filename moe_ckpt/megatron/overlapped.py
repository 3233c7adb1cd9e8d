"""Communication that Megatron's data-parallel wrapper overlaps with computation.

With `overlap_param_gather` a step leaves a rank with new weights in its own shard only.
The next forward pass gathers the other weights, bucket by bucket. Between a step and
the next forward pass, only the shard is part of the state.

Owns: this rule, and the wrapper's records of collectives that the wrapper has started.
Must not: communicate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer


def gathers_in_forward(chunk: torch.nn.Module) -> bool:
    """Return whether the next forward pass gathers the weights of a wrapped chunk."""
    return bool(getattr(cast("Any", chunk).ddp_config, "overlap_param_gather", False))


def shards(optimizers: Iterable[MegatronOptimizer]) -> dict[torch.nn.Parameter, slice]:
    """Return this rank's range of the flattened weights of each sharded parameter.

    Returns:
        Ranges of all parameters that a sharded optimizer updates. A range may be empty.
    """
    found: dict[torch.nn.Parameter, slice] = {}
    for optimizer in optimizers:
        inner: Any = optimizer
        if isinstance(optimizer, DistributedOptimizer) and not inner.is_stub_optimizer:
            # also parameters without an element in this rank's shard, because this rank
            # gathers all of their weights in forward
            found |= {
                parameter: slice(0, 0)
                for buffer in inner.buffers
                for parameter in buffer.params
            }
            for parameter in inner.model_param_group_index_map:
                held = inner._get_model_param_range_map(parameter)["param"]
                found[parameter] = slice(held.start, held.end)
    return found


def forget_communication(chunks: Iterable[torch.nn.Module]) -> None:
    """Reset the wrapper's records to those of a new wrapper.

    Afterwards no collective is under way, and the order of gradients is unknown.
    """
    for group in bucket_groups(chunks):
        # a pass that was cut off leaves handles behind, and the next pass would wait
        # for the handles
        group.grad_reduce_handle = group.param_gather_handle = None
        group.param_gather_dispatched = group.grad_reduce_finished = False
        group.golden_per_param_grad_ready_counts = {}
        group.per_param_grad_ready_counts = {}
        # A replaced rank reduces its first gradients at the end of its first pass. A
        # rank that overlaps already would reduce buckets in another order
        group.is_first_batch = group.is_last_microbatch = True


def mark_gathered(chunks: Iterable[torch.nn.Module]) -> None:
    """Make the next forward pass gather no weights.

    Call when all ranks of the stage have whole weights.
    """
    for group in bucket_groups(chunks):
        group.param_gather_handle = None
        group.param_gather_dispatched = True


def bucket_groups(chunks: Iterable[torch.nn.Module]) -> Iterator[Any]:
    """Yield the groups of gradient buckets in the order of Megatron's reductions.

    Args:
        chunks: Model chunks with their data-parallel wrappers.
    """
    for chunk in chunks:
        wrapper = cast("Any", chunk)
        yield from wrapper.bucket_groups + wrapper.expert_parallel_bucket_groups
