"""Stages that lose their state are rebuilt, and the run ends bit for bit where it would have ended without the loss.

Compared with the uninterrupted run: the digest of every rank's parameters, master weights, moments, step counts,
buffers, loss scaler, schedule and generators, and every loss, of at least ten iterations after the last fault. Dropout
is on throughout. What test_elastic.py does by killing processes is not done here again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.events import StateLost
from tests.training import events_of, losing, losses, train

FORWARD, BACKWARD, STEP, BETWEEN = "forward", "backward", "step", "between"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, and what is lost in it: (iteration, stage, phase[, data-parallel rank]), ten iterations before its end."""

    world: int = 4
    overrides: tuple[str, ...] = ()
    ckpt: tuple[str, ...] = ("ckpt.window=3",)
    lost: tuple[tuple[Any, ...], ...] = ((5, 1, FORWARD), (6, 0, STEP))
    iterations: int = 16


PP2 = ("parallel.pp=2",)
PP4 = ("parallel.pp=4", "model.num_layers=4", "train.global_batch_size=8")
FP16_SKIPPING = ("precision=fp16", "precision.initial_loss_scale=262144.0", "precision.loss_scale_hysteresis=1")

CASES = {
    # layouts
    "PP 1, DP 1": Case(world=1, overrides=("train.global_batch_size=4",), lost=((5, 0, BACKWARD),)),
    "PP 1, DP 2, EP 2": Case(world=2, lost=((5, 0, FORWARD), (6, 0, STEP))),
    "PP 1, DP 4, EP 1": Case(world=4, overrides=("parallel.pp=1", "parallel.ep=1"), lost=((5, 0, STEP),)),
    "PP 1, DP 4, EP 2": Case(world=4, overrides=("parallel.pp=1", "parallel.ep=2"), lost=((5, 0, STEP),)),
    "PP 2, DP 2, EP 1": Case(overrides=("parallel.ep=1",)),
    "PP 2, DP 2, EP 2": Case(),
    "PP 4, every stage in turn": Case(
        overrides=PP4, lost=((5, 0, FORWARD), (6, 1, BACKWARD), (8, 2, STEP), (9, 3, BETWEEN)), iterations=19
    ),
    "PP 4, DP 2, EP 2": Case(world=8, overrides=(*PP4,), lost=((5, 2, BACKWARD),)),
    "the first two stages at once": Case(overrides=PP4, lost=((5, 0, STEP), (5, 1, STEP))),
    "both ends at once": Case(overrides=PP4, lost=((5, 0, FORWARD), (5, 3, BACKWARD))),
    "no boundary log: all stages roll back": Case(ckpt=("ckpt.window=3", "ckpt.boundary_log=false")),
    "dense model, TP 2": Case(overrides=("model.num_experts=0", "parallel.pp=2", "parallel.ep=1", "parallel.tp=2")),
    # windows
    "W 5": Case(ckpt=("ckpt.window=5",), lost=((12, 1, FORWARD), (14, 0, STEP)), iterations=24),
    "W = operators": Case(ckpt=("ckpt.window=7",), lost=((17, 1, FORWARD), (18, 0, STEP)), iterations=28),
    "Algorithm 1 as printed": Case(world=2, overrides=PP2, ckpt=("ckpt.profile_iters=2", "ckpt.paper_exact=true")),
    "reordered at every window": Case(world=2, overrides=PP2, ckpt=("ckpt.window=2", "ckpt.reorder_share=0")),
    "ordered by probabilities": Case(world=2, overrides=PP2, ckpt=("ckpt.window=3", "ckpt.popularity=soft")),
    "ordered by decayed counts": Case(world=2, overrides=PP2, ckpt=("ckpt.window=3", "ckpt.popularity=decayed")),
    "two windows kept": Case(ckpt=("ckpt.window=3", "ckpt.keep_windows=2")),
    # moments
    "in each phase of one iteration": Case(lost=((5, 0, FORWARD), (5, 1, BACKWARD), (5, 0, STEP), (5, 1, BETWEEN))),
    "one rank of a stage": Case(lost=((5, 1, FORWARD, 0), (6, 0, STEP, 1), (6, 1, BETWEEN, 1))),
    "one rank of a stage, optimizer not sharded": Case(
        overrides=("train.distributed_optimizer=false",), lost=((5, 1, BACKWARD, 1),)
    ),
    "one stage again and again": Case(lost=((5, 1, STEP), (5, 1, BETWEEN), (6, 1, FORWARD), (6, 1, STEP))),
    "neighbours in a row": Case(lost=((5, 1, STEP), (5, 0, BETWEEN), (6, 1, BACKWARD))),
    # arithmetic
    "fp32": Case(world=2, overrides=(*PP2, "precision=fp32")),
    "fp32, optimizer not sharded": Case(overrides=("train.distributed_optimizer=false", "precision=fp32")),
    "fp16, optimizer not sharded": Case(overrides=(*FP16_SKIPPING, "train.distributed_optimizer=false")),
    "no clipping": Case(world=2, overrides=(*PP2, "train.clip_grad=0")),
    "clipping every step": Case(world=2, overrides=(*PP2, "train.clip_grad=0.1")),
    # models
    "aux-loss-free bias, evaluated after every iteration": Case(
        world=2,
        overrides=(
            *PP2,
            "model.moe_balancing=bias",
            "model.moe_score_function=sigmoid",
            "train.eval_every_iters=1",
            "train.eval_batches=3",
        ),
        lost=((5, 0, FORWARD), (6, 1, FORWARD)),
    ),
    "sigmoid scores": Case(world=2, overrides=(*PP2, "model.moe_score_function=sigmoid")),
    "global aux loss": Case(overrides=("model.moe_balancing=global_aux_loss",)),
    "shared experts": Case(world=2, overrides=(*PP2, "model.shared_expert_ffn_hidden_size=32")),
    "no experts on the first stage": Case(
        overrides=("model.num_dense_layers=1", "model.dense_ffn_hidden_size=64"),
    ),
    "tied embeddings, PP 1": Case(world=1, overrides=("model.tied_embeddings=true",), lost=((5, 0, STEP),)),
    "tied embeddings, both ends at once": Case(
        overrides=(*PP4, "model.tied_embeddings=true"), lost=((5, 0, FORWARD), (5, 3, FORWARD))
    ),
    "capacity": Case(world=2, overrides=(*PP2, "model.moe_capacity_factor=1.0", "model.moe_pad_to_capacity=true")),
    "full recompute": Case(world=2, overrides=(*PP2, "train.recompute=full")),
    "selective recompute": Case(world=2, overrides=(*PP2, "train.recompute=selective")),
    "GPT style": Case(
        overrides=(
            "model.position_embedding=learned",
            "model.normalization=LayerNorm",
            "model.activation=gelu",
            "model.linear_bias=true",
        ),
    ),
    "dense model": Case(world=2, overrides=(*PP2, "model.num_experts=0", "model.num_layers=4", "parallel.ep=1")),
    "one micro-batch": Case(world=2, overrides=(*PP2, "train.global_batch_size=2")),
    "many micro-batches": Case(world=2, overrides=(*PP2, "train.micro_batch_size=1", "train.global_batch_size=8")),
}


