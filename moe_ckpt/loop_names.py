"""The training loops that are not ours: their names and modules. Values only.

`moe_ckpt.integrations.loops.LOOP_IMPORTS` has the import function of each loop.
Imports nothing: each Python process of `moe-ckpt prove` imports this module as it
starts.
"""

from __future__ import annotations

from typing import NamedTuple


class LoopModules(NamedTuple):
    """The modules of a training loop."""

    training: str
    """Module with the function or class that trains, which an attachment replaces."""

    entry: str
    """Module that a program imports to train. When this module is imported, `training`
    is imported, too.
    """


LOOP_MODULES = {
    "megatron-lm": LoopModules(
        training="megatron.training.training", entry="megatron.training.training"
    ),
    "megatron-bridge": LoopModules(
        training="megatron.bridge.training.train",
        entry="megatron.bridge.training.pretrain",
    ),
    "ms-swift": LoopModules(
        training="swift.megatron.trainers.base", entry="swift.megatron.trainers.base"
    ),
}
"""The loops to which `moe_ckpt.run` can attach, by the name of `--loop`."""
