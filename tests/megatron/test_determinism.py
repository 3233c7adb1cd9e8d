"""The check before training accepts repeatable passes, and names all others.

An accepted pass leaves no trace in the state.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.distributed as dist

from moe_ckpt.collectives import TorchRanks
from moe_ckpt.errors import ConfigError
from moe_ckpt.megatron.determinism import (
    differing_gradients,
    make_deterministic,
    require_repeatable,
)
from moe_ckpt.megatron.state import digest_of
from tests.harness.gloo.ranks import run_ranks
from tests.megatron.stage import FP16, build_stage
from tests.scenarios import BIAS


def settings_of_a_deterministic_gpu() -> tuple[bool, str | None]:
    torch._dynamo.config.disable = False
    os.environ.pop("NCCL_NVLS_ENABLE", None)
    make_deterministic()
    return torch._dynamo.config.disable, os.environ.get("NCCL_NVLS_ENABLE")


def test_deterministic_runs_compile_nothing_and_sum_in_one_order() -> None:
    assert run_ranks(1, settings_of_a_deterministic_gpu) == [(True, "0")]


def train_two_stages(checks: bool) -> tuple[list[str], str]:
    """Return the parameters that differ, and the digest after two iterations."""
    state, loop = build_stage("parallel.pp=2", *BIAS, *FP16)
    differing = (
        differing_gradients(state, loop.passes.train_on_one_micro_batch)
        if checks
        else []
    )
    for iteration in (1, 2):
        loop.run_iteration(iteration)
    return differing, digest_of(state)


def test_a_check_of_two_stages_leaves_no_trace() -> None:
    checked = run_ranks(2, train_two_stages, True)
    assert [differing for differing, _ in checked] == [[], []]
    assert checked == run_ranks(2, train_two_stages, False)


def check_a_stage_with_noise(device: str) -> tuple[list[str], str]:
    """Check a stage in which rank 1's first parameter has a noisy gradient.

    Returns:
        This rank's parameters that differ, and the error, which both ranks raise.
    """
    assert torch.empty(0, device=device).device.type == device
    state, loop = build_stage(
        "parallel.pp=2", *(["runtime.backend=staged"] if device == "cuda" else [])
    )
    noise = itertools.count()
    names = [name for name, _ in state.model[0].named_parameters()]
    if dist.get_rank() == 1:
        next(iter(state.model[0].parameters())).register_hook(
            lambda gradient: gradient + next(noise)
        )
    differing = differing_gradients(state, loop.passes.train_on_one_micro_batch)
    assert differing in ([], [f"0.{names[0]}"])
    with pytest.raises(ConfigError) as error:
        require_repeatable(
            TorchRanks(),
            state,
            loop.passes.train_on_one_micro_batch,
            setting="the.setting",
        )
    return differing, str(error.value)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_gradient_that_does_not_repeat_itself_is_named_on_all_ranks(
    device: str,
) -> None:
    first, second = run_ranks(2, check_a_stage_with_noise, device)
    assert (first[0], len(second[0])) == ([], 1)
    assert first[1] == second[1]
    assert first[1].startswith(
        f"the.setting: gradients that differ: got '{second[0][0]}', wanted the same"
    )
