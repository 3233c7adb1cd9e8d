"""The backend `staged`: gloo, around groups that copy tensors through host memory.

Connections, and their end, are gloo's. Owns: forming such groups, for ranks that
outlive each other and for ranks that do not. Must not: copy (`staged_group` does).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe_ckpt.config import STAGED
from moe_ckpt.elastic.backends import GlooBackend, group_of, register_groups
from moe_ckpt.elastic.staged_group import StagedGroup


def staged_backend(device: torch.device) -> GlooBackend:
    """Return the backend for tensors on a device, which several ranks may share.

    Args:
        device: The device of the tensors.
    """
    return GlooBackend(device, StagedGroup)


def register_staged() -> None:
    """Register `staged` with `torch.distributed`.

    For a job whose ranks do not outlive each other.
    """
    if STAGED not in dist.Backend.backend_list:
        register_groups(STAGED, _create, ["cpu", "cuda"])


def _create(options: Any, _: Any) -> StagedGroup:
    gloo = dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, options.timeout
    )
    return StagedGroup(
        group_of(
            gloo, options.store, torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO
        )
    )
