"""Builds a model, its optimizer and its scheduler with Megatron-Core's own builders.

Transformer Engine's layers are used on a GPU where Transformer Engine is installed,
Megatron's own layers elsewhere.
"""

from __future__ import annotations

import importlib.util
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter

from launcher.config import ModelConfig, PrecisionConfig, Settings, TrainConfig
from moe_ckpt.config import require
from moe_ckpt.errors import ConfigError
from moe_ckpt.exactness import BITWISE
from moe_ckpt.megatron.capacity_boost import use_router
from moe_ckpt.megatron.groups import stage_group
from moe_ckpt.megatron.initial_weights import broadcast_parameters
from moe_ckpt.megatron.optimizer_state import FORMAT_DTYPES
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.standins import fp8_linear, fp8_tensors, precision_adam
from moe_ckpt.standins.grouped_linear import group_experts
from moe_ckpt.types import ParallelLayout

_SAME_IN_MODEL = (
    *(
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
    ),
    *("normalization", "hidden_dropout", "attention_dropout"),
)
_SAME_IN_TRAIN = (
    "optimizer",
    "lr",
    "min_lr",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "clip_grad",
)
"""Settings that have the same names in Megatron, like those of `_SAME_IN_MODEL`."""


def build_training(
    settings: Settings,
    layout: ParallelLayout,
    vocab_size: int,
    router: type[TopKRouter] = TopKRouter,
) -> TrainingState:
    """Build this rank's stage of the model, its optimizer and its scheduler.

    Collective. The process groups must be formed before.

    Args:
        settings: The settings of the run.
        layout: The degrees of parallelism.
        vocab_size: The padded number of tokens in the vocabulary.
        router: The class of the MoE layers' routers.

    Raises:
        ConfigError: Megatron or the installed libraries cannot do these settings.
    """
    config = transformer_config(settings, layout)
    _require_formats(settings)
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=settings.precision.grad_reduce_in_fp32,
            use_distributed_optimizer=settings.train.distributed_optimizer,
            fp8_param_gather=settings.precision.fp8_param_gather,
        ),
        _build_stage(settings, config, vocab_size, router),
    )
    # before the optimizer, which makes its master weights from these parameters
    broadcast_parameters(model)
    optimizer = get_megatron_optimizer(
        _optimizer_config(settings), [model], use_gloo_process_groups=False
    )
    return TrainingState(
        model=[model],
        optimizer=optimizer,
        scheduler=_build_scheduler(settings.train, optimizer),
    )


def transformer_config(settings: Settings, layout: ParallelLayout) -> TransformerConfig:
    """Return Megatron's own configuration for these settings.

    Raises:
        ConfigError: Only Transformer Engine's layers can do the settings, and these
            layers are not used; or Megatron refuses the combination.
    """
    model, precision = settings.model, settings.precision
    if not _use_transformer_engine():
        wanted = "without Transformer Engine on a GPU"
        require(
            model.attention == "mha",
            "model.attention",
            model.attention,
            f"mha {wanted}",
        )
        if model.num_experts:
            require(
                layout.tp == 1, "parallel.tp", layout.tp, f"1 for a MoE model {wanted}"
            )
    kind = MLATransformerConfig if model.attention == "mla" else TransformerConfig
    arguments = dict(
        **_architecture(model),
        **(_experts(model) if model.num_experts else {}),
        **(_latent_attention(model) if model.attention == "mla" else {}),
        **_recompute(settings.train),
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        tensor_model_parallel_size=layout.tp,
        # Megatron's MoE layers require sequence parallelism with tensor parallelism
        sequence_parallel=layout.tp > 1 and model.num_experts > 0,
        params_dtype=FORMAT_DTYPES[precision.dtype],
        pipeline_dtype=FORMAT_DTYPES[precision.dtype],
        bf16=precision.dtype == "bf16",
        fp16=precision.dtype == "fp16",
        deterministic_mode=settings.run.exactness == BITWISE
        and torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        **_fp8(precision),
    )
    try:
        return kind(**arguments)
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"model, parallel, train: Megatron refuses the combination: {error}"
        ) from error


