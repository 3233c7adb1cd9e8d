"""Counts the parameters of a model, operator by operator.

Pure arithmetic: no torch, no Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from launcher.config import ModelConfig
from moe_ckpt.types import OperatorId, OperatorKind, ParallelLayout


def padded_vocab_size(num_tokens: int, layout: ParallelLayout) -> int:
    """Round the vocabulary up to a multiple of 64 and of tensor parallelism.

    64 suits the kernels.

    Args:
        num_tokens: The number of tokens in the vocabulary.
        layout: The degrees of parallelism.
    """
    multiple = math.lcm(64, layout.tp)
    return -(-num_tokens // multiple) * multiple


def count_parameters(
    model: ModelConfig, vocab_size: int, max_sequence_length: int = 0
) -> tuple[int, int]:
    """Count all parameters of a model, and the active parameters.

    Example: in `tiny` with 256 byte tokens, 4 layers of 8 experts with 3 * 64 * 128
    weights each have 786,432 parameters.

    Args:
        model: The architecture.
        vocab_size: The number of tokens in the vocabulary.
        max_sequence_length: The number of learned positions.

    Returns:
        The number of parameters, and the number of parameters that process a token: of
        the routed experts only the experts to which a token is routed.
    """
    total = sum(
        count
        for _, count in operator_parameters(model, vocab_size, max_sequence_length)
    )
    if not model.num_experts:
        return total, total
    num_idle = (model.num_layers - model.num_dense_layers) * (
        model.num_experts - model.moe_topk
    )
    return total, total - num_idle * _mlp_parameters(model, model.moe_ffn_hidden_size)


def operator_parameters(
    model: ModelConfig, vocab_size: int, max_sequence_length: int = 0
) -> Iterator[tuple[OperatorId, int]]:
    """Yield the operators of the whole model from front to back.

    Args:
        model: The architecture.
        vocab_size: The number of tokens in the vocabulary.
        max_sequence_length: The number of learned positions.

    Yields:
        An operator, and the number of its parameters.
    """
    norm = model.hidden_size * (2 if model.normalization == "LayerNorm" else 1)
    positions = max_sequence_length if model.position_embedding == "learned" else 0
    yield (
        OperatorId(kind=OperatorKind.EMBEDDING),
        (vocab_size + positions) * model.hidden_size,
    )
    for layer in range(model.num_layers):
        yield from _layer_parameters(model, layer, norm)
    yield OperatorId(kind=OperatorKind.FINAL_NORM), norm
    yield (
        OperatorId(kind=OperatorKind.OUTPUT),
        0 if model.tied_embeddings else vocab_size * model.hidden_size,
    )


def _layer_parameters(
    model: ModelConfig, layer: int, norm: int
) -> Iterator[tuple[OperatorId, int]]:
    block = OperatorId(kind=OperatorKind.BLOCK, layer=layer)
    outside_mlp = _attention_parameters(model) + 2 * norm
    if not model.num_experts or layer < model.num_dense_layers:
        yield (
            block,
            outside_mlp
            + _mlp_parameters(
                model, model.dense_ffn_hidden_size or model.moe_ffn_hidden_size
            ),
        )
        return
    shared = model.shared_expert_ffn_hidden_size
    yield block, outside_mlp + (_mlp_parameters(model, shared) if shared else 0)
    yield (
        OperatorId(kind=OperatorKind.GATE, layer=layer),
        model.num_experts * (model.hidden_size + model.linear_bias),
    )
    expert = _mlp_parameters(model, model.moe_ffn_hidden_size)
    for number in range(model.num_experts):
        yield OperatorId(kind=OperatorKind.EXPERT, layer=layer, expert=number), expert


def _mlp_parameters(model: ModelConfig, inner: int) -> int:
    num_input_matrices = 2 if model.activation == "swiglu" else 1
    biases = num_input_matrices * inner + model.hidden_size if model.linear_bias else 0
    return (num_input_matrices + 1) * model.hidden_size * inner + biases


def _attention_parameters(model: ModelConfig) -> int:
    if model.attention == "mla":
        return _latent_attention_parameters(model)
    head = model.kv_channels or model.hidden_size // model.num_attention_heads
    query = model.num_attention_heads * head
    key_value = 2 * (model.num_query_groups or model.num_attention_heads) * head
    biases = query + key_value if model.qkv_bias or model.linear_bias else 0
    biases += model.hidden_size if model.linear_bias else 0
    return model.hidden_size * (query + key_value) + query * model.hidden_size + biases


def _latent_attention_parameters(model: ModelConfig) -> int:
    hidden, heads = model.hidden_size, model.num_attention_heads
    assert model.mla_kv_lora_rank is not None
    assert model.mla_qk_head_dim is not None
    assert model.mla_qk_pos_emb_head_dim is not None
    assert model.mla_v_head_dim is not None
    query = heads * (model.mla_qk_head_dim + model.mla_qk_pos_emb_head_dim)
    rank = model.mla_q_lora_rank
    queries = hidden * query if rank is None else hidden * rank + rank * query
    keys_values = hidden * (model.mla_kv_lora_rank + model.mla_qk_pos_emb_head_dim)
    keys_values += (
        model.mla_kv_lora_rank * heads * (model.mla_qk_head_dim + model.mla_v_head_dim)
    )
    return queries + keys_values + heads * model.mla_v_head_dim * hidden
