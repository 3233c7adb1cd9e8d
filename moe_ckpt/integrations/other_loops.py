"""The training loops over Megatron-Core that a run is not attached to.

Owns: the modules of these loops, and the check at each import: importing such a loop is
an error. Otherwise a run whose loop is not attached would train to its end without
protection, and report the mistake only then. Modules that convert checkpoints import no
loop and stay free.
"""

from __future__ import annotations

import sys

from moe_ckpt.loop_names import LOOP_MODULES
from moe_ckpt.refused_imports import RefusedImports

BRIDGE = LOOP_MODULES["megatron-bridge"].training
SWIFT = LOOP_MODULES["ms-swift"].training
# A loop's module: the loop's name, and the wanted alternative. Megatron-LM's module is
# not here: each import of a part of megatron.training imports that module, too.
OTHER_LOOPS = {
    BRIDGE: ("Megatron-Bridge's training loop", "--loop megatron-bridge"),
    "megatron.bridge.training.train_megatron_mimo": (
        "Megatron-Bridge's loop for multimodal models",
        "megatron.bridge.training.pretrain with --loop megatron-bridge",
    ),
    SWIFT: ("ms-swift's training loop", "--loop ms-swift"),
}


def refuse_other_loops(attached: str) -> None:
    """Refuse all loops but the attached one, in this process and in its forks.

    Args:
        attached: The attached loop, by the name of `--loop`.

    Raises:
        ConfigError: Another loop is imported already.
    """
    own = LOOP_MODULES[attached].training
    others = {name: words for name, words in OTHER_LOOPS.items() if name != own}
    refused = RefusedImports(
        {
            name: (
                f"moe_ckpt.run: got {loop} ({name}), wanted {wanted}: nothing would be"
                " protected"
            )
            for name, (loop, wanted) in others.items()
        }
    )
    for name in others:
        # Python asks no finder for a module that is imported already
        if name in sys.modules:
            refused.find_spec(name, None)
    sys.meta_path.insert(0, refused)
