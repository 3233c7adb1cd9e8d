"""Lets ms-swift's Megatron trainer be imported without the packages that a CPU cannot have, or does not need.

Owns: stand-ins for what ms-swift itself imports from them, and from its own packages for models, templates and other
trainers. The packages `swift`, `swift.megatron` and `swift.dataset` are entered without their own first lines. All
modules of the training loop, and the patches that ms-swift applies to Megatron-Core, are the real ones.
"""

from __future__ import annotations

import builtins
import importlib
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.integrations.stub_names import Stub

STUBBED = (
    *("accelerate", "datasets", "json_repair", "modelscope", "pandas", "peft", "tqdm", "transformers"),
    *("megatron.core.extensions.transformer_engine", "megatron.core.ssm.mamba_context_parallel"),
    *("swift.model", "swift.template", "swift.trainers", "swift.tuners", "swift.megatron.model", "mcore_bridge"),
)
_ENTERED = ("swift", "swift.megatron", "swift.dataset", "swift.dataset.preprocessor")


def install(swift: Path) -> None:
    """Prepare this process for imports of ms-swift, whose package is the folder `swift`."""
    stubs = {name: Stub(name, (), {"_is_stub": True, "__version__": "0"}) for name in STUBBED}
    logger = Stub("utils", (), {"logger": Stub("logger", (), {"get_logger": _logger})})
    setattr(stubs["modelscope"], "utils", logger)  # noqa: B010 - the stub's class does not name it
    real = builtins.__import__

    def load(name: str, scope: Any = None, local: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        root = next((each for each in STUBBED if f"{name}.".startswith(f"{each}.")), None)
        if level or root is None or not str((scope or {}).get("__name__")).startswith("swift."):
            return real(name, scope, local, fromlist, level)
        if not fromlist and "." in root:
            return real(name.partition(".")[0], scope, local, fromlist, level)
        found: Any = stubs[root]
        for part in name.removeprefix(root).split(".")[1:] if fromlist else ():
            found = getattr(found, part)
        return found

    builtins.__import__ = load
    for name in _ENTERED:
        _enter(name, swift.joinpath(*name.split(".")[1:]))
    sys.modules["swift.dataset"].__getattr__ = _preprocessor  # type: ignore[method-assign]


def _preprocessor(name: str) -> Any:
    if name != "RowPreprocessor":
        raise AttributeError(name)
    return importlib.import_module("swift.dataset.preprocessor.core").RowPreprocessor


def _logger() -> logging.Logger:
    """Return a logger with a handler, as modelscope's `get_logger` does."""
    logger = logging.getLogger("modelscope")
    logger.handlers = [logging.NullHandler()]
    return logger


def _enter(name: str, folder: Path) -> Any:
    """Return a package without its first lines, as imported."""
    package: Any = ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(importlib.import_module(parent), child, package)
    return package
