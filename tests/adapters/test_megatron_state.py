"""The digest sees everything that the next iteration depends on, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from megatron.core import tensor_parallel

from moe_ckpt.adapters.megatron_state import TrainingState, digest_of, named_state
from tests.adapters.stage import build_stage, first_parameter, torch_optimizer
from tests.ranks import run_ranks


def _next_representable(tensor: torch.Tensor) -> None:
    """Change one element by the least amount that its type can hold."""
    flat = tensor.data.view(-1)
    flat[0] = torch.nextafter(flat[0], torch.tensor(float("inf"), dtype=flat.dtype))


def _slots(state: TrainingState) -> dict:
    return next(iter(torch_optimizer(state).state.values()))


def _change_parameter(state: TrainingState) -> None:
    _next_representable(first_parameter(state))


def _change_master_weight(state: TrainingState) -> None:
    _next_representable(torch_optimizer(state).param_groups[0]["params"][0])


def _change_first_moment(state: TrainingState) -> None:
    _next_representable(_slots(state)["exp_avg"])


def _change_second_moment(state: TrainingState) -> None:
    _next_representable(_slots(state)["exp_avg_sq"])


def _change_step_count(state: TrainingState) -> None:
    _slots(state)["step"] += 1


def _change_learning_rate(state: TrainingState) -> None:
    torch_optimizer(state).param_groups[0]["lr"] *= 1 + 1e-15


def _change_expert_bias(state: TrainingState) -> None:
    buffers = dict(state.model[0].named_buffers())
    _next_representable(next(buffer for name, buffer in buffers.items() if name.endswith("expert_bias")))


def _change_token_count(state: TrainingState) -> None:
    buffers = dict(state.model[0].named_buffers())
    next(buffer for name, buffer in buffers.items() if name.endswith("local_tokens_per_expert"))[0] += 1


def _draw_from_the_default_generator(state: TrainingState) -> None:
    torch.rand(1)


def _draw_from_the_tracked_generator(state: TrainingState) -> None:
    with cast("Any", tensor_parallel.get_cuda_rng_tracker()).fork():
        torch.rand(1)


def _change_loss_scale(state: TrainingState) -> None:
    cast("Any", state.inner_optimizers[0]).grad_scaler._scale *= 2


CHANGES: list[Callable[[TrainingState], None]] = [
    _change_parameter,
    _change_master_weight,
    _change_first_moment,
    _change_second_moment,
    _change_step_count,
    _change_learning_rate,
    _change_expert_bias,
    _change_token_count,
    _draw_from_the_default_generator,
    _draw_from_the_tracked_generator,
    _change_loss_scale,
]


def _digests(change: Callable[[TrainingState], None]) -> tuple[str, str, str]:
    state, trainer = build_stage(
        "precision=fp16",
        "precision.initial_loss_scale=1024.0",
        "model.moe_balancing=bias",
        "model.moe_score_function=sigmoid",
    )
    trainer.run_iteration(1)
    before, again = digest_of(state), digest_of(state)
    change(state)
    return before, again, digest_of(state)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_digest_sees_the_least_change(change: Callable[[TrainingState], None]) -> None:
    before, again, after = run_ranks(1, _digests, change)[0]
    assert before == again
    assert before != after


def _names() -> list[str]:
    state, _ = build_stage()
    return [name for name, _ in named_state(state)]


def test_names_are_unique() -> None:
    for names in run_ranks(4, _names):
        assert len(names) == len(set(names))
