"""Settings: every choice under conf/ composes and converts, and every mistake is an error that names its key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, cast

import pytest
from omegaconf import DictConfig, OmegaConf

from launcher.config import (
    CONF_DIR,
    GROUPS,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    Settings,
    TrainConfig,
    compose_settings,
    group_choice_without_plus,
)
from launcher.faults.config import FAULT_CONFIGS
from launcher.simulation import GROUPS as SIMULATION_GROUPS
from moe_ckpt.config import CKPT_CONFIGS, RuntimeConfig
from moe_ckpt.errors import ConfigError
from moe_ckpt.faults import Kill, StateLoss, poisson_kills, trace_kills

FILES = sorted((path.parent.name, path.stem) for path in CONF_DIR.glob("*/*.yaml"))
CHOICES = [(group, choice) for group, choice in FILES if group in GROUPS]
NEEDS_A_PATH = {("data", "text"), ("data", "megatron"), ("fault", "trace")}
KINDS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "precision": PrecisionConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "run": RunConfig,
    "runtime": RuntimeConfig,
}
TRAIN_KEYS = sorted(field.name for field in fields(TrainConfig))


@pytest.fixture(scope="module")
def defaults() -> Settings:
    return compose_settings([])


def load(path: Path) -> DictConfig:
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    return config


def message_of(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose_settings(arguments)
    return str(caught.value)


def test_every_group_has_choices_and_no_folder_is_left_out() -> None:
    assert {group for group, _ in FILES} == {*GROUPS, *SIMULATION_GROUPS}


def needed_by(group: str, choice: str) -> dict[str, str]:
    return {"path": "/corpus"} if (group, choice) in NEEDS_A_PATH else {}


def assert_section_is_the_file(override: str, group: str, choice: str) -> None:
    needed = needed_by(group, choice)
    settings = compose_settings([override, *(f"{group}.{key}={value}" for key, value in needed.items())])
    in_file = cast("dict[str, object]", OmegaConf.to_container(load(CONF_DIR / group / f"{choice}.yaml")))
    assert asdict(getattr(settings, group)) == {**in_file, **needed}


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=lambda name: name)
def test_every_choice_composes_and_converts(group: str, choice: str) -> None:
    assert_section_is_the_file(f"{group}={choice}", group, choice)


@pytest.mark.parametrize(("group", "choice"), dict(CHOICES).items(), ids=lambda name: name)  # one choice of each
def test_a_choice_may_be_appended(group: str, choice: str) -> None:
    assert_section_is_the_file(f"+{group}={choice}", group, choice)


def class_of(group: str, config: DictConfig) -> type[Any]:
    if group == "ckpt":
        return CKPT_CONFIGS[config.policy]
    return FAULT_CONFIGS[config.kind] if group == "fault" else KINDS[group]


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=lambda name: name)
def test_every_yaml_spells_out_every_key(group: str, choice: str) -> None:
    config = load(CONF_DIR / group / f"{choice}.yaml")
    assert list(config) == [field.name for field in fields(class_of(group, config))]


def test_every_ckpt_yaml_is_named_after_its_policy() -> None:
    assert {path.stem for path in CONF_DIR.glob("ckpt/*.yaml")} == set(CKPT_CONFIGS)
    assert all(load(CONF_DIR / "ckpt" / f"{name}.yaml").policy == name for name in CKPT_CONFIGS)


def test_every_fault_yaml_is_named_after_its_kind() -> None:
    assert {path.stem for path in CONF_DIR.glob("fault/*.yaml")} == set(FAULT_CONFIGS)
    assert all(load(CONF_DIR / "fault" / f"{name}.yaml").kind == name for name in FAULT_CONFIGS)


@pytest.mark.parametrize("path", sorted(CONF_DIR.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF_DIR)))
def test_every_key_is_explained_beside_it(path: Path) -> None:
    ours = path.read_text().partition("\nhydra:")[0]  # below that are Hydra's own keys
    with_value = [line for line in ours.splitlines() if re.match(r"\s*(- )?\w+:\s*[^\s#]", line)]
    assert with_value
    assert [line for line in with_value if not re.search(r"\s#\s*\S", line)] == []


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("+ckpt=dense", "ckpt=dense"),
        ("++model=tiny", "model=tiny"),
        ("ckpt=dense", "ckpt=dense"),
        ("+train.itres=5", "+train.itres=5"),
        ("+run=x", "+run=x"),
        ("~train.lr", "~train.lr"),
    ],
)
def test_a_plus_is_dropped_before_groups_only(argument: str, meant: str) -> None:
    assert group_choice_without_plus(argument) == meant


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.iterations=77", "train", "iterations", 77),
        ("train.lr=1", "train", "lr", 1.0),
        ("train.lr_decay_iters=300", "train", "lr_decay_iters", 300),
        ("train.deterministic=false", "train", "deterministic", False),
        ("model.moe_capacity_factor=1.25", "model", "moe_capacity_factor", 1.25),
        ("model.vocab_size=512", "model", "vocab_size", 512),
        ("parallel.pp=4", "parallel", "pp", 4),
        ("run.dir=/tmp/x", "run", "dir", "/tmp/x"),
        ("model=small", "run", "name", "small"),
        ("train.min_lr=${train.lr}", "train", "min_lr", 5e-3),
    ],
)
def test_an_override_is_converted(override: str, section: str, key: str, value: object) -> None:
    got = getattr(getattr(compose_settings([override]), section), key)
    assert got == value
    assert type(got) is type(value)


def test_the_configuration_is_kept_as_composed() -> None:
    settings = compose_settings(["ckpt=dense", "train.iterations=77"])
    kept = OmegaConf.create(settings.composed_yaml)
    assert kept.train == asdict(settings.train)
    assert kept.train.iterations == 77
    assert kept.ckpt == asdict(settings.ckpt)
    assert "hydra" not in kept
    assert "name: ${model.name}" in settings.composed_yaml


def test_settings_cannot_be_changed(defaults: Settings) -> None:
    with pytest.raises(AttributeError, match="cannot assign to field 'iterations'"):
        defaults.train.iterations = 5  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("override", "key", "choices"),
    [
        ("train.itres=5", "train.itres", TRAIN_KEYS),
        ("+train.itres=5", "train.itres", TRAIN_KEYS),
        ("++train.itres=5", "train.itres", TRAIN_KEYS),
        ("model.layers=2", "model.layers", ["num_layers", "hidden_size"]),
        ("parallel.cp=2", "parallel.cp", ["dp", "ep", "pp", "tp"]),
        ("precision.type=fp32", "precision.type", ["dtype"]),
        ("data.pth=x", "data.pth", ["path", "tokenizer"]),
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
def test_an_unknown_key_is_named_with_the_keys_there_are(override: str, key: str, choices: Sequence[str]) -> None:
    message = message_of(override)
    assert message.startswith(f"{key}: ")
    assert [choice for choice in choices if not re.search(rf"\b{choice}\b", message.removeprefix(key))] == []


def test_a_key_of_another_policy_is_offered_with_that_policy_only() -> None:
    offer = message_of("ckpt.keep=2").removeprefix("ckpt.keep: ")  # of ckpt=dense, where ckpt=none is chosen
    assert "keep" not in offer or "ckpt=dense" in offer


def test_a_mistyped_key_of_the_chosen_policy_is_named_with_its_keys() -> None:
    for plus in ("", "+"):
        message = message_of("ckpt=dense", f"{plus}ckpt.kep=2")
        assert message.startswith("ckpt.kep: ")
        assert "async_save, every_iters, keep, policy, strict" in message


@pytest.mark.parametrize(
    ("override", "key", "got"),
    [
        ("train.iterations=many", "train.iterations", "many"),
        ("train.iterations=1.5", "train.iterations", "1.5"),
        ("train.iterations=true", "train.iterations", "True"),
        ("train.lr=fast", "train.lr", "fast"),
        ("train.lr=null", "train.lr", "None"),
        ("train.deterministic=maybe", "train.deterministic", "maybe"),
        ("model.num_experts=[1]", "model.num_experts", "[1]"),
        ("model.kv_channels=wide", "model.kv_channels", "wide"),
        ("parallel.pp=1.5", "parallel.pp", "1.5"),
        ("data.seed=x", "data.seed", "x"),
        ("run.tensorboard=x", "run.tensorboard", "x"),
    ],
)
def test_a_value_of_a_wrong_type_is_named(override: str, key: str, got: str) -> None:
    message = message_of(override)
    assert message.startswith(f"{key}: ")
    assert got in message.removeprefix(key)
    assert "\n" not in message


@pytest.mark.parametrize("group", GROUPS)
def test_an_unknown_choice_of_a_group_is_named_with_the_choices(group: str) -> None:
    message = message_of(f"+{group}=nonesuch")
    assert f"{group}/nonesuch" in message
    choices = [choice for of, choice in CHOICES if of == group]
    assert [choice for choice in choices if not re.search(rf"\b{choice}\b", message)] == []


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "ckpt.policy=sparse",
            "ckpt.policy: got 'sparse', wanted one of none, dense, moevement, gemini, checkfreq, moc, moetion",
        ),
        ("train.optimizer=sgd", "train.optimizer: got 'sgd', wanted one of adam"),
        ("parallel.dp=0", "parallel.dp: got 0, wanted auto or a number of at least 1"),
        ("run.name=a/b", "run.name: got 'a/b', wanted letters, digits, '_', '-' and '.'"),
    ],
)
def test_an_unknown_value_on_the_command_line_is_named_with_the_choices(override: str, says: str) -> None:
    assert message_of(override) == says


@pytest.mark.parametrize(
    ("section", "key", "choices"),
    [
        ("train", "lr_schedule", "one of constant, linear, cosine"),
        ("train", "recompute", "one of none, selective, full"),
        ("train", "lr_decay_iters", "one of auto, a number"),
        ("model", "attention", "one of mha, mla"),
        ("model", "moe_balancing", "one of none, aux_loss, seq_aux_loss, global_aux_loss, bias"),
        ("model", "moe_score_function", "one of softmax, sigmoid"),
        ("model", "moe_router_dtype", "one of fp32, fp64, model"),
        ("model", "normalization", "one of RMSNorm, LayerNorm"),
        ("model", "activation", "one of swiglu, gelu"),
        ("model", "position_embedding", "one of rope, learned"),
        ("model", "vocab_size", "one of auto, a number"),
        ("precision", "dtype", "one of fp32, bf16, fp16"),
        ("data", "source", "one of stdlib, text, megatron"),
        ("parallel", "pp", "auto or a number of at least 1"),
        ("parallel", "ep", "auto or a number of at least 1"),
        ("run", "progress", "one of auto, bar, lines, none"),
    ],
)
def test_an_unknown_value_is_named_with_the_choices(defaults: Settings, section: str, key: str, choices: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(getattr(defaults, section), **{key: "nonesuch"})
    assert str(caught.value) == f"{section}.{key}: got 'nonesuch', wanted {choices}"


@pytest.mark.parametrize(("group", "choice"), sorted(NEEDS_A_PATH))
def test_a_missing_path_is_named(group: str, choice: str) -> None:
    assert message_of(f"{group}={choice}").startswith(f"{group}.path: ")


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("train.lr=???", "train.lr"),
        ("train.lr=${train.nonesuch}", "train.lr"),
        ("~train.lr", "train.lr"),
        ("~train", "train"),
        ("train=5", "train"),
        ("train=null", "train"),
        ("train", "train"),
        ("train.lr=[", "train.lr=["),
    ],
)
def test_an_override_that_leaves_no_value_is_named(override: str, names: str) -> None:
    assert names in message_of(override)


@pytest.mark.parametrize(
    ("section", "changes", "names"),
    [
        ("model", {"num_layers": 0}, "model.num_layers: got 0, wanted at least 1"),
        ("model", {"num_experts": -1}, "model.num_experts: got -1, wanted at least 0"),
        ("model", {"moe_topk": 9}, "model.moe_topk: got 9, wanted between 1 and model.num_experts=8"),
        ("model", {"moe_topk": 0}, "model.moe_topk: got 0, wanted between 1 and model.num_experts=8"),
        ("model", {"moe_balancing": "bias"}, "model.moe_score_function: got 'softmax', wanted sigmoid"),
        ("model", {"moe_pad_to_capacity": True}, "model.moe_capacity_factor: got None, wanted a number"),
        ("model", {"attention": "mla"}, "model.mla_kv_lora_rank: got None, wanted a number"),
        ("model", {"hidden_size": 66}, "model.num_attention_heads: got 4, wanted a divisor of model.hidden_size=66"),
        ("precision", {"min_loss_scale": 0.5}, "precision.min_loss_scale: got 0.5, wanted at least 1.0"),
        ("precision", {"initial_loss_scale": 1.0, "min_loss_scale": 2.0}, "precision.initial_loss_scale: got 1.0"),
        ("precision", {"loss_scale_window_iters": 0}, "precision.loss_scale_window_iters: got 0"),
        ("data", {"path": "/corpus"}, "data.path: got '/corpus', wanted null where data.source=stdlib"),
        ("data", {"tokenizer": "t.json"}, "data.tokenizer: got 't.json', wanted null"),
        ("data", {"source": "text"}, "data.path: got None, wanted a path where data.source=text"),
        ("data", {"source": "megatron", "path": ""}, "data.path: got '', wanted a path where data.source=megatron"),
        ("data", {"eval_fraction": 0.0}, "data.eval_fraction: got 0.0, wanted between 0 and 1"),
        ("data", {"eval_fraction": 1.0}, "data.eval_fraction: got 1.0, wanted between 0 and 1"),
        ("data", {"seed": -1}, "data.seed: got -1, wanted at least 0"),
        ("run", {"digest_every_iters": -1}, "run.digest_every_iters: got -1, wanted at least 0"),
        ("train", {"iterations": 0}, "train.iterations: got 0, wanted at least 1"),
        ("train", {"eval_batches": 0}, "train.eval_batches: got 0, wanted at least 1"),
        ("train", {"lr": -1.0}, "train.lr: got -1.0, wanted at least 0"),
        ("train", {"min_lr": 1.0}, "train.min_lr: got 1.0, wanted at most train.lr=0.005"),
        ("train", {"lr_warmup_iters": 200}, "train.lr_warmup_iters: got 200, wanted less than the 200 iterations"),
        ("train", {"lr_decay_iters": 10}, "train.lr_warmup_iters: got 10, wanted less than the 10 iterations"),
        ("train", {"resume": ""}, "train.resume: got '', wanted auto, never or the path"),
    ],
)
def test_values_that_do_not_go_together_are_named(
    defaults: Settings, section: str, changes: dict[str, object], names: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(getattr(defaults, section), **changes)
    assert str(caught.value).startswith(names)


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("model", {"num_experts": 0, "moe_topk": 0}),
        ("model", {"moe_topk": 8}),
        ("model", {"moe_balancing": "bias", "moe_score_function": "sigmoid"}),
        ("model", {"moe_pad_to_capacity": True, "moe_capacity_factor": 1.0}),
        ("model", {"hidden_size": 66, "kv_channels": 16}),
        ("data", {"source": "text", "path": "/corpus", "tokenizer": "t.json"}),
        ("train", {"lr_warmup_iters": 199}),
        ("train", {"iterations": 5, "lr_decay_iters": 100}),
    ],
)
def test_values_at_the_edge_of_what_goes_together_are_taken(
    defaults: Settings, section: str, changes: dict[str, object]
) -> None:
    changed = replace(getattr(defaults, section), **changes)
    assert {name: getattr(changed, name) for name in changes} == changes


def test_the_learning_rate_decays_over_the_run_unless_told(defaults: Settings) -> None:
    assert replace(defaults.train, iterations=77).num_decay_iters == 77
    assert replace(defaults.train, iterations=77, lr_decay_iters=300).num_decay_iters == 300


@pytest.mark.parametrize(
    ("setting", "got", "says"),
    [
        ("window", "0", "got 0, wanted auto or a number of iterations of at least 1"),
        ("window", "-1", "got -1, wanted auto or a number of iterations of at least 1"),
        ("window", "x", "got 'x', wanted auto or a number of iterations of at least 1"),
        ("window", "null", "Value 'None'"),
        ("window", "1.5", "Value '1.5'"),
        ("window", "true", "Value 'True'"),
        ("profile_iters", "1", "got 1, wanted at least 2"),
        ("window_drift", "-0.1", "got -0.1, wanted at least 0"),
        ("window_drift", "nan", "got nan, wanted at least 0"),
        ("popularity", "x", "got 'x', wanted one of hard, soft, decayed, capacity"),
        ("popularity_decay", "2", "got 2.0, wanted between 0 and 1"),
        ("popularity_decay", "-0.1", "got -0.1, wanted between 0 and 1"),
        ("reorder_change", "-1", "got -1.0, wanted at least 0"),
        ("reorder_share", "1.1", "got 1.1, wanted between 0 and 1"),
        ("reorder_share", "-0.1", "got -0.1, wanted between 0 and 1"),
        ("boundary_log", "maybe", "Value 'maybe'"),
        ("keep_windows", "0", "got 0, wanted at least 1"),
        ("memory_budget_bytes", "0", "got 0, wanted at least 1"),
        ("memory_budget_bytes", "much", "Value 'much'"),
        ("strict", "maybe", "Value 'maybe'"),
        ("policy", "x", "got 'x', wanted one of none, dense, moevement, gemini, checkfreq, moc, moetion"),
    ],
)
def test_a_setting_of_sparse_snapshots_that_cannot_be_is_named(setting: str, got: str, says: str) -> None:
    assert message_of("ckpt=moevement", f"ckpt.{setting}={got}").startswith(f"ckpt.{setting}: {says}")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("window", "auto"),
        ("window", 1),
        ("profile_iters", 2),
        ("window_drift", 0.0),
        ("popularity", "capacity"),
        ("popularity_decay", 0.0),
        ("popularity_decay", 1.0),
        ("reorder_change", 0.0),
        ("reorder_share", 1.0),
        ("boundary_log", False),
        ("keep_windows", 1),
        ("memory_budget_bytes", 1),
        ("memory_budget_bytes", None),
    ],
)
def test_a_setting_of_sparse_snapshots_at_the_edge_is_taken(setting: str, value: object) -> None:
    given = "null" if value is None else value
    got = getattr(compose_settings(["ckpt=moevement", f"ckpt.{setting}={given}"]).ckpt, setting)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("at", "losses"),
    [
        ("[]", []),
        ("[{iteration: 12, stage: 1, phase: forward}]", [StateLoss(iteration=12, stage=1, phase="forward")]),
        (
            "[{iteration: 1, stage: 0, phase: between, dp_rank: 0}, {iteration: 3, stage: 2, phase: step}]",
            [
                StateLoss(iteration=1, stage=0, phase="between", dp_rank=0),
                StateLoss(iteration=3, stage=2, phase="step", dp_rank=None),
            ],
        ),
    ],
)
@pytest.mark.parametrize("plus", ["", "+"])
def test_losses_are_composed(plus: str, at: str, losses: list[StateLoss]) -> None:
    fault = compose_settings([f"{plus}fault=state_loss", f"fault.at={at}"]).fault
    assert (fault.kind, fault.losses, fault.kills(8)) == ("state_loss", losses, ())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fault.kind=x"], "fault.kind: got 'x', wanted one of none, state_loss, at, poisson, trace"),
        (["fault.at=[{iteration: 0, stage: 1, phase: step}]"], "fault.at: iteration: got 0, wanted at least 1"),
        (["fault.at=[{iteration: 1, stage: -1, phase: step}]"], "fault.at: stage: got -1, wanted at least 0"),
        (
            ["fault.at=[{iteration: 1, stage: 1, phase: x}]"],
            "fault.at: phase: got 'x', wanted one of forward, backward",
        ),
        (["fault.at=[{iteration: 1, stage: 1, phase: step, dp_rank: -1}]"], "fault.at: dp_rank: got -1, wanted at le"),
        (["fault.at=[{iteration: 1, stage: 1}]"], "fault.at[0].phase: "),
        (["fault.at=[5]"], "fault.at[0]: "),
        (["fault.at=5"], "fault.at: "),
        (["fault.at=[{iteration: 1, stage: 1, phase: step, rank: 1}]"], "fault.at: rank: Key 'rank' not in"),
        (["fault.at=[{iteration: x, stage: 1, phase: step}]"], "fault.at: iteration: Value 'x' of type"),
        (["fault.at=null"], "fault.at: "),
        (
            ["fault.att=[]"],
            "fault.att: no such setting, wanted one of the keys kind (fault=none); at, kind (fault=state",
        ),
    ],
)
def test_a_loss_that_cannot_be_is_named(arguments: list[str], says: str) -> None:
    assert message_of("fault=state_loss", *arguments).startswith(says)


def test_losses_without_a_kind_of_fault_are_refused() -> None:
    message = message_of("fault.at=[{iteration: 12, stage: 1, phase: forward}]")
    assert message.startswith("fault.at: no such setting, wanted one of the keys kind (fault=none); at, kind (fault=")


def test_nothing_goes_wrong_unless_asked_for(defaults: Settings) -> None:
    assert (defaults.fault.losses, defaults.fault.kills(8)) == ([], ())


def kills_of(*arguments: str, world_size: int = 8) -> tuple[Kill, ...]:
    fault = compose_settings(arguments).fault
    assert fault.losses == []
    return fault.kills(world_size)


@pytest.mark.parametrize(
    ("at", "kills"),
    [
        ("[]", ()),
        ("[{iteration: 12, phase: backward, rank: 2}]", (Kill(rank=2, iteration=12, phase="backward"),)),
        (
            "[{rank: 7, phase: recovery, signal: STOP}, {iteration: 3, rank: 0, scope: node}, {after_s: 2, rank: 1}]",
            (
                Kill(rank=7, phase="recovery", signal="STOP"),
                Kill(rank=0, iteration=3, scope="node"),
                Kill(rank=1, after_s=2.0),
            ),
        ),
    ],
)
@pytest.mark.parametrize("plus", ["", "+"])
def test_kills_at_points_are_composed(plus: str, at: str, kills: tuple[Kill, ...]) -> None:
    assert kills_of(f"{plus}fault=at", f"fault.at={at}") == kills


def test_ranks_that_entries_leave_open_follow_the_seed() -> None:
    at = "fault.at=[{iteration: 1}, {iteration: 2}, {iteration: 3, rank: 5}, {iteration: 4}]"
    plans = [kills_of("fault=at", at, f"fault.seed={seed}") for seed in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]
    assert [kill.iteration for kill in plans[0]] == [1, 2, 3, 4]
    assert all(kill.rank in range(8) for kill in plans[0])
    assert plans[0][2].rank == plans[2][2].rank == 5


def test_poisson_settings_become_their_plan() -> None:
    settings = ["mtbf_s=7", "count=4", "seed=3", "signal=KILL", "scope=node"]
    kills = kills_of("fault=poisson", *(f"fault.{setting}" for setting in settings), world_size=4)
    assert kills == poisson_kills(mtbf_s=7.0, count=4, seed=3, world_size=4, scope="node")
    assert {kill.scope for kill in kills} == {"node"}


def test_a_trace_becomes_its_plan(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,add,a\n60000,remove,a\n90000,remove,b\n90000,remove,c\n")
    settings = [f"path={path}", "speedup=60", "seed=3", "signal=TERM"]
    kills = kills_of("fault=trace", *(f"fault.{setting}" for setting in settings), world_size=4)
    assert kills == trace_kills(path.read_text(), speedup=60.0, seed=3, world_size=4, signal="TERM")
    assert [kill.after_s for kill in kills] == [1.0, 1.5, 1.5]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fault=at", "fault.at=[{}]"], "fault.at: iteration: got None, wanted a number here, a phase, or after_s"),
        (["fault=at", "fault.at=[{iteration: 0}]"], "fault.at: iteration: got 0, wanted at least 1"),
        (["fault=at", "fault.at=[{iteration: 1, stage: 1}]"], "fault.at: stage: Key 'stage' not in"),
        (
            ["fault=at", "fault.at=[{iteration: 9}, {iteration: 8}]"],
            "fault.at: iteration: got [9, 8], wanted the order",
        ),
        (["fault=at", "fault.seed=-1"], "fault.seed: got -1, wanted at least 0"),
        (["fault=at", "fault.count=1"], "fault.count: no such setting, wanted one of the keys kind (fault=none); "),
        (["fault=poisson", "fault.mtbf_s=0"], "fault.mtbf_s: got 0.0, wanted a number above 0"),
        (["fault=poisson", "fault.mtbf_s=inf"], "fault.mtbf_s: got inf, wanted a number above 0"),
        (["fault=poisson", "fault.count=-1"], "fault.count: got -1, wanted at least 0"),
        (["fault=poisson", "fault.seed=-1"], "fault.seed: got -1, wanted at least 0"),
        (["fault=poisson", "fault.signal=HUP"], "fault.signal: got 'HUP', wanted one of KILL, STOP, SEGV, TERM"),
        (["fault=poisson", "fault.scope=x"], "fault.scope: got 'x', wanted one of process, node"),
        (
            ["fault=poisson", "fault.scope=node", "fault.signal=TERM"],
            "fault.signal: got 'TERM', wanted KILL where scope",
        ),
        (["fault=trace", "fault.path=x", "fault.speedup=0"], "fault.speedup: got 0.0, wanted a number above 0"),
        (["fault=trace", "fault.path=x", "fault.seed=-1"], "fault.seed: got -1, wanted at least 0"),
        (["fault=trace", "fault.path=x", "fault.signal=x"], "fault.signal: got 'x', wanted one of KILL, STOP, SEGV"),
    ],
)
def test_a_plan_of_kills_that_cannot_be_is_named(arguments: list[str], says: str) -> None:
    assert message_of(*arguments).startswith(says)


def test_a_rank_that_the_job_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^fault\.at: rank: got 4, wanted between 0 and 3, the ranks of the job$"):
        kills_of("fault=at", "fault.at=[{iteration: 1, rank: 3}, {iteration: 1, rank: 4}]", world_size=4)


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "trace.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        kills_of("fault=trace", f"fault.path={path}")
    assert str(caught.value).startswith(f"fault.path: got '{path}', wanted a file with a trace (")
