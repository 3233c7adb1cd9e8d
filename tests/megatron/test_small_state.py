"""What an iteration starts from beside parameters, moments and buffers comes back, each part by itself."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch

from moe_ckpt.megatron.state import TrainingState, restore_small_state, small_state
from tests.megatron.stage import FP16, differing, double_loss_scale, draw_from_tracker, torch_optimizer, trained_stage
from tests.ranks import run_ranks

CHANGES: dict[Callable[[TrainingState], object], set[str]] = {
    lambda _: random.gauss(): {"rng.python", "rng.python_gauss"},
    lambda _: np.random.standard_normal(): {"rng.numpy", "rng.numpy_gauss"},
    lambda _: torch.rand(1): {"rng.cpu", "rng.cuda"},  # one generator where there is no GPU
    lambda _: draw_from_tracker(): {"rng.tracker.model-parallel-rng"},
    double_loss_scale: {"scaler0.scale"},
    lambda state: state.scheduler.step(increment=1): {"scheduler.num_steps"},
}


def _change_and_restore() -> list[tuple[set[str], set[str], bool]]:
    """Return for each change what it changed, what was left of that, and whether the learning rate is as before."""
    state, _ = trained_stage(*FP16, iterations=1)
    found = []
    for change in CHANGES:
        before, rate = dict(small_state(state)), torch_optimizer(state).param_groups[0]["lr"]
        change(state)
        changed = differing(before, dict(small_state(state)))
        restore_small_state(state, before)
        left = differing(before, dict(small_state(state)))
        found.append((changed, left, torch_optimizer(state).param_groups[0]["lr"] == rate))
    return found


def test_each_part_comes_back_by_itself() -> None:
    assert run_ranks(1, _change_and_restore) == [[(changed, set(), True) for changed in CHANGES.values()]]
