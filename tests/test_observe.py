"""`moe_ckpt.observe.observe` finds and names the tensors of a script's state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moe_ckpt.errors import ConfigError
from moe_ckpt.observe import named_tensors, observe
from tests.harness.gloo.ranks import run_ranks
from tests.megatron.stage import trained_stage


def test_parts_of_a_state_have_the_names_of_their_positions() -> None:
    model = torch.nn.Linear(2, 1)
    state = {
        "model": model,
        "rng": torch.get_rng_state(),
        "rest": {"lr": 0.5, "seeds": [1, None]},
    }
    found = dict(named_tensors(state | {"array": np.ones(2), "number": np.int64(3)}))
    names = [
        "model.weight",
        "model.bias",
        "rng",
        "rest.lr",
        "rest.seeds.0",
        "rest.seeds.1",
        "array",
        "number",
    ]
    assert list(found) == names
    assert found["model.weight"].data_ptr() == model.weight.data_ptr()
    assert bytes(found["rest.lr"].tolist()) == b"0.5"


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, np.array(["text"]), np.array([None])]
)
def test_another_kind_of_value_is_named(value: object) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"^observe: state\.part: got \w+, wanted an object with state_dict, a tens"
        ),
    ):
        list(named_tensors({"state": {"part": value}}))


def names_of_an_optimizer() -> list[str]:
    state, _ = trained_stage("precision=bf16", iterations=1)
    return [name for name, _ in named_tensors({"optimizer": state.optimizer})]


def test_an_optimizer_of_megatron_core_has_masters_and_moments() -> None:
    """In a separate rank, because Megatron-Core's groups belong to a whole process."""
    [names] = run_ranks(1, names_of_an_optimizer)
    for part in (".exp_avg", ".exp_avg_sq", ".masters.", ".loss_scale", ".lr"):
        assert any(part in name for name in names), part


def test_without_an_order_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOE_CKPT_PROVE", raising=False)
    observe(1, anything=object())
    assert list(tmp_path.iterdir()) == []
