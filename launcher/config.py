"""Converts a composed Hydra configuration to frozen values.

Only this module uses Hydra, and only this module and `launcher.simulator.config` use
OmegaConf. Every YAML file under conf/ contains every key of its dataclass. A key that
is missing, unknown or of another type is a ConfigError that names the key.
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
from moe_ckpt.config_keys import flat_class, from_keys, keys_of
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
"""The class of each section, or one for each choice of a section, by name."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of the model. See conf/model/tiny.yaml."""

    name: str
    """Name of the architecture."""

    num_layers: int
    """Number of transformer layers."""

    hidden_size: int
    """Width of the residual stream."""

    num_attention_heads: int
    """Number of attention heads."""

    num_query_groups: int | None
    """Number of key/value heads (grouped-query attention); None: as many as heads."""

    kv_channels: int | None
    """Width of a head; None: `hidden_size` / `num_attention_heads`."""

    attention: str
    """`mha` (multi-head) or `mla` (multi-latent, DeepSeek-V2)."""

    mla_q_lora_rank: int | None
    """MLA: rank of the query compression; None: no compression."""

    mla_kv_lora_rank: int | None
    """MLA: rank of the key/value compression."""

    mla_qk_head_dim: int | None
    """MLA: width of a query/key head without position."""

    mla_qk_pos_emb_head_dim: int | None
    """MLA: width of the rotary part of a query/key head."""

    mla_v_head_dim: int | None
    """MLA: width of a value head."""

    num_experts: int
    """Number of routed experts of a MoE layer; 0: a dense model."""

    moe_topk: int
    """Number of routed experts per token."""

    moe_ffn_hidden_size: int
    """Inner width of a routed expert."""

    shared_expert_ffn_hidden_size: int
    """Inner width of all shared experts together; 0: no shared experts."""

    num_dense_layers: int
    """Number of first layers that have an MLP instead of experts."""

    dense_ffn_hidden_size: int
    """Inner width of the MLPs of dense layers; 0: `moe_ffn_hidden_size`."""

    moe_capacity_factor: float | None
    """Tokens that an expert takes, relative to an even share; None: dropless."""

    moe_pad_to_capacity: bool
    """Whether the input of every expert is padded to its capacity."""

    moe_balancing: str
    """Load balancing: `none`, `aux_loss`, `seq_aux_loss`, `global_aux_loss` or `bias`
    (without auxiliary loss, DeepSeek-V3).
    """

    moe_aux_loss_coeff: float
    """Weight of the auxiliary loss."""

    moe_bias_update_rate: float
    """Step of the expert bias per iteration."""

    moe_z_loss_coeff: float | None
    """Weight of the router z-loss; None: no z-loss."""

    moe_score_function: str
    """`softmax` or `sigmoid`."""

    moe_router_dtype: str
    """Number format of routing: `fp32`, `fp64` or `model` (as the model)."""

    moe_grouped_gemm: bool
    """Whether one module holds all local experts (on a GPU with Transformer Engine)."""

    normalization: str
    """`RMSNorm` or `LayerNorm`."""

    activation: str
    """`swiglu` (gated SiLU) or `gelu`."""

    position_embedding: str
    """`rope` (rotary) or `learned` (absolute)."""

    rotary_base: int
    """Base of the rotary frequencies."""

    tied_embeddings: bool
    """Whether input embedding and output layer share weights."""

    linear_bias: bool
    """Whether linear layers have biases."""

    qkv_bias: bool
    """Whether the query/key/value projection has biases."""

    hidden_dropout: float
    """Dropout probability on the residual branches."""

    attention_dropout: float
    """Dropout probability on attention weights."""

    init_std: float
    """Standard deviation of the initial weights."""

    vocab_size: int | str
    """Number of tokens in the vocabulary; `auto`: as the data needs."""

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
    """Degrees of parallelism. See conf/parallel/auto.yaml.

    `auto` values follow from the number of processes.
    """

    pp: int | str
    """Number of pipeline stages; must divide `model.num_layers`."""

    dp: int | str
    """Number of data-parallel replicas: processes / (`pp` * `tp`)."""

    ep: int | str
    """Degree of expert parallelism; must divide `dp` and `model.num_experts`."""

    tp: int | str
    """Degree of tensor parallelism; `auto`: 1."""

    ranks_per_node: int | str
    """Number of ranks that fail together; `auto`: the ranks that torchrun starts on a
    node, or 1 if the node has all ranks.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            require_auto(
                f"parallel.{field.name}", getattr(self, field.name), 1, "a number"
            )


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats. See conf/precision/bf16.yaml."""

    dtype: str
    """Format of activations, gradients and compute weights: `fp32`, `bf16` or `fp16`.
    """

    fp8: bool
    """Whether linear layers multiply in FP8 (E4M3, gradients E5M2)."""

    fp8_recipe: str
    """Source of FP8 scales: the tensors themselves (`tensorwise`), their blocks
    (`blockwise`) or earlier passes (`delayed`).
    """

    fp8_amax_history_len: int
    """`delayed` only: number of passes from whose largest values a scale is computed.
    """

    fp8_param_gather: bool
    """Whether the weights of FP8 layers are kept and gathered in FP8, with masters in
    FP32.
    """

    master: str
    """Format of master weights: `fp32`, `fp16`, `remainder` (of FP32, beside BF16
    weights) or `fp8`.
    """

    exp_avg: str
    """Format of Adam's first moment: `fp32`, `bf16`, `fp16` or `fp8`."""

    exp_avg_sq: str
    """Format of Adam's second moment: `fp32`, `bf16`, `fp16` or `fp8`."""

    grad_reduce_in_fp32: bool
    """Whether gradients are accumulated and reduced in FP32."""

    initial_loss_scale: float
    """FP16 only: first loss scale."""

    min_loss_scale: float
    """FP16 only: lower limit of the loss scale."""

    loss_scale_window_iters: int
    """FP16 only: iterations without overflow before the scale doubles."""

    loss_scale_hysteresis: int
    """FP16 only: overflows, since the scale last grew, before the scale halves."""

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
            # Megatron accepts FP16 masters here but then fails: see
            # `moe_ckpt.megatron.replay`
            require(
                self.master == "fp32",
                "precision.master",
                self.master,
                f"fp32 where {setting}",
            )
            # in Transformer Engine 2.9 to 2.11, FusedAdam sets `_scale_inv` of a
            # parameter only on ranks that keep a part of the parameter
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
        """The formats in which each parameter's weights and moments are stored."""
        is_delayed = self.fp8_recipe == "delayed"
        return StateFormat(
            # snapshots hold BF16 parameters of FP8 layers as bytes, unless the scales
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
    """Source of the tokens. See conf/data/*.yaml."""

    source: str
    """Kind of data: `stdlib`, `text` or `megatron`."""

    path: str | None
    """Path of the text, or prefix of the .bin and .idx files; None for `stdlib`."""

    tokenizer: str | None
    """Path of a Hugging Face tokenizer.json; None: one token per byte, or for
    `megatron` the vocabulary of `model.vocab_size`.
    """

    eval_fraction: float
    """Share of the data that is held out for evaluation."""

    seed: int
    """Seed of the order of samples."""

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
    """Length, batch, optimizer and schedule. See conf/train/default.yaml."""

    iterations: int
    """Number of optimizer steps in all."""

    micro_batch_size: int
    """Number of sequences in a micro-batch."""

    global_batch_size: int
    """Number of sequences per optimizer step; must be a multiple of `micro_batch_size`
    * dp.
    """

    sequence_length: int
    """Number of tokens of a sequence."""

    seed: int
    """Seed of parameter initialization and dropout."""

    optimizer: str
    """`adam` (AdamW)."""

    distributed_optimizer: bool
    """Whether master weights and moments are sharded over data-parallel ranks."""

    lr: float
    """Peak learning rate."""

    min_lr: float
    """Learning rate at the end of the decay."""

    lr_schedule: str
    """`constant`, `linear` or `cosine`."""

    lr_warmup_iters: int | str
    """Iterations from 0 to the peak; `auto`: 10, or half of the decay if that is
    shorter, as the run began.
    """

    lr_decay_iters: int | str
    """Iterations until `min_lr`; `auto`: `iterations`, as the run began."""

    weight_decay: float
    """Decoupled weight decay; not applied to biases and norms."""

    adam_beta1: float
    """Decay of the first moment."""

    adam_beta2: float
    """Decay of the second moment."""

    adam_eps: float
    """Term added to the root of the second moment."""

    clip_grad: float
    """Largest total norm of gradients; 0: gradients are not clipped."""

    recompute: str
    """Activations that are recomputed in backward: `none`, `selective` (attention) or
    `full` (layers).
    """

    eval_every_iters: int
    """Iterations between evaluations; 0: only before the first and after the last
    iteration.
    """

    eval_batches: int
    """Number of global batches of an evaluation."""

    check_determinism: bool | str
    """Whether the start runs one micro-batch twice and compares gradients; `auto`: only
    for `run.exactness=bitwise` on a GPU.
    """

    resume: str
    """`auto`: the newest checkpoint of this run folder; `never`; or the path of a
    checkpoint or run folder, of any layout.
    """

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
        # Megatron saves the state of SGD but cannot load the state: `init_state_fn` is
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
        """Iterations of the warmup.

        `auto` leaves at least half of a short run to the decay.
        """
        return (
            min(_WARMUP_ITERS, self.num_decay_iters // 2)
            if self.lr_warmup_iters == AUTO
            else int(self.lr_warmup_iters)
        )

    @property
    def num_decay_iters(self) -> int:
        """Iterations until the learning rate is `min_lr`."""
        return (
            self.iterations if self.lr_decay_iters == AUTO else int(self.lr_decay_iters)
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig(CheckConfig):
    """Files, display and checks of a run. See conf/config.yaml."""

    dir: str | None
    """Path of the run folder; None: outputs/DATE/TIME-`name`."""

    name: str
    """Last part of the name of a new run folder: letters, digits, `_`, `-` and `.`."""

    exactness: str
    """Promise of recoveries, `bitwise` or `state` (`moe_ckpt.exactness`)."""

    progress: str
    """Display of progress: `auto` (`bar` on a terminal, else `lines`), `bar`, `lines`
    or `none`.
    """

    tensorboard: bool
    """Whether TensorBoard scalars are written into the run folder."""

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
    """The settings of a whole run."""

    ckpt: CkptConfig
    """Checkpoint policy."""

    runtime: RuntimeConfig
    """Supervision of workers, and limits of waits."""

    model: ModelConfig
    """Architecture of the model."""

    parallel: ParallelConfig
    """Degrees of parallelism."""

    precision: PrecisionConfig
    """Number formats."""

    data: DataConfig
    """Source of the tokens."""

    train: TrainConfig
    """Length, batch, optimizer and schedule."""

    fault: FaultConfig
    """Faults that are inflicted on purpose."""

    run: RunConfig
    """Files, display and checks of the run."""

    composed_yaml: str
    """The configuration as composed, for the run folder."""

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
    """Return the settings that command-line overrides describe.

    Args:
        arguments: Hydra overrides.

    Raises:
        ConfigError: A setting is wrong. The error names the setting and, for a closed
            set of choices, the choices.
    """
    return compose_as("config", arguments, GROUPS, to_settings, _KINDS)


def compose_as(
    name: str,
    arguments: Sequence[str],
    groups: Sequence[str],
    convert: Callable[[DictConfig], T],
    kinds: Kinds,
) -> T:
    """Compose a configuration from command-line overrides, and convert it.

    Args:
        name: The file in conf/, without its suffix.
        arguments: Hydra overrides.
        groups: The groups of the configuration, of which overrides choose files.
        convert: Converts the composed configuration.
        kinds: The classes of the sections, for errors about unknown keys.

    Returns:
        The result of `convert`.

    Raises:
        ConfigError: A setting is wrong.
    """
    # imported here: most commands need Hydra for only a part of their work, and not for
    # `--help`
    from hydra import compose, initialize_config_dir  # noqa: PLC0415
    from hydra.core.global_hydra import GlobalHydra  # noqa: PLC0415
    from hydra.core.override_parser.overrides_parser import OverridesParser  # noqa: PLC0415
    from hydra.errors import HydraException, OverrideParseException  # noqa: PLC0415

    bare = (group_choice_without_plus(argument, groups) for argument in arguments)
    overrides = [_choice_as_text(argument, groups) for argument in bare]
    # Hydra keeps one configuration per process and refuses a second one, but compare
    # and the simulator compose many configurations
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
    """Refuse sweeps over values and settings of Hydra itself.

    The latter would have no effect.

    Raises:
        ConfigError: The override is of one of these kinds.
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
    """Return `ckpt=X` for `+ckpt=X`, and all other arguments unchanged.

    Every group has a default here, and Hydra refuses to append to a group with a
    default.

    Args:
        argument: A Hydra override.
        groups: The groups of the configuration.
    """
    bare = argument.lstrip("+")
    return bare if bare.partition("=")[0] in groups else argument


def _choice_as_text(argument: str, groups: Sequence[str]) -> str:
    """Quote the choice of a group, so that `train=5` is a choice that does not exist.

    Hydra accepts no number and no null as the name of a choice.
    """
    group, _, choice = argument.partition("=")
    return (
        f"{group}='{choice}'"
        if group in groups and re.fullmatch(r"[\w.+-]+", choice)
        else argument
    )


def read_settings(path: Path) -> Settings:
    """Return the settings that a run has written to config.yaml.

    Args:
        path: The path of config.yaml.

    Raises:
        ConfigError: The settings are of another version.
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
    """Convert a composed configuration to settings.

    Args:
        config: The configuration; interpolations are resolved in place.

    Raises:
        ConfigError: A key is wrong. The error names the first such key.
    """
    # before `require_complete`, which resolves interpolations in place: the run folder
    # gets the configuration as composed
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
    """Require the keys of a configuration, and resolve interpolations in place.

    Args:
        config: The configuration.
        keys: The keys that the configuration must have. No others are allowed.

    Raises:
        ConfigError: A key is missing or unknown, or a value is not set.
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
    """Return the choice that a key names.

    Args:
        config: The configuration.
        key: The key, as `ckpt.policy`.
        choices: The allowed choices.

    Raises:
        ConfigError: The choice is not allowed.
    """
    choice = OmegaConf.select(config, key)
    require_choice(key, choice, list(choices))
    return choice


def section_of(config: DictConfig, name: str, kind: type[T]) -> T:
    """Return a section of a configuration as a value of its class.

    Args:
        config: The configuration.
        name: The name of the section.
        kind: The class of the section.

    Raises:
        ConfigError: A key is wrong. The error names the key.
    """
    known = keys_of(kind)
    for key in config[name]:
        require(
            key in known,
            f"{name}.{key}",
            config[name][key],
            f"one of the keys {_names(kind)}",
        )
    try:
        values = OmegaConf.to_object(OmegaConf.merge(_schema(kind), config[name]))
    except OmegaConfBaseException as error:
        is_ours = re.split(r"[.\[]", str(error.full_key))[0] in known
        # for a value in a list, OmegaConf names only the inner key
        of_list = next(
            (str(key) for key in config[name] if OmegaConf.is_list(config[name][key])),
            "",
        )
        key = error.full_key if is_ours else f"{of_list}: {error.full_key}"
        raise ConfigError(
            f"{name}.{key}: {error.msg or error}".split("\n")[0]
        ) from None
    return from_keys(kind, {key: getattr(values, key) for key in known})


def _schema(kind: type[Any]) -> DictConfig:
    """Return the keys of a class as OmegaConf's schema, with writable sections.

    OmegaConf makes frozen classes read-only.
    """
    schema = OmegaConf.structured(flat_class(kind))
    OmegaConf.set_readonly(schema, False)
    for name, of in keys_of(kind).items():
        if is_dataclass(of):
            schema[name] = OmegaConf.structured(of)
            OmegaConf.set_readonly(schema[name], False)
    return schema


def _explain(message: str, kinds: Kinds) -> str:
    """Return Hydra's error with the existing keys and the closest key.

    Errors of other kinds keep their text.
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
        loose = list(keys_of(cast("Any", kinds[""]))) if "" in kinds else []
        keys = ", ".join(sorted([*filter(None, kinds), *loose]))
    return (
        f"{missing[1]}: no such setting, wanted one of the keys"
        f" {keys}{_closest(missing[1], kinds)}"
    )


def _closest(missing: str, kinds: Kinds) -> str:
    """Return a question with the setting most like a missing one, or an empty text."""
    known = [
        f"{group}.{key}".lstrip(".")
        for group, chosen in kinds.items()
        for kind in (chosen.values() if isinstance(chosen, Mapping) else (chosen,))
        for key in keys_of(kind)
    ]
    close = difflib.get_close_matches(missing, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _names(kind: Any) -> str:
    return ", ".join(sorted(keys_of(kind)))


_KINDS: Kinds = {
    **{
        name: kind
        for name, kind in get_type_hints(Settings).items()
        if name != "composed_yaml"
    },
    "ckpt": CKPT_CONFIGS,
    "fault": FAULT_CONFIGS,
}
