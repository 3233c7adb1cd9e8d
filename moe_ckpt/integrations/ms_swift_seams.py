"""The parts of ms-swift's trainer that an attachment replaces, and their check.

Owns: the tested version, and the names, parameters and calls that must exist.
"""

from __future__ import annotations

import importlib
from typing import Any

from moe_ckpt.errors import ConfigError
from moe_ckpt.integrations.loop_seams import Names, require_seams

TRIED_VERSION = "4.5"
_INSTALL = "pip install 'ms-swift>=4.5,<4.6'"
_TRAINERS = "swift.megatron.trainers"
_PARAMETERS: Names = {
    "__init__": ("self", "args", "template"),
    "train": ("self", "train_dataset", "val_dataset"),
    "train_step": ("self", "train_data_iterator"),
    "run_train_step": ("self", "train_data_iterator", "val_data_iterator"),
    "forward_step": ("self", "data_iterator", "model"),
    "_prepare_data_iterator": ("self", "train_dataset", "val_dataset"),
    "_prepare_dataloader": ("self", "train_dataset", "val_dataset"),
    "_create_dataloader": ("self", "dataset", "batch_sampler"),
    "save_checkpoint": ("self",),
}
_CALLS: Names = {
    "train": (
        "setup_training",
        "run_train_step",
        "finalize_training",
        "iteration",
        "train_iters",
    ),
    "setup_training": ("setup_model_training", "_prepare_data_iterator"),
    "setup_model_training": (
        "scale_loss",
        "grad_scale_func",
        "finalize_model_grads",
        "finalize_model_grads_func",
    ),
    "run_train_step": (
        "train_step",
        "iteration",
        "should_eval",
        "evaluate",
        "should_save",
        "save_checkpoint",
    ),
    "train_step": (
        "get_forward_backward_func",
        "optimizer",
        "step",
        "opt_param_scheduler",
        "num_microbatches",
    ),
    "evaluate": ("get_forward_backward_func", "eval_iters", "num_microbatches"),
    "_prepare_dataloader": (
        "MegatronPretrainingRandomSampler",
        "MegatronPretrainingSampler",
        "_create_dataloader",
    ),
}
_FUNCTIONS: Names = {"get_forward_backward_func": (), "finalize_model_grads": ()}
_FLOW_CALLS: Names = {
    "on_step_end": (
        "consumed_train_samples",
        "global_batch_size",
        "eval_steps",
        "eval_iters",
    )
}


def import_swift() -> Any:
    """Import the base module of ms-swift's Megatron trainer and check the seams.

    Raises:
        ConfigError: The package is missing, has another version, or a seam has moved.
    """
    try:
        version = importlib.import_module("swift.version").__version__
        base, trainer = (
            importlib.import_module(f"{_TRAINERS}.{name}")
            for name in ("base", "trainer")
        )
        flow = importlib.import_module("swift.megatron.callbacks.default_flow")
    except ImportError as error:
        raise ConfigError(
            f"ms-swift: got no such package ({error}), wanted one: {_INSTALL}"
        ) from error
    if not version.startswith(f"{TRIED_VERSION}."):
        raise ConfigError(
            f"ms-swift: got {version}, wanted {TRIED_VERSION}.*: {_INSTALL}"
        )
    tried = f"ms-swift {TRIED_VERSION}"
    require_seams(trainer.MegatronTrainer, _PARAMETERS, _CALLS, tried)
    require_seams(flow.DefaultFlowCallback, {}, _FLOW_CALLS, tried)
    require_seams(base, _FUNCTIONS, {}, tried)
    return base
