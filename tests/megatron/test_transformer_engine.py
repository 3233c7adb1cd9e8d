"""Delayed scaling: what FP8 layers keep between iterations is found, named, and there before the first pass."""

from __future__ import annotations

import importlib
from typing import Any, cast

import pytest
import torch

from moe_ckpt.megatron.fp8_linear import E4M3, E5M2, ScalingState
from moe_ckpt.megatron.transformer_engine import BACKWARD, FORWARD, allocate_scaling, is_scaling, named_scaling


def test_scaling_of_each_layer_is_found_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    forward, backward = ScalingState(3, 2, E4M3), ScalingState(2, 2, E5M2)
    cast("Any", model[0]).fp8_meta = {FORWARD: forward, BACKWARD: backward, "recipe": object()}
    found = dict(named_scaling(model))
    assert list(found) == [f"0.{way}.{kind}" for way in (FORWARD, BACKWARD) for kind in ("scale", "amax_history")]
    assert found[f"0.{FORWARD}.scale"] is forward.scale
    assert found[f"0.{BACKWARD}.amax_history"] is backward.amax_history
    assert all(map(is_scaling, found))
    assert not is_scaling("0.weight")


def test_values_are_rounded_with_the_scale_of_earlier_passes() -> None:
    state, values = ScalingState(3, 2, E4M3), torch.tensor([0.3, -100.0, 500.0])
    assert state.round(values, tensor=1).tolist() == [0.3125, -96.0, 448.0], "scale 1; too large: cut"
    state.round(torch.ones(1), tensor=1)
    assert state.amax_history[0].tolist() == [0.0, 500.0, 0.0]
    state.update(torch.tensor([0.0, 3.0, torch.inf]))  # the largest values over all ranks
    scale = 448.0 / torch.tensor(3.0)
    assert state.scale.tolist() == [1.0, scale.item(), 1.0], "none and an infinite one change nothing"
    assert state.round(torch.tensor([0.3]), tensor=1) == 44.0 * scale.reciprocal()  # not 44.8
    state.update(torch.tensor([0.0, 1.75, 0.0]))
    assert state.scale[1] == scale, "the larger one of two passes"
    assert not state.amax_history[0].any(), "the next pass has noted nothing yet"
    state.update(torch.tensor([0.0, 1.75, 0.0]))
    assert state.scale[1] == 256.0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:fp8_autocast is deprecated:DeprecationWarning")
def test_a_layer_put_back_computes_the_same_again() -> None:
    """Two passes of Transformer Engine's layer from the same scales and histories are the same, bit for bit."""
    te: Any = pytest.importorskip("transformer_engine.pytorch")
    recipe: Any = importlib.import_module("transformer_engine.common.recipe")
    layer = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16)
    model = torch.nn.Sequential(layer)
    inputs = torch.randn(32, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def run() -> list[torch.Tensor]:
        outputs = []
        for factor in (1.0, 30.0, 0.1):
            with te.fp8_autocast(enabled=True, fp8_recipe=recipe.DelayedScaling(amax_history_len=2)):
                output = model(inputs * factor)
            output.sum().backward()
            outputs.append(output.detach().clone())
        return [*outputs, inputs.grad.clone()]  # type: ignore[union-attr]

    run()
    kept = {name: tensor.clone() for name, tensor in named_scaling(model)}
    assert len(kept) == 4
    inputs.grad = None
    first = run()
    for name, tensor in named_scaling(model):
        tensor.copy_(kept[name])
    inputs.grad = None
    assert all(map(torch.equal, first, run()))
    for _, tensor in named_scaling(model):
        tensor.fill_(8.0)
    inputs.grad = None
    assert not all(map(torch.equal, first, run())), "with other scales, values are rounded differently"


def test_nothing_is_allocated_without_transformer_engine() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    allocate_scaling([model])
    assert not list(named_scaling(model))
