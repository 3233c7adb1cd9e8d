"""The check that replays and snapshots can repeat a training, before training begins.

Owns: the options of Megatron that no log and no snapshot covers. Must not: replay
(`megatron.replay` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from moe_ckpt.config import require
from moe_ckpt.megatron import fp8_parameters
from moe_ckpt.megatron.operator_names import bare_model, is_grouped
from moe_ckpt.megatron.optimizer_state import holds_masters
from moe_ckpt.megatron.overlapped import gathers_in_forward
from moe_ckpt.megatron.state import TrainingState

_IN_MEMORY = "snapshots in memory: "
_FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
_OFF_IN_MODELS = (
    "mtp_standalone",
    # gradients are clipped by a norm of their own, which no record has
    "mtp_detach_heads",
    # routers draw in evaluations, too, and no log has these draws
    *("moe_input_jitter_eps", "moe_router_force_load_balancing"),
    "moe_router_force_biased",
    # a pass that is cut off leaves gradients behind
    "defer_embedding_wgrad_compute",
    *("fp4", "fp8_dot_product_attention", "fp8_multi_head_attention"),
    *("enable_cuda_graph", "external_cuda_graph"),
    # modules of the fuser keep scales where no snapshot looks
    "use_transformer_engine_op_fuser",
    # user buffers belong to one communicator, which a generation replaces
    "tp_comm_overlap",
)
"""Options of Megatron's models that no log and no snapshot covers."""

_OFF_IN_REDUCTIONS = (
    "use_megatron_fsdp",
    "nccl_ub",
    "reuse_grad_buf_for_mxfp8_param_ag",
)
"""Options of Megatron's data-parallel wrapper of the same kind."""


def require_replayable(state: TrainingState, *, rows: int | None = None) -> None:
    """Check that replays can repeat the training.

    Args:
        state: This rank's training state.
        rows: The second dimension of the tensors between stages, needed if sequence
            lengths may vary.

    Raises:
        ConfigError: An option crosses stages, or changes state, in a way that no log
            covers.
    """
    chunk = cast("Any", state.model[0])
    model, ddp = chunk.config, chunk.ddp_config
    if rows is None:
        _require_off(model, "variable_seq_lengths")
    _require_off(model, *_OFF_IN_MODELS)
    _require_off(ddp, *_OFF_IN_REDUCTIONS)
    for optimizer in state.inner_optimizers:
        _require_off(optimizer.config, "optimizer_cpu_offload")
    if getattr(model, "fp8", None):
        recipe = getattr(model.fp8_recipe, "value", model.fp8_recipe)
        _require_choice("fp8_recipe", recipe, _FP8_RECIPES)
    _require_known_parameters(state)
    for optimizer in state.inner_optimizers:
        kind = optimizer.config.optimizer
        wanted = "adam: snapshots hold the moments of no other"
        require(kind == "adam", f"{_IN_MEMORY}optimizer", kind, wanted)
    captured = getattr(model, "cuda_graph_impl", "none")
    _require_choice("cuda_graph_impl", captured, ["none"])
    # DeepEP and HybridEP key their buffers by group
    dispatcher = getattr(model, "moe_token_dispatcher_type", "alltoall")
    known = ["alltoall", "allgather"]
    _require_choice("moe_token_dispatcher_type", dispatcher, known)
    instances = "num_distributed_optimizer_instances"
    _require_choice(instances, getattr(ddp, instances, 1), [1])
    _require_known_generators()


def _require_off(config: Any, *names: str) -> None:
    """Raise ConfigError for an option that is on; older Megatron lacks some options."""
    for name in names:
        got = getattr(config, name, None)
        require(not got, f"{_IN_MEMORY}{name}", got, "False")


def _require_choice(name: str, got: object, choices: Sequence[object]) -> None:
    *most, last = map(str, choices)
    wanted = f"{', '.join(most)} or {last}" if most else last
    require(got in choices, f"{_IN_MEMORY}{name}", got, wanted)


def _require_known_generators() -> None:
    """Raise ConfigError for generators of captured graphs.

    The state of such a generator is a handle, and a copy of the handle would lose a
    part of the state.
    """
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    for name, generator in tracker.get_states().items():
        is_plain = torch.is_tensor(generator)
        require(
            is_plain,
            "snapshots in memory: generators for captured graphs",
            name,
            "none: use_cudagraphable_rng",
        )


def _require_known_parameters(state: TrainingState) -> None:
    """Raise ConfigError for parameters of an unknown stored form or cast."""
    for chunk in state.model:
        parameters = dict(bare_model(chunk).named_parameters())
        for name, parameter in parameters.items():
            kind = type(parameter.data)
            known = kind is torch.Tensor or fp8_parameters.is_supported(parameter)
            wanted = (
                "plain tensors, or FP8 with delayed, tensorwise or blockwise scaling"
            )
            require(known, f"snapshots in memory: {name}", kind.__name__, wanted)
        fp8 = {
            name: each
            for name, each in parameters.items()
            if fp8_parameters.is_fp8_parameter(each)
        }
        if fp8:
            _require_cast_by_megatron(state, chunk)
        grouped = any(
            fp8_parameters.has_history(each) and is_grouped(name)
            for name, each in fp8.items()
        )
        wanted = (
            "tensorwise or blockwise where grouped experts have FP8 parameters: they"
            " share the tensor of histories"
        )
        require(not grouped, "snapshots in memory: fp8_recipe", "delayed", wanted)


def _require_cast_by_megatron(state: TrainingState, chunk: torch.nn.Module) -> None:
    """Raise ConfigError unless Megatron holds and casts masters of FP8 parameters."""
    gather = cast("Any", chunk).ddp_config.fp8_param_gather
    require(
        gather,
        "snapshots in memory: ddp_config.fp8_param_gather",
        gather,
        "True where parameters are FP8",
    )
    late = gathers_in_forward(chunk)
    require(
        not late,
        "snapshots in memory: overlap_param_gather",
        late,
        "False where parameters are FP8: not tried",
    )
    for optimizer in state.inner_optimizers:
        sharded = isinstance(optimizer, DistributedOptimizer)
        require(
            sharded,
            "snapshots in memory: use_distributed_optimizer",
            sharded,
            "True where parameters are FP8",
        )
        wanted = (
            "FP32 where parameters are FP8, and with use_precision_aware_optimizer"
            " fp8_recipe tensorwise or blockwise"
        )
        got = f"{optimizer.config.main_params_dtype} in FusedAdam"
        # FusedAdam sets the scale of a parameter only on ranks that keep a part of its
        # master, and takes 16-bit remainders for masters. With FP16 masters and a
        # recipe other than delayed, Megatron gives FusedAdam no parameters
        require(
            not holds_masters(optimizer),
            "snapshots in memory: main_params_dtype",
            got,
            wanted,
        )
