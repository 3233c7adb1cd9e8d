"""Settings of a user's own loop; a test names only the settings that the test needs."""

from __future__ import annotations

from typing import Any

from moe_ckpt.own_loop import LoopConfig
from moe_ckpt.run_settings import ckpt_config, runtime_config
from moe_ckpt.types import ParallelLayout


def loop_config(policy: str, **changes: Any) -> LoopConfig:
    """Return settings of a small loop on two ranks; `changes` replace or add keys."""
    settings: dict[str, Any] = {
        "ckpt": ckpt_config(policy),
        "runtime": runtime_config(),
        "layout": ParallelLayout(pp=1, dp=2, ep=1, tp=1),
        "num_iterations": 8,
        "num_micro_batches": 1,
        "micro_batch_size": 1,
        "sequence_length": 16,
        "model": "model",
    }
    return LoopConfig(**(settings | changes))
