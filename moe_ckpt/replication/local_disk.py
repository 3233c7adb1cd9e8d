"""A rank's newest windows on a local disk, for a start after all memory is gone.

Owns: the blobs of one rank in one folder, synced, and the limit on their bytes. Must
not: choose the blobs. The replica daemon writes, so that the death of a worker leaves
no torn file.

    begin      all ranks start from nothing: delete leftovers, and mark the disk
    persist    delete windows that every rank has superseded
               ---> copy blob after blob, each synced before its entry appears
               ---> remove the mark
    restore    copy all intact blobs back into shared memory

The mark says that the disk has never held a state. A disk with the mark proves that no
state was ever on all disks: the next start may begin anew, although other disks hold
states. A lost or replaced disk has no mark.

A node that was cut off, and has a successor for its ranks, may save windows at its end
into folders in which the successor writes. No key of a snapshot and no name of a buffer
is used twice, and such a save removes nothing: each window stays as it was written.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.private_files import make_private, write_private
from moe_ckpt.replication.client import DaemonClient
from moe_ckpt.snapshot.blobs import Blob, BlobFolder, sync
from moe_ckpt.snapshot.token_bucket import Throttle

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 1 << 20
_NEVER_HELD = "never_held"


def folder_of(disk: Path, global_rank: int) -> Path:
    """Return the folder of a rank on a disk."""
    return disk / f"rank{global_rank:04d}"


class LocalDisk:
    """A worker's access to the rank's disk.

    The worker writes through its daemon, if there is one, and reads by itself.
    """

    def __init__(
        self,
        folder: Path,
        global_rank: int,
        daemon: DaemonClient | None,
        limit_bytes: int | None,
    ) -> None:
        """Name the rank's folder on the disk.

        Args:
            folder: Folder of all ranks on this disk.
            global_rank: The rank.
            daemon: Writes to the disk. None: the worker only reads.
            limit_bytes: Most bytes that the rank's folder may hold. None: no limit.
        """
        self.path = folder_of(folder, global_rank)
        self._daemon = daemon
        self.limit_bytes = limit_bytes

    def begin(self) -> None:
        """Empty the disk and mark it, because all ranks start from nothing.

        No write may be in progress.
        """
        self.drop(lambda _: True)
        make_private(self.path)
        # last, because the mark would be wrong beside states of an earlier start
        write_private(self.path / _NEVER_HELD, "")

    @property
    def never_held(self) -> bool:
        """Whether the disk is marked.

        A mark means that no write has succeeded since all ranks started from nothing.
        """
        try:
            return (self.path / _NEVER_HELD).exists()
        except OSError:  # an unreadable disk proves nothing
            return False

    def persist(self, keys: Sequence[str], stale: Sequence[str]) -> Future[None]:
        """Start `persist` in the daemon.

        Args:
            keys: Keys of the blobs to copy.
            stale: Keys of the blobs on disk to delete first.

        Returns:
            A future that completes when `persist` has ended, or fails with a
            CheckpointSaveError.
        """
        assert self._daemon is not None, "ckpt.disk_every_iters needs a daemon"
        return self._daemon.persist(keys, stale, self.path, self.limit_bytes)

    def flush(self, timeout_s: float) -> None:
        """Wait until all requested writes have ended, without the cap on traffic.

        A recovery waits for the writes.

        Args:
            timeout_s: Longest wait, in seconds.
        """
        if self._daemon is None:
            return
        # a daemon that has died has ended its writes, too
        with contextlib.suppress(CheckpointSaveError, TimeoutError):
            self.persist([], []).result(timeout_s)

    def drop(self, is_stale: Callable[[str], bool]) -> None:
        """Delete the blobs whose keys are stale. No write may be in progress."""
        disk = BlobFolder(self.path, synced=True)
        for key in filter(is_stale, disk.keys()):
            disk.discard(key)

    def restore(self, own: BlobFolder) -> int:
        """Call `restore` for this rank's folder on disk."""
        return restore(self.path, own)


def persist(
    own: BlobFolder,
    path: Path,
    keys: Sequence[str],
    stale: Sequence[str],
    limit_bytes: int | None,
    throttle: Throttle | None = None,
    *,
    sweeps: bool = True,
) -> None:
    """Delete stale blobs on disk, then copy blobs there.

    Blobs with a payload that are on disk already are not copied again. Without `keys`
    the disk stays unchanged.

    Args:
        own: Folder of the rank's own blobs.
        path: Folder on disk.
        keys: Keys of the blobs to copy.
        stale: Keys of the blobs on disk to delete first.
        limit_bytes: Most bytes that the folder may hold. None: no limit.
        throttle: Cap on the copies. None: no cap.
        sweeps: Whether to remove unfinished files first, which a daemon leaves that
            dies during a write. False if another process may be writing there now.

    Raises:
        CheckpointSaveError: The disk is full or cannot be written, a blob was withdrawn
            during the copy, or old and new blobs exceed `limit_bytes`. No new blob is
            on disk then.
        CheckpointLoadError: A blob was withdrawn before the copy. No new blob is on
            disk then.
    """
    if not keys:
        return
    with _naming_the_disk(path):
        _require_listed(path)
        disk = BlobFolder(path, synced=True)
        if sweeps:
            disk.sweep()
        # before the copies, so that the disk never holds three windows
        for key in stale:
            disk.discard(key)
        before = {key: _size(blob) for key, blob in _intact(disk)}
        found = {key: own.get(key) for key in keys}
        # blobs without a payload are small, and may have changed
        blobs = {
            key: blob
            for key, blob in found.items()
            if key not in before or blob.payload is None
        }
        _check_room(path, before.values(), map(_size, blobs.values()), limit_bytes)
        new: dict[str, str] = {}
        try:
            for key, blob in blobs.items():
                serial, is_new = _copy(key, blob, own, disk, throttle or Throttle())
                # another process may write the same blob, before and after this one
                if is_new:
                    new[key] = serial
        except CheckpointSaveError:
            for key, serial in new.items():
                with contextlib.suppress(OSError):  # the caller gets the first error
                    if disk.serial_of(key) == serial:
                        disk.discard(key)
            raise
        # after the last blob: if a fault cuts off the write, the mark still allows a
        # new start
        (path / _NEVER_HELD).unlink(missing_ok=True)
        sync(path)


