"""Configurations of policies with the defaults of conf/ckpt, for jobs whose ranks are threads."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

from moe_ckpt.config import CKPT_CONFIGS, InMemoryConfig, MaxBytesPerS

_FOLDER = Path(__file__).parents[2] / "conf" / "ckpt"

C = TypeVar("C", bound=InMemoryConfig)


@cache
def _defaults(policy: str) -> dict[str, Any]:
    values = yaml.safe_load((_FOLDER / f"{policy}.yaml").read_text())
    if "max_bytes_per_s" not in values:
        return values
    return values | {"max_bytes_per_s": MaxBytesPerS(**values["max_bytes_per_s"])}


def config(policy: str, **settings: Any) -> InMemoryConfig:
    """Return the policy's configuration with these settings in place of defaults."""
    made = CKPT_CONFIGS[policy](**_defaults(policy) | settings)
    assert isinstance(made, InMemoryConfig)
    return made
