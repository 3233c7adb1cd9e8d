"""MoE parts of a block's specification, in the forms of megatron-core 0.16 to 0.19.

megatron-core 0.16 describes an MoE layer by a ModuleSpec; later versions describe an
MoE layer by a partial of its class.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, cast

from megatron.core.models.gpt.gpt_layer_specs import TransformerBlockSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules


def moe_submodules(block: TransformerBlockSubmodules) -> Iterator[MoESubmodules]:
    """Yield the parts of each MoE layer in a block's specification.

    Parts may be replaced in place before the block is built.
    """
    for layer in block.layer_specs or []:
        mlp = cast("Any", layer.submodules).mlp
        submodules = (
            mlp.keywords.get("submodules")
            if isinstance(mlp, functools.partial)
            else mlp.submodules
        )
        if isinstance(submodules, MoESubmodules):
            yield submodules
