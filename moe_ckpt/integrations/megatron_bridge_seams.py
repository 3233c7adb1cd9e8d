"""The functions of Megatron-Bridge's loop that an attachment replaces, and their check.

Owns: the tested version, and the names, parameters and calls that must exist.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from moe_ckpt.errors import ConfigError
from moe_ckpt.integrations.loop_seams import Names, require_seams, what_to_install

TRIED_VERSION = "0.6"
_TRAINING = "megatron.bridge.training"
# on other Pythons pip installs 0.3
_INSTALL = what_to_install("megatron-bridge>=0.6,<0.7", (3, 12), or_newer=False)
_LOOP = (
    "forward_step_func",
    "model",
    "optimizer",
    "scheduler",
    "train_data_iterator",
    "valid_data_iterator",
)
_STEP = (
    "forward_step_func",
    "data_iterator",
    "model",
    "optimizer",
    "scheduler",
    "global_state",
)
# by a short name: the module, the parameters of its functions, and the names that these
# functions call
_SEAMS: dict[str, tuple[str, Names, Names]] = {
    "pretrain": (
        f"{_TRAINING}.pretrain",
        {"runtime_config_update": ("cfg",), "train": _LOOP},
        {
            "pretrain": ("runtime_config_update", "_pretrain"),
            "_pretrain": ("setup", "train"),
        },
    ),
    "setup": (
        f"{_TRAINING}.setup",
        {
            "create_checkpoint_manager": ("checkpoint_config",),
            "setup_data_iterators": ("cfg", "train_state"),
        },
        {
            "setup": (
                "initialize_megatron",
                "create_checkpoint_manager",
                "load",
                "setup_data_iterators",
            )
        },
    ),
    "train": (
        f"{_TRAINING}.train",
        {
            "train": (*_LOOP, "global_state", "checkpoint_manager", "pg_collection"),
            "train_step": (
                *_STEP,
                "pg_collection",
                "forward_backward_func",
                "p2p_communicator",
            ),
            "prepare_forward_step_func": ("forward_step_func", "state"),
        },
        {
            "train": (
                "train_step",
                "get_forward_backward_func",
                "evaluate_and_print_results",
            ),
            "checkpoint_and_decide_exit": ("save_checkpoint_and_time",),
            "train_step": (
                "get_rerun_state_machine",
                "should_run_forward_backward",
                "step",
                "zero_grad_buffer",
            ),
        },
    ),
    "eval": (f"{_TRAINING}.eval", {}, {"evaluate": ("get_forward_backward_func",)}),
    "loaders": (
        "megatron.bridge.data.loaders",
        {
            "build_pretraining_data_loader": (
                "dataset",
                "consumed_samples",
                "dataloader_type",
            )
        },
        {"build_train_valid_test_data_loaders": ("build_pretraining_data_loader",)},
    ),
}


def import_bridge() -> Any:
    """Import the modules of Megatron-Bridge's loop and check the seams.

    Returns:
        The modules, as attributes `pretrain`, `setup`, `train`, `eval` and `loaders`.

    Raises:
        ConfigError: The package is missing, has another version, or a seam has moved.
    """
    try:
        version = importlib.import_module("megatron.bridge.package_info").__version__
        modules = {
            name: importlib.import_module(path) for name, (path, _, _) in _SEAMS.items()
        }
    except ImportError as error:
        raise ConfigError(
            f"megatron.bridge: got no such package ({error}), wanted {_INSTALL}"
        ) from error
    if not version.startswith(f"{TRIED_VERSION}."):
        raise ConfigError(
            f"megatron.bridge: got {version}, wanted {TRIED_VERSION}.*: {_INSTALL}"
        )
    for name, (_, parameters, calls) in _SEAMS.items():
        require_seams(
            modules[name], parameters, calls, f"Megatron-Bridge {TRIED_VERSION}"
        )
    return SimpleNamespace(**modules)
