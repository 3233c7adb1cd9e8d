"""The additional stand-ins for Megatron-LM's training scripts on a machine without a GPU: for tests.

Owns: the calls of `torch.cuda` in Megatron-LM's start that ask for a device. Must not: change what training computes.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import torch

from moe_ckpt.megatron import cpu_stand_in


def enable(training: ModuleType) -> bool:
    """Let this process train without a GPU, where there is none; return whether it does."""
    if not cpu_stand_in.enable():
        return False
    seams: Any = training
    seams.initialize_megatron = functools.partial(seams.initialize_megatron, allow_no_cuda=True)
    torch.cuda.device_count = lambda: 1  # Megatron-LM forms groups only where it counts a device
    torch.cuda.set_device = lambda device: None  # noqa: ARG005 - torch's name
    datasets: Any = importlib.import_module("megatron.core.datasets.utils")
    datasets.compile_helpers = lambda: None  # a wheel has them compiled, and no Makefile
    return True
