"""Named blobs in a folder of shared memory, which outlive the process that wrote them.

Owns: the files of one folder, the index of the folder's blobs, and the mappings of
payloads in this process. One process writes, and any process may read. The folder may
vanish at any time. Must not: look into headers and payloads (the checksum of a payload
belongs into the header), or communicate with a peer.

    buffers/000001       payload of a blob, or memory that is being filled
    index/snapshot.blob  holds the header, names the buffer; written as .tmp, renamed
    incoming/            an index that is to replace the other; renamed to arrived/
                         once the incoming index is whole, then to index/
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from threading import RLock
from typing import Any

import torch

from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.private_files import make_private, open_private, write_private
from moe_ckpt.snapshot.index_entry import IndexEntry, entry_from_bytes, entry_to_bytes

_KEY = re.compile(r"[A-Za-z0-9._-]{1,200}")
_BUFFER = re.compile(r"[0-9]{6,}")
_NUMBERS = 10**18
_ENTRY, _UNFINISHED = ".blob", ".tmp"
_INDEX, _INCOMING, _ARRIVED = "index", "incoming", "arrived"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blob:
    """A header and a payload."""

    header: bytes
    """Header, whose contents this module does not interpret."""

    payload: torch.Tensor | None
    """uint8, [at least payload_bytes]; None if the blob has no payload."""

    payload_bytes: int
    """Bytes at the beginning of `payload` that belong to the blob."""

    serial: str
    """Distinguishes successive blobs of the same key."""

    payload_xxh3: int | None
    """XXH3 of the payload, given at publication; None if the writer gave none."""


def own_path(rank_folder: Path) -> Path:
    """Return the folder of a rank's own blobs."""
    return rank_folder / "own"


def held_path(rank_folder: Path, owner_rank: int) -> Path:
    """Return the folder in which a rank holds the copies of another rank's blobs."""
    return rank_folder / "held" / f"rank{owner_rank:04d}"


def held_paths(rank_folder: Path) -> dict[int, Path]:
    """Return the folders in which a rank holds copies, by the owner's rank."""
    return {
        int(path.name.removeprefix("rank")): path
        for path in (rank_folder / "held").glob("rank*")
    }


def is_key(text: str) -> bool:
    """Return whether a text is a valid key."""
    return _KEY.fullmatch(text) is not None


