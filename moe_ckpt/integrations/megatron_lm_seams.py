"""The functions of Megatron-LM's loop that an attachment replaces, and their check.

Owns: the tested versions, and the names, parameters and calls that must exist.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from moe_ckpt.errors import ConfigError
from moe_ckpt.integrations.loop_seams import require_seams, what_to_install

# for Python 3.11 pip has 0.16.1 at most: newer releases import `typing.override`
_OLDEST_PYTHON = (3, 12)
_ELSE = (
    "; on Python 3.11, scripts/fetch_megatron_lm.py of the repository of moe-ckpt makes"
    " a folder for PYTHONPATH"
)
_INSTALL = what_to_install("megatron-core>=0.18,<0.20", _OLDEST_PYTHON, or_newer=True)
if sys.version_info < _OLDEST_PYTHON:
    _INSTALL += _ELSE
# of each function: the parameters that the attachment passes or reads, in order
_PARAMETERS = {
    "initialize_megatron": ("allow_no_cuda",),
    "load_checkpoint": ("ddp_model", "optimizer", "opt_param_scheduler"),
    "build_train_valid_test_data_iterators": (
        "build_train_valid_test_datasets_provider",
    ),
    "build_train_valid_test_datasets": ("build_train_valid_test_datasets_provider",),
    "build_pretraining_data_loader": ("dataset", "consumed_samples"),
    "train": (
        *(
            "forward_step_func",
            "model",
            "optimizer",
            "opt_param_scheduler",
            "train_data_iterator",
        ),
        *("valid_data_iterator", "process_non_loss_data_func", "config"),
    ),
    "train_step": (
        *(
            "forward_step_func",
            "data_iterator",
            "model",
            "optimizer",
            "opt_param_scheduler",
            "config",
        ),
        *("forward_backward_func", "iteration"),
    ),
}
# further parameters, by version: 0.19 takes groups and a communicator of the caller
_MORE_PARAMETERS = {
    "0.18": {"get_forward_backward_func": ()},
    "0.19": {
        "get_forward_backward_func": ("schedule_pg_collection",),
        "train": ("p2p_communicator", "pg_collection"),
    },
}
TRIED_VERSIONS = tuple(_MORE_PARAMETERS)
CALLS = {  # names that each function looks up as globals, or as methods, when it runs
    "pretrain": (
        "initialize_megatron",
        "setup_model_and_optimizer",
        "build_train_valid_test_data_iterators",
        "train",
    ),
    "setup_model_and_optimizer": ("load_checkpoint",),
    "build_train_valid_test_data_iterators": ("build_train_valid_test_data_loaders",),
    "build_train_valid_test_data_loaders": (
        "build_train_valid_test_datasets",
        "build_pretraining_data_loader",
    ),
    "train": (
        "train_step",
        "get_forward_backward_func",
        "evaluate_and_print_results",
        "finalize_model_grads",
    ),
    "train_step": (
        "get_rerun_state_machine",
        "should_run_forward_backward",
        "step",
        "zero_grad_buffer",
    ),
    "save_checkpoint_and_time": ("save_checkpoint",),
    "evaluate": ("get_forward_backward_func",),
}


def import_training() -> ModuleType:
    """Import `megatron.training.training` and check the seams.

    Raises:
        ConfigError: The package is missing, has another version, or a seam has moved.
    """
    try:
        core = importlib.import_module("megatron.core")
        training = importlib.import_module("megatron.training.training")
    except ImportError as error:
        raise ConfigError(
            f"megatron.training: got no such package ({error}), wanted {_INSTALL}"
        ) from error
    require_training(training, _tried_version(core.__version__))
    return training


def require_training(training: ModuleType, tried: str) -> None:
    """Require the functions of the loop to be as in a tested version.

    Args:
        training: The module `megatron.training.training`.
        tried: One of `TRIED_VERSIONS`.

    Raises:
        ConfigError: A seam has moved.
    """
    require_seams(training, parameters_of(tried), CALLS, f"megatron-core {tried}")


def parameters_of(tried: str) -> dict[str, tuple[str, ...]]:
    """Return the parameters that the attachment passes or reads, by function.

    Args:
        tried: One of `TRIED_VERSIONS`.
    """
    more = _MORE_PARAMETERS[tried]
    return {
        name: _PARAMETERS.get(name, ()) + more.get(name, ())
        for name in (*_PARAMETERS, *more)
    }


def _tried_version(version: str) -> str:
    """Return the tested version of which `version` is a patch release."""
    for tried in TRIED_VERSIONS:
        if version.startswith(f"{tried}."):
            return tried
    wanted = " or ".join(f"{name}.*" for name in TRIED_VERSIONS)
    raise ConfigError(
        f"megatron-core: got {version}, wanted {wanted}, which the attachment was tried"
        f" with: {_INSTALL}"
    )
