"""Everything that a recovery restores is needed: leave one thing out, and the run no longer ends where it should.

Each ingredient is left out inside the ranks, by a patch of the one function that restores it. One training has need of
all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from launcher.config import Settings
from launcher.run import run
from moe_ckpt.megatron import operators, replay, state
from moe_ckpt.megatron.operators import RankOperators
from moe_ckpt.megatron.replay import StageReplay
from moe_ckpt.snapshot.boundary_log import BoundaryLog
from tests.ranks import rank_store, run_ranks
from tests.references import uninterrupted
from tests.scenarios import BIAS, FP16_SKIPPING, PP2, TIED
from tests.training import job_settings, losing

TRAINING = (
    *PP2,
    *BIAS,
    *TIED,
    *FP16_SKIPPING,
    "train.clip_grad=0.1",
    "train.global_batch_size=4",
    "train.iterations=7",
)
RECOVERY = (*losing((5, 0, "step"), (6, 1, "forward")), "ckpt.window=3")
ALL, ALL_GRADIENTS = "nothing", "skipping of weight gradients"


def _patch(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a function by one that calls `change(original, *arguments)`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **options: change(original, *arguments, **options))


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _without_buffers(copy_part: Callable[..., Any], parts: Any, key: Any, target: Any) -> None:
    if key.role != "buffer":
        copy_part(parts, key, target)


def _without_schedule(step: Callable[..., Any], scheduler: Any, increment: int) -> None:
    if increment:
        step(scheduler, increment)


def _without_scalers(restore: Callable[..., Any], state: Any, saved: dict[str, torch.Tensor]) -> None:
    restore(state, {name: tensor for name, tensor in saved.items() if not name.startswith("scaler")})


def _without_norm(record: Callable[..., Any], *arguments: Any) -> Any:
    complete = record(*arguments)
    return replace(complete, gradients=replace(complete.gradients, total_norm=1.0))


def _without_tied_gradient(record: Callable[..., Any], *arguments: Any) -> Any:
    complete = record(*arguments)
    return replace(complete, tied_gradient=torch.zeros_like(complete.tied_gradient))


def _without_one_boundary_tensor(sent: Callable[..., Any], *arguments: Any) -> list[torch.Tensor]:
    first, *others = sent(*arguments)
    return [torch.zeros_like(first), *others]


def _without_one_operator(load: Callable[..., Any], operators: Any, parts: Any, full: Any, *rest: Any) -> None:
    load(operators, parts, set(sorted(full)[1:]), *rest)


def _without_frozen_weights(
    load: Callable[..., Any], operators: Any, parts: Any, full: Any, _: Any, steps: Any
) -> None:
    load(operators, parts, full, set(), steps)


LEAVE_OUT: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "buffers": (operators, "_copy_part", _without_buffers),
    "gradient norm": (StageReplay, "record", _without_norm),
    "generators": (state, "_restore_rng_tensors", _nothing),
    "learning-rate schedule": (OptimizerParamScheduler, "step", _without_schedule),
    "loss scale": (replay, "restore_small_state", _without_scalers),
    "step count": (operators, "write_step_count", _nothing),
    "one boundary tensor": (BoundaryLog, "sent", _without_one_boundary_tensor),
    "one operator": (RankOperators, "load", _without_one_operator),
    "frozen weights": (RankOperators, "load", _without_frozen_weights),
    "gradient of tied embeddings": (StageReplay, "record", _without_tied_gradient),
    ALL_GRADIENTS: (RankOperators, "freeze", _nothing),
}


def _run_without(settings: Settings, ingredient: str) -> dict[str, Any]:
    if ingredient != ALL:
        _patch(*LEAVE_OUT[ingredient])
    return run(settings, store=rank_store())


BY_MUTANTS = ("gradient norm", "generators", "loss scale", "step count", "one operator", "frozen weights")
"""Ingredients that `make mutants` leaves out of the source as well, against tests of the default selection."""


@pytest.mark.parametrize(
    "ingredient",
    [pytest.param(each, marks=pytest.mark.full if each in BY_MUTANTS else ()) for each in (ALL, *LEAVE_OUT)],
)
def test_an_ingredient_that_is_left_out_is_missed(ingredient: str, tmp_path: Path) -> None:
    result = run_ranks(2, _run_without, job_settings(tmp_path, *TRAINING, *RECOVERY), ingredient)[0]
    only_saves_time = ingredient in (ALL, ALL_GRADIENTS)
    assert (result["digest_per_rank"] == uninterrupted(2, *TRAINING).digest_per_rank) == only_saves_time