class _Index:
    """Entries of a folder's blobs.

    With `synced`, an entry and the entry's buffer are on the device before the entry is
    visible. Paths of entries are plain text: each iteration waits for an entry, and
    `pathlib` takes more time than the kernel.
    """

    def __init__(self, path: Path, *, synced: bool) -> None:
        self._path = path
        self._folder = f"{path}{os.sep}"
        self._synced = synced

    def keys(self) -> list[str]:
        """Return the keys of all entries, sorted."""
        return sorted(
            path.stem
            for path in _listed(self._path)
            if path.suffix == _ENTRY and is_key(path.stem)
        )

    def unfinished(self) -> list[Path]:
        """Return the files of entries that never became visible."""
        return [path for path in _listed(self._path) if path.suffix == _UNFINISHED]

    def read(self, key: str) -> IndexEntry:
        """Return an entry.

        Raises:
            CheckpointLoadError: The entry is missing or damaged.
        """
        path = self._path_of(key)
        try:
            with open(path, "rb", buffering=0) as file:
                data = file.readall()
        except OSError as error:
            raise CheckpointLoadError(f"{path}: {error.strerror}") from error
        return entry_from_bytes(key, data)

    def write(self, entry: IndexEntry, buffer: Path | None) -> None:
        """Make an entry visible, atomically, in place of an entry of the same key.

        Raises:
            CheckpointSaveError: The entry cannot be written.
        """
        path = self._path_of(entry.key)
        unfinished = f"{self._folder}{entry.key}{_UNFINISHED}"
        try:
            if buffer is not None:
                buffer.stat()  # the folder may have been deleted meanwhile
            self._write_unfinished(unfinished, entry_to_bytes(entry))
            if self._synced:
                sync(*([buffer, buffer.parent] if buffer else ()), unfinished)
            # the entry appears last: if the process dies before, the old blob stays,
            # and a power cut leaves no entry without its bytes
            os.replace(unfinished, path)
            if self._synced:
                # the new name is a change of the folder, which the sync of the file
                # does not write to the device
                sync(self._folder)
        except OSError as error:
            where = self._path.parent
            raise CheckpointSaveError(
                f"blob {entry.key} in {where}: got {error}, wanted to write it"
            ) from error

    def remove(self, key: str) -> None:
        """Remove an entry, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path_of(key))

    def _write_unfinished(self, path: str, data: bytes) -> None:
        try:
            write_private(path, data)
        except FileNotFoundError:  # the first entry
            make_private(self._path)
            write_private(path, data)

    def _path_of(self, key: str) -> str:
        assert is_key(key), f"not a key: {key!r}"
        return f"{self._folder}{key}{_ENTRY}"


class BlobFolder:
    """Blobs of one folder, for any thread of a process.

    Keys pass `is_key`. The folder is created on demand. Allocated memory belongs to the
    caller, until the caller frees the memory or leaves the memory to a blob by
    `deposit`.
    """

    def __init__(
        self,
        path: Path,
        *,
        pinned: bool = False,
        synced: bool = False,
        index: str = _INDEX,
    ) -> None:
        """Open a folder, which may not exist yet.

        Args:
            path: Path of the folder.
            pinned: Whether to allocate page-locked memory if there is a GPU to copy
                from.
            synced: For a folder on disk: whether a blob is written to the device before
                the blob becomes visible. Another machine may write there, too.
            index: Name of the folder's index. `incoming` uses another name.
        """
        self.path = path
        self._pinned = pinned and torch.cuda.is_available()
        self._is_shared = synced
        self._index = _Index(path / index, synced=synced)
        self._lock = RLock()
        # memory that was allocated or adopted here, by the buffer's name
        self._mapped: dict[str, torch.Tensor] = {}
        # the names of the same buffers; a tensor's hash is its identity
        self._names: dict[torch.Tensor, str] = {}
        self._number = 0  # of the last buffer
        self._pass_all()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate shared memory.

        Args:
            nbytes: Size of the memory in bytes.

        Returns:
            uint8, [nbytes], of arbitrary contents.

        Raises:
            CheckpointSaveError: The file system has no room, or cannot be written.
        """
        with self._lock:
            name = self._next_name()
            try:
                tensor = _create(self._buffer_path(name), nbytes, pinned=self._pinned)
            except (OSError, RuntimeError, OverflowError) as error:
                # a file system that has become read-only fails here too
                with contextlib.suppress(OSError):
                    self._unlink_buffer(name)
                reason = f"got {error}, wanted room for {nbytes} bytes"
                raise CheckpointSaveError(
                    f"shared memory in {self.path}: {reason}"
                ) from error
            self._hold(name, tensor)
            return tensor

    def free(self, tensor: torch.Tensor) -> None:
        """Free memory, which must not be used afterwards.

        Args:
            tensor: The same object that was allocated or adopted.
        """
        with self._lock:
            self._unlink_buffer(self._let_go(tensor))

    def publish(
        self,
        key: str,
        header: bytes,
        payload: torch.Tensor | None,
        payload_bytes: int,
        payload_xxh3: int | None = None,
    ) -> str:
        """Make a blob visible, atomically, in place of a blob of the same key.

        Args:
            key: Key of the blob.
            header: Header of the blob.
            payload: Memory that was allocated or adopted here; None for a blob without
                payload.
            payload_bytes: Bytes at the beginning of `payload` that belong to the blob.
                The bytes must not change before the blob is withdrawn or replaced.
            payload_xxh3: XXH3 of these bytes if the hash is known, so that readers need
                not compute the hash.

        Returns:
            The blob's serial.

        Raises:
            CheckpointSaveError: The blob cannot be written.
        """
        assert payload_bytes <= (0 if payload is None else payload.numel()), (
            key,
            payload_bytes,
        )
        with self._lock:
            name = None if payload is None else self._names[payload]
            # random: a count would begin anew in a successor process, and a reader
            # could mistake the successor's blob for the earlier blob
            serial = secrets.token_hex(8)
            entry = IndexEntry(
                key=key,
                buffer=name,
                payload_bytes=payload_bytes,
                serial=serial,
                header=header,
                payload_xxh3=payload_xxh3,
            )
            self._index.write(entry, None if name is None else self._buffer_path(name))
            return serial

    def deposit(
        self, key: str, header: bytes, payload: torch.Tensor | None, payload_bytes: int
    ) -> str:
        """Publish a blob, and leave the memory of `payload` to the blob.

        This process unmaps the payload. `discard`, or a newer deposit of the same key,
        frees the memory.

        Returns:
            The blob's serial.

        Raises:
            CheckpointSaveError: The blob cannot be written. The memory then still
                belongs to the caller.
        """
        with self._lock:
            replaced = self._buffer_of(key)
            serial = self.publish(key, header, payload, payload_bytes)
            if payload is not None:
                self._let_go(payload)
            # freed last: if the process dies before, a buffer without an entry stays,
            # which `sweep` removes, and never an entry without its buffer
            self._unlink_buffer(replaced)
            return serial

    def withdraw(self, key: str) -> None:
        """Remove a blob from the index.

        The memory of the payload belongs to the caller that allocated the memory.
        """
        self._index.remove(key)

    def discard(self, key: str) -> None:
        """Remove a deposited blob, and free its memory."""
        with self._lock:
            name = self._buffer_of(key)
            self.withdraw(key)
            self._unlink_buffer(name)

    def clear(self) -> None:
        """Remove all blobs, and free their memory."""
        with self._lock:
            for key in self.keys():
                self.discard(key)
            self.sweep()

    def incoming(self) -> BlobFolder:
        """Begin to replace all blobs.

        Only the one writer may call this method. Until `finish_replacement` the writer
        must not allocate memory in this folder.

        Returns:
            An empty folder. The blobs of the returned folder take the place of this
            folder's blobs once `keep_incoming` and `finish_replacement` were called.
        """
        self.finish_replacement()
        make_private(self.path / _INCOMING)
        return BlobFolder(self.path, index=_INCOMING)

    def keep_incoming(self) -> None:
        """Mark the incoming blobs as whole.

        From now on `finish_replacement` replaces all other blobs by the incoming blobs,
        even if this process dies before the call.
        """
        (self.path / _INCOMING).rename(self.path / _ARRIVED)

    def finish_replacement(self) -> None:
        """Finish a replacement whose blobs are whole, or discard one that is not."""
        with self._lock:
            shutil.rmtree(self.path / _INCOMING, ignore_errors=True)
            arrived, index = self.path / _ARRIVED, self.path / _INDEX
            if arrived.exists():
                shutil.rmtree(index, ignore_errors=True)
                arrived.rename(index)
            self._pass_all()

    def keys(self) -> list[str]:
        """Return the keys of all blobs, sorted."""
        return self._index.keys()

    def get(self, key: str) -> Blob:
        """Return a blob.

        The payload is mapped from the file, or is the tensor that was allocated or
        adopted here.

        Raises:
            CheckpointLoadError: The blob is missing or damaged.
        """
        with self._lock:
            return self._blob(key, hold=False)

    def is_current(self, key: str, blob: Blob) -> bool:
        """Return whether a blob is still published.

        The payload of a published blob has not changed.
        """
        return self.serial_of(key) == blob.serial

    def serial_of(self, key: str) -> str | None:
        """Return a blob's serial; None if the blob is missing or damaged."""
        try:
            return self._index.read(key).serial
        except CheckpointLoadError:
            return None

    def adopt(self) -> dict[str, Blob]:
        """Sweep the folder of a process that died, and take over the folder's blobs.

        Returns:
            All blobs, by key. The memory of the payloads counts as allocated here.
        """
        with self._lock:
            self.sweep()
            return {key: self._blob(key, hold=True) for key in self.keys()}

    def sweep(self) -> None:
        """Finish a replacement, and remove damaged or unused contents.

        The contents are damaged blobs, unused buffers and unfinished entries. Only the
        one writer may call this method.
        """
        with self._lock:
            self.finish_replacement()
            for key in self.keys():
                try:
                    self.get(key)
                except CheckpointLoadError as error:
                    _log.warning("dropped what is damaged: %s", error)
                    self.withdraw(key)
            # memory that is being filled has no entry yet
            used = {self._buffer_of(key) for key in self.keys()} | self._mapped.keys()
            unused = [path for path in self._buffers() if path.name not in used]
            for path in unused + self._index.unfinished():
                path.unlink(missing_ok=True)

    def _hold(self, name: str, tensor: torch.Tensor) -> None:
        self._mapped[name] = tensor
        self._names[tensor] = name

    def _let_go(self, tensor: torch.Tensor) -> str:
        assert tensor in self._names, "a tensor that was not allocated in this folder"
        name = self._names.pop(tensor)
        del self._mapped[name]
        if self._pinned:
            # unregistered before the mapping ends: the driver must not keep pages that
            # another mapping may get
            torch.cuda.check_error(
                int(_cudart().cudaHostUnregister(tensor.untyped_storage().data_ptr()))
            )
        return name

    def _blob(self, key: str, *, hold: bool) -> Blob:
        entry = self._index.read(key)
        payload = (
            None if entry.buffer is None else self._payload(entry.buffer, hold=hold)
        )
        num_mapped = 0 if payload is None else payload.numel()
        # reads past the end of a truncated file would end this process by SIGBUS
        if num_mapped < entry.payload_bytes:
            reason = f"got {num_mapped} bytes of payload, wanted {entry.payload_bytes}"
            raise CheckpointLoadError(f"blob {key} in {self.path}: {reason}")
        return Blob(
            header=entry.header,
            payload=payload,
            payload_bytes=entry.payload_bytes,
            serial=entry.serial,
            payload_xxh3=entry.payload_xxh3,
        )

    def _payload(self, buffer: str, *, hold: bool) -> torch.Tensor:
        if buffer in self._mapped:
            return self._mapped[buffer]
        path = self._buffer_path(buffer)
        try:
            with _opened(path) as file:
                payload = _map(
                    file.fileno(), pinned=hold and self._pinned, shared=file.writable()
                )
        except (OSError, RuntimeError) as error:
            raise CheckpointLoadError(f"{path}: not a payload: {error}") from error
        if hold:
            self._hold(buffer, payload)
        return payload

    def _buffer_of(self, key: str) -> str | None:
        """Return the name of a blob's buffer.

        None if the blob has no payload, is damaged, or does not exist.
        """
        try:
            return self._index.read(key).buffer
        except CheckpointLoadError:
            return None

    def _next_name(self) -> str:
        """Return a name for a buffer that no buffer has."""
        if self._is_shared:
            # a count of another process may reach the same number at the same time
            return f"{secrets.randbelow(_NUMBERS):06d}"
        self._number += 1
        return f"{self._number:06d}"

    def _unlink_buffer(self, name: str | None) -> None:
        if name is not None:
            self._buffer_path(name).unlink(missing_ok=True)

    def _buffer_path(self, name: str) -> Path:
        return self.path / "buffers" / name

    def _pass_all(self) -> None:
        """Continue the numbering after the buffers that are in the folder.

        An earlier process left these buffers, or incoming blobs own them and keep them
        when `finish_replacement` renames the index.
        """
        self._number = max(
            self._number, *(int(buffer.name) for buffer in self._buffers()), 0
        )

    def _buffers(self) -> list[Path]:
        return [
            path
            for path in _listed(self.path / "buffers")
            if _BUFFER.fullmatch(path.name)
        ]


