"""Settings of ms-swift's Megatron trainer that cannot be exact, each refused by its name with the reason.

Owns: those that Megatron-LM does not have. All others have Megatron-LM's names, and its reasons. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from moe_ckpt.config import require
from moe_ckpt.integrations.megatron_lm_options import REFUSALS, Refusal, require_optimizer_everywhere

TRAINER = "MegatronTrainer"
_NOT_TRIED = "not tried with ms-swift's loop"
_OFF = (False, None)
_GROUPS = "its groups of parameters are gathered from all ranks, and a rank that builds alone has no others"
_OWN: Sequence[Refusal] = (
    Refusal(option="streaming", allowed=_OFF, reason="samples need random access"),
    Refusal(option="add_version", allowed=_OFF, reason="a new process would write its checkpoints to another folder"),
    Refusal(option="tuner_type", allowed=("full",), reason=_NOT_TRIED),
    Refusal(option="task_type", allowed=("causal_lm",), reason=_NOT_TRIED),
    Refusal(option="rlhf_type", allowed=(None,), reason="its batches depend on the model"),
    Refusal(option="router_replay_mode", allowed=("disabled",), reason=_NOT_TRIED),
    Refusal(option="is_multimodal", allowed=_OFF, reason=_NOT_TRIED),
    Refusal(option="virtual_pipeline_model_parallel_size", allowed=(None,), reason=_NOT_TRIED),
    Refusal(option="context_parallel_size", allowed=(1,), reason=_NOT_TRIED),
    Refusal(option="overlap_grad_reduce", allowed=_OFF, reason=_NOT_TRIED),
    Refusal(option="overlap_param_gather", allowed=_OFF, reason=_NOT_TRIED),
    Refusal(option="mcore_model", allowed=(None,), reason=_NOT_TRIED),
    Refusal(option="mcore_adapter", allowed=(None,), reason=_NOT_TRIED),
    Refusal(option="apply_wd_to_qk_layernorm", allowed=_OFF, reason=_GROUPS),
    Refusal(option="vit_lr", allowed=(None,), reason=_GROUPS),
    Refusal(option="aligner_lr", allowed=(None,), reason=_GROUPS),
)
_SHAPING = (  # settings of the model that shape the saved tensors
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("num_moe_experts", "moe_ffn_hidden_size", "moe_layer_freq", "moe_shared_expert_intermediate_size"),
    "params_dtype",
)
_SHAPING_ARGUMENTS = ("optimizer", "use_distributed_optimizer", "global_batch_size", "padded_vocab_size", "seq_length")


def require_supported(trainer: str, args: Any) -> None:
    """Raise ConfigError for another trainer than that of fine-tuning, or for an argument that cannot be exact."""
    require(trainer == TRAINER, "ms-swift's trainer", trainer, f"{TRAINER} with moe_ckpt.run: {_NOT_TRIED}")
    for refusal in (*_OWN, *REFUSALS):
        got = getattr(args, refusal.option, refusal.allowed[0])
        wanted = " or ".join(repr(value) for value in refusal.allowed[:2])
        require(got in refusal.allowed, f"--{refusal.option}", got, f"{wanted} with moe_ckpt.run: {refusal.reason}")


def require_supported_model(args: Any, config: Any) -> None:
    """Raise ConfigError for a model whose stages without experts a rank cannot build alone."""
    arguments = SimpleNamespace(
        num_experts=config.num_moe_experts,
        moe_layer_freq=config.moe_layer_freq,
        use_distributed_optimizer=args.use_distributed_optimizer,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
    )
    require_optimizer_everywhere(arguments)


def shaping_of(args: Any, config: Any) -> dict[str, Any]:
    """Return the settings that shape the saved state, by their names."""
    of_model = {name: getattr(config, name, None) for name in _SHAPING}
    return of_model | {name: getattr(args, name, None) for name in _SHAPING_ARGUMENTS}
