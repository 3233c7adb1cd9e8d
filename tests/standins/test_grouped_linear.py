"""Grouped experts replace sequential experts in a block's specification.

The specifications have the forms of megatron-core 0.16 and of later versions.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, cast

import pytest
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from moe_ckpt.standins.grouped_linear import GroupedLinear, group_experts

FORMS = {"0.16": ModuleSpec, "0.18": functools.partial}


@pytest.mark.parametrize("version", FORMS)
def test_experts_of_each_layer_are_built_as_one_module(version: str) -> None:
    form: Any = FORMS[version]
    moe = MoESubmodules(experts=form(SequentialMLP, submodules=None))
    dense = form(MLP, submodules=SimpleNamespace(linear_fc1=None))
    layers = [
        SimpleNamespace(submodules=SimpleNamespace(mlp=mlp))
        for mlp in (form(MoELayer, submodules=moe), dense)
    ]
    group_experts(cast("Any", SimpleNamespace(layer_specs=layers)))
    experts: Any = moe.experts
    assert isinstance(experts, form)
    built, parts = (
        (experts.func, experts.keywords["submodules"])
        if version == "0.18"
        else (experts.module, experts.submodules)
    )
    assert built is TEGroupedMLP
    assert parts.linear_fc1 is parts.linear_fc2 is GroupedLinear
    assert vars(
        dense.keywords["submodules"] if version == "0.18" else dense.submodules
    ) == {"linear_fc1": None}
