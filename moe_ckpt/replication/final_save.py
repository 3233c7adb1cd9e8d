"""The last save of a rank whose job is being stopped.

Complete windows go from shared memory to disk. Owns: the choice of the blobs, and the
file in which a worker leaves the target of the save. Must not: need the worker or the
daemon, which are dead by then: a worker may hang, and two processes must not write one
folder.

    worker, once, as it opens its memory:
        write_save_target(rank folder, target)
    worker, while it waits for a spare node:
        save_while_missing(rank folder, daemon, ...)
    process that the supervisor starts after worker and daemon have ended:
        save_last(rank folder), saved_iterations(rank folder)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError, lacks_room
from moe_ckpt.replication.client import DaemonClient
from moe_ckpt.replication.local_disk import folder_of, persist
from moe_ckpt.reserved_file import ReservedFile
from moe_ckpt.snapshot.blob_keys import gradients_key
from moe_ckpt.snapshot.blobs import BlobFolder, held_path, own_path
from moe_ckpt.snapshot.codec import ShardIdentity
from moe_ckpt.snapshot.folder_contents import read_kept, read_snapshots
from moe_ckpt.snapshot.gradient_log import intact_checksums
from moe_ckpt.snapshot.step_log import (
    StepLog,
    window_replay,
    window_steps,
)
from moe_ckpt.snapshot.verified_windows import verified_window
from moe_ckpt.snapshot.windows import group_windows
from moe_ckpt.types import RunIdentity

_log = logging.getLogger(__name__)

_TARGET = "save_target"


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveTarget:
    """The folder of a rank's last save, and the windows that belong there."""

    path: str
    """Folder of the rank on the rank's disk."""

    limit_bytes: int | None
    """Most bytes that the folder may hold. None: no limit."""

    identity: RunIdentity
    """The run of the windows."""

    shard: ShardIdentity
    """The rank of the windows."""

    by_gradients: bool = False
    """Whether logged gradients lead on from the windows, and no replay."""

    def path_of(self, global_rank: int) -> Path:
        """Return the folder of another rank on this rank's disk."""
        return folder_of(Path(self.path).parent, global_rank)


def write_save_target(rank_folder: Path, target: SaveTarget) -> None:
    """Write the target of the last save, in place of an earlier worker's target.

    The first worker reserves the file's room before any snapshot takes memory. A
    replacement worker needs no more room.

    Args:
        rank_folder: The rank's folder in shared memory.
        target: The target.

    Raises:
        ConfigError: The memory has no room for the first target.
    """
    content = json.dumps(asdict(target), ensure_ascii=False)
    file = ReservedFile(rank_folder / _TARGET)
    file.reserve()
    # a path may contain bytes that are not UTF-8
    file.write(content.encode(errors="surrogateescape"))


def save_last(rank_folder: Path) -> None:
    """Copy all complete windows of a rank to the rank's disk, the oldest first.

    All ranks have the oldest window, and may lack a newer one. A rank that has not
    opened its memory yet saves nothing.

    Args:
        rank_folder: The rank's folder in shared memory.

    Raises:
        CheckpointSaveError: The disk has no room. Windows that are on the disk by then
            stay.
    """
    target = _target_of(rank_folder)
    if target is None:
        return
    own = BlobFolder(own_path(rank_folder))
    computed = BlobFolder(held_path(rank_folder, target.shard.global_rank))
    disk = Path(target.path)
    # states that the rank's daemon computed from gradients are newer than the rank's
    for folder in (own, computed):
        # a worker may have died while it replaced the folder's contents
        folder.finish_replacement()
        for keys in windows_in(folder):
            # nothing is stale: if another rank saves less, all ranks continue from an
            # older state
            _persist_beside_others(folder, disk, keys, target.limit_bytes)


def save_while_missing(
    rank_folder: Path, daemon: DaemonClient, timeout_s: float, missing: Iterable[int]
) -> None:
    """Copy all complete windows of a rank, and of ranks that are missing, to disk.

    For a worker that waits for the missing ranks: no snapshot is taken meanwhile.

    Args:
        rank_folder: The rank's folder in shared memory.
        daemon: The rank's daemon, which writes the rank's own windows.
        timeout_s: Longest time for a window, in seconds.
        missing: Ranks without a process. This rank may hold copies of their windows.

    Raises:
        CheckpointSaveError: The disk has no room, or the daemon does not answer.
        TimeoutError: A window takes longer.
    """
    if (target := _target_of(rank_folder)) is None:
        return
    for rank in missing:
        held = BlobFolder(held_path(rank_folder, rank))
        for keys in windows_in(held):
            _persist_beside_others(held, target.path_of(rank), keys, target.limit_bytes)
    for keys in windows_in(BlobFolder(own_path(rank_folder))):
        saving = daemon.persist(keys, [], Path(target.path), target.limit_bytes)
        saving.result(timeout_s)


def _persist_beside_others(
    folder: BlobFolder, disk: Path, keys: Sequence[str], limit_bytes: int | None
) -> None:
    """Copy a window to a rank's disk, where another node may be writing, too.

    The other node has the rank by now, or saves the rank's windows at its end.
    """
    try:
        persist(folder, disk, keys, [], limit_bytes, sweeps=False)
    except CheckpointSaveError as error:
        if not lacks_room(error):
            raise
        # files that a dead daemon has left unfinished may take the room
        persist(folder, disk, keys, [], limit_bytes)


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
    checksums = (
        intact_checksums(kept.gradients, target.identity, target.shard)
        if target.by_gradients
        else None
    )
    found: set[int] = set()
    for window in group_windows(kept.snapshots):
        if not window.complete:
            continue
        try:
            ref = verified_window(
                window.snapshots, target.identity, target.shard, steps, checksums
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
    """Yield the keys of each complete window, the oldest window first.

    The keys of the window's logged steps and gradients come before the keys of the
    window's snapshots.
    """
    by_key = read_snapshots(folder)
    key_of = {snapshot: key for key, snapshot in by_key.items()}
    there = set(folder.keys())
    for window in sorted(
        group_windows(by_key.values()), key=lambda window: window.start
    ):
        logged = map(gradients_key, window_replay(window.snapshots))
        keys = [
            *window_steps(window.snapshots),
            *filter(there.__contains__, logged),
            *(key_of[snapshot] for snapshot in window.snapshots),
        ]
        if window.complete and there.issuperset(keys):
            yield keys
