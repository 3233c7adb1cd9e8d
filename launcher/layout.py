"""Fits the degrees of parallelism of a job to the world size. Pure: no torch."""

from __future__ import annotations

from launcher.config import AUTO, ModelConfig, ParallelConfig, TrainConfig
from moe_ckpt.config import require
from moe_ckpt.types import ParallelLayout


def fit_layout(
    parallel: ParallelConfig, world_size: int, *, num_experts: int
) -> ParallelLayout:
    """Return the degrees of parallelism for a number of processes.

    `auto` means 2 pipeline stages from 4 processes on, and 2-way expert parallelism,
    where the numbers divide.

    Args:
        parallel: The settings of parallelism.
        world_size: The number of processes.
        num_experts: The routed experts of a layer; 0: a dense model.

    Raises:
        ConfigError: The product is not the world size, or a division has a remainder.
            The error names the numbers.
    """
    tp = 1 if parallel.tp == AUTO else int(parallel.tp)
    dp = None if parallel.dp == AUTO else int(parallel.dp)
    require(
        world_size % tp == 0, "parallel.tp", tp, f"a divisor of {world_size} processes"
    )
    pp = _auto_pp(world_size, tp, dp) if parallel.pp == AUTO else int(parallel.pp)
    require(
        world_size % (pp * tp) == 0,
        "parallel.pp * parallel.tp",
        pp * tp,
        f"a divisor of {world_size} processes",
    )
    dp = world_size // (pp * tp) if dp is None else dp
    product = f"pp={pp} * dp={dp} * tp={tp}"
    require(
        pp * dp * tp == world_size,
        f"parallel: {product}",
        pp * dp * tp,
        f"{world_size}, the number of processes",
    )
    can_halve_experts = num_experts > 0 and num_experts % 2 == 0 and dp % 2 == 0
    ep = (2 if can_halve_experts else 1) if parallel.ep == AUTO else int(parallel.ep)
    require(dp % ep == 0, "parallel.ep", ep, f"a divisor of dp={dp}")
    return ParallelLayout(pp=pp, dp=dp, ep=ep, tp=tp)


def _auto_pp(world_size: int, tp: int, dp: int | None) -> int:
    replicas = world_size // tp
    if dp is not None and replicas % dp == 0:
        return replicas // dp
    return 2 if replicas >= 4 and replicas % 2 == 0 else 1


def check_fit(layout: ParallelLayout, model: ModelConfig, train: TrainConfig) -> None:
    """Check that model and batch divide over a layout.

    Raises:
        ConfigError: A division has a remainder. The error names the numbers.
    """
    require(
        model.num_layers % layout.pp == 0,
        "parallel.pp",
        layout.pp,
        f"a divisor of {model.num_layers} layers",
    )
    if model.num_experts:
        wanted = f"a divisor of model.num_experts={model.num_experts}"
        require(model.num_experts % layout.ep == 0, "parallel.ep", layout.ep, wanted)
    else:
        require(layout.ep == 1, "parallel.ep", layout.ep, "1 where model.num_experts=0")
    heads = model.num_query_groups or model.num_attention_heads
    require(
        heads % layout.tp == 0,
        "parallel.tp",
        layout.tp,
        f"a divisor of {heads} attention heads or query groups",
    )
    wanted = f"a divisor of model.num_attention_heads={model.num_attention_heads}"
    require(
        model.num_attention_heads % heads == 0, "model.num_query_groups", heads, wanted
    )
    dense, wanted = model.num_dense_layers, f"0 to model.num_layers={model.num_layers}"
    require(0 <= dense <= model.num_layers, "model.num_dense_layers", dense, wanted)
    length = train.sequence_length
    require(
        length % layout.tp == 0,
        "train.sequence_length",
        length,
        f"a multiple of tp={layout.tp}",
    )
    step = train.micro_batch_size * layout.dp
    wanted = (
        f"a multiple of train.micro_batch_size={train.micro_batch_size} *"
        f" dp={layout.dp}"
    )
    require(
        train.global_batch_size % step == 0,
        "train.global_batch_size",
        train.global_batch_size,
        wanted,
    )


def check_supervised(
    layout: ParallelLayout, model: ModelConfig, train: TrainConfig
) -> None:
    """Check that a replaced rank can build the model alone.

    While it builds the model, Megatron asks all ranks for the kinds of parameters. A
    rank that builds alone knows only its own kinds. On a stage without experts such a
    rank makes no optimizer for experts, and the norm of gradients would never end.

    Raises:
        ConfigError: A stage has no experts, and the optimizer is not distributed.
    """
    num_first = model.num_layers // layout.pp
    lacks_experts = (
        model.num_experts > 0 and layout.pp > 1 and model.num_dense_layers >= num_first
    )
    wanted = (
        "true where a stage has no experts"
        f" (model.num_dense_layers={model.num_dense_layers}, {layout})"
    )
    require(
        train.distributed_optimizer or not lacks_experts,
        "train.distributed_optimizer",
        False,
        wanted,
    )
