"""Content identity of an input, for a process that reads the input again.

Modification times and paths are not part of an identity: both differ between nodes with
equal copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

WHOLE_BYTES = 16 << 20
"""Size in bytes up to which all bytes of a file are hashed."""

NUM_BLOCKS, BLOCK_BYTES = 64, 64 << 10
"""Number and size in bytes of the sampled blocks of a larger file.

The blocks are the first, the last, and others at even distances.
"""


def file_identity(path: Path) -> str:
    """Return the size and a content hash of a file; sampled blocks for a large file.

    Raises:
        OSError: The file cannot be read.
    """
    size_bytes = path.stat().st_size
    content = xxhash.xxh3_128()
    with path.open("rb") as file:
        for start, end in _hashed_blocks(size_bytes):
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
    """Return the size and a hash of bytes in memory; all bytes are hashed."""
    content = xxhash.xxh3_128()
    for part in parts:
        content.update(part)
    return f"{sum(part.nbytes for part in parts)} bytes, {content.hexdigest()}"


def mapped_identity(*parts: memoryview) -> str:
    """Return the size and a hash of bytes that may be mapped files.

    Of a large file only sampled blocks are hashed.
    """
    content = xxhash.xxh3_128()
    for part in parts:
        if not part.nbytes:
            # Python cannot cast an empty view
            continue
        flat = part.cast("B")
        for start, end in _hashed_blocks(flat.nbytes):
            content.update(flat[start:end])
    return f"{sum(part.nbytes for part in parts)} bytes, {content.hexdigest()}"


def _hashed_blocks(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the starts and ends of the blocks that are hashed."""
    if size_bytes <= WHOLE_BYTES:
        yield 0, size_bytes
        return
    for block in range(NUM_BLOCKS):
        start = (size_bytes - BLOCK_BYTES) * block // (NUM_BLOCKS - 1)
        yield start, start + BLOCK_BYTES
