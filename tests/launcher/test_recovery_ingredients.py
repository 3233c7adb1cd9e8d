"""Everything that a recovery restores is needed: leave one thing out, and the run no longer ends where it should.

Each ingredient is left out inside the ranks, by a patch of the one function that restores it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from launcher.config import Settings, compose_settings
from launcher.run import run
from moe_ckpt.adapters import megatron_operators, megatron_replay, megatron_state
from moe_ckpt.adapters.megatron_operators import RankOperators
from moe_ckpt.adapters.megatron_replay import StageReplay
from moe_ckpt.store.boundary import BoundaryLog
from tests.ranks import rank_store, run_ranks
from tests.training import fast, losing, train

SMALL = ("parallel.pp=2", "train.iterations=8", "train.clip_grad=0.1")
LOST = ((6, 0, "step"), (7, 1, "forward"))
FP16 = ("precision=fp16", "precision.initial_loss_scale=262144.0", "precision.loss_scale_hysteresis=1")
BIAS = ("model.moe_balancing=bias", "model.moe_score_function=sigmoid")


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


INGREDIENTS: dict[str, tuple[tuple[str, ...], Callable[[], None]]] = {
    "buffers": (BIAS, lambda: _patch(megatron_operators, "_copy_part", _without_buffers)),
    "gradient norm": ((), lambda: _patch(StageReplay, "record", _without_norm)),
    "generators": ((), lambda: _patch(megatron_state, "_restore_rng_tensors", _nothing)),
    "learning-rate schedule": ((), lambda: _patch(OptimizerParamScheduler, "step", _without_schedule)),
    "loss scale": (FP16, lambda: _patch(megatron_replay, "restore_small_state", _without_scalers)),
    "step count": ((), lambda: _patch(megatron_operators, "write_step_count", _nothing)),
    "one boundary tensor": ((), lambda: _patch(BoundaryLog, "sent", _without_one_boundary_tensor)),
    "one operator": ((), lambda: _patch(RankOperators, "load", _without_one_operator)),
    "frozen weights": ((), lambda: _patch(RankOperators, "load", _without_frozen_weights)),
    "gradient of tied embeddings": (
        ("model.tied_embeddings=true",),
        lambda: _patch(StageReplay, "record", _without_tied_gradient),
    ),
}


def _run_without(settings: Settings, ingredient: str | None) -> dict[str, Any]:
    if ingredient == "skipping of weight gradients":
        _patch(RankOperators, "freeze", _nothing)
    elif ingredient is not None:
        INGREDIENTS[ingredient][1]()
    return run(settings, store=rank_store())


def _digest_without(ingredient: str | None, folder: Path, *overrides: str) -> str:
    settings = compose_settings((*fast(*SMALL), *losing(*LOST), "ckpt.window=3", *overrides, f"run.dir={folder}"))
    return run_ranks(2, _run_without, settings, ingredient)[0]["digest"]


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], str]:
    """Return the digest of a job that loses nothing, which one that recovers with all ingredients reaches, too."""

    @functools.cache
    def run_both(overrides: tuple[str, ...]) -> str:
        folder = tmp_path_factory.mktemp("complete")
        expected = train(2, folder / "whole", *SMALL, *overrides)["digest"]
        assert _digest_without(None, folder / "recovered", *overrides) == expected
        return expected

    return run_both


@pytest.mark.parametrize("ingredient", INGREDIENTS)
def test_an_ingredient_that_is_left_out_is_missed(
    ingredient: str, tmp_path: Path, complete: Callable[[tuple[str, ...]], str]
) -> None:
    overrides = INGREDIENTS[ingredient][0]
    assert _digest_without(ingredient, tmp_path, *overrides) != complete(overrides)


def test_skipping_the_weight_gradients_of_frozen_operators_only_saves_time(
    tmp_path: Path, complete: Callable[[tuple[str, ...]], str]
) -> None:
    assert _digest_without("skipping of weight gradients", tmp_path) == complete(())
