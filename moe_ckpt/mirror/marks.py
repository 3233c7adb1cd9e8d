"""Marks: all-reduces whose bytes say which group a stream belongs to, and which rank
sends it. Pure.

gloo's connections use ports that no setting determines. At the start of a stream of
gradients each group reduces a mark by MAX: as many equal units as the ring has
segments, so that each message is one unit. A partial result names the ranks that have
contributed to it: its sender, and those behind it in the ring.

    16 bytes MAGIC | 16 bytes of the group | one byte for each rank: 1 if it has contributed
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_ckpt.mirror.framing import PREAMBLE_BYTES, data_length

MAGIC = b"moe_ckpt mirror\xff"
GROUP_BYTES = 16
_HEAD_BYTES = len(MAGIC) + GROUP_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamMark:
    """A mark in a segment: the group, its size, the sender's rank in it, and where
    gloo's message begins.
    """

    group: bytes
    size: int
    rank: int
    start: int


def mark_of(group: bytes, size: int, rank: int) -> bytes:
    """Return the bytes that a rank of a group contributes to the reduction by MAX."""
    assert len(group) == GROUP_BYTES, group
    contributed = bytes(int(each == rank) for each in range(size))
    return 2 * size * (MAGIC + group + contributed)


def find_mark(payload: bytes) -> StreamMark | None:
    """Return the first mark that lies in these bytes of a stream with its whole message
    and names the sender.
    """
    place = payload.find(MAGIC)
    while place >= 0:
        found = _mark_at(payload, place)
        if found:
            return found
        place = payload.find(MAGIC, place + 1)
    return None


def _mark_at(payload: bytes, place: int) -> StreamMark | None:
    start = place - PREAMBLE_BYTES
    length = data_length(payload[start:place]) if start >= 0 else None
    if length is None or length <= _HEAD_BYTES or len(payload) < place + length:
        return None
    unit = payload[place : place + length]
    contributed = unit[_HEAD_BYTES:]
    size = len(contributed)
    senders = [
        rank
        for rank in range(size)
        if contributed[rank] == 1 and contributed[rank - 1] == 0
    ]
    # a complete result names no sender: all ranks have contributed to it
    if len(senders) != 1 or set(contributed) != {0, 1}:
        return None
    return StreamMark(
        group=unit[len(MAGIC) : _HEAD_BYTES], size=size, rank=senders[0], start=start
    )
