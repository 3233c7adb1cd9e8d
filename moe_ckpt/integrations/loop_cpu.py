"""The additional stand-ins for training loops' own start on a machine without a GPU:
for tests.

Owns: the calls of `torch.cuda` in that start which ask for a device. Must not: change
what training computes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from moe_ckpt.megatron import cpu_stand_in


def enable(starting: Any, compiling: Any) -> bool:
    """Let this process train without a GPU, where there is none; return whether it
    does.

    `starting` is the module that calls `initialize_megatron`, `compiling` the one whose
    `compile_helpers` that calls.
    """
    if not cpu_stand_in.enable():
        return False
    starting.initialize_megatron = functools.partial(
        starting.initialize_megatron, allow_no_cuda=True
    )
    # these loops form groups only where they count a device
    torch.cuda.device_count = lambda: 1
    # a CUDA build answers this by the count of devices
    torch.cuda.is_available = lambda: False
    torch.cuda.set_device = lambda device: None  # noqa: ARG005 - torch's name
    # a wheel has them compiled, and no Makefile
    compiling.compile_helpers = lambda: None
    return True
