"""Makes Megatron-Bridge's training loop importable without packages for GPUs.

Owns: stand-ins for the names that Megatron-Bridge itself imports from packages that a
CPU cannot have, or does not need. For Megatron-Core these packages are still missing,
as Megatron-Core expects on a CPU. The `__init__` modules of `megatron.bridge` and
`megatron.bridge.models` do not run, because they import every model. All modules of the
training loop are the real ones.
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
    """Prepare this process for imports of Megatron-Bridge.

    Args:
        bridge: Folder of the package `megatron.bridge`.
    """
    stub_imports(STUBBED, "megatron.bridge")
    enter("megatron.bridge", bridge)
    enter("megatron.bridge.models", bridge / "models").__getattr__ = _provider
    # before all other modules, as in the `__init__` modules that do not run
    importlib.import_module("megatron.bridge.models.conversion.auto_bridge")


def _provider(name: str) -> Any:
    """Return an attribute of `megatron.bridge.models`, imported on demand."""
    if name not in _PROVIDERS:
        raise AttributeError(name)
    return getattr(
        importlib.import_module(f"megatron.bridge.models.{_PROVIDERS[name]}"), name
    )
