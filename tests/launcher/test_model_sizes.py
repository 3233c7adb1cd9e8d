"""The models under conf/model have the sizes of the papers' models."""

from __future__ import annotations

from functools import cache

import pytest

import tests.preload  # noqa: F401 - imports Megatron without its warnings
from launcher.config import AUTO, ModelConfig, compose_settings
from launcher.parameters import count_parameters, padded_vocab_size
from moe_ckpt.types import ParallelLayout

BYTE_VOCABULARY = 256
SEQUENCE_LENGTH = 2048
BILLION = 1e9


@cache
def model_named(name: str) -> ModelConfig:
    return compose_settings([f"model={name}"]).model


def billions(name: str) -> tuple[float, float]:
    """Return the total and the active parameters, in billions."""
    model = model_named(name)
    vocab_size = BYTE_VOCABULARY if model.vocab_size == AUTO else int(model.vocab_size)
    total, active = count_parameters(model, vocab_size, SEQUENCE_LENGTH)
    return total / BILLION, active / BILLION


# MoEvement, Table 2, in which only DeepSeek-MoE has shared experts: 2
@pytest.mark.parametrize(
    ("name", "layers", "topk", "experts", "shares", "total", "active"),
    [
        ("moe_llava", 32, 2, 4, False, 2.9, 2.0),
        ("gpt_moe", 12, 6, 32, False, 7.3, 1.6),
        ("qwen_moe", 24, 8, 64, False, 14.3, 2.7),
        ("deepseek_moe", 28, 8, 64, True, 16.4, 3.7),
    ],
)
def test_evaluated_models_are_those_of_the_paper(
    name: str,
    layers: int,
    topk: int,
    experts: int,
    shares: bool,
    total: float,
    active: float,
) -> None:
    model = model_named(name)
    assert (model.num_layers, model.moe_topk, model.num_experts) == (
        layers,
        topk,
        experts,
    )
    assert (model.shared_expert_ffn_hidden_size > 0) == shares
    assert billions(name) == pytest.approx((total, active), rel=0.05)


# MoEvement, section 5.4; "small" has about 30 million
@pytest.mark.parametrize(
    ("name", "total", "rel"),
    [
        ("deepseek_32b", 32.0, 0.05),
        ("deepseek_67b", 67.0, 0.05),
        ("deepseek_145b", 145.0, 0.05),
        ("deepseek_671b", 671.0, 0.05),
        ("small", 0.03, 1 / 6),
    ],
)
def test_scaled_models_and_small_have_their_size(
    name: str, total: float, rel: float
) -> None:
    assert billions(name)[0] == pytest.approx(total, rel=rel)


# arXiv:2412.19437, section 4.2
def test_deepseek_v3_activates_37_billion_parameters() -> None:
    assert billions("deepseek_671b")[1] == pytest.approx(37.0, rel=0.05)


def test_tiny_is_counted_exactly() -> None:
    """The tiny model has width 64 and 4 layers of 8 experts (top-2).

    Experts have inner width 128. The model has RMSNorm, SwiGLU, rotary positions and no
    biases.
    """
    expert = 3 * 64 * 128
    attention_gate_and_norms = 4 * 64 * 64 + 8 * 64 + 2 * 64
    embedding_output_and_norm = 2 * 256 * 64 + 64
    rest = 4 * attention_gate_and_norms + embedding_output_and_norm
    assert count_parameters(model_named("tiny"), 256) == (
        rest + 4 * 8 * expert,
        rest + 4 * 2 * expert,
    )


@pytest.mark.parametrize(
    ("num_tokens", "tp", "padded"),
    [
        (256, 1, 256),
        (257, 1, 320),
        (1, 1, 64),
        (64, 1, 64),
        (50257, 1, 50304),
        (256, 3, 384),
        (257, 128, 384),
    ],
)
def test_the_vocabulary_is_padded_to_64_and_to_tensor_parallelism(
    num_tokens: int, tp: int, padded: int
) -> None:
    assert (
        padded_vocab_size(num_tokens, ParallelLayout(pp=1, dp=1, ep=1, tp=tp)) == padded
    )
