"""The layers of each stage, for each setting that splits a model.

Errors name stages without layers or experts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from megatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
)
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from moe_ckpt.errors import ConfigError
from moe_ckpt.megatron.layer_split import (
    CONFIG_FIELDS,
    MEGATRON_LM_FIELDS,
    LayerSplit,
    require_recoverable,
)

LAYOUT, FIRST = "pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage"
LAST = "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = (
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
CHUNKS = "virtual_pipeline_model_parallel_size"


def split(num_layers: int, num_stages: Any = 2, **settings: Any) -> LayerSplit:
    facts = {
        "num_layers": num_layers,
        "pipeline_model_parallel_size": num_stages,
        "num_moe_experts": 4,
    }
    return LayerSplit.of(SimpleNamespace(**facts | settings), CONFIG_FIELDS, "model.{}")


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (split(4), [[[0, 1]], [[2, 3]]]),
        (split(8, **{CHUNKS: 2}), [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (split(5, 3, **{FIRST: 1}), [[[0]], [[1, 2]], [[3, 4]]]),
        (split(4, **{LAST: 1}), [[[0, 1, 2]], [[3]]]),
        (split(6, **{EMBEDDING: True, LOSS: True}), [[[0, 1, 2]], [[3, 4, 5]]]),
        (split(3, **{LAYOUT: "Et|ttL"}), [[[0]], [[1, 2]]]),
        (split(4, **{LAYOUT: "Et|t|t|tL"}), [[[0], [2]], [[1], [3]]]),
        (split(2, 1), []),
        (split(5), []),
    ],
    ids=[
        "even",
        "chunks",
        "first",
        "last",
        "both ends",
        "layout",
        "layout of chunks",
        "one stage",
        "no split",
    ],
)
def test_the_layers_of_each_stage(
    made: LayerSplit, wanted: list[list[list[int]]]
) -> None:
    assert made.layers() == wanted


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {FIRST: 2},
        {LAST: 5},
        {FIRST: 1, LAST: 3},
        {CHUNKS: 2},
        {EMBEDDING: True, LOSS: True, "num_layers": 6},
    ],
    ids=str,
)
def test_the_numbers_are_megatrons(settings: dict[str, Any]) -> None:
    facts: dict[str, Any] = {"num_layers": 8, "pipeline_model_parallel_size": 4}
    unset: dict[str, Any] = {
        LAYOUT: None,
        FIRST: None,
        LAST: None,
        EMBEDDING: False,
        LOSS: False,
        CHUNKS: None,
    }
    config: Any = SimpleNamespace(**facts | unset | settings)
    found = LayerSplit.of(config, CONFIG_FIELDS, "{}").layers()
    assert len(found) == 4
    for stage, chunks in enumerate(found):
        for chunk, layers in enumerate(chunks):
            number = chunk if len(chunks) > 1 else None
            assert len(layers) == get_num_layers_to_build(config, number, stage)


LAYERLESS = pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            split(2, **{LAYOUT: "Ett|L"}),
            rf"^model.{LAYOUT}: got 'Ett\|L', wanted a layer .* stage 1 has none",
        ),
        (split(2, **{LAYOUT: "E|ttL"}), rf"^model.{LAYOUT}: .* stage 0 has none"),
        (
            split(2, **{LAYOUT: [["embedding"], ["decoder", "decoder", "loss"]]}),
            rf"^model.{LAYOUT}: .* stage 0 has none",
        ),
        (
            split(2, **{LAYOUT: PipelineParallelLayerLayout("Ett|L", 2)}),
            rf"^model.{LAYOUT}: got 'Ett\|L'",
        ),
        (
            split(3, **{LAYOUT: "Et|t|t|L"}),
            rf"^model.{LAYOUT}: .* chunk 1 of stage 1 has none",
        ),
        (
            split(4, **{FIRST: 0}),
            rf"^model.{FIRST}: got 0, wanted a layer .* stage 0 has none",
        ),
        (
            split(4, **{FIRST: 4}),
            rf"^model.{FIRST}: got 4, wanted a layer .* stage 1 has none",
        ),
        (split(4, **{LAST: 0}), rf"^model.{LAST}: got 0, wanted .* stage 1 has none"),
        (
            split(1, **{EMBEDDING: True}),
            rf"^model.{EMBEDDING}: got True, wanted .* stage 0 has none",
        ),
        (
            split(2, 3, **{LOSS: True}),
            rf"^model.{LOSS}: got True, wanted .* stage 2 has none",
        ),
    ],
)


@LAYERLESS
def test_a_stage_without_layers_is_one_error(made: LayerSplit, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made.require_layers()


@pytest.mark.parametrize(
    ("made", "stage"),
    [
        (split(2, moe_layer_freq=2), 1),
        (split(4, moe_layer_freq=[0, 0, 1, 1]), 0),
        (split(3, moe_layer_freq=[1, 0, 0], **{LAYOUT: "Et|ttL"}), 1),
        (split(4, moe_layer_freq=[1, 1, 1, 0], **{LAST: 1}), 1),
    ],
)
def test_a_stage_without_experts_needs_a_sharded_optimizer(
    made: LayerSplit, stage: int
) -> None:
    made.require_experts(is_sharded=True, setting="sharded")
    with pytest.raises(
        ConfigError,
        match=rf"^sharded: got False, wanted True where stage {stage} has no experts",
    ):
        made.require_experts(is_sharded=False, setting="sharded")


def test_stages_with_experts_do_without() -> None:
    for made in (
        split(4),
        split(4, moe_layer_freq=2),
        split(2, moe_layer_freq=[1, 1]),
        split(2, num_moe_experts=None),
    ):
        made.require_experts(is_sharded=False, setting="sharded")
        made.require_layers()


class BuiltState:
    """Stands in for a rank's state whose optimizer is not sharded."""

    def __init__(self, **settings: Any) -> None:
        facts = {
            "num_layers": 2,
            "pipeline_model_parallel_size": 2,
            "num_moe_experts": 4,
        }
        self.model = [SimpleNamespace(config=SimpleNamespace(**facts | settings))]
        self.inner_optimizers: list[Any] = []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({LAYOUT: "Ett|L"}, rf"^{LAYOUT}: got 'Ett\|L', wanted a layer"),
        ({FIRST: 2}, rf"^{FIRST}: got 2, wanted a layer"),
        (
            {"moe_layer_freq": [0, 1]},
            r"^use_distributed_optimizer: got False, wanted True where stage 0",
        ),
    ],
)
def test_a_model_that_is_built_is_asked_the_same(
    settings: dict[str, Any], message: str
) -> None:
    require_recoverable(cast("Any", BuiltState()), is_supervised=True)
    with pytest.raises(ConfigError, match=message):
        require_recoverable(cast("Any", BuiltState(**settings)), is_supervised=True)


def test_ranks_that_build_together_need_no_experts_in_each_stage() -> None:
    """Without supervisors all ranks start again, and make optimizers together."""
    require_recoverable(
        cast("Any", BuiltState(moe_layer_freq=[0, 1])), is_supervised=False
    )
    with pytest.raises(ConfigError, match="wanted a layer"):
        require_recoverable(cast("Any", BuiltState(**{FIRST: 2})), is_supervised=False)


def test_options_of_megatron_lm_are_named_as_they_are_written() -> None:
    args = SimpleNamespace(
        num_layers=4,
        pipeline_model_parallel_size=2,
        decoder_first_pipeline_num_layers=4,
    )
    with pytest.raises(
        ConfigError,
        match=r"^--decoder-first-pipeline-num-layers: got 4, wanted a layer in each",
    ):
        LayerSplit.of(args, MEGATRON_LM_FIELDS, "--{}").require_layers()
