"""Maps parameters and buffers of a Megatron-Core GPT to operators, by name.

Operators have the numbers of global layers and global experts.
"""

from __future__ import annotations

import re
from typing import Any, cast

import torch

from moe_ckpt.errors import ConfigError
from moe_ckpt.megatron.transformer_engine import is_scaling
from moe_ckpt.types import OperatorId, OperatorKind

_EDGES = {
    "embedding": OperatorKind.EMBEDDING,
    "rotary_pos_emb": OperatorKind.EMBEDDING,
    "output_layer": OperatorKind.OUTPUT,
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_MTP = re.compile(
    r"mtp\.layers\.(\d+)\.(?:(?:transformer_layer|mtp_model_layer)\.)?(.+)"
)
_SEQUENTIAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.linear_fc[12]\.(?:weight|bias)(\d+)$")
_SECTIONS = (
    OperatorKind.EMBEDDING,
    OperatorKind.BLOCK,
    OperatorKind.FINAL_NORM,
    OperatorKind.OUTPUT,
)


def bare_model(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return a model chunk without its wrappers for data parallelism and precision."""
    while hasattr(chunk, "module"):
        chunk = cast("torch.nn.Module", chunk.module)
    return chunk


def locate(model: torch.nn.Module, name: str) -> OperatorId:
    """Return the operator of a parameter or buffer.

    Args:
        model: A bare GPT model.
        name: The name of the parameter or buffer in the model.

    Raises:
        ConfigError: The name belongs to no operator, or to experts that share one
            weight (Megatron's legacy GroupedMLP).
    """
    root = name.partition(".")[0]
    if root in _EDGES:
        return OperatorId(kind=_EDGES[root])
    if name.startswith("decoder.final_layernorm."):
        return OperatorId(kind=OperatorKind.FINAL_NORM)
    if match := _LAYER.match(name):
        layer = cast("Any", model).decoder.layers[int(match[1])]
        return _locate_in_layer(
            layer.mlp, match[2], layer=layer.layer_number - 1, mtp_depth=None
        )
    if match := _MTP.match(name):
        module = cast("Any", model).mtp.layers[int(match[1])]
        inner = getattr(module, "transformer_layer", None) or module.mtp_model_layer
        return _locate_in_layer(inner.mlp, match[2], layer=0, mtp_depth=int(match[1]))
    raise ConfigError(
        f"snapshots in memory: {name!r} is in no operator, wanted a GPTModel of"
        " Megatron-Core"
    )


def _locate_in_layer(
    mlp: Any, rest: str, *, layer: int, mtp_depth: int | None
) -> OperatorId:
    position = {"layer": layer, "mtp_depth": mtp_depth}
    if rest.startswith("mlp.router."):
        return OperatorId(kind=OperatorKind.GATE, **position)
    if rest.startswith("mlp.experts."):
        match = _SEQUENTIAL_EXPERT.match(rest) or _GROUPED_EXPERT.match(rest)
        # a grouped layer has the scales of all of its experts in one tensor
        if match is None and is_scaling(rest):
            return OperatorId(kind=OperatorKind.BLOCK, **position)
        if match is None:
            raise ConfigError(
                f"snapshots in memory: {rest!r} holds several experts, wanted one"
                " weight an expert"
            )
        return OperatorId(
            kind=OperatorKind.EXPERT,
            expert=mlp.local_expert_indices[int(match[1])],
            **position,
        )
    return OperatorId(kind=OperatorKind.BLOCK, **position)


def front_to_back(operator: OperatorId) -> tuple[int, ...]:
    """Return a key that sorts operators from the front of the model to the back.

    The order is embedding, layers (block, gate, experts), final norm, MTP modules,
    output.
    """
    in_layer = operator.layer is not None
    section = OperatorKind.BLOCK if in_layer else operator.kind
    # 5 for MTP modules: between the final norm, 4, and the output, 6
    after_decoder = 2 * _SECTIONS.index(section) + (
        3 if operator.mtp_depth is not None else 0
    )
    kind = list(OperatorKind).index(operator.kind)
    return (
        after_decoder,
        operator.mtp_depth or 0,
        operator.layer or 0,
        kind,
        operator.expert or 0,
    )


def is_grouped(name: str) -> bool:
    """Return whether a parameter is one expert's weight in a grouped layer.

    A grouped layer has all local experts in one module.
    """
    return _GROUPED_EXPERT.search(name) is not None


def grouped_name(name: str) -> str:
    """Return a name without the number of a grouped expert.

    Weights of one such name all compute gradients, or none of them does.
    """
    return re.sub(r"(linear_fc[12]\.(?:weight|bias))\d+$", r"\1", name)
