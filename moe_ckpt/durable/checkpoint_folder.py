"""Checkpoint directories on a file system that all ranks share.

Owns: names, the commit marker, the list of checkpoints, and removing old ones. A
directory counts only once it has its marker, which is written last and lists every file
with the file's size and checksum. Must not: interpret the contents of the files,
or communicate.

    iter_0000050/          a checkpoint, committed
        COMMITTED.json     identity, iteration, and per file: bytes and CRC-32
    iter_0000050.before/   earlier checkpoint of an iteration that came again, until
                           the iteration is committed again
    iter_0000100/          no marker: torn, or still being written; never read
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.exact_json import ExactDecoder
from moe_ckpt.private_files import make_private, write_private
from moe_ckpt.types import CheckpointRef, FileRecord, RunIdentity

MARKER = "COMMITTED.json"
_NAME = re.compile(r"iter_(\d{7,})(\.before)?")
# ends of the names of files in Megatron's format
_OF_SAVES = (".distcp", ".json", ".metadata", ".pt")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of a commit marker."""

    iteration: int
    """Iteration of the checkpoint."""

    identity: RunIdentity
    """Identity of the run that saved the checkpoint."""

    files: tuple[FileRecord, ...]
    """Records of all files but the marker."""

    @property
    def size_bytes(self) -> int:
        """Size of all files, in bytes."""
        return sum(file.size_bytes for file in self.files)


_MANIFESTS = ExactDecoder(Manifest)


class CheckpointFolder:
    """The checkpoints of one run.

    Only the rank that writes markers calls the methods that change files.
    """

    def __init__(self, root: Path) -> None:
        """Name the folder, which may be missing.

        Args:
            root: The folder.
        """
        self.root = root

    def directory(self, iteration: int) -> Path:
        """Return the directory of an iteration's checkpoint."""
        return self.root / f"iter_{iteration:07d}"

    def prepare(self, iteration: int) -> Path:
        """Return an empty directory for a checkpoint.

        Files of a torn save in the directory are removed. A committed checkpoint of the
        same iteration stays usable beside the directory, until the new checkpoint is
        committed.
        """
        directory = self.directory(iteration)
        if is_committed(directory):
            _remove_if_there(_before(directory))
            directory.rename(_before(directory))
        _remove_if_there(directory)
        make_private(directory)
        return directory

    def committed(self) -> list[CheckpointRef]:
        """Return the committed checkpoints, newest first."""
        return [ref for ref in self._all() if is_committed(Path(ref.directory))]

    def torn(self) -> list[CheckpointRef]:
        """Return the checkpoints without a marker, newest first."""
        return [ref for ref in self._all() if not is_committed(Path(ref.directory))]

    def keep_newest(self, count: int, *, up_to: int) -> None:
        """Remove old checkpoints, and files of failed saves.

        Of an iteration that came again the last checkpoint stays. Checkpoints after
        `up_to` stay: this run could not use them, and their owner may want to look into
        them.

        Args:
            count: Number of committed checkpoints that stay, the newest up to `up_to`.
            up_to: Newest iteration whose checkpoint may be removed.
        """
        for ref in self.committed():
            if ref.iteration <= up_to:
                _remove_if_there(_before(Path(ref.directory)))
        old = [ref for ref in self.committed() if ref.iteration <= up_to][count:]
        for ref in old + [ref for ref in self.torn() if ref.iteration < up_to]:
            remove_checkpoint(Path(ref.directory))

    def _all(self) -> list[CheckpointRef]:
        if not self.root.is_dir():
            return []
        # foreign files and folders stay: the user may keep other things in this folder
        named = (
            (_NAME.fullmatch(entry.name), entry)
            for entry in self.root.iterdir()
            if entry.is_dir()
        )
        found = [
            CheckpointRef(iteration=int(name[1]), directory=str(entry))
            for name, entry in named
            if name
        ]
        return sorted(found, key=lambda ref: (-ref.iteration, ref.directory))


