"""The content identity of an input: what a process that reads the input again must
find.

Modification times and paths are no part of an identity: both differ between nodes that
have equal copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

WHOLE_BYTES = 16 << 20
"""A file up to this size counts with all of its bytes."""

NUM_BLOCKS, BLOCK_BYTES = 64, 64 << 10
"""Of a larger file, so many blocks of this size count: the first, the last, and others
at even distances.
"""


def file_identity(path: Path) -> str:
    """Return a file's size and a hash of its content, of a large file of sampled
    blocks.

    Raises:
        OSError: The file cannot be read.
    """
    size_bytes = path.stat().st_size
    content = xxhash.xxh3_128()
    with path.open("rb") as file:
        for start, end in _counted(size_bytes):
            file.seek(start)
            content.update(file.read(end - start))
    return f"{size_bytes} bytes, {content.hexdigest()}"


def files_identity(files: Iterable[Path]) -> str:
    """Return the identity of several files, in this order.

    Raises:
        OSError: A file cannot be read.
    """
    identities = [file_identity(path) for path in files]
    return (
        f"{len(identities)} files,"
        f" {xxhash.xxh3_128_hexdigest(' '.join(identities).encode())}"
    )


def bytes_identity(*parts: memoryview) -> str:
    """Return the size and a hash of bytes in memory, all of them."""
    content = xxhash.xxh3_128()
    for part in parts:
        content.update(part)
    return f"{sum(part.nbytes for part in parts)} bytes, {content.hexdigest()}"


def mapped_identity(*parts: memoryview) -> str:
    """Return the size and a hash of bytes that may be mapped files; of large ones
    sampled blocks count.
    """
    content = xxhash.xxh3_128()
    for part in parts:
        if not part.nbytes:
            continue  # Python casts no empty view
        flat = part.cast("B")
        for start, end in _counted(flat.nbytes):
            content.update(flat[start:end])
    return f"{sum(part.nbytes for part in parts)} bytes, {content.hexdigest()}"


def _counted(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the starts and ends of the blocks that count."""
    if size_bytes <= WHOLE_BYTES:
        yield 0, size_bytes
        return
    for block in range(NUM_BLOCKS):
        start = (size_bytes - BLOCK_BYTES) * block // (NUM_BLOCKS - 1)
        yield start, start + BLOCK_BYTES
