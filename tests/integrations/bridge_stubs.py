"""Lets Megatron-Bridge's training loop be imported without the packages that a CPU
cannot have, or does not need.

Owns: stand-ins for what Megatron-Bridge itself imports from them; Megatron-Core still
finds them missing, as it expects on a CPU. The packages `megatron.bridge` and
`megatron.bridge.models` are entered without their own first lines, which import every
model. All modules of the training loop are the real ones.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tests.integrations.stub_names import enter, stub_imports

STUBBED = (
    *(
        "transformer_engine",
        "modelopt",
        "nvidia_resiliency_ext",
        "transformers",
        "datasets",
    ),
    "megatron.energon",
)
_PROVIDERS = {"GPTModelProvider": "gpt_provider", "T5ModelProvider": "t5_provider"}


def install(bridge: Path) -> None:
    """Prepare this process for imports of Megatron-Bridge, whose package is the folder
    `bridge`.
    """
    stub_imports(STUBBED, "megatron.bridge")
    enter("megatron.bridge", bridge)
    enter("megatron.bridge.models", bridge / "models").__getattr__ = _provider
    # first, as those lines have it
    importlib.import_module("megatron.bridge.models.conversion.auto_bridge")


def _provider(name: str) -> Any:
    if name not in _PROVIDERS:
        raise AttributeError(name)
    return getattr(
        importlib.import_module(f"megatron.bridge.models.{_PROVIDERS[name]}"), name
    )
