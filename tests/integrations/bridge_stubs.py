"""Lets Megatron-Bridge's training loop be imported without the packages that a CPU cannot have, or does not need.

Owns: stand-ins for what Megatron-Bridge itself imports from them; Megatron-Core still finds them missing, as it expects
on a CPU. The packages `megatron.bridge` and `megatron.bridge.models` are entered without their own first lines, which
import every model. All modules of the training loop are the real ones.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.integrations.stub_names import Stub

STUBBED = (
    *("transformer_engine", "modelopt", "nvidia_resiliency_ext", "transformers", "datasets"),
    "megatron.energon",
)
_PROVIDERS = {"GPTModelProvider": "gpt_provider", "T5ModelProvider": "t5_provider"}


def install(bridge: Path) -> None:
    """Prepare this process for imports of Megatron-Bridge, whose package is the folder `bridge`."""
    stubs = {name: Stub(name, (), {"_is_stub": True, "__version__": "0"}) for name in STUBBED}
    real = builtins.__import__

    def load(name: str, scope: Any = None, local: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        root = next((each for each in STUBBED if f"{name}.".startswith(f"{each}.")), None)
        if level or root is None or not str((scope or {}).get("__name__")).startswith("megatron.bridge"):
            return real(name, scope, local, fromlist, level)
        found: Any = stubs[root]
        for part in name.removeprefix(root).split(".")[1:] if fromlist else ():
            found = getattr(found, part)
        return found

    builtins.__import__ = load
    _enter("megatron.bridge", bridge)
    _enter("megatron.bridge.models", bridge / "models").__getattr__ = _provider
    importlib.import_module("megatron.bridge.models.conversion.auto_bridge")  # first, as those lines have it


def _enter(name: str, folder: Path) -> Any:
    """Return a package without its first lines, as imported."""
    package: Any = ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package
    parent, _, child = name.rpartition(".")
    setattr(importlib.import_module(parent), child, package)
    return package


def _provider(name: str) -> Any:
    if name not in _PROVIDERS:
        raise AttributeError(name)
    return getattr(importlib.import_module(f"megatron.bridge.models.{_PROVIDERS[name]}"), name)
