"""The training loops over Megatron-Core that no attachment here fits: to import one in an attached run is an error.

Owns: their modules, and the check at each import. A run whose loop is not attached would train to its end without
protection, and only then be found to be so. Modules for conversions of checkpoints, which import no loop, stay free.
"""

from __future__ import annotations

import sys

from moe_ckpt.refused_imports import RefusedImports

LOOPS = {
    "megatron.bridge.training.train": "Megatron-Bridge's training loop",
    "swift.megatron.trainers.base": "ms-swift's training loop",
}
_WANTED = "Megatron-LM's pretrain, or a loop of one's own (docs/attach.md): nothing would be protected"


def refuse_other_loops() -> None:
    """Refuse these loops in this process, and in those that it forks. Raises ConfigError if one is imported already."""
    refused = RefusedImports(
        {name: f"moe_ckpt.run: got {loop} ({name}), wanted {_WANTED}" for name, loop in LOOPS.items()}
    )
    for name in LOOPS:
        if name in sys.modules:
            refused.find_spec(name, None)
    sys.meta_path.insert(0, refused)
