"""Settings of each checkpoint policy as plain values. Knows no Hydra; every check names the setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_ckpt.errors import ConfigError


def require(condition: bool, setting: str, got: object, wanted: str) -> None:
    """Raise ConfigError naming the setting, what it holds and what it may hold, unless the condition holds."""
    if not condition:
        raise ConfigError(f"{setting}: got {got!r}, wanted {wanted}")


def require_choice(setting: str, got: str, choices: Sequence[str]) -> None:
    """Raise ConfigError unless `got` is one of `choices`."""
    require(got in choices, setting, got, "one of " + ", ".join(choices))


def require_at_least(setting: str, got: float, least: float) -> None:
    """Raise ConfigError unless `got` is at least `least`."""
    require(got >= least, setting, got, f"at least {least}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NoneConfig:
    """`ckpt=none`: saves nothing; a fault restarts from the beginning."""

    policy: str

    def __post_init__(self) -> None:
        require_choice("ckpt.policy", self.policy, ["none"])


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseConfig:
    """`ckpt=dense`: the whole state, durable, in Megatron's dist_checkpointing format."""

    policy: str
    every_iters: int
    keep: int
    async_save: bool
    strict: bool

    def __post_init__(self) -> None:
        require_choice("ckpt.policy", self.policy, ["dense"])
        require_at_least("ckpt.every_iters", self.every_iters, 1)
        require_at_least("ckpt.keep", self.keep, 1)


CkptConfig = NoneConfig | DenseConfig
CKPT_CONFIGS: dict[str, type[NoneConfig] | type[DenseConfig]] = {"none": NoneConfig, "dense": DenseConfig}
