"""Helpers that publish and read blobs, list folders of blobs, and limit file sizes."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

import torch

from moe_ckpt.snapshot.blobs import Blob, BlobFolder

KIB = 1 << 10


@contextlib.contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Make the kernel refuse larger files, as a full file system would."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def filled(folder: BlobFolder, content: bytes) -> torch.Tensor:
    """Allocate memory in a folder, and fill the memory with these bytes."""
    payload = folder.allocate(len(content))
    payload.numpy()[:] = bytearray(content)
    return payload


def publish(
    folder: BlobFolder,
    key: str,
    content: bytes | None = b"content",
    header: bytes = b"header",
) -> torch.Tensor:
    """Publish a blob, and return the memory of the blob's payload.

    Args:
        folder: Folder of the blob.
        key: Key of the blob.
        content: Bytes of the payload. None: no payload, and the result is empty.
        header: Header of the blob.
    """
    payload = None if content is None else filled(folder, content)
    folder.publish(key, header, payload, len(content or b""))
    return torch.empty(0) if payload is None else payload


def deposit(
    folder: BlobFolder, key: str, content: bytes, header: bytes = b"header"
) -> torch.Tensor:
    """Publish a blob that owns its payload's memory, and return the memory."""
    payload = filled(folder, content)
    folder.deposit(key, header, payload, len(content))
    return payload


def payload_of(blob: Blob) -> torch.Tensor:
    assert blob.payload is not None
    return blob.payload


def content_of(folder: BlobFolder, key: str) -> tuple[bytes, bytes | None]:
    """Return a blob's header and payload; None for a blob without payload."""
    blob = folder.get(key)
    return blob.header, None if blob.payload is None else blob.payload[
        : blob.payload_bytes
    ].numpy().tobytes()


def buffers_of(folder: BlobFolder) -> list[str]:
    """Return the names of a folder's buffers."""
    return sorted(os.listdir(folder.path / "buffers"))


def index_of(folder: BlobFolder) -> list[str]:
    """Return the names of the files in a folder's index."""
    return sorted(os.listdir(folder.path / "index"))
