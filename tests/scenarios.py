"""Layouts, models and precisions of several test modules, as tuples of overrides."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PP2 = ("parallel.pp=2",)
PP4 = ("parallel.pp=4", "model.num_layers=4", "train.global_batch_size=8")
BIAS = ("model.moe_balancing=bias", "model.moe_score_function=sigmoid")
BIAS_EVALUATED_OFTEN = ("train.iterations=30", *BIAS, "train.eval_every_iters=2")
"""Training of two campaigns, which so share an uninterrupted run."""

FP16_SKIPPING = (
    "precision=fp16",
    "precision.initial_loss_scale=262144.0",
    "precision.loss_scale_hysteresis=1",
)
FP16_SKIPPING_AT_FIRST = (
    "precision=fp16",
    "precision.initial_loss_scale=1048576.0",
    "precision.loss_scale_hysteresis=1",
)
"""FP16 that overflows in the first iteration of each small model, not in the last."""

TIED = ("model.tied_embeddings=true",)
UNSHARDED = ("train.distributed_optimizer=false",)
THIRTY_SIX = ("train.iterations=36",)
"""Training of the longest campaigns, which so share one uninterrupted run."""

DENSE_TP2 = ("model.num_experts=0", "parallel.ep=1", "parallel.tp=2")
GPT_STYLE = (
    "model.position_embedding=learned",
    "model.normalization=LayerNorm",
    "model.activation=gelu",
)
MOC = ("ckpt.k_snapshot=2", "ckpt.k_persist=1")
"""Snapshots have two experts of each layer in memory, and one in storage."""

LINEAR_BIAS = ("model.linear_bias=true",)
