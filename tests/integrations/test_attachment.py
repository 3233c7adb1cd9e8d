"""Process groups of an attached script belong to the runtime, which ends them with the worker."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch.distributed as dist

import tests.preload  # noqa: F401 - imports Megatron without its warnings
from moe_ckpt.integrations.attachment import route_groups


def test_a_script_may_destroy_groups_but_ends_none_of_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Bridge destroys all of Megatron's groups after training."""
    for module in (dist, dist.distributed_c10d):
        for name in ("new_group", "destroy_process_group"):
            monkeypatch.setattr(module, name, getattr(module, name))
    group = cast("Any", "a group of the runtime")
    with pytest.raises(ValueError, match="Invalid process group"):
        dist.destroy_process_group(group)
    route_groups()
    dist.destroy_process_group(group)
    with pytest.raises(AssertionError, match="Process group cannot be None"):
        dist.destroy_process_group()
