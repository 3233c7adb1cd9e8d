"""Communication that Megatron's data-parallel wrapper overlaps with computation: which
weights are stale, what to drop.

With `overlap_param_gather` a step leaves a rank with its own shard of new weights; the
next forward pass gathers the others, bucket by bucket. So between a step and that pass
only the shard is part of the state. Owns: that rule, and the wrapper's records of
collectives that it has started. Must not: communicate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer


def gathers_in_forward(chunk: torch.nn.Module) -> bool:
    """Return whether the next forward pass gathers the weights of a wrapped model
    chunk.
    """
    return bool(getattr(cast("Any", chunk).ddp_config, "overlap_param_gather", False))


def shards(optimizers: Iterable[MegatronOptimizer]) -> dict[torch.nn.Parameter, slice]:
    """Return this rank's range of the flattened weights of each parameter that a
    sharded optimizer updates.
    """
    found: dict[torch.nn.Parameter, slice] = {}
    for optimizer in optimizers:
        inner: Any = optimizer
        if isinstance(optimizer, DistributedOptimizer) and not inner.is_stub_optimizer:
            # also parameters without an element in this rank's shard: this rank gathers
            # all of them in forward
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
    """Let the wrapper begin as a new one does: no collective is under way, and the
    order of gradients is unknown.
    """
    for group in bucket_groups(chunks):
        # a pass that was cut off leaves handles behind, and the next one would wait for
        # them
        group.grad_reduce_handle = group.param_gather_handle = None
        group.param_gather_dispatched = group.grad_reduce_finished = False
        group.golden_per_param_grad_ready_counts = {}
        group.per_param_grad_ready_counts = {}
        # a replaced rank reduces its first gradients at the end of its first pass; a
        # rank that overlaps already would reduce buckets in another order
        group.is_first_batch = group.is_last_microbatch = True


def mark_gathered(chunks: Iterable[torch.nn.Module]) -> None:
    """Let the next forward pass gather nothing: all ranks of the stage have whole
    weights.
    """
    for group in bucket_groups(chunks):
        group.param_gather_handle = None
        group.param_gather_dispatched = True


def bucket_groups(chunks: Iterable[torch.nn.Module]) -> Iterator[Any]:
    """Yield the groups of gradient buckets of wrapped model chunks, in the order in
    which Megatron reduces them.
    """
    for chunk in chunks:
        wrapper = cast("Any", chunk)
        yield from wrapper.bucket_groups + wrapper.expert_parallel_bucket_groups