def _architecture(model: ModelConfig) -> dict[str, Any]:
    return {
        **{name: getattr(model, name) for name in _SAME_IN_MODEL},
        "ffn_hidden_size": model.dense_ffn_hidden_size or model.moe_ffn_hidden_size,
        "gated_linear_unit": model.activation == "swiglu",
        "activation_func": F.silu if model.activation == "swiglu" else F.gelu,
        # in Megatron 0.16.1 the forward pass of experts with biases fails at EP=1, with
        # or without checkpoints
        "add_bias_linear": model.linear_bias,
        "add_qkv_bias": model.qkv_bias,
        "init_method_std": model.init_std,
    }


def _experts(model: ModelConfig) -> dict[str, Any]:
    has_aux_loss = model.moe_balancing not in ("none", "bias")
    return {
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.shared_expert_ffn_hidden_size
        or None,
        "moe_layer_freq": [
            int(layer >= model.num_dense_layers) for layer in range(model.num_layers)
        ],
        "moe_router_topk": model.moe_topk,
        "moe_router_load_balancing_type": model.moe_balancing
        if has_aux_loss
        else "none",
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff if has_aux_loss else 0.0,
        "moe_router_enable_expert_bias": model.moe_balancing == "bias",
        "moe_router_bias_update_rate": model.moe_bias_update_rate,
        "moe_z_loss_coeff": model.moe_z_loss_coeff,
        "moe_router_score_function": model.moe_score_function,
        "moe_router_dtype": None
        if model.moe_router_dtype == "model"
        else model.moe_router_dtype,
        "moe_expert_capacity_factor": model.moe_capacity_factor,
        "moe_pad_expert_input_to_capacity": model.moe_pad_to_capacity,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": model.moe_grouped_gemm and _use_transformer_engine(),
    }


def _fp8(precision: PrecisionConfig) -> dict[str, Any]:
    """Return the FP8 options of Transformer Engine's layers.

    On a CPU there are none: `fp8_linear` rounds.
    """
    if not (precision.fp8 and _use_transformer_engine()):
        return {}
    return {
        "fp8": "hybrid",
        "fp8_recipe": precision.fp8_recipe,
        "fp8_amax_history_len": precision.fp8_amax_history_len,
        "fp8_amax_compute_algo": "max",
        "fp8_param": precision.fp8_param_gather,
    }


def _latent_attention(model: ModelConfig) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": model.mla_q_lora_rank,
        "kv_lora_rank": model.mla_kv_lora_rank,
        "qk_head_dim": model.mla_qk_head_dim,
        "qk_pos_emb_head_dim": model.mla_qk_pos_emb_head_dim,
        "v_head_dim": model.mla_v_head_dim,
        "rope_type": "rope",
        "rotary_base": model.rotary_base,
        "apply_rope_fusion": False,
    }


