"""The layers of each pipeline stage, from the settings that split a model.

Owns: two rules. Each model chunk has a layer: a chunk without layers has no state to
recover from. Each stage has an expert unless the optimizer is sharded: a replaced rank
builds its model alone, and makes no optimizer for experts of other stages. Must not:
build anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
)

from moe_ckpt.config import require
from moe_ckpt.megatron.operator_names import bare_model
from moe_ckpt.megatron.state import TrainingState

_FIELDS = {
    "layout": "pipeline_model_parallel_layout",
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
    "embedding": "account_for_embedding_in_pipeline_split",
    "loss": "account_for_loss_in_pipeline_split",
    "num_layers": "num_layers",
    "num_stages": "pipeline_model_parallel_size",
    "num_chunks": "virtual_pipeline_model_parallel_size",
    "layer_freq": "moe_layer_freq",
    "num_experts": "num_moe_experts",
}

CONFIG_FIELDS: Mapping[str, str] = _FIELDS
"""The fields of a TransformerConfig, by the names of this module."""

MEGATRON_LM_FIELDS: Mapping[str, str] = _FIELDS | {
    "first": "decoder_first_pipeline_num_layers",
    "last": "decoder_last_pipeline_num_layers",
    "num_experts": "num_experts",
}
"""The arguments of Megatron-LM, by the names of this module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSplit:
    """The settings that split a model into stages and chunks."""

    values: Mapping[str, Any]
    """The values of the settings, by the names of this module; None: not set."""

    flags: Mapping[str, str]
    """The names of the settings in errors, by the names of this module."""

    @classmethod
    def of(cls, settings: Any, fields: Mapping[str, str], flag: str) -> LayerSplit:
        """Read the settings.

        Args:
            settings: An object that has the settings as attributes.
            fields: The names of the attributes: `CONFIG_FIELDS` or
                `MEGATRON_LM_FIELDS`.
            flag: The form of a setting's name in errors, such as `--{}`.
        """
        values = {
            name: getattr(settings, field, None) for name, field in fields.items()
        }
        flags = {name: flag.format(field) for name, field in fields.items()}
        if flag.startswith("--") and fields is MEGATRON_LM_FIELDS:
            flags = {name: text.replace("_", "-") for name, text in flags.items()}
        return cls(values=values, flags=flags)

    def require_layers(self) -> None:
        """Check that each chunk of each stage has a layer.

        Raises:
            ConfigError: A chunk has no layer. The error names the setting that splits
                the model.
        """
        for stage, chunks in enumerate(self.layers()):
            for chunk, layers in enumerate(chunks):
                of_chunk = (
                    f"chunk {chunk} of stage {stage}"
                    if len(chunks) > 1
                    else f"stage {stage}"
                )
                name = self._splitting
                wanted = (
                    f"a layer in each stage: {of_chunk} has none, and no state to"
                    " recover from"
                )
                require(bool(layers), self.flags[name], self._shown(name), wanted)

    def require_experts(self, *, is_sharded: bool, setting: str) -> None:
        """Check that each stage has experts, unless the optimizer is sharded.

        Args:
            is_sharded: Whether the optimizer is sharded.
            setting: The name in errors of the setting that shards the optimizer.

        Raises:
            ConfigError: The optimizer is not sharded, and a stage has no experts.
        """
        if is_sharded or not self.values["num_experts"]:
            return
        for stage, chunks in enumerate(self.layers()):
            has_experts = any(
                self._is_moe(layer) for layers in chunks for layer in layers
            )
            reason = (
                "a rank that builds its model alone makes no optimizer for experts of"
                " other stages"
            )
            wanted = f"True where stage {stage} has no experts: {reason}"
            require(has_experts, setting, is_sharded, wanted)

    def layers(self) -> list[list[list[int]]]:
        """Return the global numbers of the layers, by stage and chunk.

        The result is empty for one stage, and for a split that Megatron refuses.
        """
        num_stages = self.values["num_stages"] or 1
        num_layers = self.values["num_layers"]
        counts = self._counts(num_stages) if num_stages > 1 and num_layers else []
        if sum(sum(chunks) for chunks in counts) != num_layers:
            return []
        found: list[list[list[int]]] = [[] for _ in counts]
        first = 0
        for chunk in range(len(counts[0])):
            for stage, chunks in enumerate(counts):
                found[stage].append(list(range(first, first + chunks[chunk])))
                first += chunks[chunk]
        return found

    def _counts(self, num_stages: int) -> list[list[int]]:
        """Return the number of layers, by stage and chunk."""
        layout = self.values["layout"]
        if layout is not None:
            if not isinstance(layout, PipelineParallelLayerLayout):
                layout = PipelineParallelLayerLayout(layout, num_stages)
            return [
                [chunk.count(LayerType.decoder) for chunk in chunks]
                for chunks in layout.layout
            ]
        num_chunks = self.values["num_chunks"] or 1
        of_stages = self._of_stages(num_stages)
        counts = [
            [count // num_chunks for _ in range(num_chunks)] for count in of_stages
        ]
        # embedding and loss each take the place of a layer
        counts[0][0] -= bool(self.values["embedding"])
        counts[-1][-1] -= bool(self.values["loss"])
        return counts

    def _of_stages(self, num_stages: int) -> list[int]:
        first, last = self.values["first"], self.values["last"]
        taken = (first or 0) + (last or 0)
        rest = num_stages - (first is not None) - (last is not None)
        more = bool(self.values["embedding"]) + bool(self.values["loss"])
        each = (self.values["num_layers"] + more - taken) // rest if rest else 0
        counts = [each] * num_stages
        if first is not None:
            counts[0] = first
        if last is not None:
            counts[-1] = last
        return counts

    def _is_moe(self, layer: int) -> bool:
        frequency = self.values["layer_freq"]
        if isinstance(frequency, list | tuple):
            return bool(frequency[layer])
        return layer % (frequency or 1) == 0

    @property
    def _splitting(self) -> str:
        """The setting that errors name: the one that splits the model unevenly."""
        for name in ("layout", "first", "last", "embedding", "loss"):
            value = self.values[name]
            if value is not None and value is not False:  # 0 is a number of layers
                return name
        return "num_layers"

    def _shown(self, name: str) -> object:
        value = self.values[name]
        return value if isinstance(value, str | int | list) else str(value)


def require_recoverable(state: TrainingState, *, is_supervised: bool) -> None:
    """Check the layer split of a model that has been built.

    Some loops do not know the settings before the model is built.

    Args:
        state: A rank's training state.
        is_supervised: Whether a replaced rank builds its model alone.

    Raises:
        ConfigError: A stage has no layer. Or a replaced rank builds alone, a stage has
            no expert, and the optimizer is not sharded.
    """
    split = LayerSplit.of(bare_model(state.model[0]).config, CONFIG_FIELDS, "{}")
    split.require_layers()
    if not is_supervised:
        return
    is_sharded = any(
        isinstance(each, DistributedOptimizer) for each in state.inner_optimizers
    )
    split.require_experts(is_sharded=is_sharded, setting="use_distributed_optimizer")
