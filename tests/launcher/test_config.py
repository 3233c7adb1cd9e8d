"""Settings: every choice under conf/ composes, and every error names its key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, cast, get_type_hints

import pytest
from omegaconf import DictConfig, OmegaConf

from launcher.config import (
    CONF_DIR,
    GROUPS,
    Settings,
    TrainConfig,
    compose_settings,
    group_choice_without_plus,
    to_settings,
)
from launcher.faults.config import FAULT_CONFIGS
from launcher.simulator.config import GROUPS as SIMULATION_GROUPS
from launcher.simulator.config import ExperimentConfig
from moe_ckpt.config import CKPT_CONFIGS
from moe_ckpt.config_keys import keys_of, to_keys
from moe_ckpt.faults.schedule import Kill, StateLoss, poisson_kills, trace_kills
from moe_ckpt.sim.hardware import ClusterConfig
from tests.launcher.errors import error_of

FILES = sorted(CONF_DIR.glob("*/*.yaml"))
CHOICES = {
    group: sorted(path.stem for path in FILES if path.parent.name == group)
    for group in GROUPS
}
NEED_A_PATH = ("data=text", "data=megatron", "fault=trace")
KINDS: dict[str, type[Any]] = {
    **get_type_hints(Settings),
    "cluster": ClusterConfig,
    "experiment": ExperimentConfig,
}
TRAIN_KEYS = sorted(field.name for field in fields(TrainConfig))


def load(path: Path) -> DictConfig:
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    return config


@cache
def composed(*choices: str) -> DictConfig:
    """Return the composed choices of groups, for all rows of a table.

    Hydra takes a tenth of a second for a composition.
    """
    paths = [
        f"{choice.partition('=')[0]}.path=/corpus"
        for choice in choices
        if choice in NEED_A_PATH
    ]
    return cast(
        "DictConfig",
        OmegaConf.create(compose_settings([*choices, *paths]).composed_yaml),
    )


def converted(arguments: Sequence[str]) -> Settings:
    """Convert choices of groups and values of keys to settings.

    As `compose_settings` does, but Hydra reads no value.
    """
    choices = [
        argument for argument in arguments if argument.partition("=")[0] in GROUPS
    ]
    values = [argument for argument in arguments if argument not in choices]
    return to_settings(
        cast(
            "DictConfig",
            OmegaConf.merge(composed(*choices), OmegaConf.from_dotlist(values)),
        )
    )


def error_of_values(arguments: str) -> str:
    """Return the error of settings that semicolons separate."""
    return error_of(converted, arguments.split("; "))


def lacks(message: str, words: Sequence[str]) -> list[str]:
    return [word for word in words if not re.search(rf"\b{word}\b", message)]


def test_every_group_has_choices_and_no_folder_is_left_out() -> None:
    assert {path.parent.name for path in FILES} == {*GROUPS, *SIMULATION_GROUPS}


ROUNDS = [
    ("+", 0),
    *(("", number) for number in range(max(map(len, CHOICES.values())))),
]


@pytest.mark.parametrize(("plus", "number"), ROUNDS)
def test_every_choice_composes_and_converts(plus: str, number: int) -> None:
    """Each round has one choice of every group, so that a few rounds have all choices.

    The first round also puts a `+` before each choice.
    """
    chosen = {
        group: choices[number % len(choices)] for group, choices in CHOICES.items()
    }
    needed = {
        group: {"path": "/corpus"}
        for group, choice in chosen.items()
        if f"{group}={choice}" in NEED_A_PATH
    }
    settings = compose_settings(
        [
            *(f"{plus}{group}={choice}" for group, choice in chosen.items()),
            *(f"{group}.path=/corpus" for group in needed),
        ]
    )
    for group, choice in chosen.items():
        in_file = cast(
            "dict[str, object]",
            OmegaConf.to_container(load(CONF_DIR / group / f"{choice}.yaml")),
        )
        assert to_keys(getattr(settings, group)) == {**in_file, **needed.get(group, {})}


def class_of(group: str, config: DictConfig) -> type[Any]:
    if group == "ckpt":
        return CKPT_CONFIGS[config.policy]
    return FAULT_CONFIGS[config.kind] if group == "fault" else KINDS[group]


@pytest.mark.parametrize(
    "path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_every_yaml_spells_out_every_key(path: Path) -> None:
    config = load(path)
    assert sorted(map(str, config)) == sorted(
        keys_of(class_of(path.parent.name, config))
    )


def test_a_yaml_of_a_policy_or_kind_of_fault_is_named_after_it() -> None:
    for group, key, kinds in (
        ("ckpt", "policy", CKPT_CONFIGS),
        ("fault", "kind", FAULT_CONFIGS),
    ):
        named = {
            path.stem: load(path)[key] for path in CONF_DIR.glob(f"{group}/*.yaml")
        }
        assert named == {name: name for name in kinds}


@pytest.mark.parametrize(
    "path",
    sorted(CONF_DIR.rglob("*.yaml")),
    ids=lambda path: str(path.relative_to(CONF_DIR)),
)
def test_every_key_is_explained_beside_it(path: Path) -> None:
    with_value = [
        line
        for line in path.read_text().splitlines()
        if re.match(r"\s*(- )?\w+:\s*[^\s#]", line)
    ]
    assert with_value
    assert [line for line in with_value if not re.search(r"\s#\s*\S", line)] == []


def test_a_plus_is_dropped_before_groups_only() -> None:
    dropped = ("+ckpt=dense", "++model=tiny")
    kept = ("ckpt=dense", "+train.itres=5", "+run=x", "~train.lr")
    assert [group_choice_without_plus(argument) for argument in dropped] == [
        "ckpt=dense",
        "model=tiny",
    ]
    assert [group_choice_without_plus(argument) for argument in kept] == list(kept)


OVERRIDDEN = {
    "train.iterations=77": 77,
    "train.lr=1": 1.0,
    "train.min_lr=${train.lr}": 1.0,
    "train.lr_decay_iters=300": 300,
    "train.distributed_optimizer=false": False,
    "model.moe_capacity_factor=1.25": 1.25,
    "model.vocab_size=512": 512,
    "parallel.pp=4": 4,
    "run.dir=/tmp/x": "/tmp/x",
}


def test_overrides_are_converted_and_kept_as_composed() -> None:
    settings = compose_settings(["ckpt=dense", "model=small", *OVERRIDDEN])
    for override, value in {**OVERRIDDEN, "run.name=${model.name}": "small"}.items():
        section, _, key = override.partition("=")[0].partition(".")
        got = getattr(getattr(settings, section), key)
        assert (got, type(got)) == (value, type(value)), override
    kept = OmegaConf.create(settings.composed_yaml)
    assert (kept.train, kept.ckpt) == (to_keys(settings.train), to_keys(settings.ckpt))
    assert "hydra" not in kept
    assert "name: ${model.name}" in settings.composed_yaml


@pytest.mark.parametrize(
    ("override", "key", "choices"),
    [
        ("train.itres=5", "train.itres", TRAIN_KEYS),
        ("+train.itres=5", "train.itres", TRAIN_KEYS),
        ("++train.itres=5", "train.itres", TRAIN_KEYS),
        ("run.nme=x", "run.nme", ["dir", "name", "progress", "tensorboard"]),
        ("+run.nme=x", "run.nme", ["dir", "name", "progress", "tensorboard"]),
        ("ckpt.kep=2", "ckpt.kep", ["policy"]),
        ("+ckpt.keep=2", "ckpt.keep", ["policy"]),  # ckpt=none has no such key
        ("trian.iterations=5", "trian.iterations", ["train", "model"]),
        ("itres=5", "itres", ["train", "model"]),
        ("+itres=5", "itres", ["train", "model"]),
        ("+trian.iterations=5", "trian", ["train", "model"]),
    ],
)
def test_an_unknown_key_is_named_with_the_keys_there_are(
    override: str, key: str, choices: Sequence[str]
) -> None:
    message = error_of(compose_settings, [override])
    assert message.startswith(f"{key}: ")
    assert lacks(message.removeprefix(key), choices) == []


def test_the_closest_setting_is_offered() -> None:
    assert error_of(compose_settings, ["train.itertions=9"]).endswith(
        "; did you mean train.iterations?"
    )
    assert "did you mean" not in error_of(compose_settings, ["xyz=9"])


def test_a_short_run_decays_for_half_of_its_iterations() -> None:
    assert [
        compose_settings([f"train.iterations={n}"]).train.num_warmup_iters
        for n in (1, 6, 200)
    ] == [0, 3, 10]


def test_a_key_of_another_policy_is_offered_with_that_policy_only() -> None:
    # ckpt=none is chosen here
    offer = error_of(compose_settings, ["ckpt.keep=2"]).removeprefix("ckpt.keep: ")
    assert "keep" not in offer or "ckpt=dense" in offer
    of_faults = (
        "fault.at: no such setting, wanted one of the keys kind (fault=none); at, kind"
        " (fault=state"
    )
    at = "fault.at=[{iteration: 12, stage: 1, phase: forward}]"
    assert error_of(compose_settings, [at]).startswith(of_faults)


@pytest.mark.parametrize("plus", ["", "+"])
def test_a_mistyped_key_of_the_chosen_policy_is_named_with_its_keys(plus: str) -> None:
    message = error_of(compose_settings, ["ckpt=dense", f"{plus}ckpt.kep=2"])
    assert message.startswith("ckpt.kep: ")
    assert "async_save, every_iters, keep, policy, strict" in message


@pytest.mark.parametrize("group", GROUPS)
def test_an_unknown_choice_of_a_group_is_named_with_the_choices(group: str) -> None:
    message = error_of(compose_settings, [f"+{group}=nonesuch"])
    assert f"{group}/nonesuch" in message
    assert lacks(message, CHOICES[group]) == []


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.optimizer=sgd", "train.optimizer: got 'sgd', wanted one of adam"),
        ("train.iterations=1.5", "train.iterations: Value '1.5'"),
        ("train.lr=???", "train.lr"),
        ("train.lr=${train.nonesuch}", "train.lr"),
        ("~train.lr", "train.lr"),
        ("~train", "train"),
        ("train=5", "train"),
        ("train=null", "train"),
        ("train", "train"),
        ("train.lr=[", "train.lr=["),
        *((choice, f"{choice.partition('=')[0]}.path: ") for choice in NEED_A_PATH),
    ],
)
def test_an_override_that_leaves_no_value_is_named(override: str, says: str) -> None:
    assert says in error_of(compose_settings, [override])


@pytest.mark.parametrize(
    ("override", "got"),
    [
        ("train.iterations=many", "many"),
        ("train.iterations=true", "True"),
        ("train.lr=fast", "fast"),
        ("train.lr=null", "None"),
        ("train.distributed_optimizer=maybe", "maybe"),
        ("model.num_experts=[1]", "[1]"),
        ("model.kv_channels=wide", "wide"),
        ("parallel.pp=1.5", "1.5"),
        ("data.seed=x", "x"),
        ("run.tensorboard=x", "x"),
        ("ckpt.window=null", "None"),
        ("ckpt.window=1.5", "1.5"),
        ("ckpt.window=true", "True"),
        ("ckpt.boundary_log=maybe", "maybe"),
        ("ckpt.memory_budget_bytes=much", "much"),
        ("ckpt.strict=maybe", "maybe"),
    ],
)
def test_a_value_of_a_wrong_type_is_named(override: str, got: str) -> None:
    key = override.partition("=")[0]
    message = error_of_values(f"ckpt=moevement; {override}")
    assert message.startswith(f"{key}: ")
    assert got in message.removeprefix(key)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("train.lr_schedule", "one of constant, linear, cosine"),
        ("train.recompute", "one of none, selective, full"),
        ("train.lr_decay_iters", "one of auto, a number"),
        ("model.attention", "one of mha, mla"),
        (
            "model.moe_balancing",
            "one of none, aux_loss, seq_aux_loss, global_aux_loss, bias",
        ),
        ("model.moe_score_function", "one of softmax, sigmoid"),
        ("model.moe_router_dtype", "one of fp32, fp64, model"),
        ("model.normalization", "one of RMSNorm, LayerNorm"),
        ("model.activation", "one of swiglu, gelu"),
        ("model.position_embedding", "one of rope, learned"),
        ("model.vocab_size", "one of auto, a number"),
        ("precision.dtype", "one of fp32, bf16, fp16"),
        ("data.source", "one of stdlib, text, megatron"),
        ("parallel.pp", "auto or a number of at least 1"),
        ("parallel.ep", "auto or a number of at least 1"),
        ("run.progress", "one of auto, bar, lines, none"),
        ("ckpt.policy", f"one of {', '.join(CKPT_CONFIGS)}"),
        ("ckpt.window", "auto or a number of iterations of at least 1"),
        ("ckpt.popularity", "one of hard, soft, decayed"),
        ("fault.kind", "one of none, state_loss, at, poisson, trace"),
        ("fault.signal", "one of KILL, STOP, SEGV, TERM, RAISE"),
        ("fault.scope", "one of process, node"),
    ],
)
def test_an_unknown_value_is_named_with_the_choices(key: str, choices: str) -> None:
    message = error_of_values(f"ckpt=moevement; fault=poisson; {key}=nonesuch")
    assert message == f"{key}: got 'nonesuch', wanted {choices}"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("model.num_layers=0", "model.num_layers: got 0, wanted at least 1"),
        ("model.num_experts=-1", "model.num_experts: got -1, wanted at least 0"),
        (
            "model.moe_topk=9",
            "model.moe_topk: got 9, wanted between 1 and model.num_experts=8",
        ),
        (
            "model.moe_topk=0",
            "model.moe_topk: got 0, wanted between 1 and model.num_experts=8",
        ),
        (
            "model.moe_balancing=bias",
            "model.moe_score_function: got 'softmax', wanted sigmoid",
        ),
        (
            "model.moe_pad_to_capacity=true",
            "model.moe_capacity_factor: got None, wanted a number",
        ),
        ("model.attention=mla", "model.mla_kv_lora_rank: got None, wanted a number"),
        (
            "model.hidden_size=66",
            (
                "model.num_attention_heads: got 4, wanted a divisor of"
                " model.hidden_size=66"
            ),
        ),
        (
            "precision.min_loss_scale=0.5",
            "precision.min_loss_scale: got 0.5, wanted at least 1.0",
        ),
        (
            "precision.initial_loss_scale=1; precision.min_loss_scale=2",
            "precision.initial_loss_scale: got 1.0",
        ),
        (
            "precision.loss_scale_window_iters=0",
            "precision.loss_scale_window_iters: got 0",
        ),
        ("parallel.dp=0", "parallel.dp: got 0, wanted auto or a number of at least 1"),
        (
            "data.path=/corpus",
            "data.path: got '/corpus', wanted null where data.source=stdlib",
        ),
        ("data.tokenizer=t.json", "data.tokenizer: got 't.json', wanted null"),
        (
            "data.source=megatron; data.path=''",
            "data.path: got '', wanted a path where data.source=megatron",
        ),
        (
            "data.eval_fraction=0.0",
            "data.eval_fraction: got 0.0, wanted between 0 and 1",
        ),
        (
            "data.eval_fraction=1.0",
            "data.eval_fraction: got 1.0, wanted between 0 and 1",
        ),
        ("data.seed=-1", "data.seed: got -1, wanted at least 0"),
        (
            "run.digest_every_iters=-1",
            "run.digest_every_iters: got -1, wanted at least 0",
        ),
        (
            "run.leave_out=weights",
            "run.leave_out: got 'weights', wanted one of nothing, moments",
        ),
        (
            "run.name=a/b",
            "run.name: got 'a/b', wanted letters, digits, '_', '-' and '.'",
        ),
        ("train.iterations=0", "train.iterations: got 0, wanted at least 1"),
        ("train.eval_batches=0", "train.eval_batches: got 0, wanted at least 1"),
        ("train.lr=-1", "train.lr: got -1.0, wanted at least 0"),
        ("train.min_lr=1", "train.min_lr: got 1.0, wanted at most train.lr=0.005"),
        (
            "train.lr_warmup_iters=200",
            (
                "train.lr_warmup_iters: got 200, wanted at least 0 and less than the"
                " 200 iterations"
            ),
        ),
        (
            "train.lr_warmup_iters=some",
            "train.lr_warmup_iters: got 'some', wanted one of auto, a number",
        ),
        ("train.resume=''", "train.resume: got '', wanted auto, never or the path"),
        (
            "ckpt=moevement; ckpt.window=0",
            "ckpt.window: got 0, wanted auto or a number of iterations of at least 1",
        ),
        (
            "ckpt=moevement; ckpt.profile_iters=1",
            "ckpt.profile_iters: got 1, wanted at least 2",
        ),
        (
            "ckpt=moevement; ckpt.window_drift=-0.1",
            "ckpt.window_drift: got -0.1, wanted at least 0",
        ),
        (
            "ckpt=moevement; ckpt.window_drift=nan",
            "ckpt.window_drift: got nan, wanted at least 0",
        ),
        (
            "ckpt=moevement; ckpt.popularity_decay=2",
            "ckpt.popularity_decay: got 2.0, wanted between 0 and 1",
        ),
        (
            "ckpt=moevement; ckpt.popularity_decay=-0.1",
            "ckpt.popularity_decay: got -0.1, wanted between 0 and 1",
        ),
        (
            "ckpt=moevement; ckpt.reorder_change=-1",
            "ckpt.reorder_change: got -1.0, wanted at least 0",
        ),
        (
            "ckpt=moevement; ckpt.reorder_share=1.1",
            "ckpt.reorder_share: got 1.1, wanted between 0 and 1",
        ),
        (
            "ckpt=moevement; ckpt.reorder_share=-0.1",
            "ckpt.reorder_share: got -0.1, wanted between 0 and 1",
        ),
        (
            "ckpt=moevement; ckpt.keep_windows=0",
            "ckpt.keep_windows: got 0, wanted at least 1",
        ),
        (
            "ckpt=moevement; ckpt.memory_budget_bytes=0",
            "ckpt.memory_budget_bytes: got 0, wanted at least 1",
        ),
        (
            "ckpt=moevement; ckpt.max_bytes_per_s.host=0",
            "ckpt.max_bytes_per_s.host: got 0.0, wanted more than 0",
        ),
        (
            "ckpt=moc; ckpt.max_bytes_per_s.disk=-5",
            "ckpt.max_bytes_per_s.disk: got -5.0, wanted more than 0",
        ),
        (
            "ckpt=gemini; ckpt.max_bytes_per_s.peers=inf",
            "ckpt.max_bytes_per_s.peers: got inf, wanted more than 0",
        ),
        ("ckpt=gemini; ckpt.max_bytes_per_s.tape=1", "ckpt.max_bytes_per_s.tape: "),
        (
            "ckpt=checkfreq; ckpt.max_bytes_per_s.peers=1",
            "ckpt.max_bytes_per_s.peers: got 1.0, wanted null where",
        ),
        (
            "ckpt=moevement; ckpt.tls.key=/node.key",
            "ckpt.tls.certificate: got None, wanted a path, as the other keys",
        ),
        ("ckpt=gemini; ckpt.mtbf_s=-1", "ckpt.mtbf_s: got -1.0, wanted more than 0"),
        (
            "ckpt=flowcheck; ckpt.max_lag_iters=-1",
            "ckpt.max_lag_iters: got -1, wanted at least 0",
        ),
        (
            "ckpt=flowcheck; ckpt.replicas=-1",
            "ckpt.replicas: got -1, wanted auto or a number of copies of at least 0",
        ),
        (
            "fault=poisson; fault.mtbf_s=0",
            "fault.mtbf_s: got 0.0, wanted a number above 0",
        ),
        (
            "fault=poisson; fault.mtbf_s=inf",
            "fault.mtbf_s: got inf, wanted a number above 0",
        ),
        ("fault=poisson; fault.count=-1", "fault.count: got -1, wanted at least 0"),
        ("fault=poisson; fault.seed=-1", "fault.seed: got -1, wanted at least 0"),
        (
            "fault=poisson; fault.scope=node; fault.signal=TERM",
            "fault.signal: got 'TERM', wanted KILL where scope",
        ),
        (
            "fault=trace; fault.speedup=0",
            "fault.speedup: got 0.0, wanted a number above 0",
        ),
        ("fault=trace; fault.seed=-1", "fault.seed: got -1, wanted at least 0"),
        (
            "fault=trace; fault.signal=x",
            "fault.signal: got 'x', wanted one of KILL, STOP, SEGV",
        ),
        ("fault=at; fault.seed=-1", "fault.seed: got -1, wanted at least 0"),
        (
            "fault=at; fault.count=1",
            "fault.count: got 1, wanted one of the keys at, kind, seed",
        ),
        ("fault=state_loss; fault.at=5", "fault.at: "),
        ("fault=state_loss; fault.at=null", "fault.at: "),
    ],
)
def test_values_that_do_not_go_together_are_named(arguments: str, says: str) -> None:
    assert error_of_values(arguments).startswith(says)


@pytest.mark.parametrize(
    ("kind", "at", "says"),
    [
        (
            "state_loss",
            "{iteration: 0, stage: 1, phase: step}",
            "fault.at: iteration: got 0, wanted at least 1",
        ),
        ("state_loss", "{iteration: 1, stage: 1}", "fault.at[0].phase: "),
        ("state_loss", "5", "fault.at[0]: "),
        (
            "state_loss",
            "{iteration: 1, stage: 1, phase: step, rank: 1}",
            "fault.at: rank: Key 'rank' not in",
        ),
        (
            "state_loss",
            "{iteration: x, stage: 1, phase: step}",
            "fault.at: iteration: Value 'x' of type",
        ),
        ("at", "{iteration: 0}", "fault.at: iteration: got 0, wanted at least 1"),
        ("at", "{iteration: 1, stage: 1}", "fault.at: stage: Key 'stage' not in"),
        (
            "at",
            "{iteration: 9}, {iteration: 8}",
            "fault.at: iteration: got [9, 8], wanted the order",
        ),
    ],
)
def test_a_fault_in_a_list_that_cannot_be_is_named(
    kind: str, at: str, says: str
) -> None:
    assert error_of_values(f"fault={kind}; fault.at=[{at}]").startswith(says)


@pytest.mark.parametrize(
    "changes",
    [
        {"model.num_experts": 0, "model.moe_topk": 0},
        {"model.moe_topk": 8},
        {"model.moe_balancing": "bias", "model.moe_score_function": "sigmoid"},
        {"model.moe_pad_to_capacity": True, "model.moe_capacity_factor": 1.0},
        {"model.hidden_size": 66, "model.kv_channels": 16},
        {"data.source": "text", "data.path": "/corpus", "data.tokenizer": "t.json"},
        {"train.lr_warmup_iters": 199},
        {"train.iterations": 5, "train.lr_decay_iters": 100},
        {
            "ckpt.window": "auto",
            "ckpt.popularity_decay": 0.0,
            "ckpt.memory_budget_bytes": 1,
            "ckpt.profile_iters": 2,
        },
        {
            "ckpt.window": 1,
            "ckpt.popularity_decay": 1.0,
            "ckpt.memory_budget_bytes": None,
            "ckpt.keep_windows": 1,
        },
        {
            "ckpt.window_drift": 0.0,
            "ckpt.popularity": "soft",
            "ckpt.boundary_log": False,
        },
        {"ckpt.reorder_change": 0.0, "ckpt.reorder_share": 1.0},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_values_at_the_edge_of_what_goes_together_are_taken(
    changes: dict[str, object],
) -> None:
    values = [
        f"{key}={'null' if value is None else value}" for key, value in changes.items()
    ]
    settings = converted(["ckpt=moevement", *values])
    for key, value in changes.items():
        section, _, name = key.partition(".")
        got = getattr(getattr(settings, section), name)
        assert (got, type(got)) == (value, type(value))


def test_the_learning_rate_decays_over_the_run_unless_told() -> None:
    train = converted(["train.iterations=77"]).train
    assert (
        train.num_decay_iters,
        replace(train, lr_decay_iters=300).num_decay_iters,
    ) == (77, 300)


def test_no_fault_comes_unless_asked_for() -> None:
    fault = converted([]).fault
    assert (fault.losses, fault.kills(8)) == ([], ())


def test_losses_are_composed() -> None:
    at = (
        "[{iteration: 1, stage: 0, phase: between, dp_rank: 0}, {iteration: 3, stage:"
        " 2, phase: step}]"
    )
    fault = compose_settings(["fault=state_loss", f"fault.at={at}"]).fault
    losses = [
        StateLoss(iteration=1, stage=0, phase="between", dp_rank=0),
        StateLoss(iteration=3, stage=2, phase="step", dp_rank=None),
    ]
    assert (fault.kind, fault.losses, fault.kills(8)) == ("state_loss", losses, ())


def kills_of(*arguments: str, world_size: int = 8) -> tuple[Kill, ...]:
    fault = compose_settings(arguments).fault
    assert fault.losses == []
    return fault.kills(world_size)


def test_kills_at_points_are_composed() -> None:
    at = (
        "[{rank: 7, phase: recovery, signal: STOP}, {iteration: 3, rank: 0, scope:"
        " node}, {after_s: 2, rank: 1}]"
    )
    assert kills_of("fault=at", f"fault.at={at}") == (
        Kill(rank=7, phase="recovery", signal="STOP"),
        Kill(rank=0, iteration=3, scope="node"),
        Kill(rank=1, after_s=2.0),
    )


def test_ranks_that_entries_leave_open_follow_the_seed() -> None:
    at = (
        "fault.at=[{iteration: 1}, {iteration: 2}, {iteration: 3, rank: 5},"
        " {iteration: 4}]"
    )
    plans = [kills_of("fault=at", at, f"fault.seed={seed}") for seed in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]
    assert [kill.iteration for kill in plans[0]] == [1, 2, 3, 4]
    assert all(kill.rank in range(8) for kill in plans[0])
    assert plans[0][2].rank == plans[2][2].rank == 5


def test_poisson_settings_become_their_plan() -> None:
    settings = ["mtbf_s=7", "count=4", "seed=3", "signal=KILL", "scope=node"]
    kills = kills_of(
        "fault=poisson", *(f"fault.{setting}" for setting in settings), world_size=4
    )
    assert kills == poisson_kills(
        mtbf_s=7.0, count=4, seed=3, world_size=4, scope="node"
    )
    assert {kill.scope for kill in kills} == {"node"}


def test_a_trace_becomes_its_plan(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,add,a\n60000,remove,a\n90000,remove,b\n90000,remove,c\n")
    settings = [f"path={path}", "speedup=60", "seed=3", "signal=TERM"]
    kills = kills_of(
        "fault=trace", *(f"fault.{setting}" for setting in settings), world_size=4
    )
    assert kills == trace_kills(
        path.read_text(), speedup=60.0, seed=3, world_size=4, signal="TERM"
    )
    assert [kill.after_s for kill in kills] == [1.0, 1.5, 1.5]


def test_a_rank_that_the_job_lacks_is_named() -> None:
    at = "fault.at=[{iteration: 1, rank: 3}, {iteration: 1, rank: 4}]"
    says = "fault.at: rank: got 4, wanted between 0 and 3, the ranks of the job"
    assert error_of(kills_of, "fault=at", at, world_size=4) == says


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_trace_that_cannot_be_read_is_named(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "trace.csv"
    if content is not None:
        path.write_bytes(content)
    message = error_of(kills_of, "fault=trace", f"fault.path={path}")
    assert message.startswith(f"fault.path: got '{path}', wanted a file with a trace (")
