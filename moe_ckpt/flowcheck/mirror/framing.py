"""Parses the messages that gloo sends over a TCP connection (torch 2.13). Pure.

Owns: the start and end of each message in one direction, also after gaps. Must not:
interpret the purpose of a message.

    8 bytes, from the end that opened the connection | message | message | ...
    message: six little-endian 64-bit numbers (bytes of the message including these six,
             opcode, slot, offset, length, offset there), then `length` bytes if the
             opcode is 1; 2 and 3 announce that the other side may send

The parser accepts a preamble (the six numbers) only if all numbers are consistent.
After a gap that may have contained a preamble, the parser searches for the next
preamble byte by byte, and assumes nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from moe_ckpt.flowcheck.mirror.tcp import Begin, Chunk, Gap

PREAMBLE_BYTES = 48
OPENING_BYTES = 8
MOST_PAYLOAD_BYTES = 1 << 30
_DATA, _MAY_SEND, _MAY_RECEIVE = 1, 2, 3
_PREAMBLE = struct.Struct("<6Q")
_OPCODE_OFFSET = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class FramedMessage:
    """A message with data."""

    slot: int
    """gloo's slot, which names the operation."""

    length: int
    """Bytes of data in the message."""

    pieces: tuple[tuple[int, bytes], ...]
    """Captured bytes of the data, each piece with its position in the data."""

    skipped_bytes: int | None = None
    """Bytes of the stream since the parser lost the position in the stream. None if the
    position was not lost before this message; `UNKNOWN` (-1) if the bytes cannot be
    counted, since the beginning of the stream was not captured.
    """

    @property
    def is_whole(self) -> bool:
        """Whether all bytes of the data were captured."""
        return sum(len(piece) for _, piece in self.pieces) == self.length


UNKNOWN = -1
"""Value of `skipped_bytes` if the bytes cannot be counted."""


@dataclass(slots=True)
class _Open:
    """A message in progress."""

    slot: int
    length: int
    pieces: list[tuple[int, bytes]]
    skipped_bytes: int | None
    done: int = 0


class Framing:
    """Parser of one direction of one connection."""

    def __init__(self) -> None:
        self._buffer = bytearray()  # may be the beginning of a preamble
        self._open: _Open | None = None
        self._skip = 0
        # bytes since the position in the stream was lost
        self._skipped: int | None = None

    def _begin(self, *, opened: bool) -> None:
        self._buffer.clear()
        self._open, self._skipped = None, None
        self._skip = OPENING_BYTES if opened else 0

    def feed(self, chunk: Chunk) -> Iterator[FramedMessage]:
        """Yield the messages with data that end with these bytes.

        Args:
            chunk: Next bytes or gap of the stream, or the beginning of a connection.
        """
        if isinstance(chunk, Begin):
            self._begin(opened=chunk.opened)
            return
        if isinstance(chunk, Gap):
            yield from self._pass_over(chunk.num_bytes)
            return
        skipped, chunk = chunk[: self._skip], chunk[self._skip :]
        self._skip -= len(skipped)
        while chunk:
            if self._open is None:
                chunk = self._look_for_preamble(chunk)
            else:
                taken = chunk[: self._open.length - self._open.done]
                self._open.pieces.append((self._open.done, taken))
                self._open.done += len(taken)
                chunk = chunk[len(taken) :]
            yield from self._close()

    def _pass_over(self, num_bytes: int) -> Iterator[FramedMessage]:
        if num_bytes == 0:
            self._lose(UNKNOWN)
            return
        if self._open is not None:
            left = self._open.length - self._open.done
            self._open.done += min(num_bytes, left)
            num_bytes -= left
            yield from self._close()
        elif self._skip:
            over, self._skip = num_bytes - self._skip, max(0, self._skip - num_bytes)
            num_bytes = over
        if num_bytes > 0:
            # the buffer's bytes are lost as well: the preamble that begins there lacks
            # its end
            self._lose(num_bytes + len(self._buffer))

    def _lose(self, num_bytes: int) -> None:
        self._buffer.clear()
        self._open = None
        is_unknown = UNKNOWN in (num_bytes, self._skipped)
        self._skipped = UNKNOWN if is_unknown else num_bytes + (self._skipped or 0)

    def _look_for_preamble(self, chunk: bytes) -> bytes:
        """Begin a message if a preamble is complete; return the bytes behind it."""
        self._buffer += chunk
        while len(self._buffer) >= PREAMBLE_BYTES:
            found = _read(bytes(self._buffer[:PREAMBLE_BYTES]))
            if found is not None:
                rest = bytes(self._buffer[PREAMBLE_BYTES:])
                self._buffer.clear()
                self._begin_message(*found)
                return rest
            self._drop(self._next_candidate())
        return b""

    def _begin_message(self, slot: int, length: int | None) -> None:
        if length is None:  # an announcement
            # counted: from the skipped bytes `operations` finds the number of missing
            # messages
            if self._skipped not in (None, UNKNOWN):
                self._skipped += PREAMBLE_BYTES
            return
        self._open = _Open(
            slot=slot, length=length, pieces=[], skipped_bytes=self._skipped
        )
        self._skipped = None

    def _next_candidate(self) -> int:
        """Return how many leading bytes of the buffer cannot start a preamble."""
        found = self._buffer.find(_DATA.to_bytes(1, "little"), _OPCODE_OFFSET + 1)
        others = [
            self._buffer.find(bytes([code]), _OPCODE_OFFSET + 1)
            for code in (_MAY_SEND, _MAY_RECEIVE)
        ]
        nearest = min(
            (index for index in (found, *others) if index >= 0),
            default=len(self._buffer),
        )
        return min(nearest - _OPCODE_OFFSET, len(self._buffer) - PREAMBLE_BYTES + 1)

    def _drop(self, num_bytes: int) -> None:
        del self._buffer[:num_bytes]
        if self._skipped != UNKNOWN:
            self._skipped = num_bytes + (self._skipped or 0)

    def _close(self) -> Iterator[FramedMessage]:
        each = self._open
        if each is not None and each.done == each.length:
            self._open = None
            yield FramedMessage(
                slot=each.slot,
                length=each.length,
                pieces=tuple(each.pieces),
                skipped_bytes=each.skipped_bytes,
            )


def _read(preamble: bytes) -> tuple[int, int | None] | None:
    """Return the slot of a preamble, and the length of the data.

    The length is None for a message without data. Returns None if the bytes are no
    preamble.
    """
    num_bytes, opcode, slot, offset, length, offset_there = _PREAMBLE.unpack(preamble)
    if offset or offset_there or length > MOST_PAYLOAD_BYTES:
        return None
    if opcode == _DATA and num_bytes == PREAMBLE_BYTES + length:
        return slot, length
    if opcode in (_MAY_SEND, _MAY_RECEIVE) and num_bytes == PREAMBLE_BYTES:
        return slot, None
    return None


def data_length(preamble: bytes) -> int | None:
    """Return the bytes of data that follow a preamble.

    None if the bytes are not the preamble of a message with data.
    """
    found = _read(preamble) if len(preamble) == PREAMBLE_BYTES else None
    return found[1] if found else None
