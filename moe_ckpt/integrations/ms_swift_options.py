"""ms-swift's settings: the refusals, and the settings that shape a run.

Settings that cannot be exact are refused, each by its name and with the reason. Owns:
the refusals of settings that Megatron-LM does not have. All other settings have the
names of Megatron-LM's options, and the same reasons. Pure.
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
    """Refuse trainers and arguments that cannot be exact.

    Args:
        trainer: The name of the trainer's class; only `TRAINER`, for fine-tuning, is
            exact.
        args: The arguments of the trainer.

    Raises:
        ConfigError: The trainer is another one, or an argument cannot be exact.
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
    """Refuse models that a rank cannot build alone.

    Args:
        args: The arguments of the trainer.
        config: Megatron's configuration of the model.

    Raises:
        ConfigError: A stage has no layers, or a stage has no experts and the optimizer
            is not sharded.
    """
    split = LayerSplit.of(config, CONFIG_FIELDS, "--{}")
    split.require_layers()
    is_sharded = args.use_distributed_optimizer
    split.require_experts(is_sharded=is_sharded, setting="--use_distributed_optimizer")


def shaping_of(args: Any, config: Any) -> dict[str, Any]:
    """Return the settings that shape the saved state, by name."""
    of_model = {
        name: getattr(config, name, None) for name in (*LAYER_SHAPE, "num_moe_experts")
    }
    return of_model | {name: getattr(args, name, None) for name in _SHAPING_ARGUMENTS}
