"""The split step equals Megatron's own step bit for bit."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from moe_ckpt.megatron import step as megatron_step
from moe_ckpt.megatron.state import TrainingState, digest_of
from moe_ckpt.megatron.step import ReadyGradients
from tests.harness.gloo.ranks import run_ranks
from tests.megatron.stage import torch_optimizer, trained_stage
from tests.scenarios import UNSHARDED

CLIPPED = "train.clip_grad=0.01"


def _digest_with_split_step(overrides: tuple[str, ...]) -> str:
    return digest_of(trained_stage(*overrides, iterations=3)[0])


def _digest_with_whole_step(overrides: tuple[str, ...]) -> str:
    # the calls of `finish_gradients` and `apply_update` are replaced in the process of
    # this rank only
    import moe_ckpt.loop as loop  # noqa: PLC0415

    def step(state: TrainingState) -> ReadyGradients:
        updated, norm, _ = cast("Any", state.optimizer).step()
        return ReadyGradients(overflows=(not updated,), total_norm=norm, loss_scale=1.0)

    loop.finish_gradients = step
    loop.apply_update = lambda state, gradients: None
    assert loop.finish_gradients is not megatron_step.finish_gradients
    return _digest_with_split_step(overrides)


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (4, (CLIPPED,)),  # two stages of two ranks
        (2, ("train.clip_grad=0",)),
        (
            2,
            (
                "precision=fp8_fp32_fp32",
                "precision.fp8_param_gather=true",
                "precision.fp8_recipe=delayed",
            ),
        ),
        (2, (CLIPPED, *UNSHARDED, "precision=fp32")),
        (
            4,
            (
                "precision=fp16",
                "precision.initial_loss_scale=262144.0",
                "precision.loss_scale_hysteresis=1",
            ),
        ),
    ],
    ids=str,
)
def test_split_step_equals_megatrons_step(
    world_size: int, overrides: tuple[str, ...]
) -> None:
    split, whole = (
        run_ranks(world_size, run, overrides)
        for run in (_digest_with_split_step, _digest_with_whole_step)
    )
    assert split == whole


def _update_where_all_is_frozen() -> list[int]:
    """Return the number of gradients in each call that clips.

    The optimizer first has no gradients, and then has one gradient.
    """
    state, _ = trained_stage("precision=fp32", CLIPPED, iterations=1)
    counts: list[int] = []
    megatron_step.clip_grad_by_total_norm_fp32 = lambda parameters, *_: counts.append(
        sum(parameter.grad is not None for parameter in parameters)
    )
    gradients = ReadyGradients(overflows=(False,), total_norm=1.0, loss_scale=1.0)
    first, *others = (
        parameter
        for group in torch_optimizer(state).param_groups
        for parameter in group["params"]
    )
    for parameter in (first, *others):
        parameter.grad = None
    megatron_step.apply_update(state, gradients)
    first.grad = torch.zeros_like(first)
    megatron_step.apply_update(state, gradients)
    return counts


def test_an_optimizer_without_gradients_is_not_clipped() -> None:
    """Transformer Engine's kernel would read the first tensor of an empty list."""
    assert run_ranks(1, _update_where_all_is_frozen) == [[1]]
