"""Fault tolerance for Mixture-of-Experts training on unmodified Megatron-Core: the public API,
beside `attach` and `TrainingLoop` of `moe_ckpt.attach`.

Names are imported on first use: torch and Megatron take seconds, and the pure modules need neither. docs/api.md says
which names are stable.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_ckpt.config import (
        CheckfreqConfig,
        DenseConfig,
        FlowcheckConfig,
        GeminiConfig,
        MocConfig,
        MoetionConfig,
        MoevementConfig,
        NoneConfig,
        RuntimeConfig,
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
    "CheckfreqConfig",
    "DenseConfig",
    "EventLog",
    "FlowcheckConfig",
    "GeminiConfig",
    "MocConfig",
    "MoeCkptError",
    "MoetionConfig",
    "MoevementConfig",
    "NoneConfig",
    "RuntimeConfig",
    "Session",
    "StageCommunicator",
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
_HOMES = {
    "moe_ckpt.config": tuple(name for name in __all__ if name.endswith("Config")),
    "moe_ckpt.engine.session": ("Session",),
    "moe_ckpt.errors": ("MoeCkptError",),
    "moe_ckpt.events": ("EventLog", "read_events"),
    "moe_ckpt.megatron.pipeline": ("StageCommunicator",),
    "moe_ckpt.megatron.state": ("TrainingState",),
    "moe_ckpt.megatron.step": (
        "advance_schedule",
        "apply_update",
        "clear_gradients",
        "finish_gradients",
        "gather_parameters",
    ),
    "moe_ckpt.run_settings": ("ckpt_config", "runtime_config"),
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module. Raises AttributeError for any other."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'moe_ckpt' has no attribute {name!r}")
