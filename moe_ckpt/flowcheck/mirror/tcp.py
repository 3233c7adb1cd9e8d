"""Puts the segments of one TCP stream in order, and reports lost bytes. Pure.

A mirror port repeats nothing: bytes that another host has received, but the capture has
not, remain a gap. A gap is reported once more than `patience_bytes` after the gap are
held, so reordering and retransmission within that range have no effect.

    segments 5-9, 1-4, 1-4, 15-19, ...      ->  1-4, 5-9, gap of 5, 15-19
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from moe_ckpt.flowcheck.mirror.frames import TcpSegment

_MODULUS = 1 << 32
_WINDOW = 1 << 30  # a sequence number further ahead does not belong to this stream


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Bytes of the stream that no frame contained."""

    num_bytes: int
    """Number of bytes; 0 if the number is unknown, since the beginning of the stream
    was not captured.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """Beginning of the connection."""

    opened: bool
    """Whether the sender of this stream opened the connection."""


Chunk = bytes | Gap | Begin


class Reassembly:
    """Reassembly of one stream.

    Bytes have positions, counted from the first byte that is read. A sequence number is
    a position plus a constant, modulo 2 ** 32.
    """

    def __init__(self, patience_bytes: int, start: int | None = None) -> None:
        """Begin before the first segment.

        Args:
            patience_bytes: Bytes to hold after a gap before the gap is reported.
            start: Sequence number from which the stream is read; None to read from the
                first segment.
        """
        self._patience_bytes = patience_bytes
        self._start = start  # the sequence number of position 0
        self._first: int | None = None
        self._next = 0
        self._held: dict[int, bytes] = {}  # by position, all beyond `_next`
        self._order: list[int] = []  # a heap of their positions
        self._held_bytes = 0

    def feed(self, segment: TcpSegment) -> Iterator[Chunk]:
        """Yield the bytes and gaps that follow in order now.

        Args:
            segment: Next captured segment of the stream.
        """
        if segment.begins:
            if segment.sequence != self._first:  # else a retransmission
                self._begin(segment.sequence)
                yield Begin(opened=segment.opens)
            return
        if not segment.payload:
            return
        if self._start is None:
            self._start = segment.sequence
            yield Gap(num_bytes=0)
        ahead = self._ahead(segment.sequence)
        if ahead <= 0:  # retransmitted, wholly or in part, or in order
            yield from self._take(segment.payload[-ahead:])
        elif ahead < _WINDOW:
            self._hold(self._next + ahead, segment.payload)
            if self._held_bytes > self._patience_bytes:
                yield from self._give_up()

    def flush(self) -> Iterator[Chunk]:
        """Yield all held bytes with the gaps before them: no more come in time."""
        while self._order:
            yield from self._give_up()

    def _begin(self, sequence: int) -> None:
        # a SYN takes one sequence number (RFC 9293)
        self._first, self._start, self._next = sequence, (sequence + 1) % _MODULUS, 0
        self._held, self._order, self._held_bytes = {}, [], 0

    def _hold(self, position: int, payload: bytes) -> None:
        before = self._held.get(position, b"")
        if not before:
            heappush(self._order, position)
        # a retransmission may begin at the same byte and be longer
        if len(payload) > len(before):
            self._held[position] = payload
            self._held_bytes += len(payload) - len(before)

    def _give_up(self) -> Iterator[Chunk]:
        nearest = self._order[0]
        yield Gap(num_bytes=nearest - self._next)
        self._next = nearest
        yield from self._take(b"")

    def _take(self, payload: bytes) -> Iterator[Chunk]:
        """Yield bytes that are next, and the held bytes that follow."""
        if payload:
            self._next += len(payload)
            yield payload
        while self._order and self._order[0] <= self._next:
            position = heappop(self._order)
            held = self._held.pop(position)
            self._held_bytes -= len(held)
            following = held[self._next - position :]
            if following:
                self._next += len(following)
                yield following

    def _ahead(self, sequence: int) -> int:
        """Return how far a sequence number is ahead of the next one.

        Below 0 the sequence number is behind.
        """
        assert self._start is not None
        # the shorter way around: sequence numbers start again every 4 GiB
        return (
            sequence - self._start - self._next + _MODULUS // 2
        ) % _MODULUS - _MODULUS // 2
