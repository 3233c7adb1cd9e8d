"""The last save of a rank whose job is being stopped: complete windows go from shared
memory to disk.

Owns: the choice of the blobs, and the file in which a worker leaves the place for them.
Must not: need the worker or the daemon, which are dead by then: a worker may hang, and
two processes must not write one folder.

    worker      write_save_target(rank folder, target)          once, as it opens its memory
    process that the supervisor starts after both have ended    save_last(rank folder), saved_iterations(rank folder)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.replication.local_disk import persist
from moe_ckpt.replication.publisher import read_kept, read_snapshots
from moe_ckpt.reserved_file import ReservedFile
from moe_ckpt.snapshot.blobs import BlobFolder, held_path, own_path
from moe_ckpt.snapshot.codec import ShardIdentity
from moe_ckpt.snapshot.step_log import StepLog, window_steps
from moe_ckpt.snapshot.verified_windows import verified_window
from moe_ckpt.snapshot.windows import group_windows
from moe_ckpt.types import RunIdentity

_log = logging.getLogger(__name__)

_TARGET = "save_target"


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveTarget:
    """The place of a rank's last save, and the windows that belong there."""

    path: str
    """The folder of the rank on its disk."""

    limit_bytes: int | None
    """The most bytes there; None: no limit."""

    identity: RunIdentity
    """The run."""

    shard: ShardIdentity
    """The rank."""


def write_save_target(rank_folder: Path, target: SaveTarget) -> None:
    """Leave the target for the last save, in place of an earlier worker's.

    The first worker's target takes its room before any snapshot; a replacement needs
    none.

    Args:
        rank_folder: The rank's folder in shared memory.
        target: The target.

    Raises:
        ConfigError: The memory has no room for the first target.
    """
    content = json.dumps(asdict(target), ensure_ascii=False)
    file = ReservedFile(rank_folder / _TARGET)
    file.reserve()
    # a path may have bytes that are no UTF-8
    file.write(content.encode(errors="surrogateescape"))


def save_last(rank_folder: Path) -> None:
    """Copy all complete windows of a rank to its disk, the oldest first.

    All ranks have the oldest one, and may lack a newer one. A rank that has not opened
    its memory yet saves nothing. Raises CheckpointSaveError if the disk has no room;
    windows that are on the disk by then stay.
    """
    target = _target_of(rank_folder)
    if target is None:
        return
    own, served = (
        BlobFolder(own_path(rank_folder)),
        BlobFolder(held_path(rank_folder, target.shard.global_rank)),
    )
    disk = Path(target.path)
    # a checkpoint server of the rank itself has newer states than the rank
    for folder in (own, served):
        folder.settle()  # a worker may have died as it replaced what is there
        for keys in windows_in(folder):
            # nothing is stale: if another rank saves less, all ranks go on from an
            # older state
            persist(folder, disk, keys, [], target.limit_bytes)


def saved_iterations(rank_folder: Path) -> list[int]:
    """Return the iterations to which a rank's disk leads, by the checks of a start.

    All bytes on the disk are read and hashed: the job may be killed on this answer.

    Args:
        rank_folder: The rank's folder in shared memory.

    Returns:
        The iterations, in order; none without a target.
    """
    target = _target_of(rank_folder)
    if target is None:
        return []
    kept = read_kept(BlobFolder(Path(target.path)))
    steps = StepLog()
    steps.adopt(kept.starts, kept.records)
    found: set[int] = set()
    for window in group_windows(kept.snapshots):
        if not window.complete:
            continue
        steps_to = steps.reaches(window.start + 1)
        try:
            ref = verified_window(
                window.snapshots, target.identity, target.shard, steps_to
            )
        except CheckpointLoadError as error:
            _log.warning("on disk, and of no use to a start: %s", error)
            continue
        if ref is not None:
            found.add(ref.end)
    return sorted(found)


def _target_of(rank_folder: Path) -> SaveTarget | None:
    content = ReservedFile(rank_folder / _TARGET).read()
    if not content:
        return None
    fields = json.loads(content.decode(errors="surrogateescape"))
    return msgspec.convert(fields, SaveTarget)


def windows_in(folder: BlobFolder) -> Iterator[list[str]]:
    """Yield the keys of each complete window with its steps, the oldest window first;
    the first key is its end's.
    """
    by_key = read_snapshots(folder)
    of_payload = {id(snapshot.payload): key for key, snapshot in by_key.items()}
    there = set(folder.keys())
    for window in sorted(
        group_windows(by_key.values()), key=lambda window: window.start
    ):
        keys = [
            *window_steps(window.snapshots),
            *(of_payload[id(snapshot.payload)] for snapshot in window.snapshots),
        ]
        if window.complete and there.issuperset(keys):
            yield keys
