"""Delayed scaling: state that FP8 layers keep between iterations is found and named.

The state exists before the first pass.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from moe_ckpt.megatron.transformer_engine import (
    BACKWARD,
    FORWARD,
    allocate_scaling,
    forget_noted,
    forget_pass,
    is_scaling,
    named_scaling,
)
from moe_ckpt.standins.fp8_linear import E4M3, E5M2, ScalingState


def test_scaling_of_each_layer_is_found_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    forward, backward = ScalingState(3, 2, E4M3), ScalingState(2, 2, E5M2)
    cast("Any", model[0]).fp8_meta = {
        FORWARD: forward,
        BACKWARD: backward,
        "recipe": object(),
    }
    found = dict(named_scaling(model.named_modules()))
    assert list(found) == [
        f"0.{way}.{kind}"
        for way in (FORWARD, BACKWARD)
        for kind in ("scale", "amax_history")
    ]
    assert found[f"0.{FORWARD}.scale"] is forward.scale
    assert found[f"0.{BACKWARD}.amax_history"] is backward.amax_history
    assert all(map(is_scaling, found))
    assert not is_scaling("0.weight")


def test_values_are_rounded_with_the_scale_of_earlier_passes() -> None:
    state, values = ScalingState(3, 2, E4M3), torch.tensor([0.3, -100.0, 500.0])
    assert state.round(values, tensor=1).tolist() == [0.3125, -96.0, 448.0], (
        "scale 1; too large: cut"
    )
    state.round(torch.ones(1), tensor=1)
    assert state.amax_history[0].tolist() == [0.0, 500.0, 0.0]
    # the largest values over all ranks
    state.update(torch.tensor([0.0, 3.0, torch.inf]))
    scale = 448.0 / torch.tensor(3.0)
    assert state.scale.tolist() == [1.0, scale.item(), 1.0], (
        "none and an infinite one change nothing"
    )
    # 0.3 * scale is 44.8, which E4M3 rounds to 44
    assert state.round(torch.tensor([0.3]), tensor=1) == 44.0 * scale.reciprocal()
    state.update(torch.tensor([0.0, 1.75, 0.0]))
    assert state.scale[1] == scale, "the larger one of two passes"
    assert not state.amax_history[0].any(), "the next pass has noted nothing yet"
    state.update(torch.tensor([0.0, 1.75, 0.0]))
    assert state.scale[1] == 256.0


def test_values_noted_between_iterations_are_dropped_but_those_of_weights() -> None:
    layer = torch.nn.Linear(2, 2)
    forward, backward = ScalingState(6, 2, E4M3), ScalingState(4, 2, E5M2)
    for state in (forward, backward):
        state.amax_history.fill_(2.0)
    cast("Any", layer).fp8_meta = {FORWARD: forward, BACKWARD: backward}
    forget_noted(layer.named_modules())
    assert forward.amax_history.tolist() == [[0.0, 2.0, 0.0, 0.0, 2.0, 0.0], [2.0] * 6]
    assert bool((backward.amax_history == 2.0).all())


STAND_IN = {
    "__init__.py": "",
    "pytorch/__init__.py": "",
    "pytorch/module/__init__.py": "",
    "pytorch/module/base.py": """
import torch

class TransformerEngineBaseModule(torch.nn.Module):
    def init_fp8_metadata(self, num_gemms):
        self.num_allocated = num_gemms
""",
    "pytorch/quantization.py": """
class FP8GlobalStateManager:
    fp8_tensors_recompute_buffer = [["scales"]]
""",
    "pytorch/distributed.py": """
class activation_recompute_forward:
    _is_first_fp8_module = [True]
""",
}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide Transformer Engine's names, without a GPU."""
    for name, text in STAND_IN.items():
        file = tmp_path / "transformer_engine" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for name in imported_engine():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in imported_engine():
        del sys.modules[name]


def imported_engine() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]


@pytest.mark.usefixtures("engine")
def test_layers_allocate_what_their_first_pass_would() -> None:
    """Attention has no parameters, but has scales."""
    base: Any = importlib.import_module(
        "transformer_engine.pytorch.module.base"
    ).TransformerEngineBaseModule
    linear, grouped, fused, attention = layers = [base() for _ in range(4)]
    linear.weight = torch.nn.Parameter(torch.zeros(1))
    grouped.num_gemms, fused.fc2_weight, attention.fused_attention = (
        5,
        torch.nn.Parameter(torch.zeros(1)),
        object(),
    )
    model = torch.nn.Sequential(*layers)
    cast("Any", model).config = SimpleNamespace(fp8="hybrid", fp8_recipe="delayed")
    allocate_scaling([model])
    assert [layer.num_allocated for layer in layers] == [1, 5, 2, 3]


@pytest.mark.usefixtures("engine")
def test_a_pass_that_was_cut_off_leaves_nothing_to_the_next_one() -> None:
    forget_pass()
    manager = importlib.import_module(
        "transformer_engine.pytorch.quantization"
    ).FP8GlobalStateManager
    recomputed = importlib.import_module(
        "transformer_engine.pytorch.distributed"
    ).activation_recompute_forward
    assert manager.fp8_tensors_recompute_buffer == [[]]
    assert recomputed._is_first_fp8_module == []


@pytest.mark.gpu
def test_the_names_are_those_of_transformer_engine() -> None:
    te: Any = pytest.importorskip("transformer_engine.pytorch")
    quantization, distributed, base = (
        importlib.import_module(f"{te.__name__}.{name}")
        for name in ("quantization", "distributed", "module.base")
    )
    attention = te.DotProductAttention(4, 32)
    assert isinstance(attention, base.TransformerEngineBaseModule)
    assert hasattr(attention, "fused_attention")
    assert distributed.activation_recompute_forward._is_first_fp8_module == []
    manager = quantization.FP8GlobalStateManager
    assert hasattr(
        getattr(manager, "quantization_state", manager), "fp8_tensors_recompute_buffer"
    )


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:fp8_autocast is deprecated:DeprecationWarning")
def test_a_layer_put_back_computes_the_same_again() -> None:
    """Two runs from the same scales and histories are equal bit for bit.

    The layer is Transformer Engine's own.
    """
    te: Any = pytest.importorskip("transformer_engine.pytorch")
    recipe: Any = importlib.import_module("transformer_engine.common.recipe")
    layer = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16)
    model = torch.nn.Sequential(layer)
    inputs = torch.randn(
        32, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True
    )

    def run() -> list[torch.Tensor]:
        outputs = []
        for factor in (1.0, 30.0, 0.1):
            with te.fp8_autocast(
                enabled=True, fp8_recipe=recipe.DelayedScaling(amax_history_len=2)
            ):
                output = model(inputs * factor)
            output.sum().backward()
            outputs.append(output.detach().clone())
        return [*outputs, inputs.grad.clone()]  # type: ignore[union-attr]

    run()
    kept = {
        name: tensor.clone() for name, tensor in named_scaling(model.named_modules())
    }
    assert len(kept) == 4
    inputs.grad = None
    first = run()
    for name, tensor in named_scaling(model.named_modules()):
        tensor.copy_(kept[name])
    inputs.grad = None
    assert all(map(torch.equal, first, run()))
    for _, tensor in named_scaling(model.named_modules()):
        tensor.fill_(8.0)
    inputs.grad = None
    assert not all(map(torch.equal, first, run())), (
        "with other scales, values are rounded differently"
    )


def test_nothing_is_allocated_without_transformer_engine() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    allocate_scaling([model])
    assert not list(named_scaling(model.named_modules()))
