"""What an iteration starts from beside parameters, moments and buffers comes back, each part by itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from megatron.core import tensor_parallel

from moe_ckpt.adapters.megatron_state import TrainingState, restore_small_state, small_state
from tests.adapters.stage import build_stage, torch_optimizer
from tests.ranks import run_ranks


def _draw_from_the_tracker(state: TrainingState) -> None:
    with cast("Any", tensor_parallel.get_cuda_rng_tracker()).fork():
        torch.rand(1)


def _halve_the_loss_scale(state: TrainingState) -> None:
    cast("Any", state.inner_optimizers[0]).grad_scaler._scale /= 2


CHANGES: dict[Callable[[TrainingState], object], set[str]] = {
    lambda _: random.gauss(): {"rng.python", "rng.python_gauss"},
    lambda _: np.random.standard_normal(): {"rng.numpy", "rng.numpy_gauss"},
    lambda _: torch.rand(1): {"rng.cpu", "rng.cuda"},  # one generator where there is no GPU
    _draw_from_the_tracker: {"rng.tracker.model-parallel-rng"},
    _halve_the_loss_scale: {"scaler0.scale"},
    lambda state: state.scheduler.step(increment=1): {"scheduler.num_steps"},
}


def _differing(state: TrainingState, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in small_state(state).items() if not torch.equal(tensor, before[name])}


def _change_and_restore() -> list[tuple[set[str], set[str], bool]]:
    """Return for each change what it changed, what was left of that, and whether the learning rate is as before."""
    state, trainer = build_stage("precision=fp16", "precision.initial_loss_scale=1024.0")
    trainer.run_iteration(1)
    found = []
    for change in CHANGES:
        before, rate = small_state(state), torch_optimizer(state).param_groups[0]["lr"]
        change(state)
        changed = _differing(state, before)
        restore_small_state(state, before)
        found.append((changed, _differing(state, before), torch_optimizer(state).param_groups[0]["lr"] == rate))
    return found


def test_each_part_comes_back_by_itself() -> None:
    assert run_ranks(1, _change_and_restore) == [[(changed, set(), True) for changed in CHANGES.values()]]
