"""Puts the segments of one TCP stream in order, and reports lost bytes. Pure.

A mirror port repeats nothing: bytes that another host has received, and the capture has not, remain a gap. A gap is
reported once `patience_bytes` after it are held, so reordering and retransmission within that have no effect.

    segments 5-9, 1-4, 1-4, 15-19, ...      ->  1-4, 5-9, gap of 5, 15-19
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moe_ckpt.mirror.frames import TcpSegment

_MODULUS = 1 << 32
_WINDOW = 1 << 30  # a sequence number further ahead does not belong to this stream


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Bytes of the stream that no frame contained; not counted if the beginning of the stream was not captured."""

    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """The connection begins; `opened`: by the end whose stream this is."""

    opened: bool


Chunk = bytes | Gap | Begin


class Reassembly:
    """One stream. `start`: the sequence number from which on it is read; None: that of the first segment."""

    def __init__(self, patience_bytes: int, start: int | None = None) -> None:
        self._patience_bytes = patience_bytes
        self._next = start
        self._first: int | None = None
        self._held: dict[int, bytes] = {}  # by sequence number, all beyond `_next`

    def feed(self, segment: TcpSegment) -> Iterator[Chunk]:
        """Yield the bytes and gaps that follow in order now."""
        if segment.begins:
            if segment.sequence != self._first:  # else it was retransmitted
                self._first, self._held = segment.sequence, {}
                self._next = (segment.sequence + 1) % _MODULUS
                yield Begin(opened=segment.opens)
            return
        if not segment.payload:
            return
        if self._next is None:
            self._next = segment.sequence
            yield Gap(num_bytes=0)
        ahead = self._distance(segment.sequence)
        if ahead <= 0:  # retransmitted, wholly or in part, or in order
            yield from self._take(segment.payload[-ahead:])
        elif ahead < _WINDOW and len(segment.payload) > len(self._held.get(segment.sequence, b"")):
            self._held[segment.sequence] = segment.payload
            if sum(map(len, self._held.values())) > self._patience_bytes:
                yield from self._give_up()

    def flush(self) -> Iterator[Chunk]:
        """Yield all held bytes: nothing more comes in time."""
        while self._held:
            yield from self._give_up()

    def _give_up(self) -> Iterator[Chunk]:
        nearest = min(self._held, key=self._distance)
        yield Gap(num_bytes=self._distance(nearest))
        self._next = nearest
        yield from self._take(self._held.pop(nearest))

    def _take(self, payload: bytes) -> Iterator[Chunk]:
        """Yield bytes that are next, and those held that follow."""
        if payload:
            self._advance(len(payload))
            yield payload
        while self._held:
            nearest = min(self._held, key=self._distance)
            ahead = self._distance(nearest)
            if ahead > 0:
                return
            following = self._held.pop(nearest)[-ahead:]
            if following:
                self._advance(len(following))
                yield following

    def _advance(self, num_bytes: int) -> None:
        assert self._next is not None
        self._next = (self._next + num_bytes) % _MODULUS

    def _distance(self, sequence: int) -> int:
        """Return how far a sequence number is ahead of the next one; below 0: behind it."""
        assert self._next is not None
        return (sequence - self._next + _MODULUS // 2) % _MODULUS - _MODULUS // 2