@pytest.fixture(scope="module")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Case], tuple[dict[str, Any], dict[int, float]]]:
    """Return the result and losses of a job in which nothing is lost; jobs that differ in `ckpt` only share a run."""

    @functools.cache
    def run_once(world: int, overrides: tuple[str, ...]) -> tuple[dict[str, Any], dict[int, float]]:
        folder = tmp_path_factory.mktemp("uninterrupted")
        return train(world, folder, *overrides), losses(folder)

    return lambda case: run_once(case.world, (f"train.iterations={case.iterations}", *case.overrides))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_recovered_run_equals_the_uninterrupted_one(
    case: Case, tmp_path: Path, uninterrupted: Callable[[Case], tuple[dict[str, Any], dict[int, float]]]
) -> None:
    expected, expected_losses = uninterrupted(case)

    iterations = f"train.iterations={case.iterations}"
    result = train(case.world, tmp_path, *losing(*case.lost), *case.ckpt, iterations, *case.overrides)

    struck = {
        (loss.iteration, loss.phase) for rank in range(case.world) for loss in events_of(tmp_path, StateLost, rank)
    }
    assert struck == {(iteration, phase) for iteration, _, phase, *_ in case.lost}
    assert max(iteration for iteration, *_ in case.lost) + 10 <= case.iterations
    assert result["digest_per_rank"] == expected["digest_per_rank"]
    assert losses(tmp_path) == expected_losses
    assert result["eval_loss"] == expected["eval_loss"]
