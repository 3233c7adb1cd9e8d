"""The state of FP8 layers between iterations: scales and histories of delayed scaling.

Owns: the location of the state (`fp8_meta` of each module), its allocation before the
first forward pass, and cleaning up after a pass that was cut off. The CPU reference
(`standins.fp8_linear.DelayedScaling`) keeps its state in the same attributes. The code
is written against Transformer Engine 2.9 and later. Must not: know snapshots, which
take these tensors as buffers.

Recipes that take a scale from the tensor itself (tensorwise, blockwise, MXFP8) have no
such state.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch

FORWARD, BACKWARD = "scaling_fwd", "scaling_bwd"
_TENSORS = ("scale", "amax_history")


def is_scaling(name: str) -> bool:
    """Return whether a name is a name of `named_scaling`."""
    return f".{FORWARD}." in name or f".{BACKWARD}." in name


def named_scaling(
    modules: Iterable[tuple[str, torch.nn.Module]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of delayed scaling, float32, in place.

    Names are `linear.scaling_fwd.scale`, `linear.scaling_fwd.amax_history` and so on. A
    module that multiplies n times has scales of [3n] tensors in forward (inputs,
    weights, outputs), and of [2n] tensors in backward. A history has a row for each
    update that it remembers.

    Args:
        modules: Names and modules, as `named_modules` yields them.
    """
    for name, module in modules:
        # no `getattr`, with which torch searches three dictionaries for a missing
        # attribute
        meta = vars(module).get("fp8_meta")
        if meta is None:
            continue
        for direction in (FORWARD, BACKWARD):
            for kind in _TENSORS:
                tensor = getattr(meta.get(direction), kind, None)
                if torch.is_tensor(tensor):
                    yield f"{name}.{direction}.{kind}", tensor


def allocate_scaling(chunks: Sequence[torch.nn.Module]) -> None:
    """Allocate the scaling state of Transformer Engine's layers before the first pass.

    Without this call the first forward pass allocates the state. A snapshot that is
    taken before that pass would lack the state, and a longer history would be cut in
    place.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return
    base: Any = importlib.import_module(
        "transformer_engine.pytorch.module.base"
    ).TransformerEngineBaseModule
    utilities: Any = importlib.import_module("megatron.core.fp8_utils")
    for chunk in chunks:
        config: Any = cast("Any", chunk).config
        if getattr(config, "fp8", None) and config.fp8_recipe == "delayed":
            # without gradients, leaving the context updates no scale
            with torch.no_grad(), utilities.get_fp8_context(config):
                for module in chunk.modules():
                    if isinstance(module, base):
                        cast("Any", module).init_fp8_metadata(
                            num_gemms=_num_products(module)
                        )


def _num_products(module: torch.nn.Module) -> int:
    """Return the number of matrix products of a layer.

    Attention has 3 products, a fused MLP has 2, a grouped layer has one for each
    expert. Attention has scales even if it does not use FP8.
    """
    if hasattr(module, "fused_attention"):
        return 3
    return getattr(module, "num_gemms", 2 if hasattr(module, "fc2_weight") else 1)


def forget_noted(modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
    """Drop the largest values of inputs and outputs that an evaluation has noted.

    Transformer Engine notes largest values without gradients, too, and the next
    training pass would take its scales from them. A recovery repeats no evaluation, and
    would take other scales.

    Largest values of weights stay: the cast of FP8 weights notes these values after a
    step, and an evaluation notes the same values as the next pass.
    """
    named = named_scaling(modules)
    forward = [
        tensor for name, tensor in named if name.endswith(f"{FORWARD}.amax_history")
    ]
    # columns are input, weight, output of each product
    noted = [history[0, first::3] for history in forward for first in (0, 2)]
    if noted:
        torch._foreach_zero_(noted)


def forget_pass() -> None:
    """Drop the scales that a pass has stored for recomputation in backward.

    Call when the pass was cut off.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return
    pytorch: Any = importlib.import_module("transformer_engine.pytorch")
    module = (
        "quantization"
        if importlib.util.find_spec(f"{pytorch.__name__}.quantization")
        else "fp8"
    )
    manager: Any = importlib.import_module(
        f"{pytorch.__name__}.{module}"
    ).FP8GlobalStateManager
    for kept in getattr(
        manager, "quantization_state", manager
    ).fp8_tensors_recompute_buffer:
        kept.clear()  # the next pass would use them
    distributed: Any = importlib.import_module(f"{pytorch.__name__}.distributed")
    distributed.activation_recompute_forward._is_first_fp8_module.clear()
