"""Settings of ms-swift's Megatron trainer that cannot be exact, each refused by its
name with the reason.

Owns: those that Megatron-LM does not have. All others have Megatron-LM's names, and its
reasons. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_ckpt.config import require
from moe_ckpt.integrations.megatron_lm_options import LAYER_SHAPE, REFUSALS, Refusal
from moe_ckpt.megatron.layer_split import CONFIG_FIELDS, LayerSplit

TRAINER = "MegatronTrainer"
_NOT_TRIED = "not tried with ms-swift's loop"
_OFF = (False, None)
_GROUPS = (
    "its groups of parameters are gathered from all ranks, and a rank that builds alone"
    " has no others"
)
_OWN: Sequence[Refusal] = (
    Refusal(option="streaming", allowed=_OFF, reason="samples need random access"),
    Refusal(
        option="add_version",
        allowed=_OFF,
        reason="a new process would write its checkpoints to another folder",
    ),
    Refusal(option="tuner_type", allowed=("full",), reason=_NOT_TRIED),
    Refusal(option="task_type", allowed=("causal_lm",), reason=_NOT_TRIED),
    Refusal(
        option="rlhf_type", allowed=(None,), reason="its batches depend on the model"
    ),
    Refusal(option="router_replay_mode", allowed=("disabled",), reason=_NOT_TRIED),
    Refusal(option="is_multimodal", allowed=_OFF, reason=_NOT_TRIED),
    Refusal(
        option="virtual_pipeline_model_parallel_size",
        allowed=(None,),
        reason=_NOT_TRIED,
    ),
    Refusal(option="context_parallel_size", allowed=(1,), reason=_NOT_TRIED),
    Refusal(option="overlap_grad_reduce", allowed=_OFF, reason=_NOT_TRIED),
    Refusal(option="overlap_param_gather", allowed=_OFF, reason=_NOT_TRIED),
    Refusal(option="mcore_model", allowed=(None,), reason=_NOT_TRIED),
    Refusal(option="mcore_adapter", allowed=(None,), reason=_NOT_TRIED),
    Refusal(option="apply_wd_to_qk_layernorm", allowed=_OFF, reason=_GROUPS),
    Refusal(option="vit_lr", allowed=(None,), reason=_GROUPS),
    Refusal(option="aligner_lr", allowed=(None,), reason=_GROUPS),
)
_SHAPING_ARGUMENTS = (
    "optimizer",
    "use_distributed_optimizer",
    "global_batch_size",
    "padded_vocab_size",
    "seq_length",
)


def require_supported(trainer: str, args: Any) -> None:
    """Raise ConfigError for another trainer than that of fine-tuning, or for an
    argument that cannot be exact.
    """
    require(
        trainer == TRAINER,
        "ms-swift's trainer",
        trainer,
        f"{TRAINER} with moe_ckpt.run: {_NOT_TRIED}",
    )
    for refusal in (*_OWN, *REFUSALS):
        refusal.require_allowed(f"--{refusal.option}", args)


def require_supported_model(args: Any, config: Any) -> None:
    """Raise ConfigError for a model with stages without layers, or without experts that
    a rank builds alone.
    """
    split = LayerSplit.of(config, CONFIG_FIELDS, "--{}")
    split.require_layers()
    is_sharded = args.use_distributed_optimizer
    split.require_experts(is_sharded=is_sharded, setting="--use_distributed_optimizer")


def shaping_of(args: Any, config: Any) -> dict[str, Any]:
    """Return the settings that shape the saved state, by their names."""
    of_model = {
        name: getattr(config, name, None) for name in (*LAYER_SHAPE, "num_moe_experts")
    }
    return of_model | {name: getattr(args, name, None) for name in _SHAPING_ARGUMENTS}
