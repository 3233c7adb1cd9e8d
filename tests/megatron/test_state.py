"""The digest covers exactly the state on which the next iteration depends."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from moe_ckpt.megatron.state import (
    TrainingState,
    buffers,
    digest_of,
    named_state,
    restore_buffers,
    restore_small_state,
    small_state,
)
from moe_ckpt.sim.job import STEP_LOG_BYTES_ON_CPU
from tests.harness.gloo.ranks import run_ranks
from tests.megatron.stage import (
    FP16,
    differing,
    double_loss_scale,
    draw_from_tracker,
    first_parameter,
    torch_optimizer,
    trained_stage,
)
from tests.scenarios import BIAS


def _raise(tensor: torch.Tensor) -> None:
    """Change one element by the least amount that its dtype can hold."""
    flat = tensor.data.view(-1)
    flat[0] = torch.nextafter(flat[0], torch.tensor(float("inf"), dtype=flat.dtype))


def _slots(state: TrainingState) -> dict:
    return next(iter(torch_optimizer(state).state.values()))


def _change_learning_rate(state: TrainingState) -> None:
    torch_optimizer(state).param_groups[0]["lr"] *= 1 + 1e-15


def _buffer(state: TrainingState, suffix: str) -> torch.Tensor:
    return next(
        buffer
        for name, buffer in state.model[0].named_buffers()
        if name.endswith(suffix)
    )


CHANGES: dict[str, Callable[[TrainingState], object]] = {
    "parameter": lambda state: _raise(first_parameter(state)),
    "master weight": lambda state: _raise(
        torch_optimizer(state).param_groups[0]["params"][0]
    ),
    "first moment": lambda state: _raise(_slots(state)["exp_avg"]),
    "second moment": lambda state: _raise(_slots(state)["exp_avg_sq"]),
    "step count": lambda state: _slots(state)["step"].add_(1),
    "learning rate": _change_learning_rate,
    "expert bias": lambda state: _raise(_buffer(state, "expert_bias")),
    "token count": lambda state: _buffer(state, "local_tokens_per_expert")[0].add_(1),
    "default generator": lambda _: torch.rand(1),
    "tracked generator": lambda _: draw_from_tracker(),
    "loss scale": double_loss_scale,
}


def _look_at_changes() -> tuple[dict[str, bool], list[str]]:
    """Apply all changes, one upon the other.

    Returns:
        Whether each change has changed the digest, and the names of all tensors.
    """
    state, _ = trained_stage(*FP16, *BIAS, iterations=1)
    digest = digest_of(state)
    seen = {"nothing": digest_of(state) != digest}
    for name, change in CHANGES.items():
        change(state)
        before, digest = digest, digest_of(state)
        seen[name] = before != digest
    return seen, [name for name, _ in named_state(state)]


def test_digest_sees_the_least_change() -> None:
    for seen, names in run_ranks(2, _look_at_changes):
        assert seen == {"nothing": False} | dict.fromkeys(CHANGES, True)
        assert len(names) == len(set(names))


RESTORED: dict[Callable[[TrainingState], object], set[str]] = {
    lambda _: random.gauss(): {"rng.python", "rng.python_gauss"},
    lambda _: np.random.standard_normal(): {"rng.numpy", "rng.numpy_gauss"},
    # without a GPU both names stand for one generator
    lambda _: torch.rand(1): {"rng.cpu", "rng.cuda"},
    lambda _: draw_from_tracker(): {"rng.tracker.model-parallel-rng"},
    double_loss_scale: {"scaler0.scale"},
    lambda state: state.scheduler.step(increment=1): {"scheduler.num_steps"},
}


def _change_and_restore() -> list[tuple[set[str], set[str], bool]]:
    """Change and restore the small state, once for each change.

    Returns:
        For each change: the changed tensors, the tensors that the restore has left
        different, and whether the learning rate is as before.
    """
    state, _ = trained_stage(*FP16, iterations=1)
    found = []
    for change in RESTORED:
        before, rate = (
            dict(small_state(state)),
            torch_optimizer(state).param_groups[0]["lr"],
        )
        change(state)
        changed = differing(before, dict(small_state(state)))
        restore_small_state(state, before)
        left = differing(before, dict(small_state(state)))
        found.append(
            (changed, left, torch_optimizer(state).param_groups[0]["lr"] == rate)
        )
    return found


def test_each_part_of_the_small_state_comes_back_by_itself() -> None:
    assert run_ranks(1, _change_and_restore) == [
        [(changed, set(), True) for changed in RESTORED.values()]
    ]


def _logged_bytes() -> int:
    state, _ = trained_stage(iterations=1)
    return sum(tensor.nbytes for tensor in small_state(state).values())


def test_a_simulated_rank_logs_as_much_of_an_iteration_as_a_real_one() -> None:
    assert run_ranks(1, _logged_bytes) == [STEP_LOG_BYTES_ON_CPU]


def _restore_buffers_that_were_replaced() -> tuple[list[int], list[int]]:
    """Return counts of tokens, as saved and as restored."""
    state, _ = trained_stage(*BIAS, iterations=1)
    buffers(state)  # walks the model once, before a buffer is replaced
    named = state.model[0].named_modules()
    name, module = next(
        pair for pair in named if hasattr(pair[1], "local_tokens_per_expert")
    )
    router = cast("Any", module)
    router.local_tokens_per_expert = torch.full_like(router.local_tokens_per_expert, 7)
    saved = buffers(state)
    router.local_tokens_per_expert = torch.zeros_like(router.local_tokens_per_expert)
    restore_buffers(state, saved)
    kept = saved[f"0.{name}.local_tokens_per_expert"]
    return kept.int().tolist(), router.local_tokens_per_expert.int().tolist()


def test_a_buffer_that_was_assigned_anew_is_saved_and_restored() -> None:
    ((kept, restored),) = run_ranks(1, _restore_buffers_that_were_replaced)
    assert kept == restored == [7] * len(kept)