def _recompute(train: TrainConfig) -> dict[str, Any]:
    match train.recompute:
        case "full":
            return {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        case "selective":
            return {"recompute_granularity": "selective"}
        case _:
            return {}


def _build_stage(
    settings: Settings,
    config: TransformerConfig,
    vocab_size: int,
    router: type[TopKRouter],
) -> torch.nn.Module:
    model = settings.model
    layers = get_gpt_decoder_block_spec(
        config, _use_transformer_engine(), normalization=model.normalization
    )
    if model.moe_grouped_gemm and not torch.cuda.is_available():
        group_experts(layers)
    use_router(layers, router)
    stage = GPTModel(
        config,
        # the parameter is annotated as the spec of one layer, but also takes the specs
        # of a block
        cast("Any", layers),
        vocab_size=vocab_size,
        max_sequence_length=settings.train.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope"
        if model.position_embedding == "rope"
        else "learned_absolute",
        rotary_base=model.rotary_base,
    )
    if torch.cuda.is_available():
        stage.cuda(torch.cuda.current_device())
    precision = settings.precision
    if precision.fp8 and not torch.cuda.is_available():
        is_delayed = precision.fp8_recipe == "delayed"
        delayed = (
            fp8_linear.DelayedScaling(stage_group, precision.fp8_amax_history_len)
            if is_delayed
            else None
        )
        fp8_linear.use_fp8(stage, delayed, blocks=precision.fp8_recipe == "blockwise")
    wrapped = stage if precision.dtype == "fp32" else Float16Module(config, stage)
    if precision.fp8_param_gather and not torch.cuda.is_available():
        # after the wrapper, which would undo the conversion by changing types
        fp8_tensors.convert(wrapped, fp8_linear.quantizer_of)
    return wrapped


def _use_transformer_engine() -> bool:
    return (
        torch.cuda.is_available()
        and importlib.util.find_spec("transformer_engine") is not None
    )


def _require_formats(settings: Settings) -> None:
    """Refuse number formats that the layers or the optimizer cannot do.

    Raises:
        ConfigError: The first setting that does not fit.
    """
    precision, train = settings.precision, settings.train
    if precision.fp8 and torch.cuda.is_available():
        require(
            _use_transformer_engine(),
            "precision.fp8",
            True,
            "false on a GPU without Transformer Engine",
        )
    elif precision.fp8 and precision.fp8_recipe == "delayed":
        wanted = "none with precision.fp8_recipe=delayed on a CPU"
        require(train.recompute == "none", "train.recompute", train.recompute, wanted)
    if precision.fp8_param_gather:
        wanted = "true where precision.fp8_param_gather=true"
        require(
            train.distributed_optimizer,
            "train.distributed_optimizer",
            train.distributed_optimizer,
            wanted,
        )
    if not precision.state_format.is_plain:
        wanted = (
            "true where precision.master, exp_avg or exp_avg_sq are not fp32 (got"
            f" {precision.state_format})"
        )
        require(
            train.distributed_optimizer,
            "train.distributed_optimizer",
            train.distributed_optimizer,
            wanted,
        )
        has_fused = not torch.cuda.is_available() or _use_transformer_engine()
        require(
            has_fused,
            "precision",
            str(precision.state_format),
            "FP32 states on a GPU without Transformer Engine",
        )
        supported = precision.master != "fp8" or not torch.cuda.is_available()
        require(
            supported,
            "precision.master",
            precision.master,
            "fp32, fp16 or remainder: FusedAdam has no FP8 master",
        )


def _optimizer_config(settings: Settings) -> OptimizerConfig:
    """Return Megatron's own configuration of the optimizer.

    On a CPU, formats other than FP32 use the reference implementation of FusedAdam,
    which is installed here.
    """
    arguments = _optimizer_arguments(settings)
    if settings.precision.state_format.is_plain:
        return OptimizerConfig(**arguments)
    arguments |= _stored_as(settings.precision)
    if torch.cuda.is_available():
        return OptimizerConfig(**arguments)
    precision_adam.install()
    # Megatron imports Transformer Engine's FusedAdam when it checks the types of states
    with precision_adam.importable():
        return OptimizerConfig(**arguments)


def _stored_as(precision: PrecisionConfig) -> dict[str, Any]:
    has_remainders = precision.master == "remainder"
    return {
        "use_precision_aware_optimizer": True,
        "main_params_dtype": torch.float32
        if has_remainders
        else FORMAT_DTYPES[precision.master],
        "exp_avg_dtype": FORMAT_DTYPES[precision.exp_avg],
        "exp_avg_sq_dtype": FORMAT_DTYPES[precision.exp_avg_sq],
        "store_param_remainders": has_remainders,
    }


def _optimizer_arguments(settings: Settings) -> dict[str, Any]:
    train, precision = settings.train, settings.precision
    return {
        **{name: getattr(train, name) for name in _SAME_IN_TRAIN},
        "bf16": precision.dtype == "bf16",
        "fp16": precision.dtype == "fp16",
        "params_dtype": FORMAT_DTYPES[precision.dtype],
        "use_distributed_optimizer": train.distributed_optimizer,
        # otherwise Megatron takes the masters of FP8 parameters from FusedAdam
        "fp8_recipe": precision.fp8_recipe if precision.fp8_param_gather else None,
        "initial_loss_scale": precision.initial_loss_scale,
        "min_loss_scale": precision.min_loss_scale,
        "loss_scale_window": precision.loss_scale_window_iters,
        "hysteresis": precision.loss_scale_hysteresis,
    }


def _build_scheduler(train: TrainConfig, optimizer: Any) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=train.lr,
        min_lr=train.min_lr,
        lr_warmup_steps=train.num_warmup_iters,
        lr_decay_steps=train.num_decay_iters,
        lr_decay_style=train.lr_schedule,
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_steps=train.num_decay_iters,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )
