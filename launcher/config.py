"""From a composed Hydra configuration to frozen values. The only place that sees
OmegaConf and Hydra.

Every YAML under conf/ spells out every key of the dataclass it becomes; a missing,
unknown or mistyped one is a ConfigError that names it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.faults.config import FAULT_CONFIGS, FaultConfig
from launcher.overrides import CONF_DIR
from moe_ckpt.config import (
    AUTO,
    CKPT_CONFIGS,
    CheckConfig,
    CkptConfig,
    RunFolderConfig,
    RuntimeConfig,
    require,
    require_all_at_least,
    require_at_least,
    require_auto,
    require_choice,
    require_switch,
)
from moe_ckpt.errors import ConfigError
from moe_ckpt.exactness import require_valid
from moe_ckpt.job_config import JobConfig
from moe_ckpt.state_format import (
    FP8_RECIPES,
    MASTER_FORMATS,
    MOMENT_FORMATS,
    StateFormat,
)

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

GROUPS = ("ckpt", "model", "parallel", "precision", "data", "train", "fault", "runtime")
_WARMUP_ITERS = 10

T = TypeVar("T")
Kinds = Mapping[str, type[Any] | Mapping[str, type[Any]]]
"""The class of each section, or one for each choice."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture. Key by key explained in conf/model/tiny.yaml."""

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None
    kv_channels: int | None
    attention: str
    mla_q_lora_rank: int | None
    mla_kv_lora_rank: int | None
    mla_qk_head_dim: int | None
    mla_qk_pos_emb_head_dim: int | None
    mla_v_head_dim: int | None
    num_experts: int
    moe_topk: int
    moe_ffn_hidden_size: int
    shared_expert_ffn_hidden_size: int
    num_dense_layers: int
    dense_ffn_hidden_size: int
    moe_capacity_factor: float | None
    moe_pad_to_capacity: bool
    moe_balancing: str
    moe_aux_loss_coeff: float
    moe_bias_update_rate: float
    moe_z_loss_coeff: float | None
    moe_score_function: str
    moe_router_dtype: str
    moe_grouped_gemm: bool
    normalization: str
    activation: str
    position_embedding: str
    rotary_base: int
    tied_embeddings: bool
    linear_bias: bool
    qkv_bias: bool
    hidden_dropout: float
    attention_dropout: float
    init_std: float
    vocab_size: int | str

    def __post_init__(self) -> None:
        require_all_at_least(
            "model.",
            self,
            num_layers=1,
            hidden_size=1,
            num_attention_heads=1,
            num_experts=0,
        )
        require_all_at_least("model.", self, num_query_groups=1, kv_channels=1)
        require_choice("model.attention", self.attention, ["mha", "mla"])
        balancing = ["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "bias"]
        require_choice("model.moe_balancing", self.moe_balancing, balancing)
        require_choice(
            "model.moe_score_function", self.moe_score_function, ["softmax", "sigmoid"]
        )
        require_choice(
            "model.moe_router_dtype", self.moe_router_dtype, ["fp32", "fp64", "model"]
        )
        require_choice(
            "model.normalization", self.normalization, ["RMSNorm", "LayerNorm"]
        )
        require_choice("model.activation", self.activation, ["swiglu", "gelu"])
        require_choice(
            "model.position_embedding", self.position_embedding, ["rope", "learned"]
        )
        if self.num_experts:
            wanted = f"between 1 and model.num_experts={self.num_experts}"
            require(
                1 <= self.moe_topk <= self.num_experts,
                "model.moe_topk",
                self.moe_topk,
                wanted,
            )
        if self.moe_balancing == "bias":
            wanted = (
                "sigmoid where model.moe_balancing=bias (Megatron updates the bias for"
                " sigmoid scores only)"
            )
            require(
                self.moe_score_function == "sigmoid",
                "model.moe_score_function",
                self.moe_score_function,
                wanted,
            )
        if self.moe_pad_to_capacity:
            wanted = "a number where model.moe_pad_to_capacity=true"
            require(
                self.moe_capacity_factor is not None,
                "model.moe_capacity_factor",
                None,
                wanted,
            )
        if isinstance(self.vocab_size, str):
            require_choice("model.vocab_size", self.vocab_size, [AUTO, "a number"])
        else:
            require_at_least("model.vocab_size", self.vocab_size, 1)
        if self.attention == "mla":
            for name in (
                "mla_kv_lora_rank",
                "mla_qk_head_dim",
                "mla_qk_pos_emb_head_dim",
                "mla_v_head_dim",
            ):
                require(
                    getattr(self, name) is not None,
                    f"model.{name}",
                    None,
                    "a number where model.attention=mla",
                )
        else:
            head_dim_given = (
                self.kv_channels is not None
                or self.hidden_size % self.num_attention_heads == 0
            )
            wanted = (
                f"a divisor of model.hidden_size={self.hidden_size}, or"
                " model.kv_channels"
            )
            require(
                head_dim_given,
                "model.num_attention_heads",
                self.num_attention_heads,
                wanted,
            )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of parallelism, `auto` where they follow from the number of processes.
    See conf/parallel/auto.yaml.
    """

    pp: int | str
    dp: int | str
    ep: int | str
    tp: int | str
    ranks_per_node: int | str

    def __post_init__(self) -> None:
        for field in fields(self):
            require_auto(
                f"parallel.{field.name}", getattr(self, field.name), 1, "a number"
            )


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats. See conf/precision/bf16.yaml."""

    dtype: str
    fp8: bool
    fp8_recipe: str
    fp8_amax_history_len: int
    fp8_param_gather: bool
    master: str
    exp_avg: str
    exp_avg_sq: str
    grad_reduce_in_fp32: bool
    initial_loss_scale: float
    min_loss_scale: float
    loss_scale_window_iters: int
    loss_scale_hysteresis: int

    def __post_init__(self) -> None:
        require_choice("precision.dtype", self.dtype, ["fp32", "bf16", "fp16"])
        require_choice("precision.fp8_recipe", self.fp8_recipe, FP8_RECIPES)
        require_all_at_least(
            "precision.", self, fp8_amax_history_len=1, loss_scale_window_iters=1
        )
        require_all_at_least(
            "precision.",
            self,
            min_loss_scale=1.0,
            initial_loss_scale=self.min_loss_scale,
        )
        require_choice("precision.master", self.master, MASTER_FORMATS)
        require_choice("precision.exp_avg", self.exp_avg, MOMENT_FORMATS)
        require_choice("precision.exp_avg_sq", self.exp_avg_sq, MOMENT_FORMATS)
        if self.fp8 or self.master == "remainder":
            setting, got = (
                ("precision.fp8", self.fp8)
                if self.fp8
                else ("precision.master", self.master)
            )
            require(
                self.dtype == "bf16",
                "precision.dtype",
                self.dtype,
                f"bf16 where {setting}={got}".lower(),
            )
        if self.fp8_param_gather:
            setting = "precision.fp8_param_gather=true"
            require(self.fp8, "precision.fp8", self.fp8, f"true where {setting}")
            # Megatron accepts FP16 masters, and breaks: see `moe_ckpt.megatron.replay`
            require(
                self.master == "fp32",
                "precision.master",
                self.master,
                f"fp32 where {setting}",
            )
            # Transformer Engine 2.9 to 2.11: FusedAdam sets `_scale_inv` only on ranks
            # that keep a part
            has_fp32_moments = (self.exp_avg, self.exp_avg_sq) == ("fp32", "fp32")
            wanted = f"tensorwise or blockwise where {setting} and moments are not fp32"
            require(
                has_fp32_moments or self.fp8_recipe != "delayed",
                "precision.fp8_recipe",
                self.fp8_recipe,
                wanted,
            )

    @property
    def state_format(self) -> StateFormat:
        """How each parameter's weights and moments are stored."""
        is_delayed = self.fp8_recipe == "delayed"
        return StateFormat(
            # BF16 parameters of FP8 layers are bytes in a snapshot, unless their scales
            # are those of earlier passes
            compute="fp8"
            if self.fp8_param_gather or (self.fp8 and not is_delayed)
            else self.dtype,
            master=self.master,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            has_history=self.fp8_param_gather and is_delayed,
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from. See conf/data/*.yaml."""

    source: str
    path: str | None
    tokenizer: str | None
    eval_fraction: float
    seed: int

    def __post_init__(self) -> None:
        require_choice("data.source", self.source, ["stdlib", "text", "megatron"])
        require(
            0.0 < self.eval_fraction < 1.0,
            "data.eval_fraction",
            self.eval_fraction,
            "between 0 and 1",
        )
        require_at_least("data.seed", self.seed, 0)
        if self.source == "stdlib":
            require(
                self.path is None,
                "data.path",
                self.path,
                "null where data.source=stdlib",
            )
            require(
                self.tokenizer is None,
                "data.tokenizer",
                self.tokenizer,
                "null (bytes) where data.source=stdlib",
            )
        else:
            require(
                bool(self.path),
                "data.path",
                self.path,
                f"a path where data.source={self.source}",
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, batch, optimizer, schedule. See conf/train/default.yaml."""

    iterations: int
    micro_batch_size: int
    global_batch_size: int
    sequence_length: int
    seed: int
    optimizer: str
    distributed_optimizer: bool
    lr: float
    min_lr: float
    lr_schedule: str
    lr_warmup_iters: int | str
    lr_decay_iters: int | str
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    clip_grad: float
    recompute: str
    eval_every_iters: int
    eval_batches: int
    check_determinism: bool | str
    resume: str

    def __post_init__(self) -> None:
        require_all_at_least(
            "train.",
            self,
            iterations=1,
            micro_batch_size=1,
            global_batch_size=1,
            sequence_length=1,
        )
        require_all_at_least(
            "train.", self, eval_batches=1, seed=0, lr=0, min_lr=0, weight_decay=0
        )
        require_all_at_least("train.", self, clip_grad=0, eval_every_iters=0)
        # SGD's state is saved by Megatron, and cannot be loaded: its `init_state_fn` is
        # None
        require_choice("train.optimizer", self.optimizer, ["adam"])
        require_choice(
            "train.lr_schedule", self.lr_schedule, ["constant", "linear", "cosine"]
        )
        require_choice("train.recompute", self.recompute, ["none", "selective", "full"])
        require(
            self.min_lr <= self.lr,
            "train.min_lr",
            self.min_lr,
            f"at most train.lr={self.lr}",
        )
        for name in ("lr_decay_iters", "lr_warmup_iters"):
            if isinstance(getattr(self, name), str):
                require_choice(f"train.{name}", getattr(self, name), [AUTO, "a number"])
        wanted = (
            f"at least 0 and less than the {self.num_decay_iters} iterations that the"
            " learning rate decays over"
        )
        valid = 0 <= self.num_warmup_iters < self.num_decay_iters
        require(valid, "train.lr_warmup_iters", self.lr_warmup_iters, wanted)
        require_switch("train.check_determinism", self.check_determinism)
        require(
            bool(self.resume),
            "train.resume",
            self.resume,
            "auto, never or the path of a checkpoint",
        )

    @property
    def num_warmup_iters(self) -> int:
        """The iterations of the warmup; `auto` leaves at least half of a short run to
        the decay.
        """
        return (
            min(_WARMUP_ITERS, self.num_decay_iters // 2)
            if self.lr_warmup_iters == AUTO
            else int(self.lr_warmup_iters)
        )

    @property
    def num_decay_iters(self) -> int:
        return (
            self.iterations if self.lr_decay_iters == AUTO else int(self.lr_decay_iters)
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig(CheckConfig):
    """Where a run leaves its files, how it shows progress, and what it is compared by.
    See conf/config.yaml.
    """

    dir: str | None
    name: str
    exactness: str
    progress: str
    tensorboard: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        require_valid(self.exactness, may_be_auto=False)
        require_choice("run.progress", self.progress, [AUTO, "bar", "lines", "none"])
        require(
            bool(re.fullmatch(r"[\w.-]+", self.name)),
            "run.name",
            self.name,
            "letters, digits, '_', '-' and '.'",
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole run. `composed_yaml` is the configuration as composed, for the run
    folder.
    """

    ckpt: CkptConfig
    runtime: RuntimeConfig
    model: ModelConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    data: DataConfig
    train: TrainConfig
    fault: FaultConfig
    run: RunConfig
    composed_yaml: str

    @property
    def job(self) -> JobConfig:
        """The settings that every training loop has."""
        return JobConfig(
            ckpt=self.ckpt,
            runtime=self.runtime,
            folder=RunFolderConfig(
                dir=self.run.dir, name=self.run.name, configuration=self.composed_yaml
            ),
            ranks_per_node=self.parallel.ranks_per_node,
            checks=self.run,
            losses=self.fault.losses,
            exactness=self.run.exactness,
            check_determinism=self.train.check_determinism,
        )


def compose_settings(arguments: Sequence[str]) -> Settings:
    """Return the run that command-line overrides describe.

    Raises ConfigError naming the setting and, for a closed set of choices, the choices.
    """
    return compose_as("config", arguments, GROUPS, to_settings, _KINDS)


def compose_as(
    name: str,
    arguments: Sequence[str],
    groups: Sequence[str],
    convert: Callable[[DictConfig], T],
    kinds: Kinds,
) -> T:
    """Return what the configuration that is called `name` becomes with command-line
    overrides.

    `kinds` are the classes of its sections, for what is said of a key that there is
    not. Raises ConfigError.
    """
    # here, as most commands need Hydra for a part of their work only, and none for
    # `--help`
    from hydra import compose, initialize_config_dir  # noqa: PLC0415
    from hydra.core.global_hydra import GlobalHydra  # noqa: PLC0415
    from hydra.core.override_parser.overrides_parser import OverridesParser  # noqa: PLC0415
    from hydra.errors import HydraException, OverrideParseException  # noqa: PLC0415

    bare = (group_choice_without_plus(argument, groups) for argument in arguments)
    overrides = [_choice_as_text(argument, groups) for argument in bare]
    # Hydra keeps one configuration a process, and refuses a second one: compare and the
    # simulator compose many
    GlobalHydra.instance().clear()
    try:
        for override in OverridesParser.create().parse_overrides(overrides):
            _require_one_value(override)
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            return convert(compose(name, overrides=overrides))
    except OverrideParseException as error:
        raise ConfigError(f"{error.override}: {error}") from None
    except HydraException as error:
        raise ConfigError(_explain(str(error), kinds)) from None


def _require_one_value(override: Override) -> None:
    """Raise ConfigError for a sweep over values, and for a setting of Hydra's own,
    which would do nothing.
    """
    key = override.key_or_group
    is_hydras = re.split(r"[./]", key)[0] == "hydra"
    require(
        not is_hydras,
        key,
        "a setting of Hydra's own",
        "one of the settings that --help lists",
    )
    if override.is_sweep_override():
        _, _, values = (override.input_line or "").partition("=")
        raise ConfigError(
            f"{key}: got {values!r}, wanted one value (start once for each), or a list"
            " as [a, b]"
        )


def group_choice_without_plus(argument: str, groups: Sequence[str] = GROUPS) -> str:
    """Make `+ckpt=X` mean `ckpt=X`: every group has a default here, which Hydra refuses
    to append to.
    """
    bare = argument.lstrip("+")
    return bare if bare.partition("=")[0] in groups else argument


def _choice_as_text(argument: str, groups: Sequence[str]) -> str:
    """Make `train=5` a choice that does not exist; Hydra takes no number or null for a
    choice's name.
    """
    group, _, choice = argument.partition("=")
    return (
        f"{group}='{choice}'"
        if group in groups and re.fullmatch(r"[\w.+-]+", choice)
        else argument
    )


def read_settings(path: Path) -> Settings:
    """Return the settings that a run left as config.yaml. Raises ConfigError for those
    of another version.
    """
    config = OmegaConf.load(path)
    require(
        OmegaConf.is_dict(config),
        str(path),
        type(config).__name__,
        "a composed configuration",
    )
    return to_settings(cast("DictConfig", config))


def to_settings(config: DictConfig) -> Settings:
    """Convert a composed configuration; raises ConfigError naming the first key that is
    wrong.
    """
    # first: `require_complete` resolves interpolations in place, and the run folder
    # gets what was composed
    composed_yaml = OmegaConf.to_yaml(config)
    require_complete(config, sorted(_KINDS))
    chosen = {
        **_KINDS,
        "ckpt": CKPT_CONFIGS[choice_of(config, "ckpt.policy", CKPT_CONFIGS)],
        "fault": FAULT_CONFIGS[choice_of(config, "fault.kind", FAULT_CONFIGS)],
    }
    sections: dict[str, Any] = {
        name: section_of(config, name, cast("Any", kind))
        for name, kind in chosen.items()
    }
    return Settings(**sections, composed_yaml=composed_yaml)


def require_complete(config: DictConfig, keys: Sequence[str]) -> None:
    """Raise ConfigError unless a configuration has these keys, no others, and all that
    is in them; resolve it.
    """
    for key in config:
        require(key in keys, str(key), "a value", f"one of the keys {', '.join(keys)}")
    for name in keys:
        require(
            name in config,
            name,
            "nothing",
            "its keys; what they mean stands under conf/",
        )
    try:
        for key in sorted(OmegaConf.missing_keys(config)):
            raise ConfigError(
                f"{key}: not set, wanted a value; what it means stands beside it under"
                " conf/"
            )
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{error.full_key}: {error.msg or error}".split("\n")[0]
        ) from None


def choice_of(config: DictConfig, key: str, choices: Mapping[str, Any]) -> str:
    """Return what a key chooses. Raises ConfigError for what cannot be chosen."""
    choice = OmegaConf.select(config, key)
    require_choice(key, choice, list(choices))
    return choice


def section_of(config: DictConfig, name: str, kind: type[T]) -> T:
    """Return a section as a value of its class. Raises ConfigError, naming the key that
    is wrong.
    """
    known = {field.name for field in fields(cast("Any", kind))}
    for key in config[name]:
        require(
            key in known,
            f"{name}.{key}",
            config[name][key],
            f"one of the keys {_names(kind)}",
        )
    try:
        return cast(
            "T", OmegaConf.to_object(OmegaConf.merge(_schema(kind), config[name]))
        )
    except OmegaConfBaseException as error:
        is_ours = re.split(r"[.\[]", str(error.full_key))[0] in known
        # of a value in a list OmegaConf names the inner key only
        of_list = next(
            (str(key) for key in config[name] if OmegaConf.is_list(config[name][key])),
            "",
        )
        key = error.full_key if is_ours else f"{of_list}: {error.full_key}"
        raise ConfigError(
            f"{name}.{key}: {error.msg or error}".split("\n")[0]
        ) from None


def _schema(kind: type[Any]) -> DictConfig:
    """Return a class as OmegaConf's schema, with sections of its own writable: frozen
    classes become read-only.
    """
    schema = OmegaConf.structured(kind)
    OmegaConf.set_readonly(schema, False)
    for name, of in get_type_hints(kind).items():
        if is_dataclass(of):
            schema[name] = OmegaConf.structured(of)
            OmegaConf.set_readonly(schema[name], False)
    return schema


def _explain(message: str, kinds: Kinds) -> str:
    """Add the keys that exist, and the closest one, to Hydra's error about a key that
    does not.
    """
    missing = re.search(r"Could not override '([\w.]+)'", message)
    if missing is None:
        return message.partition("\nConfig search path")[0].strip()
    group = missing[1].rpartition(".")[0]
    chosen = kinds.get(group) if group else None
    if isinstance(chosen, Mapping):
        keys = "; ".join(
            f"{_names(kind)} ({group}={choice})" for choice, kind in chosen.items()
        )
    elif chosen:
        keys = _names(chosen)
    else:
        # the groups, and the keys of the section without a name, which belong to no
        # group
        loose = (
            [field.name for field in fields(cast("Any", kinds[""]))]
            if "" in kinds
            else []
        )
        keys = ", ".join(sorted([*filter(None, kinds), *loose]))
    return (
        f"{missing[1]}: no such setting, wanted one of the keys"
        f" {keys}{_closest(missing[1], kinds)}"
    )


def _closest(missing: str, kinds: Kinds) -> str:
    """Return a question that names the setting most like a missing one, or nothing."""
    known = [
        f"{group}.{field.name}".lstrip(".")
        for group, chosen in kinds.items()
        for kind in (chosen.values() if isinstance(chosen, Mapping) else (chosen,))
        for field in fields(cast("Any", kind))
    ]
    close = difflib.get_close_matches(missing, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _names(kind: Any) -> str:
    return ", ".join(sorted(field.name for field in fields(kind)))


_KINDS: Kinds = {
    **{
        name: kind
        for name, kind in get_type_hints(Settings).items()
        if name != "composed_yaml"
    },
    "ckpt": CKPT_CONFIGS,
    "fault": FAULT_CONFIGS,
}
