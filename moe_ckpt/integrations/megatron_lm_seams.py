"""The functions of Megatron-LM's training loop that an attachment replaces, and the check that they are as expected.

Its functions call each other as module globals, so an attribute of the module is a seam. Owns: the tested versions, and
the names, parameters and calls that must exist. An attachment to any other loop fails by name before training starts: a
seam that moved would leave a run that looks protected and is not (Megatron-Bridge issue 6086).
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

from moe_ckpt.errors import ConfigError

TRIED_VERSIONS = ("0.19",)
_ATTACHED = "_moe_ckpt_attached"
_INSTALL = "pip install 'megatron-core>=0.19,<0.20', or a checkout of Megatron-LM core_v0.19.* on PYTHONPATH"
_PARAMETERS = {  # of each function those that the attachment passes or reads, in their order
    "initialize_megatron": ("allow_no_cuda",),
    "load_checkpoint": ("ddp_model", "optimizer", "opt_param_scheduler"),
    "build_train_valid_test_data_iterators": ("build_train_valid_test_datasets_provider",),
    "build_train_valid_test_datasets": ("build_train_valid_test_datasets_provider",),
    "build_pretraining_data_loader": ("dataset", "consumed_samples"),
    "get_forward_backward_func": ("schedule_pg_collection",),
    "train": (
        *("forward_step_func", "model", "optimizer", "opt_param_scheduler", "train_data_iterator"),
        *("valid_data_iterator", "process_non_loss_data_func", "config", "p2p_communicator", "pg_collection"),
    ),
    "train_step": (
        *("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler", "config"),
        *("forward_backward_func", "iteration"),
    ),
}
_CALLS = {  # each function finds these as globals, or as methods, when it runs
    "pretrain": ("initialize_megatron", "setup_model_and_optimizer", "build_train_valid_test_data_iterators", "train"),
    "setup_model_and_optimizer": ("load_checkpoint",),
    "build_train_valid_test_data_iterators": ("build_train_valid_test_data_loaders",),
    "build_train_valid_test_data_loaders": ("build_train_valid_test_datasets", "build_pretraining_data_loader"),
    "train": ("train_step", "get_forward_backward_func", "evaluate_and_print_results"),
    "train_step": ("get_rerun_state_machine", "should_run_forward_backward", "step", "zero_grad_buffer"),
    "evaluate": ("get_forward_backward_func",),
}


def import_training() -> ModuleType:
    """Return `megatron.training.training` after checking its seams. Raises ConfigError."""
    try:
        core = importlib.import_module("megatron.core")
        training = importlib.import_module("megatron.training.training")
    except ImportError as error:
        raise ConfigError(f"megatron.training: got no such package ({error}), wanted one: {_INSTALL}") from error
    _require_version(core.__version__)
    _require_seams(training)
    return training


def mark_attached(training: Any) -> None:
    """Mark the loop as attached. Raises ConfigError for a second attachment."""
    if is_attached(training):
        raise ConfigError("moe_ckpt.run: got a second attachment to megatron.training, wanted one a process")
    setattr(training, _ATTACHED, True)


def is_attached(training: Any) -> bool:
    """Return whether this process's training loop has an attachment."""
    return getattr(training, _ATTACHED, False)


def _require_version(version: str) -> None:
    if not any(version.startswith(f"{tried}.") for tried in TRIED_VERSIONS):
        tried = " or ".join(f"{name}.*" for name in TRIED_VERSIONS)
        raise ConfigError(
            f"megatron-core: got {version}, wanted {tried}, which the attachment was tried with: {_INSTALL}"
        )


def _require_seams(training: ModuleType) -> None:
    for name, wanted in _PARAMETERS.items():
        got = list(inspect.signature(_function(training, name)).parameters)
        _require_seam(training, name, "the parameters", [each for each in wanted if each not in got])
    for name, wanted in _CALLS.items():
        function = inspect.unwrap(_function(training, name))
        _require_seam(training, name, "calls of", [each for each in wanted if each not in function.__code__.co_names])


def _function(training: ModuleType, name: str) -> Any:
    function = getattr(training, name, None)
    if not callable(function):
        raise ConfigError(f"{training.__name__}.{name}: got nothing, wanted the function that training calls")
    return function


def _require_seam(training: ModuleType, name: str, kind: str, missing: list[str]) -> None:
    if missing:
        wanted = f"one with {kind} {', '.join(missing)}, as in megatron-core {TRIED_VERSIONS[-1]}"
        raise ConfigError(f"{training.__name__}.{name}: got another function than expected, wanted {wanted}")
