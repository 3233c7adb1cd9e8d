"""Settings of Megatron-Bridge's configuration that cannot be exact, each refused by its name with the reason.

Owns: those that Megatron-LM does not have. All others have Megatron-LM's names, and its reasons. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from moe_ckpt.config import require
from moe_ckpt.integrations.megatron_lm_options import (
    OTHER_LIBRARY,
    REFUSALS,
    Refusal,
    require_optimizer_everywhere,
)

_SECTIONS = ("model", "ddp", "optimizer", "train", "validation", "dist", "dataset", "checkpoint", "ft")
_OFF = (None, False)
_NOT_TRIED = "not tried with Megatron-Bridge's loop"
_OF_SECTIONS: Sequence[tuple[str, Refusal]] = (
    ("model", Refusal(option="virtual_pipeline_model_parallel_size", allowed=(None,), reason=_NOT_TRIED)),
    ("model", Refusal(option="dist_train", allowed=_OFF, reason="its groups differ from Megatron-Core's")),
    ("model", Refusal(option="restore_modelopt_state", allowed=_OFF, reason=_NOT_TRIED)),
    ("train", Refusal(option="rampup_batch_size", allowed=(None,), reason=_NOT_TRIED)),
    ("train", Refusal(option="num_epochs", allowed=(None,), reason=_NOT_TRIED)),
    ("dist", Refusal(option="use_decentralized_pg", allowed=_OFF, reason="its groups differ from Megatron-Core's")),
    ("dist", Refusal(option="lazy_init", allowed=_OFF, reason="a loop is entered with all groups")),
    ("dist", Refusal(option="eval_context_parallel_size", allowed=(None,), reason=_NOT_TRIED)),
    ("dataset", Refusal(option="dataloader_type", allowed=("single",), reason="samples need random access")),
    ("inprocess_restart", Refusal(option="enabled", allowed=_OFF, reason=OTHER_LIBRARY)),
)
_WHOLE: Sequence[Refusal] = tuple(
    Refusal(option=option, allowed=(None,), reason=_NOT_TRIED)
    for option in ("peft", "nvrx_straggler", "tensor_inspect")
)
_SHAPING = {  # settings that shape the saved tensors
    "model": (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("num_moe_experts", "moe_ffn_hidden_size", "moe_layer_freq", "moe_shared_expert_intermediate_size"),
        *("vocab_size", "seq_length", "share_embeddings_and_output_weights", "params_dtype"),
    ),
    "optimizer": ("optimizer", "use_distributed_optimizer"),
    "train": ("global_batch_size",),
}


def require_supported(config: Any) -> None:
    """Raise ConfigError for the first setting of a `ConfigContainer` that cannot be exact."""
    for section in _SECTIONS:
        for refusal in REFUSALS:
            _require(f"{section}.", getattr(config, section, None), refusal)
    for section, refusal in _OF_SECTIONS:
        _require(f"{section}.", getattr(config, section, None), refusal)
    for refusal in _WHOLE:
        _require("", config, refusal)
    model = config.model
    arguments = SimpleNamespace(
        num_experts=model.num_moe_experts,
        moe_layer_freq=getattr(model, "moe_layer_freq", 1),
        use_distributed_optimizer=config.optimizer.use_distributed_optimizer,
        pipeline_model_parallel_size=model.pipeline_model_parallel_size,
    )
    require_optimizer_everywhere(arguments)


def shaping_of(config: Any) -> dict[str, object]:
    """Return the settings that shape the saved state, by their names."""
    return {
        f"{section}.{name}": getattr(getattr(config, section), name, None)
        for section, names in _SHAPING.items()
        for name in names
    }


def _require(prefix: str, values: Any, refusal: Refusal) -> None:
    got = getattr(values, refusal.option, refusal.allowed[0])
    wanted = " or ".join(repr(value) for value in refusal.allowed[:2])
    setting = f"{prefix}{refusal.option}"
    require(got in refusal.allowed, setting, got, f"{wanted} with moe_ckpt.run: {refusal.reason}")
