"""Fault tolerance for Mixture-of-Experts training on unmodified Megatron-Core.

The names here, and `attach` and `TrainingLoop` of `moe_ckpt.attach`, are the public
API. docs/api.md states which names are stable. A name is imported on first use: torch
and Megatron take seconds to import, and the pure modules need neither.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Supervisors fork, and a look for a GPU that started CUDA would leave workers without a
# GPU: torch asks NVML instead if this variable is set before torch looks
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

if TYPE_CHECKING:
    from moe_ckpt.config import (
        NO_CAPS,
        NO_DISK,
        NO_REPLICATION,
        NO_TLS,
        CheckfreqConfig,
        DenseConfig,
        EverySnapshotToDisk,
        FlowcheckConfig,
        GeminiConfig,
        LocalDiskConfig,
        MaxBytesPerS,
        MocConfig,
        MoetionConfig,
        MoevementConfig,
        NoneConfig,
        ReplicationConfig,
        RuntimeConfig,
        TlsConfig,
    )
    from moe_ckpt.engine.session import Session
    from moe_ckpt.errors import MoeCkptError
    from moe_ckpt.events import EventLog, read_events
    from moe_ckpt.megatron.pipeline import StageCommunicator
    from moe_ckpt.megatron.state import TrainingState
    from moe_ckpt.megatron.step import (
        advance_schedule,
        apply_update,
        clear_gradients,
        finish_gradients,
        gather_parameters,
    )
    from moe_ckpt.run_settings import ckpt_config, runtime_config

__version__ = "0.2.0"
__all__ = [
    "NO_CAPS",
    "NO_DISK",
    "NO_REPLICATION",
    "NO_TLS",
    "CheckfreqConfig",
    "DenseConfig",
    "EventLog",
    "EverySnapshotToDisk",
    "FlowcheckConfig",
    "GeminiConfig",
    "LocalDiskConfig",
    "MaxBytesPerS",
    "MocConfig",
    "MoeCkptError",
    "MoetionConfig",
    "MoevementConfig",
    "NoneConfig",
    "ReplicationConfig",
    "RuntimeConfig",
    "Session",
    "StageCommunicator",
    "TlsConfig",
    "TrainingState",
    "__version__",
    "advance_schedule",
    "apply_update",
    "ckpt_config",
    "clear_gradients",
    "finish_gradients",
    "gather_parameters",
    "read_events",
    "runtime_config",
]
# modules that need neither torch nor Megatron come first: for the names of these
# modules the others are not imported
_HOMES = (
    *("config", "errors", "events", "run_settings"),
    *("engine.session", "megatron.pipeline", "megatron.state", "megatron.step"),
)


def __getattr__(name: str) -> Any:
    """Import a public name from its module.

    Raises:
        AttributeError: The name is not public.
    """
    for home in _HOMES if name in __all__ else ():
        module = import_module(f"moe_ckpt.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module 'moe_ckpt' has no attribute {name!r}")
