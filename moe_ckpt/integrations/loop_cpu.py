"""Stand-ins with which third-party loops start without a GPU, for tests.

Adds to `moe_ckpt.standins.gpu`. Owns: the calls of `torch.cuda` in a loop's
start that ask for a device. Must not: change the results of training.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from moe_ckpt.standins import gpu


def enable(starting: Any, compiling: Any) -> bool:
    """Let this process train without a GPU if there is none.

    Args:
        starting: The module that calls `initialize_megatron`.
        compiling: The module whose `compile_helpers` is called by
            `initialize_megatron`.

    Returns:
        Whether the process trains without a GPU.
    """
    if not gpu.enable():
        return False
    starting.initialize_megatron = functools.partial(
        starting.initialize_megatron, allow_no_cuda=True
    )
    # these loops form process groups only if `device_count` is not 0
    torch.cuda.device_count = lambda: 1
    # torch with CUDA computes `is_available` from the count of devices
    torch.cuda.is_available = lambda: False
    torch.cuda.set_device = lambda device: None  # noqa: ARG005 - torch's name
    # the wheel of Megatron has compiled helpers and no Makefile
    compiling.compile_helpers = lambda: None
    return True
