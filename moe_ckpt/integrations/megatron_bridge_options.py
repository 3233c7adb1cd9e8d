"""Megatron-Bridge's settings: the refusals, and the settings that shape a run.

Settings that cannot be exact are refused, each by its name and with the reason. Owns:
the refusals of settings that Megatron-LM does not have. All other settings have the
names of Megatron-LM's options, and the same reasons. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from moe_ckpt.integrations.megatron_lm_options import (
    AGAIN,
    COURSE,
    LAYER_SHAPE,
    OTHER_LIBRARY,
    REFUSALS,
    Refusal,
)
from moe_ckpt.megatron.layer_split import CONFIG_FIELDS, LayerSplit

_SECTIONS = (
    *(
        "model",
        "ddp",
        "optimizer",
        "train",
        "validation",
        "dist",
        "dataset",
        "checkpoint",
        "ft",
    ),
    "rerun_state_machine",
    "straggler",
)
_OFF = (None, False)
_NOT_TRIED = "not tried with Megatron-Bridge's loop"
_OF_SECTIONS: Sequence[tuple[str, Refusal]] = (
    (
        "model",
        Refusal(
            option="virtual_pipeline_model_parallel_size",
            allowed=(None,),
            reason=_NOT_TRIED,
        ),
    ),
    (
        "model",
        Refusal(
            option="dist_train",
            allowed=_OFF,
            reason="its groups differ from Megatron-Core's",
        ),
    ),
    (
        "model",
        Refusal(option="restore_modelopt_state", allowed=_OFF, reason=_NOT_TRIED),
    ),
    ("train", Refusal(option="rampup_batch_size", allowed=(None,), reason=_NOT_TRIED)),
    ("train", Refusal(option="num_epochs", allowed=(None,), reason=_NOT_TRIED)),
    (
        "dist",
        Refusal(
            option="use_decentralized_pg",
            allowed=_OFF,
            reason="its groups differ from Megatron-Core's",
        ),
    ),
    (
        "dist",
        Refusal(
            option="lazy_init", allowed=_OFF, reason="a loop is entered with all groups"
        ),
    ),
    (
        "dist",
        Refusal(
            option="eval_context_parallel_size", allowed=(None,), reason=_NOT_TRIED
        ),
    ),
    (
        "dataset",
        Refusal(
            option="dataloader_type",
            allowed=("single",),
            reason="samples need random access",
        ),
    ),
    ("profiling", Refusal(option="use_pytorch_profiler", allowed=_OFF, reason=AGAIN)),
    ("profiling", Refusal(option="use_nsys_profiler", allowed=_OFF, reason=AGAIN)),
    (
        "inprocess_restart",
        Refusal(option="enabled", allowed=_OFF, reason=OTHER_LIBRARY),
    ),
)
_WHOLE: Sequence[Refusal] = tuple(
    Refusal(option=option, allowed=(None,), reason=_NOT_TRIED)
    for option in ("peft", "nvrx_straggler", "tensor_inspect")
)
_SHAPING = {  # settings that shape the saved tensors
    "model": (
        *LAYER_SHAPE,
        "num_moe_experts",
        "vocab_size",
        "seq_length",
        "share_embeddings_and_output_weights",
    ),
    "optimizer": ("optimizer", "use_distributed_optimizer"),
    "train": ("global_batch_size",),
}


def require_supported(config: Any) -> None:
    """Refuse settings of a `ConfigContainer` that cannot be exact.

    Raises:
        ConfigError: Such a setting is in use, a stage has no layers, or a stage has no
            experts and the optimizer is not sharded.
    """
    for section in _SECTIONS:
        for refusal in REFUSALS:
            _require_allowed(config, section, refusal)
    for section, refusal in _OF_SECTIONS:
        _require_allowed(config, section, refusal)
    for refusal in _WHOLE:
        refusal.require_allowed(refusal.option, config)
    split = LayerSplit.of(config.model, CONFIG_FIELDS, "model.{}")
    split.require_layers()
    is_sharded = config.optimizer.use_distributed_optimizer
    split.require_experts(
        is_sharded=is_sharded, setting="optimizer.use_distributed_optimizer"
    )


def shaping_of(config: Any) -> dict[str, object]:
    """Return the settings that shape the saved state, by name."""
    return {
        f"{section}.{name}": getattr(getattr(config, section), name, None)
        for section, names in _SHAPING.items()
        for name in names
    }


def course_of(config: Any) -> dict[str, object]:
    """Return the other settings that decide the states of a run, by name."""
    found: dict[str, object] = {}
    for section in ("model", "rng", "dataset", "train"):
        values = getattr(config, section, None)
        found |= {
            f"{section}.{name}": getattr(values, name)
            for name in COURSE
            if hasattr(values, name)
        }
    return found


def files_of(config: Any) -> dict[str, object]:
    """Return the settings that may name files of data and tokenizers, by name."""
    sections = {
        "dataset": getattr(config, "dataset", None),
        "tokenizer": getattr(config, "tokenizer", None),
    }
    return {
        f"{section}.{name}": value
        for section, each in sections.items()
        for name, value in _fields(each)
    }


def _fields(section: Any) -> Iterable[tuple[str, object]]:
    # without folders of caches, which the run itself fills
    return (
        ((name, value) for name, value in vars(section).items() if "cache" not in name)
        if section
        else ()
    )


def _require_allowed(config: Any, section: str, refusal: Refusal) -> None:
    refusal.require_allowed(
        f"{section}.{refusal.option}", getattr(config, section, None)
    )
