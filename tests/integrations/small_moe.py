"""The small MoE that the recipes of Megatron-Bridge and ms-swift train on CPUs.

The module has the settings of Megatron-Core for the model. The model has two stages,
and expert parallelism over two ranks.
"""

from __future__ import annotations

from typing import Any

SEQUENCE, VOCABULARY = 16, 256


def settings() -> dict[str, Any]:
    """Return the model's settings, without the recipes' own data types and losses."""
    # imported here: processes that write checkpoints import this module, and do not
    # need the enum
    from megatron.core.transformer.enums import AttnBackend  # noqa: PLC0415

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