def _before(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.before")


def is_committed(directory: Path) -> bool:
    """Return whether a directory holds a commit marker."""
    return (directory / MARKER).is_file()


def remove_checkpoint(directory: Path) -> None:
    """Remove a checkpoint, the marker first.

    A half-removed checkpoint is therefore torn, not damaged.
    """
    (directory / MARKER).unlink(missing_ok=True)
    shutil.rmtree(directory)


def _remove_if_there(directory: Path) -> None:
    if directory.exists():
        remove_checkpoint(directory)


def file_names(directory: Path) -> list[str]:
    """Return the paths, inside the directory, of all files but the marker, sorted."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return sorted(
        str(path.relative_to(directory)) for path in files if path.name != MARKER
    )


def seal_files(directory: Path, names: Iterable[str]) -> list[FileRecord]:
    """Sync files to the disk, and describe their contents.

    The files must not change any more, and are read back. Any thread of the process
    that wrote the files may call this function, and should: on a network file system
    only the machine of that process can sync the files.

    Args:
        directory: Directory of the checkpoint.
        names: Paths of the files inside the directory.

    Returns:
        Sizes and checksums of the files.
    """
    records = []
    for name in names:
        _sync(directory / name)
        records.append(_describe(directory, name))
    return records


def commit(directory: Path, manifest: Manifest) -> None:
    """Make a checkpoint visible.

    The names of the files, too, are on the disk before the marker appears.

    Args:
        directory: Directory of the checkpoint, whose files are sealed.
        manifest: Content of the marker.
    """
    marker = directory / MARKER
    temporary = marker.with_suffix(".tmp")
    write_private(temporary, json.dumps(asdict(manifest), indent=1))
    _sync(temporary)
    _sync(directory)
    temporary.rename(marker)
    # without these two syncs a loss of power may remove the name of marker or directory
    _sync(directory)
    _sync(directory.parent)


def read_manifest(directory: Path) -> Manifest:
    """Return the contents of the marker.

    Raises:
        CheckpointLoadError: There is no marker, or the marker cannot be parsed.
    """
    try:
        return _MANIFESTS.decode((directory / MARKER).read_bytes())
    except OSError as error:
        raise CheckpointLoadError(
            f"{directory}: no readable {MARKER} ({error.strerror})"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointLoadError(
            f"{directory}/{MARKER}: not a commit marker ({error!r})"
        ) from error


def verify_files(directory: Path, expected: Iterable[FileRecord]) -> None:
    """Compare files with their records.

    Raises:
        CheckpointLoadError: A file is missing or differs. The message names the first
            one.
    """
    for record in expected:
        try:
            found = _describe(directory, record.name)
        except OSError as error:
            raise CheckpointLoadError(
                f"{directory}/{record.name}: {error.strerror}"
            ) from error
        if found != record:
            raise CheckpointLoadError(
                f"{directory}/{record.name}: got {found.size_bytes} bytes with CRC-32"
                f" {found.crc32:08x}, wanted {record.size_bytes} bytes with"
                f" {record.crc32:08x}"
            )


def require_listed(directory: Path, manifest: Manifest) -> None:
    """Check that a marker lists all files of a checkpoint: only those are verified.

    Other files, which a user or a file system may have added, may be missing in the
    marker.

    Args:
        directory: The checkpoint.
        manifest: The content of the checkpoint's marker.

    Raises:
        CheckpointLoadError: The marker belongs to another save, or lists only a part of
            the save.
    """
    listed = {record.name for record in manifest.files}
    missing = [
        name
        for name in file_names(directory)
        if name not in listed and name.endswith(_OF_SAVES)
    ]
    if missing:
        got = f"got no checksum of {', '.join(missing)}"
        raise CheckpointLoadError(
            f"{directory}/{MARKER}: {got}, wanted one of each file of the save"
        )


def _describe(directory: Path, name: str) -> FileRecord:
    size_bytes, crc32 = 0, 0
    with open(directory / name, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size_bytes += len(chunk)
            crc32 = zlib.crc32(chunk, crc32)
    return FileRecord(name=name, size_bytes=size_bytes, crc32=crc32)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
