"""Collectives that overlap with computation: late gathers, and passes cut off."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
import torch.distributed as dist

import launcher.model
from moe_ckpt.megatron.operators import RankOperators
from moe_ckpt.megatron.overlapped import forget_communication, mark_gathered
from moe_ckpt.megatron.state import (
    TrainingState,
    digest_of,
    named_state,
    restore_small_state,
    small_state,
)
from moe_ckpt.megatron.step import clear_gradients, gather_late_parameters
from tests.harness.gloo.ranks import run_ranks
from tests.megatron.stage import StageLoop, build_stage

BUCKET_SIZE = 999  # parameters in a bucket; the model has more


def build_overlapped() -> tuple[TrainingState, StageLoop]:
    """Return a stage of two data-parallel ranks that overlaps both collectives.

    Each group of buckets has several buckets.
    """
    options = {
        "overlap_param_gather": True,
        "overlap_grad_reduce": True,
        "bucket_size": BUCKET_SIZE,
    }
    config: Any = launcher.model.DistributedDataParallelConfig
    launcher.model.DistributedDataParallelConfig = functools.partial(config, **options)
    return build_stage("parallel.pp=1", "parallel.dp=2", "parallel.ep=1")


def groups_of(state: TrainingState) -> list[Any]:
    wrapper = cast("Any", state.model[0])
    return wrapper.bucket_groups + wrapper.expert_parallel_bucket_groups


def _weights(state: TrainingState) -> torch.Tensor:
    return torch.cat(
        [
            parameter.detach().view(-1).clone()
            for parameter in state.model[0].parameters()
        ]
    )


def _hash_before_and_after_gathering() -> int:
    """Return the number of this rank's weights that are stale after a step.

    Also check that gathering the weights changes no digest.
    """
    state, loop = build_overlapped()
    operators = RankOperators(state)
    for iteration in (1, 2):  # the learning rate of the first step is 0
        loop.run_iteration(iteration)
    assert len(groups_of(state)) > 2, "several buckets"
    stale, digest, hashes = _weights(state), digest_of(state), operators.digests()
    weights = {f"model0.{name}" for name, _ in state.model[0].named_parameters()}
    sizes = torch.tensor(
        sum(value.numel() for name, value in named_state(state) if name in weights)
    )
    dist.all_reduce(sizes)
    assert sizes == stale.numel(), "each weight is in one rank's digest"
    gather_late_parameters(state)
    assert (digest_of(state), operators.digests()) == (digest, hashes)
    return int((stale != _weights(state)).sum())


def test_weights_that_are_gathered_later_are_no_part_of_a_digest() -> None:
    assert min(run_ranks(2, _hash_before_and_after_gathering)) > 0


def _train_three_iterations(is_cut: bool) -> str:
    """Return the digest after iteration 3.

    Args:
        is_cut: Whether a first attempt of iteration 3 is cut off.
    """
    state, loop = build_overlapped()
    for iteration in (1, 2):
        loop.run_iteration(iteration)
    if is_cut:
        start = small_state(state)
        clear_gradients(state)
        loop.passes.train_on(3)
        group = groups_of(state)[0]
        group.grad_reduce_handle = object()  # a collective that never ends
        group.per_param_grad_ready_counts = {next(iter(group.params)): 1}
        forget_communication(state.model)
        restore_small_state(state, start)
        assert all(group.is_first_batch for group in groups_of(state)), (
            "as on a rank that was replaced"
        )
    loop.run_iteration(3)
    return digest_of(state)


def test_a_pass_that_was_cut_off_leaves_no_collective_behind() -> None:
    assert run_ranks(2, _train_three_iterations, True) == run_ranks(
        2, _train_three_iterations, False
    )


def _gather_twice() -> int:
    """Return the number of gathers that a forward pass starts after all are done."""
    state, loop = build_overlapped()
    loop.run_iteration(1)
    mark_gathered(state.model)
    started: list[Any] = []
    for group in groups_of(state):
        group.start_param_sync = lambda **_: started.append(1)
    clear_gradients(state)
    loop.passes.train_on(2)
    return len(started)


def test_a_pass_gathers_nothing_once_all_weights_are_there() -> None:
    assert run_ranks(2, _gather_twice) == [0, 0]
