"""FP8 parameters: casts from parts of masters, stored payloads and scales, copies.

A copy in another order of elements follows payload and scales. The tests run on the
tensors that stand in on a CPU and, marked `gpu`, on Transformer Engine's own tensors.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from moe_ckpt.errors import ConfigError
from moe_ckpt.megatron import fp8_parameters
from moe_ckpt.megatron.fp8_parameters import (
    Shard,
    cast_masters,
    has_history,
    is_fp8_parameter,
    payload_of,
    refresh,
    scales_of,
)
from moe_ckpt.megatron.initial_weights import synchronize_fresh
from moe_ckpt.megatron.replayable import require_replayable
from moe_ckpt.standins.fp8_tensors import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    convert,
)
from tests.harness.gloo.ranks import run_ranks
from tests.megatron.stage import build_stage, join

RECIPES = ("tensorwise", "blockwise", "delayed")
ROWS, COLUMNS = 384, 256
STORED = ("precision=fp8_fp32_fp32", "precision.fp8_param_gather=true")
KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def values(seed: int) -> torch.Tensor:
    """Return master weights, float32 [ROWS * COLUMNS].

    The values of one block are much larger than all other values.
    """
    drawn = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))
    drawn[128:256, :128] *= 1e6
    return drawn.view(-1)


def made(recipe: str, kind: str = "cpu") -> torch.nn.Parameter:
    return _on_gpu(recipe) if kind == "cuda" else _on_cpu(recipe)


def _on_cpu(recipe: str) -> torch.nn.Parameter:
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16)
    quantizers = {
        "tensorwise": Float8CurrentScalingQuantizer(),
        "blockwise": Float8BlockQuantizer(),
        "delayed": Float8Quantizer(torch.full((1,), 0.5), torch.zeros(1)),
    }
    convert(layer, lambda _: quantizers[recipe])
    return cast("torch.nn.Parameter", layer.weight)


def _on_gpu(recipe: str) -> torch.nn.Parameter:
    te: Any = pytest.importorskip("transformer_engine.pytorch")
    recipes: Any = importlib.import_module("transformer_engine.common.recipe")
    kinds = {
        "tensorwise": recipes.Float8CurrentScaling,
        "blockwise": recipes.Float8BlockScaling,
        "delayed": recipes.DelayedScaling,
    }
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # `fp8_model_init` is the older name
    in_fp8 = (
        te.quantized_model_init
        if hasattr(te, "quantized_model_init")
        else te.fp8_model_init
    )
    with in_fp8(enabled=True, recipe=kinds[recipe]()):
        return te.Linear(COLUMNS, ROWS, bias=False, params_dtype=torch.bfloat16).weight


def cast_all(parameter: torch.nn.Parameter, masters: torch.Tensor) -> None:
    group = dist.group.WORLD if parameter.is_cuda else None
    cast_masters(
        [Shard(parameter, masters.to(parameter.device), 0)],
        cast("dist.ProcessGroup", group),
    )
    refresh([parameter])


def computed_with(parameter: torch.nn.Parameter) -> torch.Tensor:
    return cast("Any", parameter).dequantize().detach().cpu()


def near(computed: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether values differ by no more than rounding to a 3-bit mantissa."""
    return bool((computed - wanted).abs().max() <= wanted.abs().max() / 16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_the_masters_in_fp8(recipe: str, kind: str) -> None:
    parameter, masters = made(recipe, kind), values(0)
    assert is_fp8_parameter(parameter)
    assert fp8_parameters.is_supported(parameter)
    assert has_history(parameter) == (recipe == "delayed")
    assert scales_of(parameter).shape == ((3, 2) if recipe == "blockwise" else (1,))
    if recipe == "delayed":
        cast("Any", parameter)._get_quantizer().scale.fill_(0.5)
    cast_all(parameter, masters)
    computed, wanted = computed_with(parameter).float(), masters.view(ROWS, COLUMNS)
    assert near(computed[:128], wanted[:128]) == (recipe != "tensorwise"), (
        "one scale for large and small values"
    )
    assert near(computed, wanted) == (recipe != "delayed"), (
        "values that the scale of earlier passes has no room for"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cast_may_be_repeated(recipe: str, kind: str) -> None:
    parameter = made(recipe, kind)
    cast_all(parameter, values(1))
    first = [
        payload_of(parameter).clone(),
        scales_of(parameter).clone(),
        computed_with(parameter),
    ]
    cast_all(parameter, values(1))
    assert all(
        map(
            torch.equal,
            first,
            [payload_of(parameter), scales_of(parameter), computed_with(parameter)],
        )
    )
    cast_all(parameter, values(2))
    assert not torch.equal(first[0], payload_of(parameter))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_payload_and_scales_are_all_of_a_weight(recipe: str, kind: str) -> None:
    parameter, other = made(recipe, kind), made(recipe, kind)
    cast_all(parameter, values(3))
    cast_all(other, values(4))
    before = computed_with(other)
    payload_of(other).copy_(payload_of(parameter).clone())
    scales_of(other).copy_(scales_of(parameter).clone())
    refresh([other])
    assert not torch.equal(computed_with(other), before), (
        "a copy in another order has followed"
    )
    assert torch.equal(computed_with(other), computed_with(parameter))
    scales_of(other).mul_(2.0)
    refresh([other])
    assert not torch.equal(computed_with(other), computed_with(parameter))


@pytest.mark.parametrize("kind", KINDS)
def test_delayed_scaling_casts_with_the_scale_that_is_there(kind: str) -> None:
    parameter = made("delayed", kind)
    quantizer = cast("Any", parameter)._get_quantizer()
    quantizer.scale.fill_(2.0)
    quantizer.amax.zero_()
    cast_all(parameter, values(5))
    assert scales_of(parameter).item() == 0.5
    assert quantizer.amax.item() == values(5).bfloat16().abs().max(), (
        "noted for the next passes"
    )
    assert quantizer.scale.item() == 2.0


def _cast_by_parts() -> None:
    """Cast two weights whose masters are on two ranks.

    Each rank has a part of the first master. Rank 1 has the whole second master, and
    rank 0 has no part of the second master.
    """
    join("parallel.dp=2")
    rank, half = dist.get_rank(), ROWS * COLUMNS // 2 + 77
    for recipe in RECIPES:
        whole, parts = [made(recipe), made(recipe)], [made(recipe), made(recipe)]
        masters = [values(6), values(7)]
        for parameter, master in zip(whole, masters, strict=True):
            cast_all(parameter, master)
        mine = slice(0, half) if rank == 0 else slice(half, None)
        shards = [
            Shard(parts[0], masters[0][mine], mine.start),
            Shard(parts[1], masters[1], 0)
            if rank == 1
            else Shard(parts[1], None, None),
        ]
        cast_masters(shards, cast("dist.ProcessGroup", dist.group.WORLD))
        for parameter, expected, owned in zip(
            parts, whole, (mine, slice(None) if rank else slice(0)), strict=True
        ):
            assert torch.equal(scales_of(parameter), scales_of(expected)), recipe
            assert torch.equal(
                payload_of(parameter)[owned], payload_of(expected)[owned]
            ), recipe


def test_parts_on_several_ranks_are_cast_with_scales_of_the_whole() -> None:
    run_ranks(2, _cast_by_parts)


def _start_afresh() -> None:
    state, _ = build_stage(*STORED)
    masters = {
        name: cast("Any", parameter).main_param.clone()
        for name, parameter in state.model[0].named_parameters()
        if is_fp8_parameter(parameter)
    }
    assert masters
    synchronize_fresh(state)
    parameters = dict(state.model[0].named_parameters())
    for name, values_before in masters.items():
        master = cast("Any", parameters[name]).main_param
        assert torch.equal(master, values_before), (
            "masters keep the bits that FP8 has no room for"
        )
        assert not torch.equal(master, computed_with(parameters[name]).float().view(-1))


def test_masters_keep_what_fp8_rounds_off_where_a_run_starts() -> None:
    run_ranks(1, _start_afresh)


def _refusals() -> None:
    state, _ = build_stage(*STORED)
    require_replayable(state)
    chunk: Any = state.model[0]
    chunk.ddp_config.fp8_param_gather = False
    with pytest.raises(
        ConfigError,
        match=r"ddp_config\.fp8_param_gather: got False, wanted True where parameters",
    ):
        require_replayable(state)
    chunk.ddp_config.fp8_param_gather = True
    config: Any = state.inner_optimizers[0].config
    # Megatron sets this flag for FP16 masters and for delayed scaling
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    with pytest.raises(
        ConfigError,
        match=r"main_params_dtype: got 'torch.float32 in FusedAdam', wanted FP32 where",
    ):
        require_replayable(state)
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = False
    fp8 = next(each for each in chunk.parameters() if is_fp8_parameter(each))
    fp8._quantizer = object()
    with pytest.raises(
        ConfigError,
        match=r"got 'Float8Tensor', wanted plain tensors, or FP8 with delayed",
    ):
        require_replayable(state)


def test_fp8_parameters_that_cannot_be_exact_are_refused_by_name() -> None:
    run_ranks(1, _refusals)


def _grouped_with_history() -> None:
    delayed = ("precision.fp8_recipe=delayed", "model.moe_grouped_gemm=true")
    state, _ = build_stage(*STORED, *delayed)
    with pytest.raises(
        ConfigError,
        match=(
            r"fp8_recipe: got 'delayed', wanted tensorwise or blockwise where grouped"
        ),
    ):
        require_replayable(state)


def test_grouped_experts_with_histories_and_fp8_parameters_are_refused() -> None:
    run_ranks(1, _grouped_with_history)
