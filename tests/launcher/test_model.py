"""The parameter count from settings equals the count of the model that Megatron builds.

Every setting and layer that a CPU can build is covered.
"""

from __future__ import annotations

from typing import Any, cast

import pytest

from launcher.config import compose_settings
from launcher.parameters import count_parameters
from tests.harness.gloo.ranks import run_ranks
from tests.harness.jobs.training import fast
from tests.megatron.stage import build_stage

VARIANTS = [
    (),
    (
        "model.shared_expert_ffn_hidden_size=48",
        "model.num_dense_layers=1",
        "model.dense_ffn_hidden_size=80",
    ),
    ("model.num_experts=0", "model.dense_ffn_hidden_size=80"),
    ("model.num_experts=9", "model.moe_topk=3"),
    ("model.num_query_groups=2", "model.kv_channels=12", "model.qkv_bias=true"),
    ("model.tied_embeddings=true", "model.position_embedding=learned"),
    (
        "model.normalization=LayerNorm",
        "model.activation=gelu",
        "model.linear_bias=true",
    ),
    ("model.normalization=LayerNorm", "model.linear_bias=true"),
]


def _built_parameters(overrides: tuple[str, ...]) -> int:
    state, _ = build_stage(*overrides)
    return sum(
        parameter.numel() for chunk in state.model for parameter in chunk.parameters()
    )


@pytest.mark.parametrize(
    "overrides", VARIANTS, ids=lambda overrides: ", ".join(overrides) or "tiny"
)
def test_count_equals_what_is_built(overrides: tuple[str, ...]) -> None:
    model = compose_settings(fast(*overrides)).model
    total, active = count_parameters(model, vocab_size=256, max_sequence_length=16)
    assert total == run_ranks(1, _built_parameters, overrides)[0]
    assert active <= total
    assert (active < total) == (model.num_experts > 0)


def _synchronizes_after_transfers() -> bool:
    state, _ = build_stage()
    return cast("Any", state.model[0]).config.batch_p2p_sync


def test_pipeline_transfers_do_not_synchronize_the_device() -> None:
    """Megatron's default waits for all streams after each transfer.

    Such a wait includes the copies of a whole snapshot.
    """
    assert run_ranks(1, _synchronizes_after_transfers) == [False]
