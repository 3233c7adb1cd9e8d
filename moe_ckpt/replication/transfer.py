"""One blob over a connection: from mapped memory to mapped memory, with checksums.

Owns: the order of the bytes, and the rule that no torn, garbled or withdrawn blob is ever stored. Must not: connect, or
choose blobs.

    sender    Found          header | payload    Sent, or Refused if it was withdrawn meanwhile
    receiver        Done                                                                        keep
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch

from moe_ckpt.replication.connection import Connection, Pace, RefusedError
from moe_ckpt.replication.messages import Done, Found, Refused, Sent
from moe_ckpt.snapshot.blobs import Blob, BlobFolder

MOST_HEADER_BYTES = 256 << 20

Keep = Callable[[str, bytes, torch.Tensor | None, int], None]
"""`BlobFolder.publish` or `BlobFolder.deposit`."""


def send_blob(link: Connection, folder: BlobFolder, key: str, blob: Blob, pace: Pace) -> None:
    """Send a blob that `folder.get(key)` returned."""
    payload_bytes = None if blob.payload is None else blob.payload_bytes
    link.send(Found(header_bytes=len(blob.header), payload_bytes=payload_bytes))
    link.expect(Done)
    header_xxh3 = link.send_stream(memoryview(blob.header), pace)
    payload_xxh3 = link.send_stream(_bytes_of(blob.payload, blob.payload_bytes), pace)
    if folder.is_current(key, blob):
        link.send(Sent(header_xxh3=header_xxh3, payload_xxh3=payload_xxh3))
    else:  # its memory may have been reused already
        link.send(Refused(reason=f"blob {key} was withdrawn while it was sent", garbled=False))


def receive_blob(link: Connection, found: Found, folder: BlobFolder, key: str, keep: Keep, pace: Pace) -> int:
    """Receive a blob into memory of `folder` and store it under a key; return its bytes.

    Raises RefusedError if it arrived garbled, was withdrawn meanwhile or has too large a header, and
    CheckpointSaveError if there is no room. Nothing is stored then.
    """
    if found.header_bytes > MOST_HEADER_BYTES:
        reason = f"blob {key}: got a header of {found.header_bytes} bytes, wanted at most {MOST_HEADER_BYTES}"
        raise RefusedError(reason, garbled=False)
    with ExitStack() as undo:
        payload = None
        if found.payload_bytes is not None:
            payload = folder.allocate(found.payload_bytes)
            undo.callback(folder.free, payload)
        header = bytearray(found.header_bytes)
        link.send(Done())
        header_xxh3 = link.receive_stream(memoryview(header), pace)
        payload_xxh3 = link.receive_stream(_bytes_of(payload, found.payload_bytes or 0), pace)
        _compare(key, link.expect(Sent), Sent(header_xxh3=header_xxh3, payload_xxh3=payload_xxh3))
        keep(key, bytes(header), payload, found.payload_bytes or 0)
        undo.pop_all()
    return found.header_bytes + (found.payload_bytes or 0)


def _bytes_of(payload: torch.Tensor | None, nbytes: int) -> memoryview:
    return memoryview(b"") if payload is None else payload[:nbytes].numpy().data


def _compare(key: str, wanted: Sent, got: Sent) -> None:
    if got != wanted:
        raise RefusedError(f"blob {key} was garbled on its way: got {got}, wanted {wanted}", garbled=True)
