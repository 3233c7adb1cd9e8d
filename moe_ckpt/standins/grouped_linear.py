"""All local experts of a layer in one module, on a CPU.

The module stands in for Transformer Engine's grouped linear layers.

Owns: one weight for each expert, under the names of Megatron-Core's `TEGroupedMLP` and
its checkpoints, and the product of each expert's tokens. Must not: know experts. Biases
and tensor parallelism are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.models.gpt.gpt_layer_specs import TransformerBlockSubmodules
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from moe_ckpt.config import require
from moe_ckpt.megatron.layer_specs import moe_submodules
from moe_ckpt.standins import fp8_linear


class GroupedLinear(torch.nn.Module):
    """Linear layers of the local experts, without biases.

    The parameters are `weight0`, `weight1` and so on, each [output_size, input_size].

    Args:
        num_gemms: The number of local experts.
        input_size: Elements of a token before the product.
        output_size: Elements of a token after the product.
        config: Megatron's TransformerConfig.
        init_method: Initializes a weight in place.
        bias: Must be false.
        pg_collection: Megatron's process groups.

    Raises:
        ConfigError: `bias` is true.
    """

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        require(
            not bias,
            "model.linear_bias",
            bias,
            "false where model.moe_grouped_gemm=true without a GPU",
        )
        self._groups = pg_collection
        self._num_gemms = num_gemms
        for index in range(num_gemms):
            weight = torch.nn.Parameter(
                torch.empty(output_size, input_size, dtype=config.params_dtype)
            )
            init_method(weight.data)
            # Megatron's attribute: false keeps the weight out of reductions over ranks
            # that hold other experts
            weight.allreduce = pg_collection.ep.size() == 1  # type: ignore[attr-defined]
            self.register_parameter(f"weight{index}", weight)
        self._multiply = fp8_linear.multiplying_fp8(F.linear)

    @property
    def weights(self) -> Sequence[torch.nn.Parameter]:
        return [
            self.get_parameter(f"weight{index}") for index in range(self._num_gemms)
        ]

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: Sequence[int]
    ) -> tuple[torch.Tensor, None]:
        """Multiply the tokens of each expert by the expert's weight.

        Args:
            tokens: Tokens sorted by expert, [tokens, input_size].
            tokens_per_expert: The number of tokens of each expert.

        Returns:
            The products, [tokens, output_size], and None in place of biases.
        """
        parts = tokens.split(list(tokens_per_expert))
        outputs = [
            self._multiply(part, weight)
            for part, weight in zip(parts, self.weights, strict=True)
        ]
        return torch.cat(outputs), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), *_: Any, **__: Any
    ) -> dict[str, Any]:
        """Return the weights under the keys of experts in separate modules."""
        first = self._groups.ep.rank() * self._num_gemms
        num_experts = self._groups.ep.size() * self._num_gemms
        found: dict[str, Any] = {}
        for index, weight in enumerate(self.weights):
            offsets = (
                *sharded_offsets,
                (len(sharded_offsets), first + index, num_experts),
            )
            sharded = make_sharded_tensors_for_checkpoint(
                {f"{prefix}weight": weight}, "", {}, offsets
            )
            found[f"{prefix}weight{index}"] = entry = sharded[f"{prefix}weight"]
            # Megatron puts the data-parallel rank in here, with which only the first
            # rank's experts would have a main copy
            entry.replica_id = (*entry.replica_id[:2], self._groups.expt_dp.rank())
        return found


def group_experts(block: TransformerBlockSubmodules) -> None:
    """Build each MoE layer of a block with all local experts in one module.

    Args:
        block: The specification of the block, which is changed in place.
    """
    # megatron-core 0.17 and later have a class for the parts, and describe the experts
    # by a partial
    parts = getattr(experts, "GroupedMLPSubmodules", MLPSubmodules)(
        linear_fc1=GroupedLinear, linear_fc2=GroupedLinear
    )
    for submodules in moe_submodules(block):
        is_called = isinstance(submodules.experts, functools.partial)
        kind = functools.partial if is_called else ModuleSpec
        submodules.experts = cast("Any", kind(experts.TEGroupedMLP, submodules=parts))
