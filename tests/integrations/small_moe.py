"""The small MoE that the recipes of Megatron-Bridge and of ms-swift train on CPUs, as
settings of Megatron-Core.

It has two stages, and expert parallelism over two ranks.
"""

from __future__ import annotations

from typing import Any

SEQUENCE, VOCABULARY = 16, 256


def settings() -> dict[str, Any]:
    """Return the settings of the model; their numbers of bits, and losses, are the
    recipes' own.
    """
    from megatron.core.transformer.enums import AttnBackend  # noqa: PLC0415 - processes that write checkpoints need none

    fusions = (
        "masked_softmax",
        "bias_activation",
        "bias_dropout",
        "apply_rope",
        "cross_entropy_loss",
    )
    return {f"{name}_fusion": False for name in (*fusions, "gradient_accumulation")} | {
        "attention_backend": AttnBackend.unfused,
        "transformer_impl": "local",
        "persist_layer_norm": False,
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
    }
