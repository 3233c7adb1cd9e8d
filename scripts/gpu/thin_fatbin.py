"""Zero a library's machine code for other GPUs, so that the library compresses well.

    python scripts/gpu/thin_fatbin.py IN.so OUT.so 90      keep sm_90 and sm_90a
    python scripts/gpu/thin_fatbin.py IN.so                only list the library's code

The file keeps its length and offsets. Payloads of other architectures, and PTX, become
zeros. CUDA's driver chooses an entry by the architecture in the entry's header, and
reads no other entry.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# header of a fatbin: magic, version, size of the header, size of all entries
_MAGIC = struct.pack("<I", 0xBA55ED50)
_HEADER = struct.Struct("<4sHHQ")
_VERSION = 1
_PTX, _ELF = 1, 2
_KINDS = {_PTX: "ptx", _ELF: "elf"}
_OTHER_KINDS = (4, 8, 16, 64)
_LEAST_HEAD_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The code for one architecture in a fatbin."""

    kind: int
    """1: PTX, 2: machine code."""

    architecture: int
    """Compute capability without a point, such as 90."""

    offset: int
    """Position in the file at which the payload begins, in bytes."""

    size_bytes: int
    """Length of the payload."""


def entries_of(data: bytes | mmap.mmap) -> Iterator[Entry]:
    """Yield the entries of all fatbins in a file's bytes, in order."""
    at = data.find(_MAGIC)
    while at >= 0:
        if at + _HEADER.size <= len(data):
            yield from _entries_of_one(data, at)
        at = data.find(_MAGIC, at + 1)


def _entries_of_one(data: bytes | mmap.mmap, at: int) -> Iterator[Entry]:
    _, version, header_bytes, all_bytes = _HEADER.unpack_from(data, at)
    end = at + header_bytes + all_bytes
    if version != _VERSION or header_bytes < _HEADER.size or end > len(data):
        return  # these bytes only look like a header
    at += header_bytes
    while at + 64 <= end:
        kind, _, head_bytes = struct.unpack_from("<HHI", data, at)
        (size_bytes,) = struct.unpack_from("<Q", data, at + 8)
        (architecture,) = struct.unpack_from("<I", data, at + 28)
        is_known = kind in (*_KINDS, *_OTHER_KINDS) and head_bytes >= _LEAST_HEAD_BYTES
        if not is_known or at + head_bytes + size_bytes > end:
            return
        yield Entry(
            kind=kind,
            architecture=architecture,
            offset=at + head_bytes,
            size_bytes=size_bytes,
        )
        at += head_bytes + size_bytes


def thin(path: Path, architectures: Sequence[int]) -> int:
    """Zero all code in a file except machine code of some architectures.

    Args:
        path: The file, which is changed in place.
        architectures: The architectures to keep, such as 90.

    Returns:
        The number of bytes that were zeroed.

    Raises:
        ValueError: The file has no machine code of these architectures.
    """
    zeroed_bytes = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        entries = list(entries_of(data))
        found = {entry.architecture for entry in entries if entry.kind != _PTX}
        if not found & set(architectures):
            raise ValueError(
                f"architectures: got {list(architectures)}, wanted some of"
                f" {sorted(found)}, as {path.name} has"
            )
        for entry in entries:
            if entry.kind != _PTX and entry.architecture in architectures:
                continue
            data[entry.offset : entry.offset + entry.size_bytes] = bytes(
                entry.size_bytes
            )
            zeroed_bytes += entry.size_bytes
        data.flush()
    return zeroed_bytes


def describe(path: Path) -> list[str]:
    """Return a line for each kind of code and architecture in a file."""
    sizes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for entry in entries_of(path.read_bytes()):
        sizes[entry.kind, entry.architecture].append(entry.size_bytes)
    return [
        f"{_KINDS.get(kind, kind)} sm_{architecture}: {len(each)} entries,"
        f" {sum(each) / 2**20:.1f} MiB"
        for (kind, architecture), each in sorted(sizes.items())
    ]


def main(arguments: Sequence[str]) -> int:
    if not arguments or len(arguments) == 2:
        print(__doc__, file=sys.stderr)
        return 2
    source = Path(arguments[0])
    print(*describe(source), sep="\n")
    if len(arguments) > 2:
        target = Path(arguments[1])
        shutil.copyfile(source, target)
        zeroed_bytes = thin(target, [int(each) for each in arguments[2:]])
        print(
            f"zeroed {zeroed_bytes / 2**20:.1f} of"
            f" {target.stat().st_size / 2**20:.1f} MiB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