def _create(path: Path, nbytes: int, *, pinned: bool) -> torch.Tensor:
    make_private(path.parent)
    _require_free(path.parent, nbytes)
    with open(path, "xb+", buffering=0, opener=open_private) as file:
        # allocated at once: a full file system is an error here, not SIGBUS later
        os.posix_fallocate(file.fileno(), 0, max(nbytes, 1))
        tensor = _map(file.fileno(), pinned=pinned)
    # an empty file cannot be mapped, so the file of an empty payload has one byte
    return tensor if nbytes else tensor[:0]


def _require_free(directory: Path, nbytes: int) -> None:
    """Raise OSError if the file system has less room than `nbytes`.

    Without this check a request of absurd size would take all memory before failing.
    """
    there = os.statvfs(directory)
    if nbytes > there.f_bavail * there.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        # a disk has failed: training needs no disk, and a later write to the disk
        # reports the error
        _log.warning(
            "%s: got %s, wanted its files; it counts as empty", directory, error
        )
        return []


def sync(*paths: str | Path) -> None:
    """Wait until files, or the entries of folders, are on the device.

    Raises:
        OSError: A path cannot be opened or synced.
    """
    for path in paths:
        fd = os.open(path, os.O_RDONLY)  # `open` refuses folders
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _opened(path: Path) -> FileIO:
    """Open a payload to write to it, or to read it if its file system is read-only."""
    try:
        return open(path, "rb+", buffering=0)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return open(path, "rb", buffering=0)


def _map(fd: int, *, pinned: bool, shared: bool = True) -> torch.Tensor:
    """Return a whole file as a tensor that shares the file's memory.

    The file is mapped by descriptor, since the file's name may be deleted already.

    Args:
        fd: Descriptor of the file.
        pinned: Whether to page-lock the memory.
        shared: False for a file that cannot be written. Pages are then copied if the
            tensor changes.
    """
    nbytes = os.fstat(fd).st_size
    tensor = torch.from_file(
        f"/proc/self/fd/{fd}", shared=shared, size=nbytes, dtype=torch.uint8
    )
    if pinned:
        torch.cuda.check_error(
            int(_cudart().cudaHostRegister(tensor.data_ptr(), nbytes, 0))
        )
    return tensor


def _cudart() -> Any:
    return torch.cuda.cudart()