def _require_listed(path: Path) -> None:
    """Check that the files of a folder can be listed, if the folder exists.

    Otherwise stale blobs would stay, and fill the disk.

    Raises:
        OSError: The files cannot be listed.
    """
    with contextlib.suppress(FileNotFoundError):
        next(path.iterdir(), None)


@contextlib.contextmanager
def _naming_the_disk(path: Path) -> Iterator[None]:
    """Raise CheckpointSaveError for any error of the file system.

    A file system may have become read-only, for example.
    """
    try:
        yield
    except CheckpointSaveError:
        raise
    except OSError as error:
        raise CheckpointSaveError(
            f"local disk, {path}: got {error}, wanted to write there"
        ) from error


def restore(path: Path, own: BlobFolder) -> int:
    """Copy all intact blobs on disk into shared memory.

    A damaged blob stays behind: the blob's window may not be needed.

    Args:
        path: Folder on disk.
        own: Folder of the rank's own blobs.

    Returns:
        The size of the copied blobs, in bytes.

    Raises:
        CheckpointSaveError: The memory has no room.
    """
    disk = BlobFolder(path)
    return _copy_all(disk, own, _intact(disk))


def _intact(folder: BlobFolder) -> Iterator[tuple[str, Blob]]:
    for key in folder.keys():  # noqa: SIM118 - not a mapping
        try:
            yield key, folder.get(key)
        except CheckpointLoadError as error:
            _log.warning("left on the local disk as it is damaged: %s", error)


def copy_blobs(source: BlobFolder, target: BlobFolder, keys: Iterable[str]) -> int:
    """Copy blobs from a folder of this node into another folder.

    Args:
        source: Folder that has the blobs.
        target: Folder that receives copies.
        keys: Keys of the blobs.

    Returns:
        The size of the copied blobs, in bytes.

    Raises:
        CheckpointLoadError: A blob is damaged. Blobs before the first damaged one are
            copied by then.
        CheckpointSaveError: There is no room.
    """
    return _copy_all(source, target, ((key, source.get(key)) for key in keys))


def _copy_all(
    source: BlobFolder, target: BlobFolder, blobs: Iterable[tuple[str, Blob]]
) -> int:
    """Copy blobs one after another, and return their size in bytes."""
    size_bytes = 0
    for key, blob in blobs:
        _copy(key, blob, source, target, Throttle())
        size_bytes += _size(blob)
    return size_bytes


def _copy(
    key: str, blob: Blob, source: BlobFolder, target: BlobFolder, throttle: Throttle
) -> tuple[str, bool]:
    """Copy a blob.

    Returns:
        The serial of the copy, and whether the target had no intact blob of the key.
    """
    payload = None
    throttle.wait(len(blob.header))
    if blob.payload is not None:
        payload = target.allocate(blob.payload_bytes)
        for start in range(0, blob.payload_bytes, _CHUNK_BYTES):
            chunk = slice(start, min(start + _CHUNK_BYTES, blob.payload_bytes))
            throttle.wait(chunk.stop - chunk.start)
            payload[chunk].copy_(blob.payload[chunk])
    try:
        # the blob's memory may have been reused already
        if not source.is_current(key, blob):
            raise CheckpointSaveError(f"blob {key} was withdrawn while it was copied")
        is_new = target.serial_of(key) is None
        return target.deposit(key, blob.header, payload, blob.payload_bytes), is_new
    except CheckpointSaveError:
        if payload is not None:
            target.free(payload)
        raise


def _check_room(
    path: Path,
    used: Iterable[int],
    more: Iterable[int],
    limit_bytes: int | None,
) -> None:
    used_bytes, more_bytes = sum(used), sum(more)
    if limit_bytes is not None and used_bytes + more_bytes > limit_bytes:
        raise CheckpointSaveError(
            f"local disk, {path}: got {used_bytes} bytes in use and {more_bytes}"
            f" more to hold, wanted at most ckpt.disk_budget_bytes={limit_bytes}"
        )


def _size(blob: Blob) -> int:
    return len(blob.header) + blob.payload_bytes
