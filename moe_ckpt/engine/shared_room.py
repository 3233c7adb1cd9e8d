"""Compares the forecasts of all ranks with the free space of their shared memory.

Owns: measuring one rank's part of a shared memory. Must not: forecast (policies do).
"""

from __future__ import annotations

import os
from pathlib import Path

from moe_ckpt.collectives import Ranks, gather_results
from moe_ckpt.errors import ConfigError
from moe_ckpt.linux import boot_id
from moe_ckpt.policies.memory_forecast import SharedUse, require_room

_BLOCK_BYTES = 512  # unit of st_blocks, on every file system


def require_shared_room(ranks: Ranks, folder: Path, needed_bytes: int) -> None:
    """Check that shared memory has room for the snapshots and copies of all ranks.

    Collective over all ranks, before the first iteration of a start.

    Args:
        ranks: All ranks of the job.
        folder: This rank's folder in shared memory.
        needed_bytes: The forecast of this rank's bytes in shared memory.

    Raises:
        ConfigError: The memory of a node has less room. Raised on all ranks.
    """
    ranks.barrier()  # no rank frees or takes memory between the measurements
    uses = gather_results(ranks, lambda: _measure(folder, needed_bytes), ConfigError)
    require_room(uses)


def _measure(folder: Path, needed_bytes: int) -> SharedUse:
    there = os.statvfs(folder)
    return SharedUse(
        memory=f"{boot_id()} {folder.stat().st_dev}",
        free_bytes=there.f_bavail * there.f_frsize,
        held_bytes=_held_bytes(folder),
        needed_bytes=needed_bytes,
    )


def _held_bytes(folder: Path) -> int:
    """Return the bytes that a folder's files take."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            total += os.lstat(os.path.join(parent, name)).st_blocks * _BLOCK_BYTES
    return total
