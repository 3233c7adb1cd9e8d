"""One blob over a connection: from mapped memory to mapped memory, with checksums.

Owns: the order of the bytes, and the rule that no torn, garbled or withdrawn blob is
ever stored. Must not: connect, or choose blobs.

    sender    Found          header | payload    Sent, or Refused if the blob was
                                                 withdrawn meanwhile
    receiver        Done                                    keep

A small header is in Found. A blob with such a header and without a payload is a single
message, since each iteration sends such a blob and waits for the transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol, Unpack

import torch

from moe_ckpt.replication.connection import Connection, Pace, RefusedError
from moe_ckpt.replication.messages import Done, Found, Message, Refused, Sent
from moe_ckpt.snapshot.blobs import Blob, BlobFolder

MOST_HEADER_BYTES = 256 << 20
_SMALL_BYTES = 256 << 10


class Consumer(Protocol):
    """Uses a payload while the payload arrives.

    A result counts only once the receiver calls `keep`: the bytes are intact then.
    """

    def arrived(self, num_bytes: int) -> None:
        """Note that the first `num_bytes` bytes of the payload have arrived."""
        ...

    def keep(self) -> None:
        """Store the result.

        Raises:
            CheckpointLoadError: The blob leads to no valid result.
            CheckpointSaveError: The result cannot be written.
        """
        ...

    def abandon(self) -> None:
        """Drop the result, and stop using the payload.

        The receiver frees the payload next.
        """
        ...


BlobParts = tuple[BlobFolder, str, bytes, torch.Tensor | None, int]
"""A blob that arrives: folder, key, header, payload, and bytes of the payload."""

Begin = Callable[[Unpack[BlobParts]], Consumer]
"""Returns the consumer of a blob.

Does not raise, because the header may be garbled.
"""


class Deposit:
    """Stores a blob unchanged, in memory of the folder."""

    def __init__(
        self,
        folder: BlobFolder,
        key: str,
        header: bytes,
        payload: torch.Tensor | None,
        payload_bytes: int,
    ) -> None:
        self._folder = folder
        self._blob = key, header, payload, payload_bytes

    def arrived(self, num_bytes: int) -> None:
        """Do nothing before all bytes have arrived."""

    def keep(self) -> None:
        self._folder.deposit(*self._blob)

    def abandon(self) -> None:
        """Do nothing: there is no result to drop."""


def send_blob(
    link: Connection,
    folder: BlobFolder,
    key: str,
    blob: Blob,
    pace: Pace,
    *before: Message,
) -> None:
    """Send a blob.

    Args:
        link: The connection.
        folder: Folder that has the blob.
        key: Key of the blob.
        blob: Result of `folder.get(key)`.
        pace: Called before each chunk of bytes.
        before: Requests to which the blob belongs, sent together with the first
            message.

    Raises:
        RefusedError: The receiver refuses the blob, for lack of room for example.
        OSError: The connection failed.
    """
    payload_bytes = None if blob.payload is None else blob.payload_bytes
    is_small = len(blob.header) <= _SMALL_BYTES
    sizes = Found(
        header=blob.header if is_small else None,
        header_bytes=0 if is_small else len(blob.header),
        payload_bytes=payload_bytes,
    )
    link.send(*before, sizes)
    if _is_whole(sizes):
        return
    # the receiver has allocated memory by then: a receiver without room refuses here,
    # before any payload is on its way
    link.expect(Done)
    header_xxh3 = link.send_stream(memoryview(b"" if is_small else blob.header), pace)
    payload = _bytes_of(blob.payload, blob.payload_bytes)
    payload_xxh3 = link.send_stream(payload, pace, blob.payload_xxh3)
    if folder.is_current(key, blob):
        link.send(Sent(header_xxh3=header_xxh3, payload_xxh3=payload_xxh3))
    else:  # the blob's memory may have been reused already
        link.send(
            Refused(reason=f"blob {key} was withdrawn while it was sent", garbled=False)
        )


def receive_blob(
    link: Connection,
    found: Found,
    folder: BlobFolder,
    key: str,
    pace: Pace,
    begin: Begin = Deposit,
) -> int:
    """Receive a blob for a consumer.

    If an error is raised, nothing is stored.

    Args:
        link: The connection.
        found: First message of the blob.
        folder: Folder in whose memory the blob arrives.
        key: Key of the blob.
        pace: Called before each chunk of bytes.
        begin: Returns the consumer.

    Returns:
        The size of header and payload, in bytes.

    Raises:
        RefusedError: The blob arrived garbled, was withdrawn meanwhile, or has too
            large a header.
        CheckpointSaveError: There is no room, or the consumer cannot write the result.
        CheckpointLoadError: The consumer gets no valid result from the blob.
        OSError: The connection failed.
    """
    if found.header_bytes > MOST_HEADER_BYTES:
        reason = (
            f"blob {key}: got a header of {found.header_bytes} bytes, wanted at most"
            f" {MOST_HEADER_BYTES}"
        )
        raise RefusedError(reason, garbled=False)
    if found.header is not None and _is_whole(found):
        begin(folder, key, found.header, None, 0).keep()
        return len(found.header)
    with ExitStack() as undo:
        payload, payload_bytes = None, found.payload_bytes or 0
        if found.payload_bytes is not None:
            payload = folder.allocate(found.payload_bytes)
            undo.callback(folder.free, payload)
        streamed = bytearray(found.header_bytes)
        link.send(Done())
        header_xxh3 = link.receive_stream(memoryview(streamed), pace)
        header = bytes(streamed) if found.header is None else found.header
        consumer = begin(folder, key, header, payload, payload_bytes)
        # callbacks run in reverse order: the consumer ends before the payload is freed
        undo.callback(consumer.abandon)
        payload_xxh3 = link.receive_stream(
            _bytes_of(payload, payload_bytes), _counting(consumer, pace)
        )
        consumer.arrived(payload_bytes)
        _compare(
            key,
            link.expect(Sent),
            Sent(header_xxh3=header_xxh3, payload_xxh3=payload_xxh3),
        )
        consumer.keep()
        undo.pop_all()
    return len(header) + payload_bytes


def _is_whole(found: Found) -> bool:
    """Return whether a message contains all of its blob."""
    return found.header is not None and found.payload_bytes is None


def _counting(consumer: Consumer, pace: Pace) -> Pace:
    """Return a pace that also reports the bytes of earlier chunks to the consumer."""
    arrived_bytes = 0

    def count(num_bytes: int) -> None:
        nonlocal arrived_bytes
        if arrived_bytes:
            consumer.arrived(arrived_bytes)
        arrived_bytes += num_bytes
        pace(num_bytes)

    return count


def _bytes_of(payload: torch.Tensor | None, nbytes: int) -> memoryview:
    return memoryview(b"") if payload is None else payload[:nbytes].numpy().data


def _compare(key: str, wanted: Sent, got: Sent) -> None:
    if got != wanted:
        raise RefusedError(
            f"blob {key} was garbled on its way: got {got}, wanted {wanted}",
            garbled=True,
        )
