"""Makes ms-swift's Megatron trainer importable without packages for GPUs.

Owns: stand-ins for the names that ms-swift itself imports from packages that a CPU
cannot have, or does not need, and from ms-swift's own packages for models, templates
and other trainers. The `__init__` modules of `swift`, `swift.megatron`, `swift.dataset`
and `swift.dataset.preprocessor` do not run. All modules of the training loop, and the
patches that ms-swift applies to Megatron-Core, are the real ones.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import Any

from tests.integrations.stub_names import Stub, enter, stub_imports

STUBBED = (
    *(
        "accelerate",
        "datasets",
        "json_repair",
        "modelscope",
        "pandas",
        "peft",
        "tqdm",
        "transformers",
    ),
    *(
        "megatron.core.extensions.transformer_engine",
        "megatron.core.ssm.mamba_context_parallel",
    ),
    *(
        "swift.model",
        "swift.template",
        "swift.trainers",
        "swift.tuners",
        "swift.megatron.model",
        "mcore_bridge",
    ),
)
_ENTERED = ("swift", "swift.megatron", "swift.dataset", "swift.dataset.preprocessor")


def install(swift: Path) -> None:
    """Prepare this process for imports of ms-swift.

    Args:
        swift: Folder of the package `swift`.
    """
    stubs = stub_imports(STUBBED, "swift")
    logger = Stub("utils", (), {"logger": Stub("logger", (), {"get_logger": _logger})})
    # `setattr`, because the class of the stand-in does not name the attribute
    setattr(stubs["modelscope"], "utils", logger)  # noqa: B010
    for name in _ENTERED:
        enter(name, swift.joinpath(*name.split(".")[1:]))
    sys.modules["swift.dataset"].__getattr__ = _preprocessor  # type: ignore[method-assign]


def _preprocessor(name: str) -> Any:
    """Return an attribute of `swift.dataset`, imported on demand."""
    if name != "RowPreprocessor":
        raise AttributeError(name)
    return importlib.import_module("swift.dataset.preprocessor.core").RowPreprocessor


def _logger() -> logging.Logger:
    """Return a logger with a handler, as modelscope's `get_logger` does."""
    logger = logging.getLogger("modelscope")
    logger.handlers = [logging.NullHandler()]
    return logger
