"""The training loops over Megatron-Core that no attachment here fits: to import one in an attached run is an error.

Owns: their modules, and the check at each import. A run whose loop is not attached would train to its end without
protection, and only then be found to be so. Modules for conversions of checkpoints, which import no loop, stay free.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from moe_ckpt.errors import ConfigError

LOOPS = {
    "megatron.bridge.training.train": "Megatron-Bridge's training loop",
    "swift.megatron.trainers.base": "ms-swift's training loop",
}


class RefusedLoops(importlib.abc.MetaPathFinder):
    """Raises an error in place of an import of a loop that has no attachment."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the importer's protocol
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname in LOOPS:
            wanted = "Megatron-LM's pretrain, or a loop of one's own (docs/attach.md): nothing would be protected"
            raise ConfigError(f"moe_ckpt.run: got {LOOPS[fullname]} ({fullname}), wanted {wanted}")
        return None


def refuse_other_loops() -> None:
    """Refuse these loops in this process, and in those that it forks. Raises ConfigError if one is imported already."""
    refused = RefusedLoops()
    for name in LOOPS:
        if name in sys.modules:
            refused.find_spec(name, None)
    sys.meta_path.insert(0, refused)
