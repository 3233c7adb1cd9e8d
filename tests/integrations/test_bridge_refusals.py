"""Refusals of the attachment to Megatron-Bridge before a model is built.

The attachment refuses settings, and seams that have moved.
"""

from __future__ import annotations

import copy
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import tests.preload  # noqa: F401 - imports Megatron without its warnings
from moe_ckpt.errors import ConfigError
from moe_ckpt.integrations import megatron_bridge_options as options
from moe_ckpt.integrations import megatron_bridge_seams as seams
from moe_ckpt.integrations.loop_seams import require_seams
from moe_ckpt.integrations.megatron_lm_options import REFUSALS, Refusal

FINE = SimpleNamespace(
    model=SimpleNamespace(
        num_layers=2,
        num_moe_experts=4,
        moe_layer_freq=1,
        pipeline_model_parallel_size=2,
    ),
    optimizer=SimpleNamespace(use_distributed_optimizer=True, optimizer="adam"),
    **{
        name: SimpleNamespace()
        for name in ("ddp", "train", "validation", "dist", "dataset", "checkpoint")
    },
    ft=None,
    inprocess_restart=None,
    profiling=None,
    peft=None,
)


def changed(section: str, option: str, value: Any) -> Any:
    """Return the settings `FINE` with another value of one option.

    An empty section stands for the settings themselves.
    """
    config = copy.deepcopy(FINE)
    if not section:
        setattr(config, option, value)
    elif getattr(config, section) is None:
        setattr(config, section, SimpleNamespace(**{option: value}))
    else:
        setattr(getattr(config, section), option, value)
    return config


@pytest.mark.parametrize("section", ["model", "ddp", "train", "ft"])
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.option)
def test_each_option_of_megatron_lm_is_refused_in_each_section(
    section: str, refusal: Refusal
) -> None:
    options.require_supported(FINE)
    got = True if False in refusal.allowed else "another"
    with pytest.raises(ConfigError) as error:
        options.require_supported(changed(section, refusal.option, got))
    assert str(error.value).startswith(
        f"{section}.{refusal.option}: got {got!r}, wanted "
    )
    assert str(error.value).endswith(refusal.reason)


@pytest.mark.parametrize(
    ("section", "refusal"),
    [*options._OF_SECTIONS, *(("", each) for each in options._WHOLE)],
)
def test_each_setting_of_bridge_alone_is_refused(
    section: str, refusal: Refusal
) -> None:
    with pytest.raises(ConfigError) as error:
        options.require_supported(changed(section, refusal.option, "another"))
    name = f"{section}.{refusal.option}" if section else refusal.option
    assert str(error.value).startswith(
        f"{name}: got 'another', wanted {refusal.allowed[0]!r}"
    )


@pytest.mark.parametrize("section", ["straggler", "rerun_state_machine"])
def test_sections_beside_the_models_are_read(section: str) -> None:
    option = {
        "straggler": "log_straggler",
        "rerun_state_machine": "check_for_spiky_loss",
    }[section]
    config = copy.deepcopy(FINE)
    setattr(config, section, SimpleNamespace(**{option: True}))
    with pytest.raises(
        ConfigError, match=rf"^{section}\.{option}: got True, wanted False"
    ):
        options.require_supported(config)


def test_a_stage_without_experts_needs_a_sharded_optimizer() -> None:
    config = changed("model", "moe_layer_freq", [0, 1])
    options.require_supported(config)
    config.optimizer.use_distributed_optimizer = False
    with pytest.raises(
        ConfigError,
        match=r"^optimizer\.use_distributed_optimizer: got False, wanted True",
    ):
        options.require_supported(config)


def test_a_stage_without_layers_is_refused() -> None:
    config = changed("model", "pipeline_model_parallel_layout", "Ett|L")
    with pytest.raises(
        ConfigError,
        match=r"^model\.pipeline_model_parallel_layout: got 'Ett\|L', wanted a layer",
    ):
        options.require_supported(config)


def test_the_shape_of_the_saved_state_names_all_its_settings() -> None:
    before, after = (
        options.shaping_of(FINE),
        options.shaping_of(changed("model", "hidden_size", 64)),
    )
    assert {name for name in before if before[name] != after[name]} == {
        "model.hidden_size"
    }


@pytest.mark.parametrize("name", seams._SEAMS)
def test_a_seam_of_bridge_that_moved_is_named(name: str) -> None:
    path, parameters, calls = seams._SEAMS[name]
    module = ModuleType(path)
    for function in (*parameters, *calls):
        body = " + ".join(f"{each}()" for each in calls.get(function, ())) or "0"
        exec(
            f"def {function}({', '.join(parameters.get(function, ()))}): return {body}",
            vars(module),
        )
    require_seams(module, parameters, calls, "Megatron-Bridge 0.6")
    for function in {**parameters, **calls}:
        moved: Any = ModuleType(path)
        vars(moved).update(
            {each: value for each, value in vars(module).items() if each != function}
        )
        with pytest.raises(ConfigError) as error:
            require_seams(moved, parameters, calls, "Megatron-Bridge 0.6")
        assert str(error.value).startswith(
            f"{path}.{function}: got nothing, wanted the function"
        )
        setattr(moved, function, lambda: 0)
        with pytest.raises(ConfigError, match=r"as in Megatron-Bridge 0\.6"):
            require_seams(moved, parameters, calls, "Megatron-Bridge 0.6")
